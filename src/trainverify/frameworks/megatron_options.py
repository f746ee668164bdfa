"""Options of a Megatron-core job: Megatron-LM's names, and every field of Megatron-core's TransformerConfig."""

from __future__ import annotations

import argparse
import dataclasses
import types
import typing
from collections.abc import Sequence
from typing import Any, Final

from trainverify.translate.targets import CaptureError

SIZES: Final = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size")
_TAKEN: Final = ("normalization", "params_dtype", "hidden_dropout", "attention_dropout")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        raise CaptureError(f"megatron: {message}")


def _plain(hint: Any) -> Any:
    """The type of an option's value: of `Optional[int]` int; None where a command line cannot say it."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        kinds = [a for a in typing.get_args(hint) if a is not type(None)]
        hint = kinds[0] if len(kinds) == 1 else None
    if typing.get_origin(hint) is typing.Literal and all(isinstance(v, str) for v in typing.get_args(hint)):
        return str
    return hint if hint in (int, float, str, bool) else None


def parser(config: type) -> argparse.ArgumentParser:
    """`config` is Megatron-core's TransformerConfig."""
    p = _Parser("trainverify megatron", add_help=False, allow_abbrev=False)
    given: list[tuple[str, Any, Any]] = [
        ("num-layers", int, 2),
        ("hidden-size", int, 64),
        ("num-attention-heads", int, 4),
        ("vocab-size", int, 128),
        ("seq-length", int, 16),
        ("micro-batch-size", int, 2),
        ("global-batch-size", int, None),
        ("position-embedding-type", str, "learned_absolute"),
        ("normalization", str, "LayerNorm"),
        ("hidden-dropout", float, 0.0),
        ("attention-dropout", float, 0.0),
        ("num-experts", int, None),
        ("num-layers-per-virtual-pipeline-stage", int, None),
        ("expert-tensor-parallel-size", int, None),
        ("lr", float, 1e-3),
        ("weight-decay", float, 0.01),
        ("clip-grad", float, 1.0),
        ("adam-beta1", float, 0.9),
        ("adam-beta2", float, 0.999),
        ("adam-eps", float, 1e-8),
        ("optimizer", str, "adam"),
        ("sgd-momentum", float, 0.9),
        ("ddp-bucket-size", int, None),
    ]
    for name, kind, default in given:
        p.add_argument(f"--{name}", type=kind, default=default)
    for name in (
        "swiglu",
        "group-query-attention",
        "disable-bias-linear",
        "untie-embeddings-and-output-weights",
        "use-distributed-optimizer",
        "overlap-grad-reduce",
        "overlap-param-gather",
        "ddp-average-in-collective",
        "bf16",
    ):
        p.add_argument(f"--{name}", action="store_true")
    known = {a.dest for a in p._actions}
    hints = typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        kind = _plain(hints[field.name])
        if kind is None or field.name in known or field.name in _TAKEN:
            continue
        option = f"--{field.name.replace('_', '-')}"
        if kind is bool:
            p.add_argument(option, action=argparse.BooleanOptionalAction, default=None)
        else:
            p.add_argument(option, type=kind, default=None)
    return p


def parsed(options: Sequence[str], config: type) -> dict[str, Any]:
    """Options by name, None where nothing was said."""
    found = vars(parser(config).parse_args(list(options)))
    for name in SIZES:
        if found[name] is None:
            found[name] = 1
    return found


def alone(given: dict[str, Any]) -> dict[str, Any]:
    """The same options without parallelism."""
    off = {
        "sequence_parallel": None,
        "num_layers_per_virtual_pipeline_stage": None,
        "expert_tensor_parallel_size": None,
        "use_distributed_optimizer": False,
        "overlap_grad_reduce": False,
        "overlap_param_gather": False,
        "num_layers_in_first_pipeline_stage": None,
        "num_layers_in_last_pipeline_stage": None,
        "account_for_embedding_in_pipeline_split": None,
        "account_for_loss_in_pipeline_split": None,
        "pipeline_model_parallel_layout": None,
    }
    return {**given, **{n: v for n, v in off.items() if n in given}, **dict.fromkeys(SIZES, 1)}


def transformer(given: dict[str, Any], config: type) -> dict[str, Any]:
    """Arguments of TransformerConfig, as Megatron-LM's `core_transformer_config_from_args` makes them."""
    names = {f.name for f in dataclasses.fields(config)}
    made = {n: v for n, v in given.items() if n in names and v is not None}
    made["num_moe_experts"] = given["num_experts"]
    if given["pipeline_model_parallel_size"] > 1:
        import torch

        made["pipeline_dtype"] = torch.float32
    if given["swiglu"]:
        import torch.nn.functional as F

        made |= {"gated_linear_unit": True, "activation_func": F.silu}
    if given["disable_bias_linear"]:
        made["add_bias_linear"] = False
    per = given["num_layers_per_virtual_pipeline_stage"]
    if per is not None:
        made["virtual_pipeline_model_parallel_size"] = given["num_layers"] // given["pipeline_model_parallel_size"] // per
    return made
