"""Lineage and obligations (TV3xx)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import trainverify as tv
from check.plans import codes, found, small, small_plan, types, with_program
from trainverify.build.plan import RankBuilder
from trainverify.graph.lineage import Layout, Part, Partial, Parts, Pattern, Placements, Replicate, Run, Shard, layout
from trainverify.graph.plan import Plan
from trainverify.graph.program import Domain, Output, Program
from trainverify.verdicts import assumptions

MESH = tv.Mesh(dp=3, tp=2)


def halves(mesh: tv.Mesh = MESH) -> Parts:
    """Rows 0:5 of w on tp=0, rows 5:10 on tp=1, spelt out."""
    return Parts(tuple((r, (Part((0, 0), (Run(5 * (r % 2), 5), Run(0, 8))),)) for r in range(mesh.size)))


def replaced(plan: Plan, local: str, *layouts: Layout) -> Plan:
    """A plan with other lineage for one local tensor."""
    return replace(plan, lineage=(*(x for x in plan.lineage if x.local != local), *layouts))


def only(logical: Program, plan: Plan) -> tuple[str, str]:
    (f,) = found(logical, plan)
    return f.code, f.message


@pytest.mark.parametrize("form", ["(tp o) k", {"tp": Shard(0)}, {"dp": Replicate(), "tp": Shard(0)}, halves()], ids=str)
def test_three_spellings(form: Any) -> None:
    assert codes(small(), small_plan(form)) == []


def held(logical_shape: tuple[int, ...], build: Callable[[Any], None], mesh: tv.Mesh, **source: Any) -> tuple[Program, Plan]:
    """A logical program with one input x and a plan that only holds it."""
    b = tv.program("held")
    x = b.input("x", logical_shape, **source)
    w = b.parameter("w", ())
    b.loss(b.mul(b.sum_(x), w, name="loss"))
    p = tv.plan("held", mesh)
    build(p)
    return tv.complete(b.build()), p.build()


def finish(r: RankBuilder) -> None:
    w = r.parameter("w", (), "")
    one = r.mul(w, value=1.0, name="loss")
    r.loss(one)
    r.output(r.mul(w, value=2.0, name="w.grad"), "gradient", "w")


def test_uneven_shards() -> None:
    """7 rows on 3 ranks are 3 + 3 + 1, on 5 ranks 2 + 2 + 2 + 1 + 0."""
    for sizes in ((3, 3, 1), (2, 2, 2, 1, 0)):

        def build(p: Any, sizes: tuple[int, ...] = sizes) -> None:
            for i, n in enumerate(sizes):
                with p.ranks(dp=i) as r:
                    r.input("x", (n, 2), {"dp": Shard(0)})
                    finish(r)

        assert codes(*held((7, 2), build, tv.Mesh(dp=len(sizes)))) == []


def test_tv303_uneven_shards_of_one_size() -> None:
    def build(p: Any) -> None:
        with p.ranks() as r:
            r.input("x", (3, 2), {"dp": Shard(0)})
            finish(r)

    (f,) = found(*held((7, 2), build, tv.Mesh(dp=3)))
    assert (f.code, f.rank) == ("TV303", 2)
    assert f.message == "x ~ x: f32[7,2] {dp: Shard(0)} on mesh(dp=3): rank 2 holds a piece [1, 2], but 'x' is f32[3,2]"


def strided(first: str, second: str) -> list[str]:
    """w[12] on two ranks, each by a pattern of its own: codes of the findings."""

    def build(p: Any) -> None:
        for i, form in enumerate((first, second)):
            with p.ranks(tp=i) as r:
                r.input("x", (6,), form)
                finish(r)

    return codes(*held((12,), build, tv.Mesh(tp=2)))


def test_tv305_numbers_in_patterns_count_their_own_digits() -> None:
    """(2 tp 3) of rank 0 is 0…2, 6…8; (6 tp) of rank 1 is 1, 3, 5, 7, 9, 11: nobody holds 4 and 10."""
    assert strided("(2 tp 3)", "(6 tp)") == ["TV305"]
    assert strided("(6 tp)", "(2 tp 3)") == ["TV305"]
    assert strided("(2 tp 3)", "(2 tp 3)") == []
    assert strided("(6 tp)", "(6 tp)") == []
    assert strided("(2 tp o)", "(2 tp 3)") == []
    assert strided("(tp 6)", "(1 tp o)") == []
    assert strided("(tp 6)", "(2 tp 3)") == ["TV305"]


def bucket(padding: bool = True, shift: int = 0, second: int = 7, length: int = 5) -> tuple[Program, Plan]:
    """a [7] and b [2,3] in flat buckets of 5 on 3 ranks: 13 elements and 2 of padding."""
    b = tv.program("bucket")
    x = b.input("x", ())
    a, c = b.parameter("a", (7,)), b.parameter("b", (2, 3))
    b.loss(b.mul(x, b.add(b.sum_(a), b.sum_(c)), name="loss"))
    logical = tv.complete(b.build())
    p = tv.plan("bucket", tv.Mesh(dp=3))

    def flat(local: int, start: int, size: int, **more: Any) -> Part:
        return Part((local,), (Run(start, size),), flat=True, **more)

    with p.ranks() as r:
        x = r.input("x", (), "")
        w = r.parameter("bucket", (5,), Parts(((0, (flat(0, 0, 5),)), (1, (flat(0, 5, 2),)))), "a")
        pad = (flat(3, 0, 2, padding=True),) if padding else ()
        r.lives(w, "b", Parts(((1, (flat(2 - shift, 0, 3 + shift),)), (2, (flat(0, 3, 3), *pad)))))
        r.loss(r.mul(x, r.sum_(w), name="loss"))
        g = r.mul(w, value=2.0, name="g")
        r.output(g, "gradient", "bucket")
    return logical, p.build()


def test_flat_buckets_with_padding() -> None:
    assert codes(*bucket()) == []


def test_padding_is_taken_as_zero_and_said_so() -> None:
    assert "before the step the padding of bucket is zero" in assumptions(*bucket())
    assert not any("padding" in line for line in assumptions(*bucket(padding=False)))


def test_tv303_forgotten_padding() -> None:
    (f,) = found(*bucket(padding=False))
    assert (f.code, f.rank, f.hint) == ("TV303", 2, "declare padding as a part with padding=True")
    assert f.message == "bucket: f32[5] of all ~ b: no part speaks of [3:5]"


def test_tv304_parts_overlap_in_a_bucket() -> None:
    (f,) = found(*bucket(shift=1))
    assert (f.code, f.rank) == ("TV304", 1)
    assert f.message == "bucket: f32[5] of all ~ a, b: flat [5:7] at [0] and flat [0:4] at [1] overlap in it"


def tied(second: Any = "(tp v) k") -> tuple[Program, Plan]:
    """One embedding, used on the first and on the last stage."""
    b = tv.program("tied")
    ids = b.input("ids", (4, 3), "i64", ids=10)
    w = b.parameter("w", (10, 6))
    b.loss(b.mean(b.linear(b.embedding(ids, w), w), name="loss"))
    p = tv.plan("tied", tv.Mesh(pp=2, tp=2))
    for stage, form in ((0, "(tp v) k"), (1, second)):
        with p.ranks(pp=stage) as r:
            w = r.parameter("w", (5, 6), form)
            i = r.input("ids", (4, 3), "b t", dtype="i64", ids=10)
            r.metric("used", r.mean(r.to(i, dtype="f32")))
            g = r.mul(w, value=2.0, name="g")
            if stage:
                r.loss(r.mean(w, name="loss"))
            r.output(r.all_reduce(g, group="pp", name="g.synced"), "gradient", "w")
    return tv.complete(b.build()), p.build()


def test_tied_parameters_on_two_stages() -> None:
    assert codes(*tied()) == []


def test_tv301_source_of_a_rank_without_lineage() -> None:
    plan = small_plan()
    f = found(small(), replace(plan, lineage=plan.lineage[1:]))
    assert [x.code for x in f] == ["TV301", "TV301"]
    assert f[0].message == "input x: f32[2,8] of all (and 5 more ranks)"
    assert f[0].hint == "say which part of which logical tensor 'x' holds"
    assert f[1].message == "input x: f32[6,8] of small lives on no rank"


def test_tv301_on_some_ranks_only() -> None:
    plan = replaced(small_plan(), "w", layout("w", "(tp o) k", where={"dp": 1}))
    (f, *rest) = found(small(), plan)
    assert (f.code, f.rank, f.message, rest) == ("TV301", 0, "parameter w: f32[5,8] of all (and 3 more ranks)", [])


@pytest.mark.parametrize(
    ("lay", "message"),
    [
        (layout("w", "(tp o) k", where={"ep": 0}), "mesh(dp=3, tp=2) has no axis 'ep'"),
        (layout("w", "(tp o) k", where={"dp": 3}), "mesh(dp=3, tp=2) has no dp=3"),
        (layout("w", {"cp": Shard(0)}), "mesh(dp=3, tp=2) has no axis 'cp'"),
        (layout("w", Placements((("tp", Shard(0)), ("tp", Shard(1))))), "an axis is placed twice"),
        (layout("v", "(tp o) k", "w"), "small has no tensor 'v'"),
        (layout("w", "(tp o) k", "q"), "all on rank 0 has no tensor 'q' (and 5 more ranks)"),
        (layout("w", Parts(((9, ()),))), "mesh(dp=3, tp=2) has no rank 9"),
        (layout("w", Parts(((1, ()), (1, ())))), "rank 1 is given twice"),
    ],
)
def test_tv302_lineage_of_nothing(lay: Layout, message: str) -> None:
    first = found(small(), replaced(small_plan(), "w", lay))[0]
    assert first.code == "TV302"
    assert first.message.endswith(f": {message}")


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"tp": Shard(1)}, "{tp: Shard(1)} on mesh(dp=3, tp=2): rank 0 holds a piece [10, 4], but 'w' is f32[5,8]"),
        ({"tp": Shard(2)}, "{tp: Shard(2)} on mesh(dp=3, tp=2): Shard(2) of a tensor with 2 dimensions"),
        ("(dp o) k", "\"(dp o) k\" on mesh(dp=3, tp=2): pattern '(dp o) k': size 10 does not divide by 3"),
        ("(tp o) k j", "pattern '(tp o) k j' has 3 dimensions, the tensor has 2"),
        ("(tp o tp) k", "pattern '(tp o tp) k' repeats a name"),
        ("o k)", "names and (groups of names) separated by spaces"),
        (Pattern("(tp o) k", (("tp", 0, 2),)), "tp is an axis of mesh(dp=3, tp=2) and cannot be fixed"),
        (Pattern("(tp o) k", (("mb", 0, 2),)), "the pattern has no 'mb'"),
        (Pattern("(tp mb o) k", (("mb", 5, 5),)), "mb=5 of 5"),
        (Parts(tuple((r, (Part((0, 0), (Run(0, 6), Run(0, 8))),)) for r in range(6))), "0:6 in dimension 0 of a local tensor [5, 8]"),
        (
            Parts(tuple((r, (Part((0, 0), (Run(6, 5), Run(0, 8))),)) for r in range(6))),
            "up to 11 in dimension 0 of a logical tensor [10, 8]",
        ),
        (Parts(tuple((r, (Part((0,), (Run(0, 5),)),)) for r in range(6))), "the positions of each of 2 dimensions is needed"),
        (Parts(tuple((r, (Part((0, 0), (Run(0, 2, 2, 1), Run(0, 8))),)) for r in range(6))), "blocks of 2 every 1 overlap"),
        (Parts(tuple((r, (Part((0, 0), (Run(0, -5), Run(0, 8))),)) for r in range(6))), "is not a range"),
    ],
)
def test_tv303_shapes(form: Any, message: str) -> None:
    f = found(small(), replaced(small_plan(), "w", layout("w", form)))
    assert {x.code for x in f} == {"TV303"}
    assert message in f[0].message


def test_tv303_kinds() -> None:
    def build(p: Any) -> None:
        with p.ranks() as r:
            r.input("x", (3, 2), {"dp": Shard(0)}, dtype="i64", ids=4)
            finish(r)

    f = found(*held((6, 2), build, tv.Mesh(dp=2)))
    assert [x.code for x in f] == ["TV303", "TV309"]
    assert f[0].message == "x ~ x: f32[6,2] {dp: Shard(0)} on mesh(dp=2): 'x' is i64[3,2], 'x' is f32[6,2]"


def test_tv304_two_layouts_of_one_tensor() -> None:
    plan = small_plan()
    plan = replace(plan, lineage=(*plan.lineage, layout("w", "(tp o) k", where={"dp": 2})))
    (f,) = found(small(), plan)
    assert (f.code, f.rank) == ("TV304", 4)
    assert f.message == "w: f32[5,8] of all ~ w: [0:5, 0:8] at [0, 0] and [0:5, 0:8] at [0, 0] overlap in it"


def test_tv304_one_share_twice() -> None:
    def part(at: int, share: int) -> Part:
        return Part((at, 0), (Run(0, 1), Run(0, 10)), ("sum", share, 12))

    parts = Parts(tuple((r, (part(0, 2 * r), part(1, 2 * r))) for r in range(6)))
    f = found(small(), replace(small_plan(), lineage=(*small_plan().lineage, layout("y", parts))))
    assert f[0].code == "TV303"  # y is [2, 5] on a rank
    parts = Parts(
        tuple(
            (r, (Part((0, 0), (Run(0, 1), Run(0, 5)), ("sum", 0, 2)), Part((1, 0), (Run(0, 1), Run(0, 5)), ("sum", 0, 2))))
            for r in range(6)
        )
    )
    f = found(small(), replace(small_plan(), lineage=(*small_plan().lineage, layout("y", parts))))
    assert f[0].code == "TV304"
    assert f[0].message.endswith("[0:1, 0:5] at [0, 0] part 0 of 2 (sum) and [0:1, 0:5] at [1, 0] part 0 of 2 (sum) of rank 0")


def test_tv305_where_fixes_a_sharded_axis() -> None:
    """Only the ranks with tp=0 are said to hold w: half of it is nowhere."""
    lay = layout("w", Parts(tuple((r, (Part((0, 0), (Run(0, 5), Run(0, 8))),)) for r in range(6))))
    assert only(small(), replaced(small_plan(), "w", lay))[0] == "TV305"
    f = found(small(), replaced(small_plan(), "w", layout("w", "(tp o) k", where={"tp": 1})))
    assert [x.code for x in f] == ["TV301", "TV305"]
    text = 'parameter w: no rank holds [0:5, 0:8] of w ~ w: f32[10,8] "(tp o) k" on mesh(dp=3, tp=2), tp=1'
    assert f[1].message == text
    f = found(small(), replaced(small_plan(), "w", layout("w", {"tp": Shard(0)}, where={"tp": 0})))
    assert f[1].message == "parameter w: no rank holds [5:10, 0:8] of w ~ w: f32[10,8] {tp: Shard(0)} on mesh(dp=3, tp=2), tp=0"


def micro(indices: tuple[int, ...], form: str = "(dp mb b) k", of: int = 3) -> tuple[Program, Plan]:
    def build(p: Any) -> None:
        with p.ranks() as r:
            for n, m in enumerate(indices):
                r.input(f"x{n}", (4, 5), form, "x", fixed={"mb": (m, of)})
            finish(r)

    return held((24, 5), build, tv.Mesh(dp=2))


def test_micro_batches() -> None:
    assert codes(*micro((0, 1, 2))) == []
    assert codes(*micro((2, 0, 1), "(mb dp b) k")) == []
    assert codes(*micro((1, 0, 2), "(b mb dp) k")) == []


def test_tv305_micro_batch_that_nobody_holds() -> None:
    text = 'input x: no rank holds [4:8, 0:5] of x0 ~ x: f32[24,5] "(dp mb b) k", mb=0 of 3 on mesh(dp=2) (and 2 more layouts)'
    assert only(*micro((0, 2, 2))) == ("TV305", text)
    assert only(*micro((0, 1), "(mb dp b) k"))[1].startswith("input x: no rank holds [16:24, 0:5] of x0")


def test_tv305_parts_at_full_size() -> None:
    def parts(skip: int) -> Parts:
        return Parts(tuple((r, (Part((0, 0), (Run(r * 1000, 1000), Run(0, 4096))),)) for r in range(8) if r != skip))

    def build(p: Any, skip: int = 9) -> None:
        for i in range(8):
            with p.ranks(i) as r:
                if i == skip:
                    finish(r)
                    continue
                r._inputs.append("x")
                r.declare("x", types(x=(1000, 4096))["x"])
                finish(r)
        p.lineage.append(layout("x", parts(skip)))

    logical, plan = held((8000, 4096), build, tv.Mesh(dp=8))
    assert codes(logical, plan) == []
    logical, plan = held((8000, 4096), lambda p: build(p, 3), tv.Mesh(dp=8))
    assert only(logical, plan)[1].startswith("input x: no rank holds [3000:4000, 0:4096] of x ~ x: f32[8000,4096] explicit parts")


def test_tv306_partial_parameter() -> None:
    f = found(small(), replaced(small_plan(), "w", layout("w", {"tp": Shard(0), "dp": Partial("sum")})))
    assert [x.code for x in f][:1] == ["TV306"]
    text = 'w ~ w: f32[10,8] {tp: Shard(0), dp: Partial("sum")} on mesh(dp=3, tp=2): a parameter has no summands'
    assert f[0].message == text


def test_tv306_partial_gradient_at_the_end() -> None:
    plan = small_plan()
    program = plan.templates[0].program
    outputs = tuple(replace(o, tensor="w.half") if o.role == "gradient" else o for o in program.outputs)
    plan = with_program(plan, replace(program, outputs=outputs))
    lay = layout("w.grad", "(tp o) k", "w.half", partial={"dp": "avg"})
    f = [x for x in found(small(), replace(plan, lineage=(*plan.lineage, lay))) if x.severity == "error"]
    assert [x.code for x in f] == ["TV306"]
    text = 'gradient of w: w.half ~ w.grad: f32[10,8] "(tp o) k", dp: Partial("avg") on mesh(dp=3, tp=2) at the end of the step'
    assert f[0].message == text


def test_partial_lineage_of_a_computed_tensor_is_a_claim() -> None:
    """The gradient before it is synchronised may be declared; what is reported is the synchronised one."""
    plan = small_plan()
    lay = layout("w.grad", "(tp o) k", "w.half", partial={"dp": "avg"})
    assert codes(small(), replace(plan, lineage=(*plan.lineage, lay))) == []


def test_tv305_summands_that_do_not_exist() -> None:
    lay = layout("w.grad", "(tp o) k", "w.half", partial={"dp": "avg"}, where={"dp": 0})
    plan = small_plan()
    code, message = only(small(), replace(plan, lineage=(*plan.lineage, lay)))
    assert code == "TV305"
    assert message.endswith("the summands with another dp do not exist")


def sharded_gradient(**changes: Any) -> tuple[Program, Plan]:
    """The parameter is whole on every rank, its gradient is cut over dp."""
    p = tv.plan("zero", tv.Mesh(dp=2))
    for i in range(2):
        with p.ranks(dp=i, name=f"rank{i}") as r:
            x, w = r.input("x", (3, 8), "(dp b) k"), r.parameter("w", (10, 8), "o k")
            loss = r.mean(r.linear(x, w), name="mean")
            r.backward(loss)
            r.loss(r.all_reduce(loss, group="dp", op="avg", name="loss"))
            shard = r.reduce_scatter(r.gradient(w), group="dp", op="avg", name="w.shard")
            if i in changes.get("declares", (0, 1)):
                r.lives(shard, "w.grad", "(dp o) k")
            if i in changes.get("reports", (0, 1)):
                r.output(shard, "gradient", "w")
            full = r.all_gather(shard, group="dp", name="w.grad")
            r.update(w, r.sgd(w, full, lr=0.5, name=["w.new"]))
    return small(), p.build()


def test_gradient_that_lives_differently_from_its_parameter() -> None:
    assert codes(*sharded_gradient()) == []


def test_tv305_gradient_that_is_declared_on_one_rank() -> None:
    f = found(*sharded_gradient(declares=(0,), reports=(0,)))
    assert [x.code for x in f] == ["TV305"]
    text = 'gradient of w: no rank holds [5:10, 0:8] of w.shard ~ w.grad: f32[10,8] "(dp o) k" on mesh(dp=2), dp=0'
    assert f[0].message == text


def test_tv307_gradient_that_one_holder_does_not_report() -> None:
    logical, plan = sharded_gradient(declares=(), reports=(0,))
    plan = replace(plan, lineage=(*plan.lineage, layout("w.grad", "(dp o) k", "w.shard")))
    assert only(logical, plan) == ("TV307", "rank 1 of 'rank1' holds w.shard but has no gradient of w")


def test_tv303_gradient_shard_without_lineage_of_its_own() -> None:
    f = found(*sharded_gradient(declares=()))
    assert {x.code for x in f} == {"TV303"}
    assert f[0].message.endswith("rank 0 holds a piece [10, 8], but 'w.shard' is f32[5,8]")


def test_lineage_said_twice_is_said_once() -> None:
    plan = small_plan()
    assert codes(small(), replace(plan, lineage=plan.lineage * 2)) == []


def test_tv307_missing_outputs() -> None:
    plan = small_plan()
    program = plan.templates[0].program
    kept = tuple(o for o in program.outputs if o.role != "parameter")
    (f,) = found(small(), with_program(plan, replace(program, outputs=kept)))
    assert (f.code, f.rank) == ("TV307", 0)
    assert f.message == "rank 0 (and 5 more) of 'all' holds w but has no updated parameter w"
    kept = tuple(o for o in program.outputs if o.role != "loss")
    f = [x for x in found(small(), with_program(plan, replace(program, outputs=kept))) if x.severity == "error"]
    assert [(x.code, x.message) for x in f] == [("TV307", "no rank reports the loss")]
    logical = small()
    logical = replace(logical, outputs=(*logical.outputs, Output("loss", "metric", "grad_norm")))
    assert only(logical, plan) == ("TV307", "no rank reports the metric grad_norm")


def test_tv303_gradient_of_another_shape() -> None:
    def more(r: RankBuilder) -> None:
        flat = r.reshape(r.gradient(next(t for t in [tv_tensor(r, "w")])), shape=(40,), name="flat")
        r.outputs[:] = [o for o in r.outputs if o.role != "gradient"]
        r.output(flat, "gradient", "w")

    f = [x for x in found(small(), small_plan(more=more)) if x.severity == "error"]
    assert [x.code for x in f] == ["TV303"]
    assert f[0].message.endswith("rank 0 holds a piece [5, 8], but 'flat' is f32[40]")


def tv_tensor(r: RankBuilder, name: str) -> Any:
    from trainverify.build.tape import Tensor

    return Tensor(name, r.tensors[name])


def test_tv308_nothing_to_verify() -> None:
    p = small()
    f = found(replace(p, outputs=()), small_plan())
    assert [x.code for x in f] == ["TV308"] * 3
    assert f[0].message == "small reports no loss"
    assert f[2].message == "small has no outputs"
    (f,) = found(replace(p, outputs=(Output("loss", "loss"),)), small_plan())
    assert f.message == "small has neither gradients nor updated parameters: only the forward pass would be verified"


def test_tv308_parameter_that_is_not_trained() -> None:
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    import mlp

    p = mlp.logical()
    kept = tuple(o for o in p.outputs if (o.role, o.of) != ("parameter", "w1"))
    assert only(replace(p, outputs=kept), mlp.plan()) == ("TV308", "parameter w1 of mlp has no updated value among the outputs")
    assert codes(p, mlp.plan()) == []


def test_tv309_preconditions() -> None:
    logical, plan = tied()
    t = plan.templates[1]
    plan = with_program(plan, replace(t.program, domains={"ids": Domain("ids", 11)}), 1)
    (f,) = found(logical, plan)
    assert (f.code, f.rank) == ("TV309", 2)
    assert f.message.endswith("pp1 assumes ids in [0, 11) of 'ids', the logical program ids in [0, 10) of 'ids'")


def test_tv310_a_parameter_is_not_an_input() -> None:
    b = tv.program("small")
    x, w = b.input("w", (10, 8)), b.parameter("x", (6, 8))
    b.loss(b.mean(b.linear(w, x), name="loss"))
    f = found(tv.complete(b.build()), small_plan())
    assert {x.code for x in f[:2]} == {"TV310"}
    assert f[0].message.endswith("'x' is an input of all, 'x' is a parameter")


def test_tv310_a_source_is_not_computed() -> None:
    """A plan cannot assume what it has to show."""
    f = found(small(), replaced(small_plan(), "x", layout("y", "(dp b) (tp k)", "x")))
    assert "TV310" in [x.code for x in f]
