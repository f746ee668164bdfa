"""Repeated stretches of flat programs: layers and micro-batches, found by what they do and not by their names.

Ops are compared without names. Cuts are put before every op of a few chosen sorts, so that most of what lies between two
cuts occurs again and again. Two stretches are of one kind if they are equal up to names: the same ops, wired alike,
handing out the same results. Whoever treats a kind once has treated all its blocks.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from trainverify.graph.program import ALONE, Op, Program

SHORTEST: Final = 8  # ops of a block; shorter stretches stay single ops
_MATCH: Final = 0.5  # what recognising a block costs, in ops that are worked out (some three times)
_CLOSE: Final = 32
_SAMPLE: Final = 24_000  # ops that cuts are chosen by
_MODULUS: Final = (1 << 61) - 1
_BASE: Final = 1_000_003


@dataclass(frozen=True, slots=True)
class Block:
    """Ops of a program, in order. Blocks with the same `kind` are equal up to names; None is a single op."""

    kind: int | None
    ops: tuple[int, ...]
    inputs: tuple[str, ...]  # made elsewhere, in order of first use
    made: tuple[str, ...]  # everything, in order
    outputs: tuple[str, ...]  # of those made: what is used elsewhere
    sums: bool = False  # additions to what comes from elsewhere, which grows from block to block

    @property
    def tensors(self) -> tuple[str, ...]:
        return self.inputs + self.made


def outline(programs: Sequence[Program], tokens: Sequence[list[int]]) -> list[list[Block]]:
    """For every program its ops as blocks, in order. Tokens say what ops are without names; ALONE is in no block."""
    sorts = _cuts(_sample(tokens))
    kinds: dict[Hashable, int] = {}
    found: list[list[Block]] = []
    for program, mine in zip(programs, tokens, strict=True):
        users = _users(program)
        alone = _hard(mine)
        blocks: list[Block] = []
        for start, stop in _stretches(sorted(alone | {i for i, t in enumerate(mine) if t in sorts}), alone):
            blocks += _stretch(program, mine, start, stop, users, kinds)
        found.append(blocks)
    counts: dict[int | None, int] = {}
    for blocks in found:
        for b in blocks:
            counts[b.kind] = counts.get(b.kind, 0) + 1
    return [
        [x for b in blocks for x in ([b] if b.kind is None or counts[b.kind] > 1 else _singles(p, b.ops))]
        for p, blocks in zip(programs, found, strict=True)
    ]


def singles(program: Program) -> list[Block]:
    """Every op by itself."""
    return _singles(program, range(len(program.ops)))


def _singles(program: Program, ops: Sequence[int]) -> list[Block]:
    return [_single(program.ops[i], i) for i in ops]


def _single(op: Op, i: int) -> Block:
    return Block(None, (i,), tuple(dict.fromkeys(x for x in op.inputs if x is not None)), op.outputs, op.outputs)


def _users(program: Program) -> dict[str, int]:
    """The last op that uses a tensor; one past the end for outputs."""
    last = {i: n for n, op in enumerate(program.ops) for i in op.inputs if i is not None}
    last.update({o.tensor: len(program.ops) for o in program.outputs})
    return last


# -- where to cut ------------------------------------------------------------------------------------------------------


def _sample(tokens: Sequence[list[int]]) -> list[list[int]]:
    """Some programs, the first two and the last before all; of long ones the two ends."""
    order = [*tokens[:2], *tokens[-1:], *tokens[2:-1]] if len(tokens) > 2 else list(tokens)
    found: list[list[int]] = []
    left = _SAMPLE
    for mine in order:
        half = max(left, _SAMPLE // 4) // 2
        found.append(mine if len(mine) <= 2 * half else [*mine[:half], ALONE, *mine[-half:]])
        left -= len(found[-1])
        if left <= 0:
            break
    return found


def _cuts(tokens: Sequence[Sequence[int]]) -> set[int]:
    """Sorts of ops to cut before, so that little is left that is new: greedily, one after the other."""
    hashes = [_prefixes(t) for t in tokens]
    longest = max((len(t) for t in tokens), default=0)
    powers = [1]
    for _ in range(longest):
        powers.append(powers[-1] * _BASE % _MODULUS)
    at: dict[int, list[tuple[int, int]]] = {}
    hard: list[set[int]] = []
    for p, mine in enumerate(tokens):
        hard.append(_hard(mine))
        for i, t in enumerate(mine):
            if t != ALONE:
                at.setdefault(t, []).append((p, i))
    candidates = _candidates(at)
    chosen = hard

    def cost(cuts: Sequence[set[int]]) -> float:
        total, seen = 0.0, set()
        for own, alone, h in zip(cuts, hard, hashes, strict=True):
            for i, j in _stretches(sorted(own), alone):
                if j - i < SHORTEST:
                    total += j - i
                    continue
                total += _MATCH
                key = (j - i, (h[j] - h[i] * powers[j - i]) % _MODULUS)
                if key not in seen:
                    seen.add(key)
                    total += j - i
        return total

    def with_(t: int) -> list[set[int]]:
        cuts = [set(own) for own in chosen]
        for p, i in at[t]:
            cuts[p].add(i)
        return cuts

    best = cost(chosen)
    sorts: set[int] = set()
    gains = [(cost(with_(t)) - best, t) for t in candidates]  # less is better; they get smaller as others are chosen
    heapq.heapify(gains)
    while gains:
        _, t = heapq.heappop(gains)
        cuts = with_(t)
        gain = cost(cuts) - best
        if gain >= 0:
            continue
        if gains and gain > gains[0][0]:
            heapq.heappush(gains, (gain, t))
            continue
        best, chosen = best + gain, cuts
        sorts.add(t)
    return sorts


def _hard(tokens: Sequence[int]) -> set[int]:
    """Both ends of a program, and of every op that stands alone."""
    return {0, len(tokens), *(j for i, t in enumerate(tokens) if t == ALONE for j in (i, i + 1))}


def _stretches(cuts: Sequence[int], hard: set[int]) -> Iterator[tuple[int, int]]:
    """What lies between cuts; what is too short goes with what is before it."""
    start = cuts[0]
    for n in range(1, len(cuts)):
        here = cuts[n]
        if here not in hard and (here - start < SHORTEST or cuts[n + 1] - here < SHORTEST):
            continue
        yield start, here
        start = here


def _candidates(at: dict[int, list[tuple[int, int]]]) -> list[int]:
    """Sorts of ops worth a cut. Those that are equally many and begin close together cut alike: three of them are enough."""
    order = sorted((len(places), places[0], t) for t, places in at.items() if len(places) > 1)
    groups: list[list[int]] = []
    before: tuple[int, tuple[int, int]] | None = None
    for count, first, t in order:
        if before is not None and before[0] == count and before[1][0] == first[0] and first[1] - before[1][1] < _CLOSE:
            groups[-1].append(t)
        else:
            groups.append([t])
        before = count, first
    return [t for g in groups for t in dict.fromkeys((g[0], g[len(g) // 2], g[-1]))]


def _prefixes(tokens: Sequence[int]) -> list[int]:
    found = [0]
    for t in tokens:
        found.append((found[-1] * _BASE + t + 2) % _MODULUS)
    return found


# -- one stretch -------------------------------------------------------------------------------------------------------


def _stretch(
    program: Program, tokens: Sequence[int], start: int, stop: int, users: dict[str, int], kinds: dict[Hashable, int]
) -> list[Block]:
    """A stretch as a block, and behind it additions to what comes from elsewhere that only others use."""
    if stop - start < SHORTEST:
        return _singles(program, range(start, stop))
    ops = program.ops
    made_here = {o for op in ops[start:stop] for o in op.outputs}
    used: set[str] = set()
    inside: list[int] = []
    apart: list[int] = []
    for n in range(stop - 1, start - 1, -1):
        op = ops[n]
        if op.name == "add" and not any(o in used for o in op.outputs) and any(i not in made_here for i in op.inputs if i is not None):
            apart.append(n)
            continue
        inside.append(n)
        used.update(i for i in op.inputs if i is not None)
    away = {i for n in apart for i in ops[n].inputs if i is not None}
    if len(inside) >= SHORTEST:
        found = [_block(program, tokens, inside[::-1], lambda t: users.get(t, -1) >= stop or t in away, kinds)]
    else:
        found = _singles(program, inside[::-1])
    if len(apart) < SHORTEST:
        return [*found, *_singles(program, apart[::-1])]
    return [*found, _block(program, tokens, apart[::-1], lambda _: True, kinds, sums=True)]


def _block(
    program: Program,
    tokens: Sequence[int],
    inside: Sequence[int],
    used: Callable[[str], bool],
    kinds: dict[Hashable, int],
    sums: bool = False,
) -> Block:
    ops = program.ops
    number: dict[str, int] = {}
    inputs: list[str] = []
    made: list[str] = []
    wiring: list[int | None] = []
    for n in inside:
        for i in ops[n].inputs:
            if i is None:
                wiring.append(None)
                continue
            if i not in number:
                number[i] = -1 - len(inputs)
                inputs.append(i)
            wiring.append(number[i])
        for o in ops[n].outputs:
            number[o] = len(made)
            made.append(o)
    outputs = tuple([t for t in made if used(t)])
    key = (sums, tuple([tokens[n] for n in inside]), tuple(wiring), tuple([number[t] for t in outputs]))
    return Block(kinds.setdefault(key, len(kinds)), tuple(inside), tuple(inputs), tuple(made), outputs, sums)
