"""Options of a Transformers job: those of its Trainer, and of its example `run_clm.py` what says which model is trained."""

from __future__ import annotations

import contextlib
import importlib
import io
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final

from trainverify.frameworks.versions import KNOWN, TORCH
from trainverify.translate.targets import CaptureError

PACKAGES: Final = ("transformers", "accelerate")
REFUSED: Final = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "torch_compile": "compiled code",
    "deepspeed": "DeepSpeed within the Trainer",
    "label_smoothing_factor": "label smoothing",
    "neftune_noise_alpha": "noise",
    "auto_find_batch_size": "batches of another size than the one said",
}
QUIET: Final = {
    "report_to": [],
    "save_strategy": "no",
    "logging_strategy": "no",
    "eval_strategy": "no",
    "disable_tqdm": True,
    "logging_nan_inf_filter": False,
    "do_train": True,
    "max_steps": 8,
    "output_dir": "trainer_output",
}


def package(name: str = "transformers") -> Any:
    """A module of Transformers or accelerate."""
    try:
        for needed in PACKAGES:
            importlib.import_module(needed)
        return importlib.import_module(name)
    except ImportError as error:
        missing = error.name or name
        hint = " ".join(f"{p}=={KNOWN[p][-1]}" for p in PACKAGES) if missing.split(".")[0] in PACKAGES else missing
        raise CaptureError(f"Transformers needs {missing}: pip install {hint}, next to torch=={TORCH}") from error


@dataclass
class Arguments:
    """What the Trainer is not told: as in `run_clm.py` and in DistributedConfig."""

    model_type: str = field(default="llama", metadata={"help": "As in run_clm.py: llama, qwen3, …"})
    config_overrides: str | None = field(default=None, metadata={"help": "As in run_clm.py: hidden_size=64,num_hidden_layers=2"})
    block_size: int = field(default=16, metadata={"help": "As in run_clm.py: tokens in a row."})
    tp_size: int = field(default=1, metadata={"help": "Of DistributedConfig: tensor-parallel ranks."})
    fsdp_size: int = field(default=1, metadata={"help": "Of DistributedConfig: ranks that share parameters."})
    dp_replicate_size: int = field(default=1, metadata={"help": "Of DistributedConfig: replicas of these."})


@dataclass(frozen=True)
class Said:
    """The options of a job."""

    job: Arguments
    training: Mapping[str, Any]  # of TrainingArguments

    @property
    def native(self) -> bool:
        """Whether Transformers itself makes the model parallel, when it is loaded."""
        return max(self.job.tp_size, self.job.fsdp_size, self.job.dp_replicate_size) > 1

    @property
    def accelerated(self) -> bool:
        """Whether accelerate shares the parameters: `--fsdp`."""
        return bool(self.training["fsdp"])


def parsed(options: Sequence[str]) -> Said:
    transformers = package()

    class Parser(transformers.HfArgumentParser):  # type: ignore[misc,name-defined]
        def error(self, message: str) -> typing.NoReturn:
            raise CaptureError(f"transformers: {message}")

    kinds = (Arguments, transformers.TrainingArguments)
    with contextlib.redirect_stdout(io.StringIO()):
        found = vars(Parser(kinds, add_help=False, allow_abbrev=False).parse_args(list(options)))
    said = Said(Arguments(**{f.name: found.pop(f.name) for f in fields(Arguments)}), {**found, **QUIET})
    for name, what in REFUSED.items():
        if said.training.get(name):
            raise CaptureError(f"--{name}: {what} is not captured")
    if said.native and said.accelerated:
        raise CaptureError("--fsdp is accelerate's way to share parameters, --fsdp_size Transformers' own: say one of them")
    return said


def model_config(said: Said) -> Any:
    """The configuration of the model, from the class of its type and what overrides it."""
    transformers = package()
    try:
        config = transformers.CONFIG_MAPPING[said.job.model_type]()
        if said.job.config_overrides:
            config.update_from_string(said.job.config_overrides)
    except (KeyError, ValueError) as error:
        raise CaptureError(f"transformers: {error}") from error
    config.use_cache = False
    if getattr(config, "layer_types", None):  # of as many layers as the model was said to have
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    return config
