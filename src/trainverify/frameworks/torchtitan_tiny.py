"""A tiny configuration of torchtitan's with the parallelism of a large one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from trainverify.frameworks.torchtitan_shims import part
from trainverify.translate.targets import CaptureError

LENGTH: Final = 32  # of a row
LONG: Final = 256  # of one that context parallelism cuts: a block of FlexAttention's for every rank
ROWS: Final = 2  # of a rank
DEGREES: Final = {
    "pp": "pipeline_parallel_degree",
    "dp_replicate": "data_parallel_replicate_degree",
    "dp_shard": "data_parallel_shard_degree",
    "cp": "context_parallel_degree",
    "tp": "tensor_parallel_degree",
}


@dataclass(frozen=True)
class Tiny:
    """Two ranks along every axis, few layers of the registry's debug model, short rows, numbers of 32 bits; all else as it is."""

    axes: tuple[str, ...]

    @property
    def world(self) -> int:
        return int(2 ** len(self.axes))

    def apply(self, config: Any) -> None:
        self._parallelism(config)
        self._model(config)
        t = config.training
        accumulated = t.global_batch_size > 0
        t.seq_len = LONG if "cp" in self.axes else LENGTH
        t.local_batch_size = 2 * ROWS if "pp" in self.axes else ROWS
        ranks = 2 ** len([a for a in self.axes if a in ("dp_replicate", "dp_shard")])
        t.global_batch_size = 2 * t.local_batch_size * ranks if accumulated else -1
        t.mixed_precision_param = t.mixed_precision_reduce = "float32"

    def _parallelism(self, config: Any) -> None:
        p = config.parallelism
        for axis, name in DEGREES.items():
            setattr(p, name, 2 if axis in self.axes else 1)
        if "pp" in self.axes:
            p.pipeline_parallel_microbatch_size = 1

    def _model(self, config: Any) -> None:
        spec = config.model_spec
        if spec.flavor != "debugmodel":
            try:
                small = part(f"models.{spec.name}").model_registry("debugmodel")
            except (ImportError, AttributeError, KeyError) as error:
                raise CaptureError(f"torchtitan's registry has no debug model of {spec.name}") from error
            if type(small.model.first_attention.inner_attention) is not type(spec.model.first_attention.inner_attention):
                raise CaptureError(f"the debug model of {spec.name} has another kind of attention")
            config.model_spec = small
        model = config.model_spec.model
        model.layers = model.layers[: 4 if "pp" in self.axes else 2]
        loss = getattr(config.loss, "loss_fn", config.loss)  # of a loss in chunks, the one of a chunk
        if hasattr(loss, "global_vocab_size"):
            loss.global_vocab_size = model.vocab_size
