"""A training step in plain PyTorch, to compare whole steps with; changes to programs that a comparison must notice."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

import trainverify as tv
from trainverify.graph.program import Program

Tensors = dict[str, torch.Tensor]


@dataclass
class Reported:
    """What a model's forward pass gives."""

    loss: torch.Tensor
    metrics: Tensors
    state: Tensors


CLIP, STEP, RATE, DECAY = 0.4, 3, 0.02, 0.3


def decays(parameter: str) -> bool:
    return "norm" not in parameter and "bias" not in parameter


def complete(forward: Program, auxiliary: Mapping[str, float] | None = None) -> Program:
    """Our step: clipping, and AdamW in the middle of training."""
    optimizer = tv.AdamW(lr=RATE, weight_decay=DECAY, step=STEP, decays=decays)
    return tv.complete(forward, optimizer, clip=CLIP, auxiliary=auxiliary)


def torch_step(
    program: Program, values: Mapping[str, Any], model: Callable[[Tensors], Reported], auxiliary: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """The outputs of the same step from a model written in PyTorch: autograd, clip_grad_norm_, torch.optim.AdamW."""
    tensors = {n: torch.tensor(values[n]) for n in program.sources}
    parameters = {n: tensors[n].requires_grad_() for n in program.parameters}
    reported = model(tensors)
    objective = reported.loss
    for name, weight in (auxiliary or {}).items():
        objective = objective + weight * reported.metrics[name]
    objective.backward()
    wanted: dict[str, Any] = {"loss": reported.loss.detach()}
    wanted |= {f"metric {n}": v.detach() for n, v in reported.metrics.items()}
    wanted |= {f"updated state {n}": v.detach() for n, v in reported.state.items()}
    wanted |= {f"gradient of {n}": w.grad.clone() for n, w in parameters.items()}
    norm = torch.nn.utils.clip_grad_norm_(parameters.values(), CLIP)
    wanted |= {"metric grad_norm": norm, "metric clip_factor": min(1.0, CLIP / (float(norm) + 1e-6))}
    groups = [{"params": [w], "weight_decay": DECAY if decays(n) else 0.0} for n, w in parameters.items()]
    optimizer = torch.optim.AdamW(groups, lr=RATE)
    for n, w in parameters.items():
        moments = {"exp_avg": tensors[n + ".m"].clone(), "exp_avg_sq": tensors[n + ".v"].clone()}
        optimizer.state[w] = {"step": torch.tensor(float(STEP - 1)), **moments}
    optimizer.step()
    for n, w in parameters.items():
        wanted[f"updated parameter {n}"] = w.detach()
        wanted[f"updated state {n}.m"] = optimizer.state[w]["exp_avg"]
        wanted[f"updated state {n}.v"] = optimizer.state[w]["exp_avg_sq"]
    return wanted


def changed(program: Program, op: str, last: bool = False, **attrs: Any) -> Program:
    """The program with other attributes of its first (or last) op of this name."""
    at = [i for i, o in enumerate(program.ops) if o.name == op]
    assert at, f"no op {op}"
    i = at[-1] if last else at[0]
    return replace(program, ops=(*program.ops[:i], program.ops[i].with_attrs(**attrs), *program.ops[i + 1 :]))


def rewired(program: Program, tensor: str, old: str, new: str) -> Program:
    """The program in which the op that makes `tensor` reads `new` in place of `old`."""
    (op,) = (o for o in program.ops if tensor in o.outputs)
    assert old in op.inputs
    fresh = replace(op, inputs=tuple(new if i == old else i for i in op.inputs))
    return replace(program, ops=tuple(fresh if o is op else o for o in program.ops))
