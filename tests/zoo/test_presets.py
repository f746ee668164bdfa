"""Full-size models: what they consist of, and that whole steps of them are built in seconds."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest

import trainverify as tv
from trainverify.check import validate
from trainverify.zoo import deepseek, gpt, llama, resnet

MODELS = {name: (module, config) for module in (llama, gpt, deepseek, resnet) for name, config in module.PRESETS.items()}
PARAMETERS = {  # as published
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "deepseek-16b": 15_706_484_224,
    "deepseek-236b": 235_741_434_880,
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
}


def parameters(program: tv.Program) -> int:
    return sum(math.prod(program.tensors[n].shape) for n in program.parameters)


@pytest.mark.parametrize("name", MODELS)
def test_preset(name: str) -> None:
    module, config = MODELS[name]
    start = time.process_time()
    forward = module.forward(config)
    program = tv.complete(forward, tv.AdamW(lr=1e-4), clip=1.0)
    assert time.process_time() - start < 5
    if name in PARAMETERS:
        assert parameters(forward) == PARAMETERS[name]
    for role in ("gradient", "parameter"):
        assert {o.of for o in program.outputs if o.role == role} == set(forward.parameters)
    updated = {o.of for o in program.outputs if o.role == "state"}
    assert {f"{n}.{slot}" for n in forward.parameters for slot in "mv"} <= updated
    assert validate(program, None) == []


@pytest.mark.parametrize(("name", "billions"), [("gpt3-175b", 175), ("deepseek-671b", 671)])
def test_size_as_named(name: str, billions: int) -> None:
    module, config = MODELS[name]
    assert round(parameters(module.forward(config)) / 1e9) == billions


def test_ops_say_where_the_model_says_so() -> None:
    program: Any = llama.forward(llama.PRESETS["llama3-8b"])
    attention = next(op for op in program.ops if op.name == "attention")
    assert attention.source.file.endswith("llama.py")
