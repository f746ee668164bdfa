"""Options of a DeepSpeed job: its own configuration, and a file with the model and the loss."""

from __future__ import annotations

import argparse
import importlib
import json
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from trainverify.frameworks.versions import KNOWN, TORCH
from trainverify.torch.inputs import Batch
from trainverify.translate.targets import CaptureError, module_of

MODEL: Final = str(Path(__file__).with_name("deepspeed_model.py"))
REFUSED: Final = {
    "fp16": "float16",
    "bf16": "bfloat16",
    "torch_autocast": "mixed precision",
    "data_types": "accumulation in another precision",
    "scheduler": "a schedule of rates",
    "compression_training": "compression",
    "data_efficiency": "a curriculum",
    "curriculum_learning": "a curriculum",
    "pipeline": "pipeline parallelism",
    "tensor_parallel": "tensor parallelism",
    "compile": "compiled code",
    "hybrid_engine": "the hybrid engine",
    "sparse_gradients": "sparse gradients",
}
REFUSED_ZERO: Final = {
    "offload_optimizer": "offloading",
    "offload_param": "offloading",
    "cpu_offload": "offloading",
    "zenflow": "ZenFlow",
    "zero_quantized_weights": "quantization",
    "zero_quantized_gradients": "quantization",
    "zero_quantized_nontrainable_weights": "quantization",
    "zero_hpz_partition_size": "a secondary partition",
    "mics_shard_size": "MiCS",
}
STAGES: Final = (1, 2, 3)


def package(name: str = "deepspeed") -> Any:
    """A module of DeepSpeed's."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        missing = error.name or name
        hint = f"deepspeed=={KNOWN['deepspeed'][-1]}" if missing.split(".")[0] == "deepspeed" else missing
        raise CaptureError(f"DeepSpeed needs {missing}: pip install {hint}, next to torch=={TORCH}") from error


@dataclass(frozen=True)
class Said:
    """The options of a job. `whole`: the reference takes the loss of all rows at once, not the mean over micro-batches."""

    file: str
    config: Mapping[str, Any]
    whole: bool = True

    @property
    def stage(self) -> int:
        return int(self.config["zero_optimization"]["stage"])

    @property
    def micro_batches(self) -> int:
        """Of one rank."""
        return int(self.config.get("gradient_accumulation_steps", 1))

    @property
    def clip(self) -> float:
        return float(self.config.get("gradient_clipping", 0.0))


def parsed(options: Sequence[str]) -> Said:
    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> typing.NoReturn:
            raise CaptureError(f"deepspeed: {message}")

    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("file", nargs="?", default=MODEL)
    parser.add_argument("--deepspeed_config", "--deepspeed-config", default="{}")
    parser.add_argument("--mean-of-micro-batches", action="store_true")
    found = parser.parse_args(list(options))
    said = Said(found.file, _config(found.deepspeed_config), not found.mean_of_micro_batches)
    refuse(said.config)
    return said


def _config(given: str) -> dict[str, Any]:
    """A path, or the JSON itself."""
    try:
        found = json.loads(given if given.lstrip().startswith("{") else Path(given).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CaptureError(f"--deepspeed_config: {error}") from error
    if not isinstance(found, dict):
        raise CaptureError("--deepspeed_config: expected an object")
    return {**found, "zero_optimization": {"stage": 1, **found.get("zero_optimization", {})}}


def refuse(config: Mapping[str, Any]) -> None:
    """What is not captured is refused, not left out."""
    zero = config["zero_optimization"]
    for names, space in ((REFUSED, config), (REFUSED_ZERO, zero)):
        for name, what in names.items():
            given = space.get(name)
            on = given.get("enabled", True) and given.get("device", "some") != "none" if isinstance(given, Mapping) else given
            if on and not (name == "zero_hpz_partition_size" and given == 1):
                raise CaptureError(f"{name} of --deepspeed_config: {what} is not captured")
    if zero["stage"] not in STAGES:
        raise CaptureError(f"stage {zero['stage']} of zero_optimization: {', '.join(map(str, STAGES))} are captured")
    optimizer = config.get("optimizer")
    if optimizer and not (optimizer.get("type") in ("Adam", "AdamW") and optimizer.get("params", {}).get("torch_adam")):
        hint = 'say "torch_adam": true in its params, or give the file a function optimizer(parameters)'
        raise CaptureError(f"optimizer {optimizer.get('type')} of --deepspeed_config runs compiled code of DeepSpeed's: {hint}")


@dataclass(frozen=True)
class Written:
    """What the file of a job says."""

    model: Any  # () → a module
    loss: Any  # (module or engine, micro-batch) → a number
    batch: Batch  # a micro-batch of one rank
    optimizer: Any = None  # (parameters) → an optimizer of PyTorch's


def written(said: Said) -> Written:
    space = vars(module_of(f"{said.file}:model"))
    missing = [n for n in ("loss", "batch") if n not in space]
    if missing or not isinstance(space["batch"], Mapping):
        raise CaptureError(f"{said.file} needs model(), loss(model, batch) and batch = {{name: tvt.Ids(…)}}: no {', '.join(missing)}")
    if space.get("optimizer") is None and "optimizer" not in said.config:
        raise CaptureError(f"{said.file} has no function optimizer(parameters), and --deepspeed_config no optimizer")
    return Written(space["model"], space["loss"], space["batch"], space.get("optimizer"))


def torch_optimizer(said: Said, file: Written, parameters: Any) -> Any:
    """The optimizer of PyTorch's that DeepSpeed is to run: the file's, or the configuration's."""
    import torch

    if file.optimizer is not None:
        return file.optimizer(parameters)
    given = dict(said.config["optimizer"]["params"])
    given.pop("torch_adam")
    decoupled = given.pop("adam_w_mode", True) or said.config["optimizer"]["type"] == "AdamW"
    return (torch.optim.AdamW if decoupled else torch.optim.Adam)(parameters, **given)
