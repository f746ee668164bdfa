"""Megatron-core: its GPTModel with its own options, as a reference on one device and as the ranks of a mesh.

`facts` is what the options say; `Alone` and `Ranks` are what is captured: each builds model, DDP and optimizer of Megatron-core, and
returns the training step that Megatron-LM runs with them.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from trainverify.frameworks import megatron_options as said
from trainverify.frameworks.megatron_layout import held, placed, shards, whole
from trainverify.frameworks.megatron_shims import AFTER, BEFORE, _module
from trainverify.frameworks.versions import KNOWN, TORCH
from trainverify.torch.discover import Found
from trainverify.torch.inputs import Batch, Ids, Reals
from trainverify.translate.targets import CaptureError

SEED: Final = 1234


def config_type() -> Any:
    try:
        return _module("transformer.transformer_config").TransformerConfig
    except ImportError as error:
        missing = error.name or "megatron"
        hint = f"megatron-core=={KNOWN['megatron-core'][-1]}" if missing.startswith("megatron") else missing
        raise CaptureError(f"Megatron-core needs {missing}: pip install {hint}, next to torch=={TORCH}") from error


def _imported() -> Any:
    for shim in BEFORE:
        shim.apply(None)
    found = config_type()
    for shim in AFTER:
        shim.apply(None)
    return found


# -- options ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Facts:
    """What the options say about ranks and batch."""

    mesh: dict[str, int]
    rows: int
    micro_rows: int
    length: int
    vocabulary: int
    version: str
    sequence_parallel: bool = False
    rms_norm: bool = False

    @property
    def micro_batches(self) -> int:
        """Of one rank."""
        return self.rows // self.micro_rows // self.mesh.get("dp", 1)

    @property
    def batch(self) -> Batch:
        """Rows as Megatron-LM's sampler deals them out: the first micro-batch of every rank, then the second of every rank."""
        shape = (self.rows, self.length)
        cut = f"({self.micro_batches} dp b) s" if "dp" in self.mesh else "b s"
        return {
            "tokens": Ids(shape, cut, below=self.vocabulary),
            "position_ids": Ids(shape, cut, below=self.length),
            "labels": Ids(shape, cut, below=self.vocabulary),
            "loss_mask": Reals(shape, cut, kind="indicator"),
        }


def facts(options: tuple[str, ...], world: int | None) -> Facts:
    given = said.parsed(options, _imported())
    tp, pp, cp, ep = (given[n] for n in said.SIZES)
    if cp > 1:
        raise CaptureError("context parallelism needs Transformer Engine: Megatron-core's own attention refuses it")
    if given["num_experts"] is not None:
        raise CaptureError("a mixture of experts is not captured: MoELayer makes a stream of the accelerator")
    if given["bf16"]:
        raise CaptureError("bfloat16 is not captured yet")
    if given["hidden_dropout"] or given["attention_dropout"]:
        raise CaptureError("dropout is not captured: which ranks draw the same random numbers is not seen")
    ranks = world or tp * pp * ep
    if ranks == 1:
        raise CaptureError("one rank only: say --world-size N, or sizes of parallelism")
    if ranks % (tp * pp * ep):
        raise CaptureError(f"{ranks} ranks do not divide by tensor {tp} × pipeline {pp} × expert {ep} parallel ranks")
    dp = ranks // (tp * pp)
    rows = given["global_batch_size"] or given["micro_batch_size"] * dp * (pp if pp > 1 else 1)
    if rows % (given["micro_batch_size"] * dp):
        raise CaptureError(f"{rows} rows do not divide by micro-batches of {given['micro_batch_size']} on {dp} data-parallel ranks")
    mesh = {a: n for a, n in (("pp", pp), ("dp", dp), ("tp", tp)) if n > 1}
    version = importlib.metadata.version("megatron-core")
    sizes = given["micro_batch_size"], given["seq_length"], given["vocab_size"]
    return Facts(mesh, rows, *sizes, version, bool(given["sequence_parallel"]), given["normalization"] == "RMSNorm")


# -- model, optimizer, step -------------------------------------------------------------------------------------------------


def _model(given: Mapping[str, Any], config: Any, stage: int | None) -> Any:
    """One chunk of GPTModel, with Megatron-core's local layers."""
    state = _module("parallel_state")
    utils = _module("pipeline_parallel.utils")
    specs = _module("models.gpt.gpt_layer_specs")
    pipeline = state.get_pipeline_model_parallel_group()
    chunks = config.virtual_pipeline_model_parallel_size
    spec = specs.get_gpt_layer_local_spec(
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        normalization=config.normalization,
    )
    first, last = utils.is_pp_first_stage(pipeline), utils.is_pp_last_stage(pipeline)
    if stage is not None:
        first, last = first and stage == 0, last and stage == chunks - 1
    return _module("models.gpt.gpt_model").GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=given["vocab_size"],
        max_sequence_length=given["seq_length"],
        pre_process=first,
        post_process=last,
        share_embeddings_and_output_weights=not given["untie_embeddings_and_output_weights"],
        position_embedding_type=given["position_embedding_type"],
        vp_stage=stage,
    )


def _distributed(given: Mapping[str, Any], config: Any, chunks: list[Any]) -> list[Any]:
    """Megatron-core's DistributedDataParallel around every chunk, as Megatron-LM's `get_model` does."""
    package = _module("distributed")
    settings = package.DistributedDataParallelConfig(
        use_distributed_optimizer=given["use_distributed_optimizer"],
        overlap_grad_reduce=given["overlap_grad_reduce"],
        overlap_param_gather=given["overlap_param_gather"],
        average_in_collective=given["ddp_average_in_collective"],
        grad_reduce_in_fp32=given["bf16"],
        bucket_size=given["ddp_bucket_size"],
    )
    return [
        package.DistributedDataParallel(config=config, ddp_config=settings, module=c, disable_bucketing=i > 0) for i, c in enumerate(chunks)
    ]


def _optimizer(given: Mapping[str, Any], chunks: list[Any]) -> Any:
    package = _module("optimizer")
    settings = package.OptimizerConfig(
        optimizer=given["optimizer"],
        lr=given["lr"],
        weight_decay=given["weight_decay"],
        adam_beta1=given["adam_beta1"],
        adam_beta2=given["adam_beta2"],
        adam_eps=given["adam_eps"],
        sgd_momentum=given["sgd_momentum"],
        clip_grad=given["clip_grad"],
        bf16=given["bf16"],
        use_distributed_optimizer=given["use_distributed_optimizer"],
        overlap_param_gather=given["overlap_param_gather"],
    )
    overrides = package.get_standard_config_overrides(settings)
    return package.get_megatron_optimizer(settings, chunks, config_overrides=overrides, use_gloo_process_groups=False)


def _loss(mask: Any, output: Any) -> Any:
    """As in Megatron-LM's `pretrain_gpt.py`: the sum over tokens, their number, and both to be reported."""
    import torch

    mask = mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask)
    tokens = mask.sum().clone().detach().to(torch.int)
    return loss, tokens, {"lm loss": torch.stack([loss.clone().detach(), mask.sum().detach()])}


def _forward(batches: Iterator[Mapping[str, Any]], model: Any) -> Any:
    b = next(batches)
    made = model(b["tokens"], b["position_ids"], None, labels=b["labels"])
    return made, partial(_loss, b["loss_mask"])


@dataclass
class Step:
    """One training step as Megatron-LM's `train_step` runs it: loss, norm of the gradients, and where the parameters are."""

    given: Mapping[str, Any]
    chunks: list[Any]
    optimizer: Any
    count: int  # of micro-batches
    found: Found

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        import torch

        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        run = _module("pipeline_parallel").get_forward_backward_func()
        reported = run(
            forward_step_func=_forward,
            data_iterator=[self.micro_batches(batch) for _ in self.chunks] if len(self.chunks) > 1 else self.micro_batches(batch),
            model=self.chunks,
            num_microbatches=self.count,
            seq_length=self.given["seq_length"],
            micro_batch_size=self.given["micro_batch_size"],
            forward_only=False,
        )
        _, norm, _ = self.optimizer.step()
        told = {} if norm is None else {"grad_norm": torch.as_tensor(norm).reshape(())}
        if reported:
            total = torch.stack([r["lm loss"] for r in reported]).sum(0)
            torch.distributed.all_reduce(total, group=_module("parallel_state").get_data_parallel_group(with_context_parallel=True))
            told["loss"] = total[0] / total[1]
        return told

    def micro_batches(self, batch: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        rows = self.given["micro_batch_size"]
        for i in range(self.count):
            yield {n: t[i * rows : (i + 1) * rows] if self.count > 1 else t for n, t in batch.items()}


def built(given: dict[str, Any], kind: Any, count: int, grouped: Callable[[], None] = lambda: None) -> Step:
    """Model, DDP and optimizer; `grouped` is called once there are process groups."""
    state = _module("parallel_state")
    settings = said.transformer(given, kind)
    state.initialize_model_parallel(
        tensor_model_parallel_size=given["tensor_model_parallel_size"],
        pipeline_model_parallel_size=given["pipeline_model_parallel_size"],
        virtual_pipeline_model_parallel_size=settings.get("virtual_pipeline_model_parallel_size"),
        expert_model_parallel_size=given["expert_model_parallel_size"],
        expert_tensor_parallel_size=given["expert_tensor_parallel_size"],
        create_gloo_process_groups=False,
    )
    grouped()
    config = kind(**settings)
    stages = config.virtual_pipeline_model_parallel_size
    models = [_model(given, config, i) for i in range(stages)] if stages else [_model(given, config, None)]
    chunks = _distributed(given, config, models)
    optimizer = _optimizer(given, chunks)
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = _module("distributed").finalize_model_grads
    if given["overlap_grad_reduce"]:
        config.no_sync_func = [c.no_sync for c in chunks] if stages else chunks[0].no_sync
    return Step(given, chunks, optimizer, count, _found(config, models, optimizer))


def _found(config: Any, models: list[Any], optimizer: Any) -> Found:
    """The parameters by the names of the whole model, and how they lie."""
    state = _module("parallel_state")
    ranks, rank = state.get_tensor_model_parallel_world_size(), state.get_tensor_model_parallel_rank()
    model = whole(models)
    gated = bool(config.gated_linear_unit)
    inner = [o.optimizer for o in getattr(optimizer, "chained_optimizers", [optimizer]) if o.optimizer is not None]
    own = list(shards(optimizer, model))
    parts = held(model, {n: span for n, _, span in own}, ranks, rank, gated)
    return Found({"model": model}, inner, placed(model, ranks, gated), parts, [(t, n) for n, t, _ in own])


@dataclass(frozen=True)
class Alone:
    """The same options without parallelism: Megatron-core on one rank, with the whole batch in micro-batches of the same size."""

    options: tuple[str, ...]
    count: int

    grouped: bool = True  # Megatron-core needs process groups, of one rank here

    def __call__(self) -> Step:
        kind = _imported()
        return built(said.alone(said.parsed(self.options, kind)), kind, self.count)


@dataclass(frozen=True)
class Ranks:
    """Megatron-core as one rank of many."""

    options: tuple[str, ...]
    count: int

    def __call__(self, rank: int, world: int) -> Step:
        kind = _imported()
        return built(said.parsed(self.options, kind), kind, self.count)
