"""Sums on sums, as high as a model is deep: forms stay small, proofs cost what the layers cost, and one wrong floor is seen."""

from __future__ import annotations

from dataclasses import replace

import pytest

import trainverify as tv
from prove.meaning import check_program, system_of
from trainverify.graph.plan import Plan
from trainverify.graph.program import Program
from trainverify.prove.algebra.engine import Proof, Prover, prove
from trainverify.prove.algebra.kernel import Kernel
from trainverify.prove.algebra.terms import Limits, Poly, TooLarge
from trainverify.verdicts import single, verify
from trainverify.zoo.gpt import Config
from trainverify.zoo.parallel import Degrees, gpt_plan, gpt_step

B, J, V = -1, -2, -3  # variables of a row, a feature, a class
ROWS, FEATURES, CLASSES = 5, 7, 3
HIGH = 300  # floors: more than Python calls can be nested, if each takes four


# -- the kernel ------------------------------------------------------------------------------------------------------


def tower(k: Kernel, floors: int, start: int = 0) -> list[Poly]:
    """x₀ and, floor by floor, xₙ₊₁ = xₙ + aₙ, each under a name."""
    x = k.input(f"x{start}", (ROWS, FEATURES), (B, J))
    found = [x]
    for n in range(start, start + floors):
        x = k.single(k.plus(x, k.input(f"a{n}", (ROWS, FEATURES), (B, J))))
        found.append(x)
    return found


def test_a_low_tower_is_summed_term_by_term() -> None:
    k = Kernel()
    low = tower(k, k.limits.height - 1)
    assert len(k.sum(low[-1], {J: FEATURES})) == k.limits.height


def test_a_high_tower_is_summed_as_one() -> None:
    k = Kernel()
    floors = tower(k, HIGH)
    before = len(k.atoms)
    made = [k.sum(x, {J: FEATURES}) for x in floors]
    assert {len(p) for p in made[k.limits.height :]} == {1}
    assert len(k.atoms) - before == HIGH + 1  # one for every floor
    assert len({*map(repr, made)}) == HIGH + 1  # and none for two


def test_the_order_of_sums_does_not_matter() -> None:
    k = Kernel()
    top = tower(k, HIGH)[-1]
    both = k.sum(top, {B: ROWS, J: FEATURES})
    assert both == k.sum(k.sum(top, {B: ROWS}), {J: FEATURES}) == k.sum(k.sum(top, {J: FEATURES}), {B: ROWS})


def test_a_tower_on_other_indices_is_none() -> None:
    """w[v,j]·x[b,j] summed over j, plus c[v]: a Σ over v looks into it, one over b leaves the tower as it is."""
    k = Kernel()
    top = tower(k, HIGH)[-1]
    product = k.sum(k.times(k.input("w", (CLASSES, FEATURES), (V, J)), top), {J: FEATURES})
    logits = k.single(k.plus(product, k.input("c", (CLASSES,), (V,))))
    assert len(logits) == 1
    assert len(k.sum(logits, {V: CLASSES})) == 2
    assert len(k.sum(logits, {B: ROWS})) == 1
    both = k.sum(logits, {B: ROWS, V: CLASSES})
    assert len(both) == 2
    assert both == k.sum(k.sum(logits, {B: ROWS}), {V: CLASSES}) == k.sum(k.sum(logits, {V: CLASSES}), {B: ROWS})


def test_written_out_a_tower_has_all_its_terms() -> None:
    k = Kernel()
    floors = tower(k, HIGH)
    out = k.written_out(k.sum(floors[-1], {J: FEATURES}))
    assert len(out) == HIGH + 1
    assert out == k.add(*(k.sum(k.input(n, (ROWS, FEATURES), (B, J)), {J: FEATURES}) for n in ("x0", *(f"a{i}" for i in range(HIGH)))))


def test_what_does_not_come_to_rest_is_too_large() -> None:
    k = Kernel(Limits(steps=5))
    with pytest.raises(TooLarge, match="does not come to rest"):
        k.sum(tower(k, 7)[-1], {J: FEATURES})


# -- programs ----------------------------------------------------------------------------------------------------------


def stream(floors: int, missing: int | None = None, twice: int | None = None, centred: bool = True) -> Program:
    """A residual stream with its mean taken off before every layer, as a layer norm does; one layer's output may be left out or doubled."""
    b = tv.program("stream")
    x = b.input("x", (6, 5))
    for n in range(floors):
        w = b.input(f"w{n}", (5, 5))
        y = b.tanh(b.linear(b.sub(x, b.mean(x, dim=-1, keepdim=True)) if centred else x, w))
        if n != missing:
            x = b.add(x, b.add(y, y) if n == twice else y)
    b.loss(b.mean(x, name="loss"))
    return b.build()


def tried(logical: Program, plan: Plan | Program) -> Proof:
    system, wanted = system_of(logical, single(plan) if isinstance(plan, Program) else plan)
    return prove(system, wanted)


def test_streams_are_proved_and_others_are_not() -> None:
    assert not tried(stream(400), stream(400)).failed
    assert not tried(stream(60), stream(60)).failed
    assert tried(stream(60), stream(60, missing=57)).failed
    assert tried(stream(60), stream(60, twice=3)).failed


def test_forms_of_towers_mean_what_they_say() -> None:
    compared = check_program(stream(12), 0)
    assert compared.wrong == []
    assert compared.without == []


def taken_apart(floors: int, missing: int | None = None) -> Program:
    """The mean of a stream as the sum of the means of what it is made of."""
    b = tv.program("parts")
    x = b.input("x", (6, 5))
    means = [b.mean(x)]
    for n in range(floors):
        y = b.tanh(b.linear(x, b.input(f"w{n}", (5, 5))))
        if n != missing:
            means.append(b.mean(y))
        x = b.add(x, y)
    total = means[0]
    for m in means[1:]:
        total = b.add(total, m)
    b.loss(b.identity(total, name="loss"))
    return b.build()


def test_the_mean_of_a_tower_is_the_sum_of_means() -> None:
    assert not tried(stream(40, centred=False), taken_apart(40)).failed
    assert tried(stream(40, centred=False), taken_apart(40, missing=37)).failed


def shared(floors: int, divisor: float) -> tuple[Program, Plan]:
    """Rows on three ranks; the loss is the sum of their means over a divisor, which should be three."""
    p = tv.plan("shared", tv.Mesh(dp=3))
    with p.ranks() as r:
        x = r.input("x", (2, 5), "(dp b) j")
        for n in range(floors):
            w = r.input(f"w{n}", (5, 5), "o k")
            x = r.add(x, r.tanh(r.linear(r.sub(x, r.mean(x, dim=-1, keepdim=True)), w)))
        r.loss(r.div(r.all_reduce(r.mean(x), group="dp"), value=divisor, name="loss"))
    return stream(floors), p.build()


def test_a_stream_cut_by_rows() -> None:
    """Every rank sums the tower over its rows; the sum over ranks makes it whole."""
    assert not tried(*shared(40, 3.0)).failed
    assert tried(*shared(40, 2.0)).failed


# -- GPT -------------------------------------------------------------------------------------------------------------

DEEP = Config(layers=120, hidden=6, heads=2, ffn=10, vocabulary=10, sequence=4, context=5, batch=2)


@pytest.mark.long
def test_a_deep_gpt_is_proved() -> None:
    report = verify(gpt_step(DEEP), gpt_plan(DEEP, Degrees(dp=2)), points=1)
    assert report.verdict == "PROVED", report.notes


def norms(wrong: int | None = None) -> Program:
    """Layers as GPT's without attention, 120 of them; one norm may have another eps."""
    b = tv.program("norms")
    x = b.input("x", (3, 5))
    for n in range(DEEP.layers):
        gain, bias, w = b.input(f"gain{n}", (5,)), b.input(f"bias{n}", (5,)), b.input(f"w{n}", (5, 5))
        y = b.layer_norm(x, gain, bias, eps=0.5 if n == wrong else 1e-5, name=f"norm{n}")
        x = b.add(x, b.gelu(b.linear(y, w)))
    b.loss(b.mean(b.mul(x, x), name="loss"))
    return b.build()


def test_one_wrong_norm_of_many_is_refuted_and_named() -> None:
    assert verify(norms(), norms(), points=1).verdict == "PROVED"
    report = verify(norms(), norms(wrong=117), points=1)
    assert report.verdict == "REFUTED", report.reason
    assert report.place is not None
    assert report.place.tensor == "norm117"


@pytest.mark.long
def test_one_wrong_norm_in_a_deep_gpt_is_not_proved() -> None:
    (t,) = (plan := gpt_plan(DEEP, Degrees(dp=2))).templates
    ops = tuple(op.with_attrs(eps=0.5) if "mb0/h.117.ln_1.out" in op.outputs else op for op in t.program.ops)
    assert ops != t.program.ops
    proof = tried(gpt_step(DEEP), replace(plan, templates=(replace(t, program=replace(t.program, ops=ops)),)))
    failed = {str(o) for o in proof.failed}
    assert {"loss", "gradient of h.0.ln_1.weight", "gradient of h.119.mlp.c_proj.weight"} <= failed
    assert not any("117.ln_1" in str(o) for o in proof.proved)


def test_cost_is_linear_in_layers() -> None:
    """Beyond the first layers, each makes as many expressions as any other, and is worked out by renaming."""

    def cost(layers: int) -> tuple[int, int]:
        config = replace(DEEP, layers=layers)
        system, wanted = system_of(gpt_step(config), gpt_plan(config, Degrees(dp=2)))
        prover = Prover(system)
        worked = 0
        apply = prover._apply

        def counted(*args: object) -> None:
            nonlocal worked
            worked += 1
            apply(*args)  # type: ignore[arg-type]

        prover._apply = counted  # type: ignore[method-assign]
        proof = prover.prove(wanted)
        assert not proof.failed
        return proof.atoms, worked

    (few, first), (more, second), (most, third) = cost(12), cost(20), cost(28)
    assert abs((most - more) - (more - few)) < (more - few) / 50
    assert third - second == second - first <= 2 * 8  # of about 130 ops that a layer has in both programs
