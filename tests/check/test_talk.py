"""Communication (TV2xx)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import trainverify as tv
from check.plans import change, codes, found, index_of, op, small, small_plan, two_ranks, types, with_program
from trainverify.check import validate
from trainverify.graph.plan import Edit, Plan
from trainverify.graph.program import Function, Op, Ref
from trainverify.graph.types import TensorType


def only(plan: Plan) -> tuple[str, str]:
    (f,) = found(None, plan)
    return f.code, f.message


def reduce_(source: str, target: str, line: int, **attrs: Any) -> Op:
    return op("all_reduce", (source,), (target,), line, group="g", **attrs)


T = types(x=(2, 3), y=(2, 3), z=(2, 3), u=(6,), v=(6,), w=(4, 3))


def test_members_that_agree() -> None:
    first, second = [reduce_("x", "y", 1), reduce_("y", "z", 2)], [reduce_("x", "z", 11), reduce_("z", "y", 12, op="sum")]
    assert codes(None, two_ranks(first, second, T)) == []


def test_tv201_groups() -> None:
    ops = [reduce_("x", "y", 1)]
    first, second = found(None, two_ranks(ops, ops, T, h=(0, 1)))
    assert (first.code, first.rank, first.message) == ("TV201", 0, "first: y = all_reduce(x, group=g): there is no group 'g'")
    assert (second.code, second.rank) == ("TV201", 1)
    assert only(two_ranks(ops, ops, T, g=(0, 1, 1))) == ("TV201", "group g [0, 1, 1]: rank 1 is in it twice")
    assert only(two_ranks(ops, ops, T, g=(0, 1, 2))) == ("TV201", "group g [0, 1, 2]: there is no rank 2 in mesh(tp=2)")
    assert ("TV201", "group h has no members") in [(f.code, f.message) for f in validate(None, two_ranks(ops, ops, T, g=(0, 1), h=()))]
    bad = two_ranks(ops, ops, T, g=(0, 1), h=("a", 1))
    assert only(bad) == ("TV201", "group 'h': ('a', 1) is not a list of ranks")


def test_tv202_rank_outside_its_group_is_found_on_every_rank() -> None:
    plan = small_plan()
    t = plan.templates[0]
    column = list(t.bindings["group.dp"])
    column[3] = column[2]  # rank 3 (dp=1, tp=1) joins the group of tp=0
    plan = replace(plan, templates=(replace(t, bindings={**t.bindings, "group.dp": tuple(column)}),))
    (f,) = found(small(), plan)
    assert (f.code, f.rank) == ("TV202", 3)
    assert f.message == "all: w.grad.synced = all_reduce(w.half, group=$group.dp, op=avg): rank 3 is not in group dp.0 [0, 2, 4]"


def test_tv203_types() -> None:
    first, second = [op("all_reduce", ("x",), ("y",), 12, group="g")], [op("all_reduce", ("w",), ("v",), 30, group="g")]
    tensors = {**types(x=(4, 8), y=(4, 8), w=(4, 6), v=(4, 6))}
    (f,) = found(None, two_ranks(first, second, tensors, sources=("x", "w")))
    assert (f.code, f.rank, str(f.source)) == ("TV203", 0, "user.py:12")
    text = "all_reduce over g [0, 1] (number 1 on it): rank 0 passes f32[4,8] (user.py:12), rank 1 passes f32[4,6] (user.py:30)"
    assert f.message == text


def test_tv203_kind_attributes_and_number() -> None:
    first = [reduce_("x", "y", 1), reduce_("y", "z", 2)]
    other = [reduce_("x", "y", 11), op("all_reduce", ("y",), ("z",), 12, group="g", op="max")]
    text = "all_reduce over g [0, 1] (number 2 on it): rank 0 has op=sum (user.py:2), rank 1 has op=max (user.py:12)"
    assert only(two_ranks(first, other, T)) == ("TV203", text)
    other = [op("all_gather", ("x",), ("w",), 11, group="g"), reduce_("x", "y", 12)]
    text = "collectives over g [0, 1] (number 1 on it): rank 0 calls all_reduce (user.py:1), rank 1 calls all_gather (user.py:11)"
    assert only(two_ranks(first, other, T)) == ("TV203", text)
    text = "all_reduce over g [0, 1]: rank 0 has 2 collectives on it, rank 1 has 1; rank 1 has nothing for number 2 of rank 0 (user.py:2)"
    assert only(two_ranks(first, [reduce_("x", "y", 11)], T)) == ("TV203", text)
    assert codes(None, two_ranks([], [reduce_("x", "y", 11)], T)) == ["TV203"]


def test_tv203_dimensions_counted_from_the_end_are_the_same() -> None:
    tensors = types(x=(2, 3), y=(2, 6))
    first, second = [op("all_gather", ("x",), ("y",), group="g", dim=1)], [op("all_gather", ("x",), ("y",), group="g", dim=-1)]
    assert codes(None, two_ranks(first, second, tensors)) == []


def test_rooted_collectives() -> None:
    """The root alone passes a tensor; the root alone gets one."""
    first, second = [op("broadcast", ("x",), ("y",), 1, group="g", root=0)], [op("broadcast", (), ("y",), 2, group="g", root=0)]
    assert codes(None, two_ranks(first, second, T)) == []
    first, second = [op("gather", ("x",), ("w",), 1, group="g", root=0)], [op("gather", ("x",), (), 2, group="g", root=0)]
    assert codes(None, two_ranks(first, second, T)) == []


def test_tv203_rooted() -> None:
    first, second = [op("broadcast", ("x",), ("y",), 1, group="g", root=0)], [op("broadcast", ("x",), ("y",), 2, group="g", root=0)]
    text = "second: y = broadcast(x, group=g, root=0): rank 1 is not the root (0) and passes a tensor"
    assert only(two_ranks(first, second, T)) == ("TV203", text)
    first, second = [op("broadcast", (), ("y",), 1, group="g", root=0)], [op("broadcast", (), ("y",), 2, group="g", root=0)]
    assert only(two_ranks(first, second, T)) == ("TV203", "first: y = broadcast(group=g, root=0): rank 0 is the root and passes no tensor")
    first, second = [op("reduce", ("x",), ("y",), 1, group="g", root=0)], [op("reduce", ("x",), ("y",), 2, group="g", root=0)]
    text = "second: y = reduce(x, group=g, root=0): rank 1 is not the root (0) and has a result"
    assert only(two_ranks(first, second, T)) == ("TV203", text)
    first, second = [op("broadcast", ("x",), ("y",), 1, group="g", root=0)], [op("broadcast", (), ("u",), 2, group="g", root=0)]
    text = "broadcast over g [0, 1] (number 1 on it): rank 0 gets f32[2,3] (user.py:1), rank 1 gets f32[6] (user.py:2)"
    assert only(two_ranks(first, second, T)) == ("TV203", text)
    first, second = [op("broadcast", ("x",), ("y",), 1, group="g", root=0)], [op("broadcast", ("x",), ("y",), 2, group="g", root=1)]
    assert only(two_ranks(first, second, T))[1].endswith("rank 0 has root=0 (user.py:1), rank 1 has root=1 (user.py:2)")


def test_tv202_root_outside_the_group() -> None:
    ops = [op("reduce", ("x",), (), 1, group="g", root=5)]
    first, _ = found(None, two_ranks(ops, ops, T))
    assert (first.code, first.message) == ("TV202", "first: reduce(x, group=g, root=5): root 5 is not in group g [0, 1]")


def send(source: str, peer: int, line: int, **attrs: Any) -> Op:
    return op("send", (source,), (), line, peer=peer, **attrs)


def recv(target: str, shape: tuple[int, ...], peer: int, line: int, **attrs: Any) -> Op:
    return op("recv", (), (target,), line, peer=peer, shape=shape, **attrs)


def test_messages() -> None:
    assert codes(None, two_ranks([send("x", 1, 1)], [recv("y", (2, 3), 0, 2)], T)) == []


def test_tv204_messages_that_do_not_match() -> None:
    text = "message 1 from rank 0 to rank 1: sent as f32[2,3] (user.py:1), received as f32[6] (user.py:2)"
    assert only(two_ranks([send("x", 1, 1)], [recv("u", (6,), 0, 2)], T)) == ("TV204", text)
    text = "rank 0 sends 2 messages to rank 1, rank 1 receives 1 from rank 0; nothing answers send(x, peer=1) (user.py:2) on rank 0"
    assert only(two_ranks([send("x", 1, 1), send("x", 1, 2)], [recv("y", (2, 3), 0, 3)], T)) == ("TV204", text)
    text = "rank 1 receives 1 messages from rank 0 with tag 7, rank 0 sends 0 to rank 1; "
    text += "nothing answers y = recv(peer=0, shape=[2, 3], tag=7) (user.py:3) on rank 1"
    assert only(two_ranks([], [recv("y", (2, 3), 0, 3, tag=7)], T)) == ("TV204", text)
    assert codes(None, two_ranks([send("x", 1, 1, tag=2)], [recv("y", (2, 3), 0, 2, tag=3)], T)) == ["TV204", "TV204"]


def test_tv204_order_of_messages() -> None:
    first = [send("x", 1, 1), send("w", 1, 2)]
    second = [recv("v", (4, 3), 0, 11), recv("y", (2, 3), 0, 12)]
    plan = two_ranks(first, second, {**T, "v": TensorType((4, 3))}, sources=("x", "w"))
    text = "message 1 from rank 0 to rank 1: sent as f32[2,3] (user.py:1), received as f32[4,3] (user.py:11)"
    assert only(plan) == ("TV204", text)


def test_tv204_peers() -> None:
    text = "first: send(x, peer=2): there is no rank 2 in mesh(tp=2)"
    assert only(two_ranks([send("x", 2, 1)], [], T)) == ("TV204", text)
    assert only(two_ranks([send("x", 0, 1)], [], T)) == ("TV204", "first: send(x, peer=0): rank 0 talks to itself")


def test_tv205_deadlock_shows_the_cycle() -> None:
    first, second = [send("x", 1, 1), recv("y", (2, 3), 1, 2)], [send("x", 0, 11), recv("y", (2, 3), 0, 12)]
    (f,) = found(None, two_ranks(first, second, T))
    assert (f.code, f.rank, str(f.source)) == ("TV205", 0, "user.py:1")
    assert f.message == (
        "rank 0 at send(x, peer=1) (user.py:1) waits for rank 1; rank 1 at send(x, peer=0) (user.py:11) waits for rank 0, "
        "and so back to rank 0"
    )
    assert f.hint == "batch sends and recvs that belong together, or change their order on one side"


def test_batched_exchange_does_not_deadlock() -> None:
    first = [send("x", 1, 1, batch="b"), recv("y", (2, 3), 1, 2, batch="b")]
    second = [send("x", 0, 11, batch="c"), recv("y", (2, 3), 0, 12, batch="c")]
    assert codes(None, two_ranks(first, second, T)) == []


def test_tv205_what_arrives_in_a_batch_is_not_used_within_it() -> None:
    """Both wait for what the other one makes of what it waits for, whatever the batches are called."""

    def forward(peer: int, line: int, *between: Op) -> list[Op]:
        last = between[-1].outputs[0] if between else "y"
        return [recv("y", (2, 3), peer, line, batch="b"), *between, send(last, peer, line + 2, batch="b")]

    for between in ((), (op("neg", ("y",), ("z",), 2),)):
        (f,) = found(None, two_ranks(forward(1, 1, *between), forward(0, 11, *between), T))
        assert (f.code, f.rank, str(f.source)) == ("TV205", 0, "user.py:1")
        exchange = [send("x", 1, 1, batch="b"), recv("y", (2, 3), 1, 2, batch="b")]
        assert codes(None, two_ranks(exchange, forward(0, 11, *between), T)) == []
    again = [*exchange, send("y", 1, 3, batch="b"), recv("z", (2, 3), 1, 4, batch="b")]
    behind = [recv("z", (2, 3), 0, 13, batch="c"), send("x", 0, 14, batch="c"), recv("y", (2, 3), 0, 11, batch="b"), send("z", 0, 12)]
    assert codes(None, two_ranks(again, behind, T)) == []  # two exchanges, one after the other


def test_tv205_collectives_in_different_order_over_two_groups() -> None:
    first = [op("all_reduce", ("x",), ("y",), 1, group="g"), op("all_reduce", ("y",), ("z",), 2, group="h")]
    second = [op("all_reduce", ("x",), ("y",), 11, group="h"), op("all_reduce", ("y",), ("z",), 12, group="g")]
    (f,) = found(None, two_ranks(first, second, T, g=(0, 1), h=(1, 0)))
    assert f.code == "TV205"
    assert "rank 0 at y = all_reduce(x, group=g) (user.py:1) waits for rank 1; rank 1 at y = all_reduce(x, group=h)" in f.message


def ring(batch: str | None) -> Plan:
    p = tv.plan("ring", tv.Mesh(cp=5))
    with p.ranks() as r:
        x = r.input("x", (2, 3), "(cp b) k")
        r.send(x, r.each(lambda at: (at["cp"] + 1) % 5), batch=batch)
        r.metric("m", r.recv((2, 3), r.each(lambda at: (at["cp"] - 1) % 5), batch=batch, name="y"))
    return p.build()


def test_tv205_a_ring_of_one_program() -> None:
    """All ranks are one class; the cycle still goes through all of them."""
    assert codes(None, ring("exchange")) == []
    (f,) = found(None, ring(None))
    assert f.code == "TV205"
    assert [f"rank {r} at send(x, peer={(r + 1) % 5})" in f.message for r in range(5)] == [True] * 5


def test_tv206_unused_result_is_a_warning() -> None:
    plan = two_ranks([reduce_("x", "y", 1)], [reduce_("x", "y", 2)], T)
    plan = with_program(plan, replace(plan.templates[1].program, outputs=()), 1)
    (f,) = found(None, plan)
    assert (f.code, f.severity, str(f.source)) == ("TV206", "warning", "user.py:2")
    assert f.message == "second: nothing uses 'y', the result of y = all_reduce(x, group=g)"


def test_tv206_results_of_bodies_count_where_they_are_used() -> None:
    body = Function("f", types(a=(2, 3), b=(2, 3)), ("a",), ("b",), (op("all_reduce", ("a",), ("b",), 5, group="g"),))
    call = [op("call", ("x",), ("y",), function="f")]
    plan = replace(two_ranks(call, call, T), functions={"f": body})
    assert codes(None, plan) == []
    for i in (0, 1):
        plan = with_program(plan, replace(plan.templates[i].program, outputs=()), i)
    text = "first: function f: nothing uses 'b', the result of b = all_reduce(a, group=g)"
    first = found(None, plan)[0]
    assert (first.code, first.message) == ("TV206", text)


def test_tv207_ranks() -> None:
    plan = small_plan()
    t = plan.templates[0]
    fewer = replace(t, ranks=t.ranks[:-1], bindings={n: c[:-1] for n, c in t.bindings.items()})
    assert only(replace(plan, templates=(fewer,))) == ("TV207", "rank 5 of mesh(dp=3, tp=2) runs no program")
    alone = replace(t, ranks=(4,), bindings={n: c[4:5] for n, c in t.bindings.items()})
    assert only(replace(plan, templates=(t, alone))) == ("TV207", "rank 4 runs all and all")
    outside = replace(t, ranks=(0, 1, 2, 3, 4, 9))
    assert codes(None, replace(plan, templates=(outside,))) == ["TV207", "TV207"]
    nobody = replace(t, ranks=(), bindings=dict.fromkeys(t.bindings, ()), program=replace(t.program, name="spare"))
    assert only(replace(plan, templates=(t, nobody))) == ("TV207", "spare runs on no rank")
    report = tv.verify(small(), replace(plan, templates=(nobody, t)))
    assert (report.verdict, report.reason) == ("INVALID", "1 finding: TV207")


def test_edits_cut_one_rank_out() -> None:
    plan = small_plan()
    program = plan.templates[0].program
    i = index_of(program, "w.grad.synced")
    same = Edit(3, (i,), (program.ops[i],))
    assert codes(small(), replace(plan, edits=(same,))) == []
    other = Edit(3, (i,), (program.ops[i].with_attrs(op="sum"),))
    (f,) = found(small(), replace(plan, edits=(other,)))
    assert f.code == "TV203"
    assert "all_reduce over dp.1 [1, 3, 5] (number 1 on it): rank 1 has op=avg" in f.message
    assert "rank 3 has op=sum" in f.message


def test_tv208_edit_of_nothing() -> None:
    plan = small_plan()
    assert only(replace(plan, edits=(Edit(2, (99,), ()),)))[0] == "TV208"
    assert only(replace(plan, edits=(Edit(7, (0,), ()),))) == ("TV208", "edit of rank 7, which runs no program")
    assert only(replace(plan, edits=(Edit(2, (), ()),))) == ("TV208", "edit without a path")
    assert only(replace(plan, edits=(Edit(2, (0, 1), ()),))) == ("TV208", "edit at [0, 1]: op 0 (linear) calls no function")


def test_batches_are_the_same_on_all_ranks() -> None:
    plan = small_plan()
    program = plan.templates[0].program
    i = index_of(program, "loss")
    changed = change(program, i, name="send", inputs=("mean",), outputs=(), attrs=(("batch", Ref("group.dp")), ("peer", 0)))
    assert "TV106" in codes(None, with_program(plan, changed))
