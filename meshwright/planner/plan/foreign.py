"""Jobs of other programs: read as runs of ours, and our layouts in their words.

| file                        | program       | what it says                                                         |
|-----------------------------|---------------|----------------------------------------------------------------------|
| NAME.toml                   | torchtitan    | model, training, parallelism, activation_checkpoint, compile         |
| NAME.yaml, with fsdp_config | fsdp          | Accelerate's; model, sequence and batch are options of the command   |
| NAME.yaml, with distributed | fsdp          | NeMo AutoModel's; the same                                           |
| anything else               | megatron-core | arguments of Megatron-LM, as a shell script or a line has them       |

Only what a plan hangs on is read: models by sizes, batches, layouts, recomputation. Models that a file names alone are
those of configs/models.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.config import Config
from meshwright.config.load import read_yaml
from meshwright.planner.plan.software import JobForm, Program
from meshwright.ranks.errors import ConfigError

Tree = dict[str, Any]


@dataclass(frozen=True)
class ForeignJob:
    """A job of a program that we know: its run, and the facts that its file changes."""

    program: str
    run: Tree
    facts: tuple[str, ...] = field(default_factory=tuple)


MODELS = {
    ("llama3", "8B"): "llama-3.1-8b", ("llama3", "70B"): "llama-3.1-70b", ("llama3", "405B"): "llama-3.1-405b",
    ("qwen3", "0.6B"): "qwen3-0.6b", ("qwen3", "8B"): "qwen3-8b", ("qwen3", "30B-A3B"): "qwen3-30b-a3b",
}  # fmt: skip
"""Ours, by torchtitan's name and flavor."""


def read_foreign(path: Path, model: str | None, sequence: int | None, batch: int | None) -> ForeignJob:
    """The job of a file; options go before what it says. Raises ConfigError where it says too little."""
    if not path.is_file():
        raise ConfigError.of("--from", path, "is no file", "a job of torchtitan, Megatron-LM, Accelerate or AutoModel")
    if path.suffix == ".toml":
        job = _torchtitan(tomllib.loads(path.read_text(encoding="utf-8")))
    elif path.suffix in (".yaml", ".yml"):
        job = _fsdp(read_yaml(path))
    else:
        job = _megatron(parse_flags(path.read_text(encoding="utf-8")))
    run = job.run
    run["model"] = model or run.get("model")
    run["data"] = {"sequence": sequence or run.get("data", {}).get("sequence")}
    run["batch"] = run.get("batch", {}) | ({"global": batch} if batch else {})
    for option, value in {
        "--model": run["model"], "--sequence": run["data"]["sequence"], "--batch": run["batch"].get("global"),
    }.items():  # fmt: skip
        if value is None:
            raise ConfigError.of(option, "nothing", f"is given, and {path} does not say it", "the option")
    return job


def _torchtitan(tree: Mapping[str, Any]) -> ForeignJob:
    training, cut = tree.get("training", {}), tree.get("parallelism", {})
    name, flavor = tree.get("model", {}).get("name"), tree.get("model", {}).get("flavor")
    shard = cut.get("data_parallel_shard_degree", -1)
    replicas = max(1, shard) * cut.get("data_parallel_replicate_degree", 1)
    local = training.get("local_batch_size", training.get("batch_size", 1))
    whole = training.get("global_batch_size", -1)
    data: Tree = {"size": replicas, "sync": "zero3"}
    if cut.get("data_parallel_replicate_degree", 1) > 1:
        data["shard"] = max(1, shard)
    layout: Tree = {"data": data} | _cuts(
        tensor=cut.get("tensor_parallel_degree", 1), by_sequence=True,
        stages=cut.get("pipeline_parallel_degree", 1), context=cut.get("context_parallel_degree", 1),
    )  # fmt: skip
    mode = tree.get("activation_checkpoint", {}).get("mode", "none")
    compiled = tree.get("compile", {}).get("enable", training.get("compile", False))
    run: Tree = {
        "model": MODELS.get((str(name), str(flavor))),
        "data": {"sequence": training.get("seq_len")},
        "batch": {"micro": local, **({"global": whole} if whole > 0 else {"global": local * replicas})},
        "layout": layout,
        "memory": {"recompute": {"full": 1, "selective": "ops"}.get(mode, "none")},
        "precision": "bf16",
    }
    return ForeignJob("torchtitan" if compiled else "torchtitan-eager", run)


def _fsdp(tree: Mapping[str, Any]) -> ForeignJob:
    own, cut = tree.get("fsdp_config", {}), tree.get("distributed", {})
    if not (own or cut):
        rule = "has neither fsdp_config (Accelerate) nor distributed (AutoModel)"
        raise ConfigError.of("--from", "the file", rule, "a job of one of them")
    steps, size = tree.get("step_scheduler", {}), cut.get("tp_size", 1) or 1
    ranks = tree.get("num_processes") or cut.get("dp_size") or 1
    strategy = str(own.get("fsdp_sharding_strategy", "FULL_SHARD")).rpartition(".")[2]
    sync = {"SHARD_GRAD_OP": "zero2", "NO_SHARD": "allreduce"}.get(strategy, "zero3")
    again = own.get("fsdp_activation_checkpointing", cut.get("activation_checkpointing", False))
    batch = {"micro": steps["local_batch_size"]} if "local_batch_size" in steps else {}
    run: Tree = {
        "batch": batch | ({"global": steps["global_batch_size"]} if "global_batch_size" in steps else {}),
        "layout": {"data": {"size": ranks, "sync": sync}}
        | _cuts(tensor=size, by_sequence=True, stages=cut.get("pp_size", 1) or 1, context=cut.get("cp_size", 1) or 1),
        "memory": {"recompute": 1 if again else "none"},
        "precision": {"fp16": "fp16"}.get(str(tree.get("mixed_precision")), "bf16"),
    }
    return ForeignJob("fsdp", run)


def _megatron(flags: Mapping[str, str]) -> ForeignJob:
    def number(name: str, default: int = 1) -> int:
        return int(flags.get(name, default))

    layers, stages = number("num-layers", 0), number("pipeline-model-parallel-size")
    if not layers or "hidden-size" not in flags:
        rule = "has no --num-layers and --hidden-size: it is no job of Megatron-LM"
        raise ConfigError.of("--from", "the file", rule, "its arguments, a TOML of torchtitan, a YAML")
    model: Tree = {
        "layers": layers, "hidden": number("hidden-size"), "heads": number("num-attention-heads"),
        "vocabulary": number("vocab-size", 50257), "positions": number("max-position-embeddings", number("seq-length")),
        "dropout": float(flags.get("hidden-dropout", 0.1)),
    }  # fmt: skip
    if "swiglu" in flags:
        groups = {"key_value_heads": number("num-query-groups")} if "num-query-groups" in flags else {}
        model |= {"family": "llama", "feed_forward": number("ffn-hidden-size", 4 * number("hidden-size"))} | groups
        if "num-experts" in flags:
            model["experts"] = {"count": number("num-experts"), "per_token": number("moe-router-topk", 2)}
    layout = _cuts(
        tensor=number("tensor-model-parallel-size"), by_sequence="sequence-parallel" in flags, stages=stages,
        context=number("context-parallel-size"),
    )  # fmt: skip
    per_chunk = number("num-layers-per-virtual-pipeline-stage", 0)
    if per_chunk and stages > 1:
        layout["pipeline"]["chunks"] = layers // stages // per_chunk
    layout["data"] = {"sync": "zero1" if "use-distributed-optimizer" in flags else "allreduce"}
    if number("expert-model-parallel-size") > 1:
        layout["data"] |= {"expert": number("expert-model-parallel-size"), "size": number("expert-model-parallel-size")}
    granularity = flags.get("recompute-granularity", "none")
    run: Tree = {
        "model": model,
        "data": {"sequence": number("seq-length", 0) or None},
        "batch": {"micro": number("micro-batch-size"), "global": number("global-batch-size", 0) or None},
        "layout": layout,
        "memory": {"recompute": {"full": 1, "selective": "selective"}.get(granularity, "none")},
        "precision": "fp16" if "fp16" in flags else "bf16",
    }
    low = flags.get("fp8-format")
    return ForeignJob("megatron-core", run, ("products=fp8",) if low else ())


def _cuts(*, tensor: int, by_sequence: bool, stages: int, context: int) -> Tree:
    """The sections of a layout besides its replicas."""
    layout: Tree = {}
    if tensor > 1:
        layout["tensor"] = {"kind": "megatron", "size": tensor, "sequence_parallel": by_sequence}
    if stages > 1:
        layout["pipeline"] = {"size": stages, "schedule": "1f1b"}
    if context > 1:
        layout["context"] = {"size": context}
    return layout


def parse_flags(text: str) -> dict[str, str]:
    """`--micro-batch-size 2 --swiglu` of a script or a line; variables of a shell are not followed."""
    words = shlex.split(re.sub(r"\\\n", " ", text), comments=True)
    flags: dict[str, str] = {}
    for word, after in zip(words, [*words[1:], ""], strict=True):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            flags[name] = value if equals else ("" if after.startswith("--") else after)
    return flags


def foreign_words(program: Program, config: Config) -> str | None:
    """A layout in a program's own words; None where it has none that we know."""
    return "\n".join(WORDS[program.form](config, program.syncs)) if program.form else None


def _torchtitan_words(config: Config, syncs: Mapping[str, str]) -> Iterator[str]:
    layout = config.layout
    shard = layout.data.shard or layout.data.size
    yield "[training]"
    yield f"local_batch_size = {config.batch.global_ // layout.data.size}"
    yield f"global_batch_size = {config.batch.global_}"
    yield "[parallelism]"
    sliced = layout.data.strategy.slices
    yield f"data_parallel_replicate_degree = {layout.data.size // shard if sliced else layout.data.size}"
    yield f"data_parallel_shard_degree = {shard if sliced else 1}"
    yield f"tensor_parallel_degree = {dict(layout.axes).get('tensor', 1)}"
    yield f"context_parallel_degree = {layout.context.size}"
    yield f"expert_parallel_degree = {layout.data.expert}"
    yield f"pipeline_parallel_degree = {layout.pipeline.size}"
    if layout.pipeline.size > 1:
        yield f'pipeline_parallel_schedule = "{"Interleaved1F1B" if layout.pipeline.chunks > 1 else "1F1B"}"'
        yield f"pipeline_parallel_microbatch_size = {config.micro}"
    yield "[activation_checkpoint]"
    policy = config.memory.policy
    mode = "selective" if policy.attention or policy.recorded else "full"
    yield f'mode = "{mode if policy.recomputes else "none"}"'


def _megatron_words(config: Config, syncs: Mapping[str, str]) -> Iterator[str]:
    layout = config.layout
    tensor = dict(layout.axes).get("tensor", 1)
    yield f"--micro-batch-size {config.micro} --global-batch-size {config.batch.global_}"
    yield f"--tensor-model-parallel-size {tensor}"
    if tensor > 1 and layout.tensor.cuts_sequences:
        yield "--sequence-parallel"
    yield f"--pipeline-model-parallel-size {layout.pipeline.size}"
    if layout.pipeline.chunks > 1:
        per_chunk = config.model.num_blocks // (layout.pipeline.size * layout.pipeline.chunks)
        yield f"--num-layers-per-virtual-pipeline-stage {per_chunk}"
    if layout.context.size > 1:
        yield f"--context-parallel-size {layout.context.size}"
    if layout.data.expert > 1:
        yield f"--expert-model-parallel-size {layout.data.expert}"
    if flag := syncs.get(layout.data.sync):
        yield flag
    if config.memory.policy.attention:
        yield "--recompute-granularity selective"
    elif config.memory.policy.recomputes:
        yield "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


def accelerate_words(config: Config, syncs: Mapping[str, str]) -> Iterator[str]:
    hybrid = config.layout.data.shard is not None and config.layout.data.strategy.gathers
    yield f"num_processes: {config.layout.world_size}"
    yield f"mixed_precision: {config.precision.dtype}"
    yield "fsdp_config:"
    yield f"  fsdp_sharding_strategy: {'HYBRID_SHARD' if hybrid else syncs[config.layout.data.sync]}"
    yield f"  fsdp_activation_checkpointing: {str(config.memory.policy.recomputes).lower()}"
    yield f"# per_device_train_batch_size: {config.micro}, gradient_accumulation_steps: {config.num_microbatches}"


WORDS: Mapping[JobForm, Callable[[Config, Mapping[str, str]], Iterator[str]]] = {
    "toml": _torchtitan_words,
    "arguments": _megatron_words,
    "accelerate": accelerate_words,
}
"""By the form of a program's jobs."""
