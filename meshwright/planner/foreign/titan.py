"""Jobs of torchtitan: the Python registry, flags, and the TOML files used before February 2026."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.planner.foreign import zero
from meshwright.planner.foreign.account import Account
from meshwright.planner.foreign.job import Asked, Degrees, ForeignJob, known_name, model_of, run_of, schedule_of
from meshwright.planner.foreign.literals import CALLED, named_function
from meshwright.planner.plan.software import JobForm

DEFAULT = "torchtitan's default"
HARMLESS = """
hf_assets_path dump_folder job.* profil* metrics.* checkpoint.* validat* dataloader.* lr_scheduler.* optimizer.lr
optimizer.eps optimizer.beta* optimizer.weight_decay optimizer.implementation training.steps training.dataset*
training.max_norm training.seed training.gc_* training.warmup_steps experimental.custom* experimental.*import* debug.*
comm.* fault_tolerance.* tokenizer.* *.() *.()*
lr_scheduler model.tokenizer_path model.print_after_conversion loss.loss_fn* ()
activation_checkpoint.early_stop compile.backend *.float8.*fqns float8.*fqns
model.hf_assets_path context_parallel.*
parallelism.context_parallel_load_balancer *.enable_loss_parallel *.disable_loss_parallel *.pipeline_parallel_split_mode
module config parallelism.pipeline_parallel_expert_parallel_overlap
optimizer.0 checkpoint model.norm_type experimental.enable_compiled_autograd training.*determin*
"""
"""Fields that change neither seconds nor bytes of a step, or that are read as a whole."""


def read_toml(path: Path, asked: Asked) -> ForeignJob:
    """Read the job of a TOML file, torchtitan's form until February 2026."""
    tree = tomllib.loads(path.read_text(encoding="utf-8"))
    return read_fields(path, asked, tree, "toml")


def read_registry(path: Path, function: str | None, asked: Asked) -> ForeignJob:
    """Read the job of a function in a config_registry.py without running the file. Raises ConfigError as
    named_function."""
    tree, undecided = named_function(path, function)
    job = read_fields(path, asked, tree | {"module": path.resolve().parent.name, "config": function}, "flags")
    job.account.assume_neither(undecided)
    return job


def read_flags(path: Path, asked: Asked, flags: Mapping[str, str]) -> ForeignJob:
    """Read the job of `--module llama3 --config llama3_8b --training.seq_len 8192 ...`, or of `--job.config_file
    NAME.toml` with flags that have priority over the file's fields.

    A named registry is part of torchtitan and not available here, so only flags and the model's name are read.

    Raises:
        ConfigError: The TOML file is not here.
    """
    named = flags.get("job.config_file") or flags.get("job.config-file")
    tree = tomllib.loads(zero.file_beside(path, named).read_text(encoding="utf-8")) if named else {}
    for flag, value in flags.items():
        section, dot, name = flag.replace("-", "_").partition(".")
        if dot:
            tree.setdefault(section, {})[name] = value if value else True
        elif section in ("module", "config"):
            tree[section] = value
    return read_fields(path, asked, tree, "toml" if named else "flags")


def named_in(field: str) -> tuple[str, ...]:
    """Return a parallel field's names: in the section of 2025, and in the sections of 2024."""
    return tuple(f"{section}.{field}" for section in ("parallelism", "training", "experimental"))


def read_fields(path: Path, asked: Asked, tree: Mapping[str, Any], form: JobForm) -> ForeignJob:
    """Read the job of torchtitan's fields by section."""
    account = Account(tree, HARMLESS)
    training, parallelism = "training.", "parallelism."
    model = model_of(asked, account, model_name(account), path)
    sequence = account.get(f"{training}seq_len", f"{training}max_context_length")
    tokens = account.get(f"{training}num_tokens_per_microbatch_per_dp_rank")
    stages = account.number(*named_in("pipeline_parallel_degree"))
    names = (*named_in("data_parallel_shard_degree"), f"{training}data_parallel_degree")
    shard = account.number(*names, default=-1, why=f"{DEFAULT}: the rest")
    replicate = account.number(*named_in("data_parallel_replicate_degree"))
    tensor = account.number(*named_in("tensor_parallel_degree"))
    context = account.number(*named_in("context_parallel_degree"))
    rest = max(1, asked.devices // (tensor * stages * context * replicate)) if shard < 0 else shard
    told = str(account.get(*named_in("pipeline_parallel_schedule"), default="1F1B")).replace("_", "")
    told = told if stages > 1 else "1F1B"
    known = (("never", True), ("always", False), ("default", stages > 1))
    keeps = account.word(*named_in("fsdp_reshard_after_forward"), known=known, default=stages > 1)
    degrees = Degrees(
        tensor=tensor, by_sequence=account.flag(f"{parallelism}enable_sequence_parallel", default=True), stages=stages,
        chunks=2 if "interleaved" in told.lower() else 1, context=context,
        schedule=schedule_of(told, "pipeline_parallel_schedule"),
        experts=account.number(f"{parallelism}expert_parallel_degree"),
        shard=rest if min(rest, replicate) > 1 else None,
        sync=("zero2" if keeps else "zero3") if rest > 1 else "allreduce",
        replicas=None if shard < 0 else shard * replicate,
    )  # fmt: skip
    if degrees.experts > 1:  # tensor ranks that do not cut experts take experts first (distributed/parallel_dims.py)
        degrees = replace(degrees, expert_tensor=account.number(f"{parallelism}expert_tensor_parallel_degree"))
    if "interleaved" in told.lower():
        account.assume("virtual stages", 2, "torchtitan gives a rank two stages of an interleaved schedule")
    replicas = degrees.data(asked.devices)
    if tokens is None:
        local = account.number(f"{training}local_batch_size", f"{training}batch_size", default=8, why=DEFAULT)
        whole = account.number(f"{training}global_batch_size", default=-1)
        size = local
        if stages > 1:  # a count of microbatches until May 2025, by default one for each stage
            usual = stages if account.says("experimental.pipeline_parallel_degree") else 0
            count = account.number(*named_in("pipeline_parallel_microbatches"), default=usual)
            size = local // count if count else account.number(f"{parallelism}pipeline_parallel_microbatch_size")
        micro, step = min(size, local), whole if whole > 0 else local * replicas
    else:
        length = int(asked.sequence or sequence or 1)
        micro = max(1, int(tokens) // length)
        passes = account.number(f"{parallelism}num_pp_microbatches", default=stages) if stages > 1 else 1
        whole = account.number(f"{training}num_tokens_per_train_step", default=-1)
        step = whole // length if whole > 0 else micro * passes * replicas
    if account.says(f"{training}global_batch_size") is False and asked.batch is None and tokens is None:
        account.assume(f"{training}global_batch_size", step, "local batch x replicas")
    run = run_of(
        asked, account, degrees, model=model, sequence=sequence, micro=micro, global_=step,
        recompute=recomputed(account), precision=precision_of(account), path=path,
        offload="host" if account.flag(f"{training}enable_cpu_offload") else "none",
    )  # fmt: skip
    if degrees.experts == 1:
        account.get(f"{parallelism}expert_tensor_parallel_degree")  # no effect
    components = account.get("compile.components", default=("model", "loss"))
    compiled = account.flag("compile.enable", f"{training}compile") and "model" in components
    facts = (*facts_of(account), *degrees.expert_facts(asked.devices))
    return ForeignJob("torchtitan" if compiled else "torchtitan-eager", run, account, facts, form)


def model_name(account: Account) -> str | None:
    """Return the first name with sizes known here: `llama3-70B` from `model.name` and `flavor`, from
    `model_spec=model_registry("70B")` in a folder llama3, or from a config's name. Else the first name."""
    family = account.get("model.name", "module")
    if named := account.get("hf_transformers.model", "model.hf_model"):
        account.get("model.flavor")
        return str(named)
    flavor = account.get("model.flavor", "model_spec.0", "model_spec.flavor")
    config = account.get("config")
    families = (family, str(config).partition("_")[0]) if config else (family,)
    named = (*(f"{each}-{flavor}" for each in families if each and flavor), config)
    told = [str(name).replace("_", "-") for name in named if name]
    return next((name for name in told if known_name(name)), told[0] if told else None)


def recomputed(account: Account) -> Any:
    """Return our `memory.recompute` for a policy's class (SelectiveAC.Config) or `mode`. Raises ConfigError for any
    other word."""
    field = f"activation_checkpoint.{CALLED}"
    called = str(account.get(field, default=""))
    if re.search(r"AC\.Config$", called):
        return account.word(field, known=CLASSES, default="none")
    policy = account.word("activation_checkpoint.mode", known=POLICIES, default="none", why="the file has no section")
    field = "activation_checkpoint.selective_ac_option"
    if policy != POLICIES[-1][1]:
        account.get(field)  # no effect
    elif str(account.get(field, default="op", why="the file has no field, and versions differ")) == "1":
        return 1  # each layer
    else:  # another number: some layers, each whole
        account.leave(field)
        account.agree(field, "op")
    return policy


POLICIES = (("none", "none"), ("full", 1), ("selective", "ops"))
"""torchtitan's modes of activation checkpointing, each with our `memory.recompute`."""
CLASSES = (("fullac.config", 1), ("selectiveac.config", "ops"))
"""Classes of torchtitan's Python configs, each with our `memory.recompute`."""


def precision_of(account: Account) -> str:
    """Return bf16 unless the file sets float32."""
    known = (("bfloat16", "bf16"), ("float32", "float32"))
    return str(account.word("training.mixed_precision_param", known=known, default="bf16"))


def facts_of(account: Account) -> tuple[str, ...]:
    """Return the software's facts: FP8 linears, a loss of slices, asynchronous tensor parallelism, the dispatcher."""
    facts = []
    converters = str(account.get("model_converters.converters", "model.converters", default="")).lower()
    converters += str(account.get("model_spec.converters", "model_spec.quantization", default="")).lower()
    older = account.flag("float8.enable_float8_linear", "training.enable_fp8_linear")
    if older or account.get("training.fp8_linear") == "dynamic":
        converters += "float8"
    if "mxfp8" in converters:
        facts.append("products=mxfp8")
    elif "float8" in converters:
        facts.append("products=fp8")
    elif converters:  # NVFP4, adapters
        account.leave("model_spec.converters")
        account.leave("model_converters.converters")
    for name in ("enable_fsdp_float8_all_gather", "precompute_float8_dynamic_scale_for_fsdp"):
        for section in ("float8", "quantize.linear.float8", "quantize.dense.float8"):
            account.agree(f"{section}.{name}", "false")
    account.agree("optimizer.name", "adamw", "adam")
    account.agree("training.mixed_precision_reduce", "float32")
    account.agree("training.data_parallel_type", "fsdp")
    account.agree("model_spec.attn_backend", "sdpa", "flex", "varlen", "flash", "flex_flash")
    if "chunk" in str(account.get(f"loss.{CALLED}", default="")).lower():
        facts.append("logits=slices")
    if account.flag(*named_in("enable_async_tensor_parallel"), "compile.enable_async_tensor_parallel"):
        facts.append("overlapped=sums,gathers,layers")
    if account.number("parallelism.expert_parallel_degree") > 1:
        known = (("standard", "alltoall"), ("deepep", "deepep"), ("hybridep", "hybridep"))
        names = ("parallelism.expert_parallel_comm_backend", "model_spec.moe_comm_backend")
        sent = account.word(*names, known=known, default="alltoall", why=DEFAULT)
        facts.append(f"dispatch={sent}")
    return tuple(facts)
