"""A whole training step of small ResNets, against one in plain PyTorch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch.nn import functional

from completion.running import assert_same, differing, draw, outputs
from trainverify.zoo import resnet
from zoo.training import Reported, Tensors, changed, complete, torch_step

SMALL = resnet.Config((1, 1), width=2, classes=5, size=(5, 7), batch=3, stem="small", momentum=0.3)
CONFIGS = {
    "basic": SMALL,
    "bottleneck": replace(SMALL, bottleneck=True, loss="sum"),
    "large stem": replace(SMALL, size=(13, 10), stem="large", blocks=(2, 1)),
}


def model(config: resnet.Config) -> Any:
    def forward(p: Tensors) -> Reported:
        state: Tensors = {}

        def unit(x: Any, conv: str, norm: str, stride: int = 1) -> Any:
            weight = p[conv + ".weight"]
            x = functional.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2)
            mean, var = (state.setdefault(f"{norm}.running_{n}", p[f"{norm}.running_{n}"].clone()) for n in ("mean", "var"))
            return functional.batch_norm(x, mean, var, p[norm + ".weight"], p[norm + ".bias"], True, config.momentum, config.eps)

        x = p["images"]
        if config.stem == "large":
            x = functional.max_pool2d(functional.relu(unit(x, "conv1", "bn1", 2)), 3, 2, 1)
        else:
            x = functional.relu(unit(x, "conv1", "bn1"))
        for stage, count in enumerate(config.blocks, 1):
            for i in range(count):
                at = f"layer{stage}.{i}."
                stride = 2 if stage > 1 and i == 0 else 1
                y = functional.relu(unit(x, at + "conv1", at + "bn1", 1 if config.bottleneck else stride))
                y = unit(y, at + "conv2", at + "bn2", stride if config.bottleneck else 1)
                if config.bottleneck:
                    y = unit(functional.relu(y), at + "conv3", at + "bn3")
                if at + "downsample.0.weight" in p:
                    x = unit(x, at + "downsample.0", at + "downsample.1", stride)
                x = functional.relu(x + y)
        logits = functional.linear(functional.adaptive_avg_pool2d(x, 1).flatten(1), p["fc.weight"], p["fc.bias"])
        return Reported(functional.cross_entropy(logits, p["labels"], reduction=config.loss), {}, state)

    return forward


@pytest.mark.parametrize("name", CONFIGS)
def test_step(name: str) -> None:
    config = CONFIGS[name]
    program = complete(resnet.forward(config))
    values = draw(program, 1)
    results = outputs(program, values)
    assert_same(results, torch_step(program, values, model(config)))
    assert "updated state layer1.0.bn2.running_var" in results


@pytest.mark.parametrize(
    ("op", "attrs", "seen"),
    [
        ("batch_norm", {"momentum": 0.1}, {"updated state bn1.running_mean", "updated state bn1.running_var"}),
        ("batch_norm", {"eps": 1e-2}, {"loss", "gradient of conv1.weight", "updated state layer1.0.bn1.running_mean"}),
        ("cross_entropy", {"reduction": "sum"}, {"loss", "gradient of fc.bias", "metric grad_norm"}),
        ("conv2d", {"padding": (1, 1), "dilation": 1, "stride": (1, 1)}, set()),  # the same convolution in other words
    ],
)
def test_a_wrong_forward_is_noticed(op: str, attrs: dict[str, Any], seen: set[str]) -> None:
    wrong = complete(changed(resnet.forward(SMALL), op, **attrs))
    values = draw(wrong, 1)
    found = differing(outputs(wrong, values), torch_step(wrong, values, model(SMALL)))
    assert seen <= found
    if op == "batch_norm" and "momentum" in attrs:
        assert found == seen
    if not seen:
        assert found == set()


def test_gradients_with_fixed_statistics_are_noticed() -> None:
    """Backward as if mean and variance did not depend on the batch."""
    program = complete(resnet.forward(SMALL))
    wrong = changed(program, "batch_norm.grad", training=False)
    values = draw(wrong, 1)
    found = differing(outputs(wrong, values), torch_step(wrong, values, model(SMALL)))
    assert "gradient of conv1.weight" in found
    assert "loss" not in found
