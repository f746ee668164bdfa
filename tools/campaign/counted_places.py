"""Multiples of the rank as literals: where positions begin, causal offsets, shifted ids, the one rank that adds a bias."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import trainverify as tv
from tools.campaign.counted import (
    LENGTHS,
    MANY,
    Builder,
    Counted,
    Cut,
    Draw,
    Number,
    Tensor,
    around,
    completed,
    finish,
    mesh,
    over,
    weight,
)
from trainverify.graph.plan import Plan

Offset = Callable[[int], int]  # of a rank


def offsets(c: Cut) -> dict[str, Offset]:
    """Wrong beginnings of a rank's positions."""
    middle = c.ranks // 2
    found: dict[str, Offset] = {
        "one more": lambda i: i * c.chunk + 1,
        "one less": lambda i: i * c.chunk - 1,
        "chunk and one": lambda i: i * (c.chunk + 1),
        "doubled": lambda i: 2 * i * c.chunk,
        "forgotten": lambda i: 0,
        "next rank's": lambda i: (i + 1) * c.chunk,
        "one rank, one more": lambda i: i * c.chunk + (i == middle),
    }
    if c.chunk > 1:
        found["the rank itself"] = lambda i: i
        found["chunk less one"] = lambda i: i * (c.chunk - 1)
    return found


def right_offset(c: Cut) -> Offset:
    return lambda i: i * c.chunk


def positions(d: Draw) -> Counted:
    """arange(chunk) + rank · chunk, as integers or real numbers, in a rotation, a fraction of the length, or a square."""
    c, k = d.cut(), d.small()
    kind, how = d.rng.choice(("cos", "fraction", "square")), d.rng.choice(("integers", "real numbers", "arange"))
    spelled = d.spelling()
    middle = c.total // 2

    def turned(b: Builder, at: Tensor, count: int) -> Tensor:
        made: Tensor
        match kind:
            case "cos":
                made = b.cos(b.mul(at, value=0.3))
            case "fraction":
                made = over(b, b.add(at, value=1), count, spelled)
            case _:
                made = over(b, b.square(b.sub(at, value=middle)), count, spelled)
        return b.unsqueeze(made, dim=1)

    b = tv.program("positions")
    x = b.input("x", (c.total, k))
    b.loss(b.sum(b.mul(x, turned(b, b.to(b.arange(stop=c.total), dtype="f32"), c.total)), name="loss"))
    logical = b.build()

    def plan(offset: Offset, count: int) -> Plan:
        p = tv.plan("positions", mesh(cp=c.ranks))
        with p.ranks() as r:
            x = r.input("x", (c.chunk, k), "(cp s) k")
            match how:
                case "integers":
                    at = r.to(r.add(r.arange(stop=c.chunk), value=r.each_rank(offset)), dtype="f32")
                case "real numbers":
                    at = r.add(r.to(r.arange(stop=c.chunk), dtype="f32"), value=r.each_rank(lambda i: float(offset(i))))
                case _:
                    at = r.to(r.arange(start=r.each_rank(offset), stop=r.each_rank(lambda i: offset(i) + c.chunk)), dtype="f32")
            r.loss(r.all_reduce(r.sum(r.mul(x, turned(r, at, count))), group="cp", name="loss"))
        return p.build()

    right = right_offset(c)
    wrong: dict[str, Callable[[], Plan]] = {t: partial(plan, f, c.total) for t, f in offsets(c).items()}
    if kind != "cos":
        wrong |= {f"length: {t}": partial(plan, right, n) for t, n in around(c.total, cp=c.ranks).items()}
    return Counted("positions", logical, plan(right, c.total), wrong)


MASKS: Final = ("operator", "operator", "arange", "arange", "added", "difference")
BY_COLUMN: Final = "integers compared with a column over ranks"  # no law covers these two at any size
UNALIGNED: Final = "queries that begin between the cuts of the keys"


def visible(b: Builder, how: str, queries: int, keys: int, first_query: Offset, first_key: Offset, plan: bool) -> Tensor:
    """bool[queries, keys]: keys up to a query's own position. A logical program has the offsets of rank 0."""

    def at(offset: Offset) -> Any:
        return b.each_rank(offset) if plan else offset(0)

    def places(offset: Offset, count: int, dim: int) -> Tensor:
        if how == "arange":
            return b.unsqueeze(b.arange(start=at(offset), stop=at(lambda i: offset(i) + count)), dim=dim)
        found = b.unsqueeze(b.arange(stop=count), dim=dim)
        return b.add(found, value=at(offset)) if how == "added" else found

    if how == "operator":
        return b.create_mask(queries=queries, keys=keys, query_offset=at(first_query), key_offset=at(first_key))
    rows, columns = places(first_query, queries, 1), places(first_key, keys, 0)
    if how == "difference":
        return b.le(b.sub(columns, rows), value=at(lambda i: first_query(i) - first_key(i)))
    return b.ge(rows, columns)


def zero(rank: int) -> int:
    return 0


def causal(d: Draw) -> Counted:
    """Queries cut over ranks see keys up to themselves: k − q ≤ rank · chunk, or positions that begin there, or a mask operator."""
    many = d.rng.random() < 0.7
    c = Cut(d.rng.choice(MANY), d.rng.choice((1, 1, 2))) if many else Cut(d.rng.choice((3, 4, 5)), d.small())
    keys = c.total if many else d.rng.choice(LENGTHS)
    before = keys - c.total  # keys of which all queries see all
    how, softmax, width = d.rng.choice(MASKS), d.rng.random() < 0.4, d.small()

    def attended(b: Builder, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = b.matmul(q, b.transpose(k))
        shares = b.softmax(b.apply_mask(scores, mask)) if softmax else b.mul(scores, b.to(mask, dtype="f32"))
        return b.sum(b.matmul(shares, v))

    b = tv.program("causal")
    q, k, v = b.input("q", (c.total, width)), b.input("k", (keys, width)), b.input("v", (keys, width))
    b.loss(attended(b, q, k, v, visible(b, how, c.total, keys, lambda i: before, zero, False)))
    logical = b.build()

    def plan(offset: Offset) -> Plan:
        p = tv.plan("causal", mesh(cp=c.ranks))
        with p.ranks() as r:
            q = r.input("q", (c.chunk, width), "(cp s) h")
            k, v = r.input("k", (keys, width), "s h"), r.input("v", (keys, width), "s h")
            mask = visible(r, how, c.chunk, keys, lambda i: before + offset(i), zero, True)
            r.loss(r.all_reduce(attended(r, q, k, v, mask), group="cp", name="loss"))
        return p.build()

    off = {t: f for t, f in offsets(c).items() if not (softmax and before + f(0) < 0)}  # a row without keys has no softmax
    left = BY_COLUMN if how in ("added", "difference") else UNALIGNED if before else ""
    return Counted("causal", logical, plan(right_offset(c)), {t: partial(plan, f) for t, f in off.items()}, left)


def late_keys(d: Draw) -> Counted:
    """Keys cut over ranks, few queries: every rank's keys begin at rank · chunk."""
    c, queries, k, how = d.cut(), d.small(), d.small(), d.rng.choice(MASKS)
    first = d.rng.randrange(c.total // 3, c.total)  # position of the first query

    b = tv.program("keys")
    s, v = b.input("s", (queries, c.total)), b.input("v", (c.total, k))
    seen = b.to(visible(b, how, queries, c.total, lambda i: first, zero, False), dtype="f32")
    b.loss(b.sum(b.matmul(b.mul(s, seen), v), name="loss"))
    logical = b.build()

    def plan(offset: Offset) -> Plan:
        p = tv.plan("keys", mesh(cp=c.ranks))
        with p.ranks() as r:
            s, v = r.input("s", (queries, c.chunk), "q (cp s)"), r.input("v", (c.chunk, k), "(cp s) k")
            seen = r.to(visible(r, how, queries, c.chunk, lambda i: first, offset, True), dtype="f32")
            r.loss(r.all_reduce(r.sum(r.matmul(r.mul(s, seen), v)), group="cp", name="loss"))
        return p.build()

    off = {t: f for t, f in offsets(c).items() if t != "one rank, one more"}  # seen only if the rank is the border
    return Counted("keys", logical, plan(right_offset(c)), {t: partial(plan, f) for t, f in off.items()}, UNALIGNED)


def one_bias(d: Draw) -> Counted:
    """A contraction cut over ranks: one rank adds the bias, told by a column or by comparing its number; or all add their share."""
    c, rows, width, spelled = d.cut(huge=d.rng.random() < 0.5), d.small(), d.small(), d.spelling()
    home, how = d.rng.randrange(c.ranks), d.rng.choice(("column", "number", "share", "column"))

    b = tv.program("bias")
    x, w, bias = b.input("x", (rows, c.total)), b.input("w", (c.total, width)), b.input("b", (width,))
    b.loss(b.sum(b.square(b.add(b.matmul(x, w), bias)), name="loss"))
    logical = b.build()

    def plan(adds: Callable[[int], float] | None = None, equal: int = home, ranks: int = c.ranks) -> Plan:
        p = tv.plan("bias", mesh(tp=c.ranks))
        with p.ranks() as r:
            x, w = r.input("x", (rows, c.chunk), "b (tp k)"), r.input("w", (c.chunk, width), "(tp k) o")
            bias = r.input("b", (width,), "o")
            match how:
                case "column":
                    own = r.mul(bias, value=r.each_rank(adds or (lambda i: float(i == home))))
                case "number":
                    here = r.eq(r.full(shape=(), value=r.each_rank(lambda i: i), dtype="i64"), value=equal)
                    own = r.mul(bias, r.to(here, dtype="f32"))
                case _:
                    own = over(r, bias, ranks, spelled)
            y = r.all_reduce(r.add(r.matmul(x, w), own), group="tp")
            r.loss(r.sum(r.square(y), name="loss"))
        return p.build()

    wrong: dict[str, Callable[[], Plan]] = {}
    other = (home + 1) % c.ranks
    match how:
        case "column":
            wrong["on two ranks"] = lambda: plan(lambda i: float(i in (home, other)))
            wrong["doubled"] = lambda: plan(lambda i: 2.0 * (i == home))
            wrong["on none"] = lambda: plan(lambda i: 0.0)
            wrong["on all"] = lambda: plan(lambda i: 1.0)
            wrong["on all but one"] = lambda: plan(lambda i: float(i != home))
        case "number":
            wrong["a rank that is not there"] = lambda: plan(equal=c.ranks)
        case _:
            wrong |= {t: partial(plan, ranks=n) for t, n in around(c.ranks).items()}
    return Counted("one bias", logical, plan(), wrong)


def vocabulary(d: Draw) -> Counted:
    """A table of embeddings cut over ranks: rows from rank · chunk on; or ids shifted by that, clamped to the rank's rows, and masked."""
    c, h = d.cut(huge=False), d.small()
    ids, by_hand = d.rng.choice((2, 3, 3)), d.rng.random() < 0.4
    optimizer = d.rng.choice((None, tv.SGD(lr=0.5)))

    b = tv.program("vocabulary")
    i, w, v = b.input("ids", (ids,), "i64", ids=c.total), weight(b, "w", (c.total, h), None, optimizer), b.input("v", (ids, h))
    b.loss(b.sum(b.square(b.sub(b.embedding(i, w), v)), name="loss"))
    logical = completed(b, optimizer)

    def plan(offset: Offset, masked: bool = True, rows: int = c.chunk) -> Plan:
        p = tv.plan("vocabulary", mesh(tp=c.ranks))
        with p.ranks() as r:
            i, w = r.input("ids", (ids,), "n", dtype="i64", ids=c.total), weight(r, "w", (c.chunk, h), "(tp v) h", optimizer)
            v = r.input("v", (ids, h), "n h")
            if by_hand:
                own = r.sub(i, value=r.each_rank(offset))
                mine = r.logical_and(r.ge(own, value=0), r.lt(own, value=rows))
                found = r.embedding(r.clamp(own, min=0, max=c.chunk - 1), w)
                if masked:
                    found = r.mul(found, r.unsqueeze(r.to(mine, dtype="f32"), dim=1))
            else:
                found = r.embedding(i, w, start=r.each_rank(offset))
            loss = r.sum(r.square(r.sub(r.all_reduce(found, group="tp", backward="identity"), v)), name="loss")
            if optimizer is not None:
                r.backward(loss)
                r.phase = "optimizer"
            r.loss(loss)
            if optimizer is not None:
                finish(r, {"w": (w, "(tp v) h")}, {"w": r.gradient(w)}, optimizer)
        return p.build()

    right = right_offset(c)
    off = {t: f for t, f in offsets(c).items() if t != "one rank, one more"}
    wrong: dict[str, Callable[[], Plan]] = {t: partial(plan, f) for t, f in off.items()}
    if by_hand:
        wrong["not masked"] = lambda: plan(right, masked=False)
        wrong["masked by all rows"] = lambda: plan(right, rows=c.total)
    return Counted("vocabulary", logical, plan(right), wrong, BY_COLUMN if by_hand else "")


def dropped(d: Draw) -> Counted:
    """Dropout of a block whose origin is rank · chunk, and a mean by a literal."""
    c, k, spelled = d.cut(), d.small(), d.spelling()
    key = d.rng.randrange(1, 1 << 40)

    b = tv.program("dropout")
    b.loss(b.mean(b.dropout(b.input("x", (c.total, k)), p=0.25, key=key), name="loss"))
    logical = b.build()

    def plan(offset: Offset, count: Number) -> Plan:
        p = tv.plan("dropout", mesh(dp=c.ranks))
        with p.ranks() as r:
            x = r.input("x", (c.chunk, k), "(dp b) k")
            origin = r.each_rank(lambda i: (offset(i), 0))
            kept = r.dropout(x, p=0.25, key=key, origin=origin, logical_shape=(c.total, k))
            r.loss(over(r, r.all_reduce(r.sum(kept), group="dp"), count, spelled, "loss"))
        return p.build()

    count, right = c.total * k, right_offset(c)
    wrong: dict[str, Callable[[], Plan]] = {t: partial(plan, right, n) for t, n in around(count, dp=c.ranks).items()}
    if c.total * k > 60:
        wrong["the same for all ranks"] = lambda: plan(lambda i: 0, count)
    return Counted("dropout", logical, plan(right, count), wrong)


FAMILIES = (positions, positions, causal, causal, late_keys, one_bias, one_bias, vocabulary, vocabulary, dropped)
