"""Repeated stretches are found by what they do; one op that differs makes a stretch of another kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import replace

import trainverify as tv
from trainverify.graph.outline import Block, outline
from trainverify.graph.program import Op, Program

LAYERS = 6


def layers() -> Program:
    b = tv.program("layers")
    x = b.input("x", (4, 6))
    for i in range(LAYERS):
        y = x
        for n in range(5):
            y = b.silu(b.linear(y, b.parameter(f"l{i}.w{n}", (6, 6))))
        x = b.add(x, y)
    b.loss(b.sum(x))
    return b.build()


def tokens(program: Program) -> list[int]:
    numbers: dict[Hashable, int] = {}
    sorts = [(op.name, op.attrs, tuple(program.tensors[i] for i in op.inputs if i is not None)) for op in program.ops]
    return [numbers.setdefault(s, len(numbers)) for s in sorts]


def blocks(program: Program) -> list[Block]:
    (found,) = outline([program], [tokens(program)])
    assert sorted(n for b in found for n in b.ops) == list(range(len(program.ops)))  # every op once
    return found


def kinds(program: Program) -> Counter[int | None]:
    return Counter(b.kind for b in blocks(program) if b.kind is not None)


def changed(program: Program, index: int, op: Op) -> Program:
    return replace(program, ops=(*program.ops[:index], op, *program.ops[index + 1 :]))


def test_layers_are_of_one_kind() -> None:
    ((_, count),) = kinds(layers()).most_common(1)
    assert count >= LAYERS - 2  # the ends may differ


def test_an_op_that_differs_is_in_no_block_of_that_kind() -> None:
    program = layers()
    usual = kinds(program).most_common(1)[0][1]
    index = next(i for i, op in enumerate(program.ops) if op.inputs[1:] == ("l3.w2",))
    other = program.ops[index + 1]
    assert other.name == "silu"
    wrong = changed(program, index + 1, replace(other, name="relu"))
    assert kinds(wrong).most_common(1)[0][1] < usual
    common = kinds(wrong).most_common(1)[0][0]
    assert all(index + 1 not in b.ops for b in blocks(wrong) if b.kind == common)


def test_wiring_counts() -> None:
    """Layer 3 adds its input to its second activation instead of its last one: the same ops, another meaning."""
    program = layers()
    index = [i for i, op in enumerate(program.ops) if op.name == "add"][3]
    op = program.ops[index]
    second = next(o for o in program.ops if o.inputs[1:] == ("l3.w2",)).inputs[0]
    wrong = changed(program, index, replace(op, inputs=(op.inputs[0], second)))
    assert kinds(wrong).most_common(1)[0][1] < kinds(program).most_common(1)[0][1]
    (block,) = (b for b in blocks(wrong) if index in b.ops)
    assert second in block.inputs
