"""Layouts written in the words of other programs, as a file or flags that the program and `plan --from` can read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping

from meshwright.config import Config
from meshwright.planner.plan.expert_ranks import SENT_ONCE
from meshwright.planner.plan.software import JobForm, Program


def foreign_words(program: Program, config: Config, form: JobForm | None = None) -> str | None:
    """Write a layout in a program's own words; None for a program without a known form.

    Args:
        program: The preset.
        config: The run.
        form: The form of the user's file; None: the preset's.
    """
    chosen = form or program.form
    return None if chosen is None else "\n".join(WORDS[chosen](config, program))


def _tensor(config: Config) -> int:
    return dict(config.layout.axes).get("tensor", 1)


def _experts(config: Config, program: Program) -> tuple[int, int]:
    """Return (ranks with different experts, ranks that cut one expert), as Megatron-LM and torchtitan count both."""
    tensor, software = _tensor(config), program.software
    cut = software.expert_tensor or tensor
    over_context = config.layout.context.size if software.expert_context else 1
    return config.layout.data.expert * over_context * tensor // cut, cut


def _local(config: Config) -> int:
    """Return the samples of a step on a replica."""
    return config.batch.global_ // config.layout.data.size


def _titan_fields(config: Config, program: Program) -> Iterator[tuple[str, str, object]]:
    """Yield torchtitan's fields: (section, name, value)."""
    layout = config.layout
    data, stages = layout.data, layout.pipeline.size
    shard = (data.shard or data.size) if data.strategy.slices else 1
    yield "training", "local_batch_size", _local(config) if stages > 1 else config.micro
    yield "training", "global_batch_size", config.batch.global_
    yield "parallelism", "data_parallel_replicate_degree", data.size // shard
    yield "parallelism", "data_parallel_shard_degree", shard
    if data.strategy.slices:
        yield "parallelism", "fsdp_reshard_after_forward", "always" if data.strategy.gathers else "never"
    yield "parallelism", "tensor_parallel_degree", _tensor(config)
    yield "parallelism", "context_parallel_degree", layout.context.size
    ranks, cut = _experts(config, program)
    if config.model.routing.num_experts:
        yield "parallelism", "expert_parallel_degree", ranks
        yield "parallelism", "expert_tensor_parallel_degree", cut
        backend = program.software.dispatch or "alltoall"
        yield "parallelism", "expert_parallel_comm_backend", "standard" if backend == "alltoall" else backend
    yield "parallelism", "pipeline_parallel_degree", stages
    if stages > 1:
        yield "parallelism", "pipeline_parallel_schedule", "Interleaved1F1B" if layout.pipeline.chunks > 1 else "1F1B"
        yield "parallelism", "pipeline_parallel_microbatch_size", config.micro


def _recomputed(config: Config, nothing: str, whole: str, operations: str) -> str:
    """Return a program's word for activations that are kept, recomputed by whole layers, or by operations."""
    policy = config.memory.policy
    if not policy.recomputes:
        return nothing
    return operations if policy.attention or policy.recorded else whole


TITAN_CONVERTERS: Mapping[str, str] = {"fp8": "float8", "mxfp8": "mxfp8"}
"""torchtitan's converters of linears, by the format of `products`."""


def titan_toml(config: Config, program: Program) -> Iterator[str]:
    """Yield lines of torchtitan's TOML, the form before February 2026."""
    section = ""
    if (low := program.software.products) in TITAN_CONVERTERS:
        yield "[model]"
        yield f"converters = {json.dumps([TITAN_CONVERTERS[low]])}"
    for name, field, value in _titan_fields(config, program):
        if name != section:
            section = name
            yield f"[{name}]"
        yield f"{field} = {json.dumps(value)}"
    yield "[activation_checkpoint]"
    yield f'mode = "{_recomputed(config, "none", "full", "selective")}"'


def titan_flags(config: Config, program: Program) -> Iterator[str]:
    """Yield flags that follow torchtitan's --module and --config."""
    for name, field, value in _titan_fields(config, program):
        yield f"--{name}.{field} {value}"
    policy = _recomputed(config, "None", "FullAC.Config()", "SelectiveAC.Config()")
    yield f"# activation_checkpoint={policy} in the config's function"
    if (low := program.software.products) in TITAN_CONVERTERS:
        yield f"# a converter of linears to {TITAN_CONVERTERS[low]} in the config's function"


MEGATRON_RECIPES: Mapping[str, str] = {"fp8": "hybrid", "mxfp8": "e4m3 --fp8-recipe mxfp8"}
"""Megatron-LM's values of --fp8-format, with the recipe, by the format of `products`."""


def megatron_words(config: Config, program: Program) -> Iterator[str]:
    """Yield Megatron-LM's arguments."""
    layout, tensor = config.layout, _tensor(config)
    yield f"--micro-batch-size {config.micro} --global-batch-size {config.batch.global_}"
    yield f"--tensor-model-parallel-size {tensor}"
    if tensor > 1 and layout.tensor.cuts_sequences:
        yield "--sequence-parallel"
    yield f"--pipeline-model-parallel-size {layout.pipeline.size}"
    partition = layout.pipeline.partition
    if layout.pipeline.size > 1 and not isinstance(partition, str) and len({*partition}) > 1:
        # Megatron cuts even stages without this argument.
        stages = "|".join(f"t*{layers}" if layers else "" for layers in partition)
        later = config.model.model_dump().get("later_tokens", 0)
        yield f'--pipeline-model-parallel-layout "E{stages}{"m" * later}L"'
    elif layout.pipeline.chunks > 1:
        per_chunk = config.model.num_blocks // (layout.pipeline.size * layout.pipeline.chunks)
        yield f"--num-layers-per-virtual-pipeline-stage {per_chunk}"
    if layout.context.size > 1:
        yield f"--context-parallel-size {layout.context.size}"
        yield f"--cp-comm-type {program.contexts[layout.context.kind]}"
    if config.model.routing.num_experts:
        software = program.software
        ranks, cut = _experts(config, program)
        yield f"--expert-model-parallel-size {ranks}"
        if cut != tensor:
            yield f"--expert-tensor-parallel-size {cut}"
        sent = software.dispatch or "alltoall"
        flex = sent in SENT_ONCE
        yield f"--moe-token-dispatcher-type {'flex' if flex else sent}"
        if flex:
            yield f"--moe-flex-dispatcher-backend {sent}"
        if flex and software.dispatch_sms:
            yield f"--moe-flex-dispatcher-num-sms {software.dispatch_sms}"
        yield f"--moe-permute-fusion{' --moe-grouped-gemm' if any(software.streams_bytes) else ''}"
        if "experts" in software.overlapped:
            yield "--overlap-moe-expert-parallel-comm"
    if flag := program.syncs.get(layout.data.sync):
        yield flag
    if config.precision.accumulate == "stored":
        yield "--grad-reduce-in-bf16"
    if config.optimizer.states == "bf16":
        yield "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
    if (low := program.software.products) in MEGATRON_RECIPES:
        gathered = " --fp8-param-gather" if program.software.low_weights == "alone" else ""
        yield f"--fp8-format {MEGATRON_RECIPES[low]}{gathered}"
    policy = config.memory.policy
    parts = sorted(program.software.recomputed)
    if parts and not policy.by_groups:
        modules = " ".join([*(["core_attn"] if policy.attention else []), *parts])
        yield f"--recompute-granularity selective --recompute-modules {modules}"
    elif policy.attention:
        yield "--recompute-granularity selective"
    elif policy.recomputes:
        group = policy.group_size(config, config.model.num_blocks // (layout.pipeline.size * layout.pipeline.chunks))
        yield f"--recompute-granularity full --recompute-method uniform --recompute-num-layers {group}"
    if program.software.host_layers:
        yield f"--cpu-offloading-num-layers {program.software.host_layers}"
    if config.memory.offload.to != "none":
        yield "--optimizer-cpu-offload"


def accelerate_words(config: Config, program: Program) -> Iterator[str]:
    """Yield lines of a file of `accelerate config`: FSDP version 2, and a parallelism_config for several axes."""
    layout = config.layout
    data, tensor = layout.data, _tensor(config)
    yield f"num_processes: {layout.world_size}"
    stored = config.optimizer.masters == "bf16"  # Accelerate's mixed precision would make FSDP's weights float32
    mixed = "'no'" if stored and data.strategy.slices else config.precision.dtype
    yield f"mixed_precision: {'fp8' if program.software.products == 'fp8' else mixed}"
    if data.strategy.slices:
        yield "distributed_type: FSDP"
        yield "fsdp_config:"
        yield "  fsdp_version: 2"
        yield f"  fsdp_reshard_after_forward: {str(data.strategy.gathers).lower()}"
        yield f"  fsdp_activation_checkpointing: {str(config.memory.policy.recomputes).lower()}"
        yield f"  fsdp_offload_params: {str(config.memory.offload.to != 'none').lower()}"
    else:
        yield "distributed_type: MULTI_GPU"
    shard = (data.shard or data.size) if data.strategy.slices else 1
    if tensor * layout.context.size > 1 or 1 < shard < data.size:
        yield "parallelism_config:"
        yield f"  parallelism_config_dp_replicate_size: {data.size // shard}"
        yield f"  parallelism_config_dp_shard_size: {shard}"
        yield f"  parallelism_config_tp_size: {tensor}"
        if layout.context.size > 1:
            yield f"  parallelism_config_{program.contexts[layout.context.kind]}_size: {layout.context.size}"
    yield f"# per_device_train_batch_size: {config.micro}, gradient_accumulation_steps: {config.num_microbatches}"
    if stored:
        yield "# the Trainer's arguments: torch_dtype: bfloat16"
    if program.software.sums == "microbatch" and data.strategy.slices:
        yield "# the Trainer's arguments: accelerator_config: {gradient_accumulation_kwargs: {sync_each_batch: true}}"


def axolotl_words(config: Config, program: Program) -> Iterator[str]:
    """Yield lines of axolotl's YAML; without `dp_shard_size` and `fsdp_config` gradients are all-reduced."""
    layout = config.layout
    data, recomputes = layout.data, str(config.memory.policy.recomputes).lower()
    shard = (data.shard or data.size) if data.strategy.slices else 1
    if data.strategy.slices:
        yield f"dp_shard_size: {shard}"
        offload = str(config.memory.offload.to != "none").lower()
        yield "fsdp_version: 2"
        yield f"fsdp_config: {{offload_params: {offload}, reshard_after_forward: {str(data.strategy.gathers).lower()}}}"
    sizes = {
        "expert_parallel_size": data.expert,
        "dp_replicate_size": data.size // shard // data.expert if data.strategy.slices else 1,
        "tensor_parallel_size": _tensor(config),
        "context_parallel_size": layout.context.size,
    }
    yield from (f"{name}: {size}" for name, size in sizes.items() if size > 1)
    yield f"sequence_len: {config.data.lengths.source}"
    yield f"micro_batch_size: {config.micro}"
    yield f"gradient_accumulation_steps: {config.num_microbatches}"
    yield f"gradient_checkpointing: {recomputes}"
    dtype = config.precision.dtype
    if config.optimizer.masters == "bf16" and data.strategy.slices:
        yield "bf16: full"
    else:
        yield f"{'fp16' if dtype == 'fp16' else 'bf16'}: {str(dtype != 'float32').lower()}"
    if program.software.products == "fp8":
        yield "fp8: true"


def automodel_words(config: Config, program: Program) -> Iterator[str]:
    """Yield sections of AutoModel's YAML."""
    layout = config.layout
    data, stages = layout.data, layout.pipeline.size
    yield "step_scheduler:"
    yield f"  global_batch_size: {config.batch.global_}"
    yield f"  local_batch_size: {_local(config) if stages > 1 else config.micro}"
    yield "distributed:"
    yield f"  strategy: {'fsdp2' if data.strategy.slices else 'ddp'}"
    yield f"  dp_size: {data.size}"
    if data.shard and data.shard < data.size:
        yield f"  dp_replicate_size: {data.size // data.shard}"
    ranks = _experts(config, program)[0]
    for name, size in (("tp", _tensor(config)), ("pp", stages), ("cp", layout.context.size), ("ep", ranks)):
        yield f"  {name}_size: {size}"
    yield f"  sequence_parallel: {str(_tensor(config) > 1 and layout.tensor.cuts_sequences).lower()}"
    yield f"  activation_checkpointing: {str(config.memory.policy.recomputes).lower()}"
    yield f"  reshard_after_forward: {str(data.strategy.gathers).lower()}"
    if program.software.sums != "step":
        yield "  defer_fsdp_grad_sync: false"
    if stages > 1:
        chunks = layout.pipeline.chunks
        yield "  pipeline:"
        yield f"    pp_schedule: {'interleaved1f1b' if chunks > 1 else '1f1b'}"
        yield f"    pp_microbatch_size: {config.micro}"
        yield f"    layers_per_stage: {-(-config.model.num_blocks // (stages * chunks))}"
    if program.software.products == "fp8":
        yield "fp8: {enabled: true}"
    if config.model.routing.num_experts and program.software.dispatch:
        sent = "torch" if program.software.dispatch == "allgather" else program.software.dispatch
        experts = "te" if program.software.experts == "apart" else "torch_mm"
        yield f"model: {{backend: {{dispatcher: {sent}, experts: {experts}}}}}"


def nanotron_words(config: Config, program: Program) -> Iterator[str]:
    """Yield sections of nanotron's YAML."""
    layout = config.layout
    yield "parallelism:"
    yield f"  dp: {layout.data.size}"
    yield f"  pp: {layout.pipeline.size}"
    yield "  pp_engine: 1f1b"
    yield f"  tp: {_tensor(config)}"
    cut = _tensor(config) > 1 and layout.tensor.cuts_sequences
    yield f"  tp_mode: {'REDUCE_SCATTER' if cut else 'ALL_REDUCE'}"
    yield f"  recompute_layer: {str(config.memory.policy.recomputes).lower()}"
    yield "tokens:"
    yield f"  micro_batch_size: {config.micro}"
    yield f"  batch_accumulation_per_replica: {config.num_microbatches}"
    yield f"  sequence_length: {config.data.lengths.source}"
    yield "optimizer:"
    yield f"  zero_stage: {int(layout.data.strategy.slices)}"


def deepspeed_words(config: Config, program: Program) -> Iterator[str]:
    """Yield lines of DeepSpeed's JSON."""
    zero: dict[str, object] = {"stage": int(program.syncs[config.layout.data.sync])}
    if config.memory.offload.to != "none":
        zero["offload_optimizer"] = {"device": "cpu"}
    told = {
        "train_batch_size": config.batch.global_,
        "train_micro_batch_size_per_gpu": config.micro,
        "gradient_accumulation_steps": config.num_microbatches,
        "zero_optimization": zero,
        config.precision.dtype: {"enabled": True},
    }
    if config.layout.context.size > 1:
        told["sequence_parallel_size"] = config.layout.context.size
    yield from json.dumps(told, indent=2).splitlines()


WORDS: Mapping[JobForm, Callable[[Config, Program], Iterator[str]]] = {
    "toml": titan_toml,
    "flags": titan_flags,
    "arguments": megatron_words,
    "accelerate": accelerate_words,
    "axolotl": axolotl_words,
    "automodel": automodel_words,
    "nanotron": nanotron_words,
    "deepspeed": deepspeed_words,
}
"""Writers by the form of a program's jobs."""
