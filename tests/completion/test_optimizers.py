"""Optimizers and clipping over consecutive steps, against torch.optim and clip_grad_norm_."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import trainverify as tv
from completion.running import after, assert_same, differing, draw, outputs
from trainverify.graph.program import Program

SLOTS = {"momentum": "momentum_buffer", "m": "exp_avg", "v": "exp_avg_sq"}  # ours → theirs


def forward(dtype: str = "f32") -> Program:
    b = tv.program("net")
    x, t = b.input("x", (5, 3)), b.input("t", (5, 2))
    hidden = b.tanh(b.linear(x, b.parameter("in.weight", (7, 3), dtype), b.parameter("in.bias", (7,), dtype)))
    b.loss(b.mse_loss(b.linear(hidden, b.parameter("out.weight", (2, 7), dtype)), t))
    return b.build()


def torch_loss(p: dict[str, Any], v: dict[str, Any]) -> Any:
    hidden = torch.tanh(torch.from_numpy(v["x"]) @ p["in.weight"].T + p["in.bias"])
    return torch.nn.functional.mse_loss(hidden @ p["out.weight"].T, torch.from_numpy(v["t"]))


def decays(parameter: str) -> bool:
    return parameter.endswith("weight")


OPTIMIZERS = {
    "sgd": (tv.SGD(lr=0.3), torch.optim.SGD),
    "sgd decay": (tv.SGD(lr=0.3, weight_decay=0.2, decays=decays), torch.optim.SGD),
    "momentum": (tv.SGD(lr=0.1, momentum=0.9, weight_decay=0.1, decays=decays), torch.optim.SGD),
    "dampening": (tv.SGD(lr=0.1, momentum=0.8, dampening=0.3), torch.optim.SGD),
    "nesterov": (tv.SGD(lr=0.1, momentum=0.7, nesterov=True), torch.optim.SGD),
    "adamw": (tv.AdamW(lr=0.02, weight_decay=0.3, decays=decays), torch.optim.AdamW),
    "adamw betas": (tv.AdamW(lr=0.01, beta1=0.8, beta2=0.95, eps=1e-3), torch.optim.AdamW),
}


def theirs(ours: Any, kind: Any, parameters: dict[str, Any]) -> Any:
    groups = [{"params": [p], "weight_decay": ours.weight_decay if ours.decays(n) else 0.0} for n, p in parameters.items()]
    if kind is torch.optim.AdamW:
        return kind(groups, lr=ours.lr, betas=(ours.beta1, ours.beta2), eps=ours.eps)
    return kind(groups, lr=ours.lr, momentum=ours.momentum, dampening=ours.dampening, nesterov=ours.nesterov)


def at_step(optimizer: Any, number: int) -> Any:
    return replace(optimizer, step=number) if isinstance(optimizer, tv.AdamW) else replace(optimizer, first=number == 1)


@pytest.mark.parametrize("clip", [None, 0.3, 50.0])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_three_steps(name: str, clip: float | None) -> None:
    ours, kind = OPTIMIZERS[name]
    values = draw(tv.complete(forward(), ours, clip=clip), 1)
    values |= {n: np.zeros_like(v) for n, v in values.items() if n.split(".")[-1] in SLOTS}
    parameters = {n: torch.tensor(values[n], requires_grad=True) for n in forward().parameters}
    optimizer = theirs(ours, kind, parameters)
    for number in (1, 2, 3):
        values |= {n: v for n, v in draw(forward(), number).items() if n in ("x", "t")}  # a new batch
        program = tv.complete(forward(), at_step(ours, number), clip=clip)
        results = outputs(program, values)

        optimizer.zero_grad()
        loss = torch_loss(parameters, values)
        loss.backward()
        wanted: dict[str, Any] = {"loss": loss.detach()}
        wanted |= {f"gradient of {n}": p.grad.clone() for n, p in parameters.items()}
        if clip is not None:
            norm = torch.nn.utils.clip_grad_norm_(parameters.values(), clip)
            wanted |= {"metric grad_norm": norm, "metric clip_factor": min(1.0, clip / (float(norm) + 1e-6))}
        optimizer.step()
        for n, p in parameters.items():
            wanted[f"updated parameter {n}"] = p.detach()
            wanted |= {f"updated state {n}.{slot}": optimizer.state[p][SLOTS[slot]] for slot, _ in ours.state()}
        assert_same(results, wanted, 1e-12)
        values = after(program, values, results)


@pytest.mark.parametrize(
    "wrong",
    [
        tv.AdamW(lr=0.02, weight_decay=0.3, step=2),  # decays the bias too
        tv.AdamW(lr=0.02, weight_decay=0.3, step=1, decays=decays),  # bias correction of another step
        tv.AdamW(lr=0.02, weight_decay=0.3, step=2, eps=1e-2, decays=decays),
    ],
)
def test_another_optimizer_is_noticed(wrong: tv.AdamW) -> None:
    right = tv.complete(forward(), tv.AdamW(lr=0.02, weight_decay=0.3, step=2, decays=decays), clip=0.3)
    values = draw(right, 4)
    changed = differing(outputs(tv.complete(forward(), wrong, clip=0.3), values), outputs(right, values))
    assert "updated parameter in.bias" in changed
    assert not any(n.startswith(("loss", "gradient", "updated state")) for n in changed)


def test_clipping_acts_only_above_its_limit() -> None:
    step = {clip: tv.complete(forward(), tv.SGD(lr=0.5), clip=clip) for clip in (0.1, 50.0)}
    values = draw(step[0.1], 3)
    low, high = (outputs(p, values) for p in step.values())
    assert high["metric clip_factor"] == 1
    assert low["metric clip_factor"] == pytest.approx(0.1 / (float(low["metric grad_norm"]) + 1e-6))
    assert differing(low, high) == {"metric clip_factor", *(f"updated parameter {n}" for n in forward().parameters)}


def test_master_copies() -> None:
    """The gradient is taken at the working copy, the update starts from the master."""
    optimizer = tv.AdamW(lr=0.02, weight_decay=0.3, step=4, decays=decays)
    program = tv.complete(forward("bf16"), optimizer, clip=0.3, master=True)
    plain = tv.complete(forward("bf16"), optimizer, clip=0.3)
    for n in forward().parameters:
        assert program.tensors[n].dtype == "bf16"
        assert {program.tensors[f"{n}.{s}"].dtype for s in ("master", "m", "v")} == {"f32"}
        assert program.tensors[str(program.output("parameter", n))].dtype == "bf16"
        assert program.tensors[str(program.output("state", n + ".master"))].dtype == "f32"
    values = draw(program, 2)
    results = outputs(program, values)
    at_working = outputs(plain, {n: values[n] for n in plain.sources})
    for n in forward().parameters:
        np.testing.assert_array_equal(results[f"gradient of {n}"], at_working[f"gradient of {n}"])
        np.testing.assert_array_equal(results[f"updated parameter {n}"], results[f"updated state {n}.master"])
        moved = at_working[f"updated parameter {n}"] - values[n] * (1 - 0.02 * 0.3 * decays(n))
        kept = values[n + ".master"] * (1 - 0.02 * 0.3 * decays(n))
        np.testing.assert_allclose(results[f"updated state {n}.master"], kept + moved, atol=1e-12)
        assert not np.allclose(results[f"updated parameter {n}"], at_working[f"updated parameter {n}"])


def test_without_an_optimizer_the_step_ends_with_gradients() -> None:
    program = tv.complete(forward())
    assert {o.role for o in program.outputs} == {"loss", "gradient"}
    assert program.state == ()
