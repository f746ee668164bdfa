"""Shape reduction: the direct method gives what the optimiser gives; partition structure stays."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import z3

import trainverify as tv
from trainverify import cli, files
from trainverify.axes.reduction import Sizes
from trainverify.graph.obligations import obligations
from trainverify.graph.plan import Plan, units
from trainverify.graph.program import Program
from trainverify.ops import OPS
from trainverify.prove import scope
from trainverify.prove.staged.reduce import LEAST, direct, reduced
from trainverify.verdicts import related, single, verify
from trainverify.zoo.llama import Config
from trainverify.zoo.parallel import Degrees, llama_plan, llama_step
from verdicts.mlp import logical, plan

LLAMA = Config(layers=2, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocabulary=128256, sequence=8192, batch=8)


def uneven() -> tuple[Program, Plan]:
    """8 rows as 5 and 3."""
    b = tv.program("rows")
    x, w = b.input("x", (8, 7)), b.parameter("w", (7, 11))
    b.loss(b.sum(b.matmul(b.concat(b.slice(x, dim=0, start=0, stop=5), b.slice(x, dim=0, start=5, stop=8), dim=0), w)))
    return b.build(), single(b.build())


def reference(sizes: Sizes) -> dict[int, int]:
    """The same by Z3's optimiser: axis number → size."""
    solver = z3.Optimize()
    unknown: dict[int, z3.ArithRef] = {}
    families: dict[int, list[tuple[int, int]]] = {}
    for number, full, family, keeps, _ in sizes.atoms():
        x = unknown[number] = z3.Int(f"axis{number}")
        solver.add(x >= min(full, LEAST), x <= full)
        if keeps:
            solver.add(x == full)
        elif family is not None:
            families.setdefault(family, []).append((number, full))
    for members in families.values():
        by_size = sorted(members, key=lambda m: m[1])
        for (a, short), (b, long) in itertools.pairwise(by_size):
            solver.add(unknown[a] == unknown[b] if short == long else unknown[a] < unknown[b])
    solver.minimize(z3.Sum([*unknown.values(), z3.IntVal(0)]))
    assert solver.check() == z3.sat
    model = solver.model()
    return {number: model.eval(x, model_completion=True).as_long() for number, x in unknown.items()}


CASES = {
    "mlp": lambda: (logical(), plan()),
    "llama": lambda: (llama_step(LLAMA), llama_plan(LLAMA, Degrees(dp=2, tp=2, pp=2, microbatches=2))),
    "llama sp": lambda: (llama_step(replace(LLAMA, layers=1)), llama_plan(replace(LLAMA, layers=1), Degrees(tp=4, sp=True))),
    "uneven": uneven,
}


@pytest.mark.parametrize("name", CASES)
def test_direct_method_is_minimal(name: str) -> None:
    program, other = CASES[name]()
    parts = units(other)
    system = related(program, other, OPS, parts, obligations(program, other, parts)[0])
    sizes = direct(system)
    assert {n: size for n, *_, size in sizes.atoms()} == reference(sizes)


def test_uneven_pieces_stay_uneven() -> None:
    program, other = uneven()
    parts = units(other)
    small = reduced(related(program, other, OPS, parts, obligations(program, other, parts)[0]))
    assert small.shapes["x"] == (5, 2)  # 8 = 5 + 3 as 3 + 2


def test_sizes_of_llama_do_not_matter() -> None:
    program, other = CASES["llama"]()
    parts = units(other)
    small = reduced(related(program, other, OPS, parts, obligations(program, other, parts)[0]))
    assert small.shapes["logits"] == (8, 2, 4)  # dp × micro-batch × 2 rows; sequence; tp × 2 ids
    assert max(max(s, default=1) for s in small.shapes.values()) <= 32  # query heads × their size


def test_command_shows_the_shapes_of_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files.write(tmp_path / "model.json", logical())
    files.write(tmp_path / "plan.json", plan())
    assert cli.run(["reduce", str(tmp_path / "plan.json"), "--logical", str(tmp_path / "model.json")]) == 0
    shown = capsys.readouterr().out
    assert "x: [20, 6] → [8, 2]" in shown  # dp × micro-batch × 2 rows
    assert "w1 (rank 0): [7, 6] → [2, 2]" in shown
    assert cli.run(["reduce", str(tmp_path / "plan.json")]) == 2  # a plan needs its logical program


def part_of_a_mask(origin: tuple[int, int]) -> Program:
    """A dropout that starts in the middle of another tensor's: positions that no smaller sizes keep."""
    b = tv.program("part")
    x = b.input("x", (2, 3))
    b.loss(b.sum(b.dropout(x, key=3, logical_shape=(5, 7000), offset=7, origin=origin, p=0.5, name="y")))
    return b.build()


@pytest.mark.parametrize(("origin", "verdict"), [((1, 2), "PROVED"), ((1, 3), "REFUTED"), ((2, 2), "REFUTED")])
def test_what_cannot_be_smaller_is_taken_as_it_is(origin: tuple[int, int], verdict: str) -> None:
    assert verify(part_of_a_mask((1, 2)), part_of_a_mask(origin), engine="smt").verdict == verdict


def test_what_is_too_large_as_it_is_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scope, "AS_IT_IS", 10)
    report = verify(part_of_a_mask((1, 2)), part_of_a_mask((1, 2)), engine="smt")
    assert report.verdict == "UNKNOWN"
    assert any("no small sizes keep the structure" in note for note in report.notes), report.notes
