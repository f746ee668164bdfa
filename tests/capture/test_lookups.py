"""Ranks that look up their rows of a vocabulary, in the words of many libraries, and each with a mistake."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")

import numpy as np  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

import trainverify.torch as tvt  # noqa: E402
from capture.tracing import Watched, computed, value  # noqa: E402
from trainverify.graph.program import Output  # noqa: E402
from trainverify.report import Report  # noqa: E402
from trainverify.torch.record import Recorder  # noqa: E402
from trainverify.torch.translate import type_of  # noqa: E402
from trainverify.translate.pieces import Range  # noqa: E402

Look = Callable[[Any, Any, int], Any]  # rows of the table from `start` on, by ids; 0 for others
IDS, IGNORED = 10, -100
TOKENS: Range = ((0, IDS - 1),)
LABELS: Range = ((IGNORED, IGNORED), *TOKENS)


def translated(look: Look, spread: Range, ids: Any, table: Any, start: int) -> list[tuple[str, Any]]:
    """Lookups of the ids as they are, in the program that computes what PyTorch does: operators and starts."""
    t = Watched()
    for x in (ids, table):
        t.keep(x)
    t.begin()
    for name, x in (("ids", ids), ("table", table)):
        t.emitter.declare(name, type_of(x))
        t.define(x, name)
    t.emitter.ids.spreads["ids"] = spread
    with Recorder(t):
        result = look(ids, table, start)
    made = value(t, result)
    program = t.emitter.program("look", ("ids", "table"), (), (), [Output(made, "metric", "found")], {})
    found = computed(program, {"ids": ids.detach().numpy(), "table": table.detach().numpy()})[made]
    np.testing.assert_allclose(found, result.detach().numpy(), rtol=1e-6, atol=1e-7)
    lookups = [op for op in program.ops if op.name in ("embedding", "one_hot", "take_along_dim", "index_select")]
    return [(op.name, op.get("start")) for op in lookups]


def outside(ids: Any, start: int, rows: int) -> Any:
    return (ids < start) | (ids >= start + rows)


def by_where(ids: Any, table: Any, start: int) -> Any:
    masked = outside(ids, start, len(table))
    return F.embedding(torch.where(masked, 0, ids - start), table) * (~masked)[..., None]


def by_fill(ids: Any, table: Any, start: int) -> Any:
    inside = torch.logical_and(ids > start - 1, torch.logical_not(ids > start + len(table) - 1))
    rows = F.embedding((ids - start).masked_fill(~inside, len(table) - 1), table)
    return rows.masked_fill(~inside.unsqueeze(-1), 0.0)


def by_clamp(ids: Any, table: Any, start: int) -> Any:
    local = ids - start
    inside = (local == local.clamp(min=0, max=len(table) - 1)).to(table.dtype)
    return table[local.clamp(min=0).clamp(max=len(table) - 1)] * inside[..., None]


def by_product(ids: Any, table: Any, start: int) -> Any:
    inside = (ids - start >= 0) * (ids - start < len(table))
    return torch.where(inside[..., None], table.index_select(0, ((ids - start) * inside).flatten()).view(*ids.shape, -1), 0.0)


def by_moves(ids: Any, table: Any, start: int) -> Any:
    """The mask before, and the rows after the dimensions are exchanged."""
    masked = outside(ids.T, start, len(table))
    local = (ids.flatten() - start).masked_fill(outside(ids, start, len(table)).flatten(), 0)
    return (F.embedding(local, table).view(*ids.shape, -1).transpose(0, 1) * (1 - masked.float())[..., None]).transpose(0, 1)


def by_minimum(ids: Any, table: Any, start: int) -> Any:
    """Places of other ids get another row each."""
    local = torch.maximum(torch.minimum(ids - start, torch.tensor(len(table) - 1)), torch.tensor(0))
    return F.embedding(local, table) * (local == ids - start)[..., None]


def by_hits(ids: Any, table: Any, start: int) -> Any:
    return ((ids - start)[..., None] == torch.arange(len(table))).to(table.dtype) @ table


def by_numbers(ids: Any, table: Any, start: int) -> Any:
    return (ids[..., None] == torch.arange(start, start + len(table))).to(table.dtype) @ table


def by_remainders(ids: Any, table: Any, start: int) -> Any:
    """Ids of a rank have one quotient by the number of rows."""
    rows = len(table)
    return F.embedding(ids % rows, table) * (ids // rows == start // rows)[..., None]


def by_shifts(ids: Any, table: Any, start: int) -> Any:
    """The same of 4 rows, in bits."""
    return F.embedding(ids & 3, table) * ((ids >> 2) == start >> 2)[..., None]


SPELLINGS = (by_where, by_fill, by_clamp, by_product, by_moves, by_minimum, by_hits, by_numbers)
TABLE = torch.arange(15.0).view(5, 3) + 1
MATRIX = torch.tensor([[0, 3, 4, 8], [5, 4, 7, 9], [8, 9, 6, 2]])


@pytest.mark.parametrize("look", SPELLINGS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("start", [0, 4, 5, 7])
def test_rows_of_a_rank(look: Look, start: int) -> None:
    """Also where the last rows are padding."""
    found = translated(look, TOKENS, MATRIX, TABLE, start)
    assert [s for _, s in found] == [start]


@pytest.mark.parametrize("start", [0, 5])
def test_rows_by_remainders(start: int) -> None:
    assert [s for _, s in translated(by_remainders, TOKENS, MATRIX, TABLE, start)] == [start]


@pytest.mark.parametrize("start", [0, 4, 8])
def test_rows_by_bits(start: int) -> None:
    assert [s for _, s in translated(by_shifts, TOKENS, MATRIX, TABLE[:4], start)] == [start]


def beyond(a: int = 0, b: int = 0, shift: int = 0, rows: int = 0, fill: float = 0.0, row: int = 0) -> Look:
    """A mask that begins and ends elsewhere, ids that are shifted otherwise, other rows for masked ids, no 0 in their place."""

    def look(ids: Any, table: Any, start: int) -> Any:
        masked = (ids < start + a) | (ids >= start + len(table) + b)
        local = torch.where(outside(ids, start, len(table)), row, ids - start - shift)
        return F.embedding(local.clamp(0, len(table) - 1 + rows), table).masked_fill(masked[..., None], fill)

    return look


def of_rows(ids: Any, table: Any, start: int) -> Any:
    """The mask of one row of ids for another."""
    masked = outside(ids, start, len(table))
    return F.embedding(torch.where(masked, 0, ids - start), table) * (~masked.flip(0))[..., None]


def of_columns(ids: Any, table: Any, start: int) -> Any:
    """The mask of position [i, j] for [j, i]."""
    masked = outside(ids[:3, :3], start, len(table))
    return F.embedding(torch.where(masked, 0, ids[:3, :3] - start), table) * (~masked.T)[..., None]


def of_others(ids: Any, table: Any, start: int) -> Any:
    """The mask of the ids that follow."""
    masked = outside(ids, start, len(table))
    return F.embedding(torch.where(masked, 0, ids - start)[:, :-1], table) * (~masked[:, 1:])[..., None]


def of_infinite(ids: Any, table: Any, start: int) -> Any:
    """0 · ∞ is no 0: a table that is computed may be infinite."""
    return by_where(ids, 1 / table, start)


def truncated(ids: Any, table: Any, start: int) -> Any:
    """Quotients toward 0 put ids from −4 to −1 beside those from 0 to 4."""
    rows = len(table)
    shifted = ids - rows
    inside = torch.div(shifted.double(), rows, rounding_mode="trunc") == 0
    return F.embedding(torch.where(inside, shifted.abs(), 0), table) * inside[..., None]


def forgotten(ids: Any, table: Any, start: int) -> Any:
    """Ids that have no row are row 0."""
    return F.embedding(torch.where(outside(ids, start, len(table)), 0, ids - start), table)


WRONG = {
    "a row too few": beyond(a=1),
    "a row too many": beyond(a=-1),
    "ends too early": beyond(b=-1),
    "ends too late": beyond(b=1),
    "shifted": beyond(shift=1),
    "clamped too low": beyond(rows=-1),
    "not 0": beyond(fill=1.0),
    "of another row": of_rows,
    "transposed": of_columns,
    "of the next": of_others,
    "infinite": of_infinite,
    "truncated": truncated,
    "not masked": forgotten,
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_rows(what: str) -> None:
    """Not taken for the rows from 4 on."""
    found = translated(WRONG[what], TOKENS, MATRIX, TABLE, 4)
    assert not [s for _, s in found if s is not None], found


def test_an_id_that_pytorch_refuses() -> None:
    """Ids without a row are an error, masked or not: nothing is said of such a lookup, though no id here is one."""

    def look(ids: Any, table: Any, start: int) -> Any:
        return F.embedding(ids - start, table).masked_fill(outside(ids, start, len(table))[..., None], 0.0)

    inside = MATRIX.clamp(4, 8)
    assert not [s for _, s in translated(look, TOKENS, inside, TABLE, 4) if s is not None]
    assert [s for _, s in translated(look, ((4, 8),), inside, TABLE, 4)] == [4]


LABELED = torch.tensor([4, IGNORED, 0, 8, 7, 3])
SCORES = torch.arange(60.0).view(6, 10).sin()


def scores(ids: Any, table: Any, start: int) -> Any:
    """Scores of labels, 0 where they are ignored."""
    return table.gather(-1, ids.clamp(min=0)[:, None])[:, 0] * (ids != IGNORED)


def scores_by_where(ids: Any, table: Any, start: int) -> Any:
    safe = torch.where(ids >= 0, ids, 3)
    return torch.where(ids[:, None] < 0, 0, torch.take_along_dim(table, safe[:, None], 1)).squeeze(1)


def scores_counted(ids: Any, table: Any, start: int) -> Any:
    """Ignored labels count as class 0."""
    return table.gather(-1, ids.clamp(min=0)[:, None])[:, 0]


def scores_without_first(ids: Any, table: Any, start: int) -> Any:
    """Class 0 is ignored too."""
    return table.gather(-1, ids.clamp(min=0)[:, None])[:, 0] * (ids > 0)


def test_ignored_labels() -> None:
    for look in (scores, scores_by_where):
        assert translated(look, LABELS, LABELED, SCORES, 0) == [("one_hot", 0)]
    for look in (scores_counted, scores_without_first):
        assert ("one_hot", 0) not in translated(look, LABELS, LABELED, SCORES, 0)
    assert ("one_hot", 0) not in translated(scores, ((IGNORED, IDS - 1),), LABELED, SCORES, 0)  # −7 is no class


def test_remainders_of_many_ids() -> None:
    """A table by remainders or quotients; not where ids may be negative, or where the last quotient is cut short."""
    ids, table = torch.tensor([3, 699, 70, 0]), torch.arange(14.0).view(7, 2)
    look = lambda ids, table, start: F.embedding(ids % 7, table)  # noqa: E731
    assert translated(look, ((0, 699),), ids, table, 0) == [("one_hot", None)]
    assert translated(look, ((0, 700),), ids, table, 0) == [("embedding", None)]
    assert translated(look, ((-7, 699),), ids, table, 0) == [("embedding", None)]
    high = lambda ids, table, start: F.embedding(ids // 100, table)  # noqa: E731
    assert translated(high, ((0, 699),), ids, table, 0) in ([("one_hot", None)], [("embedding", None)])


def test_positions() -> None:
    """A table of positions that ranks cut."""
    for look in (by_where, by_fill, by_clamp):
        found = translated(lambda x, table, start, look=look: look(torch.arange(10), table, start), TOKENS, MATRIX, TABLE, 4)
        assert [s for _, s in found] in ([4], []), found


# -- whole steps --------------------------------------------------------------------------------------------------------------


class Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        made = x.clone()
        dist.all_reduce(made)
        return made

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return g


def stepped(looks: list[Look], rank: int, world: int) -> Any:
    tables = nn.ParameterList([nn.Parameter(torch.rand(IDS // world, 3)) for _ in looks])
    optimizer = torch.optim.SGD(tables.parameters(), lr=0.1)

    def step(batch: Any) -> Any:
        optimizer.zero_grad()
        loss = torch.zeros(())
        for n, (look, table) in enumerate(zip(looks, tables, strict=True)):
            rows = look(batch["ids"], table, rank * len(table))
            loss = loss + ((Summed.apply(rows) if world > 1 else rows) * batch["x"]).sin().sum() * (n + 1)
        loss.backward()
        optimizer.step()
        return loss

    return tables, step


def judged(looks: list[Look], reference: Look = lambda ids, table, start: F.embedding(ids, table)) -> Report:
    batch = {"ids": tvt.Ids((2, 7), "b s", below=IDS), "x": tvt.Reals((2, 7, 3), "b s h")}
    one = lambda: stepped([reference] * len(looks), 0, 1)[1]  # noqa: E731
    cuts = dict.fromkeys(("tables.*", "*"), "(tp v) h")
    return tvt.verify(one, lambda r, w: stepped(looks, r, w)[1], 2, batch, {"tp": 2}, cuts=cuts, points=1)


def test_all_spellings_are_proved() -> None:
    report = judged(list(SPELLINGS))
    assert report.verdict == "PROVED", report.reason


@pytest.mark.parametrize(("what", "expected"), [("ends too late", "UNKNOWN"), ("a row too few", "REFUTED"), ("not masked", "REFUTED")])
def test_wrong_steps(what: str, expected: str) -> None:
    """UNKNOWN where the id that is one too many counts as the last row (REFUTED where evaluation sees it)."""
    found = judged([WRONG[what]]).verdict
    assert found == expected or (found, expected) == ("REFUTED", "UNKNOWN")
