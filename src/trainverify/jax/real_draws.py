"""What JAX draws: which draws may be the same numbers, and the numbers themselves.

A draw is an input of the programs, unrelated to others. Really all functions make their numbers of a key's bits, so that two draws by one
key may be related; and what a key without arguments draws is fixed, so that a program may hold these numbers as literals or constants.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final

import numpy as np

import jax
from trainverify.jax.randomness import INTEGERS, SHUFFLE, TRUNCATED, UNIFORM, Stream, partitionable
from trainverify.jax.values import DTYPES, Array

PRECISE: Final = ("f32", "f64", *(d for d in DTYPES.values() if d[0] in "iu"))
_FOLDED: Final = re.compile(r"fold_in\((?P<key>.*), (?P<number>[^,]*)\)", re.DOTALL)
_SPLIT: Final = re.compile(r"split\((?P<key>.*), \[[\d, ]*\]\)\[\d+\]", re.DOTALL)
_SEEDED: Final = re.compile(r"key\((?P<number>[^,]*), [^,]*\)")
_INTEGER: Final = re.compile(r"-?\d+")


class NotDrawn(Exception):
    """Numbers that cannot be drawn here as JAX draws them."""


@dataclass(frozen=True)
class Doubt:
    """Two draws that may be related; or one whose numbers the other program may hold otherwise."""

    one: str
    other: str

    def __str__(self) -> str:
        return f"{self.one} and {self.other} may be the same numbers"


def doubts(logical: Mapping[str, Stream], ranks: Mapping[str, Stream]) -> list[Doubt]:
    """What a difference between two programs may rest on, of draws that not both of them have."""
    both = logical.keys() & ranks.keys()
    found = [
        Doubt(m, n) for m, a in logical.items() for n, b in ranks.items() if not (m in both and n in both) and m != n and _related(a, b)
    ]
    for draws, others in ((logical, ranks), (ranks, logical)):
        found += [
            Doubt(n, "numbers drawn before") for n, s in draws.items() if n not in both and _fixed(s.key) and not others.keys() - both
        ]
    return found


def _related(a: Stream, b: Stream) -> bool:
    """Whether two draws may have numbers in common, or one be a function of the other."""
    if not (partitionable(a.impl) and partitionable(b.impl)):
        return _chain(a.key)[-1] == _chain(b.key)[-1]
    other = (a.what, a.kind.dtype) != (b.what, b.kind.dtype)
    return other and (a.key in _chain(b.key) or b.key in _chain(a.key))


def _chain(key: str) -> list[str]:
    """A key, the one that it was derived from, and so on."""
    found = [key]
    while (made := _FOLDED.fullmatch(found[-1]) or _SPLIT.fullmatch(found[-1])) is not None:
        found.append(made["key"])
    return found


def _fixed(key: str) -> bool:
    """Whether a key depends on no argument."""
    *derived, root = _chain(key)
    numbers = [made["number"] for k in derived if (made := _FOLDED.fullmatch(k)) is not None]
    seed = _SEEDED.fullmatch(root)
    return seed is not None and all(_INTEGER.fullmatch(n) for n in (seed["number"], *numbers))


# -- the numbers ----------------------------------------------------------------------------------------------------------


def really_drawn(draws: Iterable[tuple[str, Stream]], given: Mapping[str, Array], seed: int) -> dict[str, Array]:
    """The numbers of draws, for keys of the arguments that `seed` names and other arguments as `given`."""
    return {name: _numbers(stream, _key(stream.key, stream.impl, given, seed)) for name, stream in draws}


def _key(name: str, impl: str | None, given: Mapping[str, Array], seed: int) -> Any:
    if not partitionable(impl):
        raise NotDrawn(f"a key of {impl}")
    if (made := _FOLDED.fullmatch(name)) is not None:
        return jax.random.fold_in(_key(made["key"], impl, given, seed), np.uint32(_integer(made["number"], given) % 2**32))
    if (seeded := _SEEDED.fullmatch(name)) is not None:
        return jax.random.key(_integer(seeded["number"], given), impl=impl)
    number = int.from_bytes(blake2b(f"{seed} {name}".encode(), digest_size=4).digest(), "little") >> 1
    return jax.random.key(number, impl=impl)


def _integer(text: str, given: Mapping[str, Array]) -> int:
    if _INTEGER.fullmatch(text):
        return int(text)
    if text not in given or given[text].size != 1:
        raise NotDrawn(text)
    return int(given[text].reshape(-1)[0])


def _numbers(stream: Stream, key: Any) -> Array:
    """As `randomness` has them: integers from 0 on, truncated normal ones between 0 and 1, numbers that an order is that of."""
    if stream.kind.dtype not in PRECISE:
        raise NotDrawn(f"numbers of type {stream.kind.dtype}")
    shape, least, most = stream.kind.shape, stream.low or 0, stream.high or 0
    low, high = (int(least), int(most)) if stream.name == INTEGERS else (float(least), float(most))
    dtype = next(theirs for theirs, ours in DTYPES.items() if ours == stream.kind.dtype)
    made: dict[str, Callable[[], Any]] = {
        UNIFORM: lambda: jax.random.uniform(key, shape, dtype),
        "_normal_real": lambda: jax.random.normal(key, shape, dtype),
        "_gumbel": lambda: jax.random.gumbel(key, shape, dtype),
        TRUNCATED: lambda: (np.asarray(jax.random.truncated_normal(key, low, high, shape, dtype), np.float64) - low) / (high - low),
        INTEGERS: lambda: np.asarray(jax.random.randint(key, shape, int(low), int(high), dtype), np.int64) - int(low),
        SHUFFLE: lambda: np.argsort(np.asarray(jax.random.permutation(key, shape[0]))),
    }
    if stream.name not in made:
        raise NotDrawn(stream.name)
    found = np.asarray(made[stream.name]())
    return found.astype(np.int64 if stream.name == INTEGERS else np.float64)


__all__ = ["Doubt", "NotDrawn", "doubts", "really_drawn"]
