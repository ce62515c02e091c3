"""Jobs of transformers' Trainer: Accelerate's YAML, axolotl's YAML, DeepSpeed's JSON, the Trainer's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.planner.foreign import trainer, zero
from meshwright.planner.foreign.account import Account
from meshwright.planner.foreign.job import FUSED, Asked, Degrees, ForeignJob, model_of, run_of, stored_in_bf16
from meshwright.ranks.errors import ConfigError

HARMLESS = """
compute_environment debug downcast_bf16 num_cpu_threads* enable_cpu_affinity machine_rank main_* num_machines rdzv*
same_network tpu_* use_cpu fsdp_config.*_state_dict_type fsdp_config.*auto_wrap* fsdp_config.*wrap*
fsdp_config.*ram_efficient* fsdp_config.*orig_params fsdp_config.*sync_module_states fsdp_config.*backward_prefetch*
fsdp_config.*forward_prefetch fsdp_config.*limit_all_gathers fsdp_config.*min_num_params fsdp_config.*version gpu_ids
parallelism_config.*seq_length_is_variable loss_watchdog* experimental_skip_move* min_sample_len
"""
AXOLOTL = (
    HARMLESS
    + """
dataset* chat_template* test_datasets* val_set_size output_dir wandb* mlflow* hub_* num_epochs max_steps
lr_scheduler* learning_rate cosine_* resume_* logging_* warmup* *evals_per* *saves_per* save_* eval_*
weight_decay special_tokens* tokenizer* tokens strict adam_* max_grad_norm shuffle* group_by_length
train_on_inputs model_type trust_remote_code gradient_checkpointing_kwargs*
local_rank early_stopping* fsdp fsdp_version seed push_* remove_unused* use_tensorboard pad_to_sequence_len attention
flex_attn*
"""
)
AGREED = {
    "attn_implementation": FUSED, "flash_attention": FUSED,
    "optimizer": trainer.OPTIMIZERS,
}  # fmt: skip
"""axolotl's fields, each with the values that a plan assumes."""
PLUGINS = ("LigerPlugin", "CutCrossEntropyPlugin", "ExpertParallelPlugin")
"""axolotl's plugins that do nothing without a field of their own, or have a fact of ours."""
FULL, NO_SHARD, GRADIENTS, HYBRID, HYBRID_GRADIENTS = (
    "FULL_SHARD", "NO_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"
)  # fmt: skip
STRATEGIES = {"1": FULL, "2": GRADIENTS, "3": NO_SHARD, "4": HYBRID, "5": HYBRID_GRADIENTS}
"""FSDP's strategies by number; Accelerate writes either the number or the word."""


def read_accelerate(
    path: Path, asked: Asked, tree: Mapping[str, Any], flags: Mapping[str, Any] | None = None, *, trl: bool = False
) -> ForeignJob:
    """Read the job of a file of `accelerate config`: FSDP of version 1 and 2, parallelism_config, DeepSpeed.

    Args:
        path: The file, for errors.
        asked: The options.
        tree: The file's fields.
        flags: Flags of a line `accelerate launch --config_file`; of both, a flag counts.
        trl: True if TRL's defaults replace the Trainer's.
    """
    launch = {name: value for name, value in (flags or {}).items() if name in OF_THE_LAUNCH}
    line = trainer.arguments_of({name: value for name, value in (flags or {}).items() if name not in launch})
    fields = {name: value for name, value in {**tree, **launch}.items() if name != "deepspeed_config"}
    account = Account(fields, HARMLESS)
    ranks = account.number("num_processes", default=asked.devices, why="--devices")
    if ranks != asked.devices:
        account.assume("num_processes", asked.devices, f"--devices; the file says {ranks}")
    if (given := tree.get("deepspeed_config")) is not None:
        account.get("distributed_type")
        named = given.get("deepspeed_config_file")
        inner = zero.json_beside(path, str(named)) if named else given
        return read_deepspeed(path, asked, inner, account, line, trl=trl)
    sharded: bool = account.word(
        "distributed_type", known=DISTRIBUTED, default=bool(tree.keys() & {"fsdp_config", "parallelism_config"})
    )
    told = trainer.MICRO_WHY if trl else ""
    usual = line.number("per_device_train_batch_size", default=trainer.MICRO if trl else 0, why=told)
    why = "" if usual else "the Trainer's arguments are not in this file"
    micro = account.number("per_device_train_batch_size", default=usual or 1, why=why)
    again = account.flag("fsdp_config.fsdp_activation_checkpointing") or line.flag("gradient_checkpointing")
    again = again or ((trl or line.says("finetuning_type")) and trainer.recomputed(line, trl=trl) == 1)
    half = trainer.half_of(line, trl=trl)
    precision = precision_of(account) if account.says("mixed_precision") or half is None else half
    run = run_of(
        asked, account, fsdp_degrees(account, asked.devices, sharded=sharded),
        model=model_of(asked, account, line.get(*trainer.NAMES), path), sequence=trainer.length_of(line, trl=trl),
        micro=micro, global_=asked.batch, recompute=1 if again else "none",
        accumulation=account.number("gradient_accumulation_steps", default=line.number("gradient_accumulation_steps")),
        precision=precision, path=path,
        offload="host" if account.flag("fsdp_config.fsdp_offload_params") else "none", tf32=line.flag("tf32"),
    )  # fmt: skip
    stored = trainer.weights_of(line, precision, sharded=sharded)
    facts = (*compiled(account), *trainer.facts_of(line))
    account.merge(line, "--")
    return ForeignJob("fsdp", run | stored, account, facts, "accelerate")


def read_trainer(
    path: Path, asked: Asked, fields: Mapping[str, Any], prefix: str = "", *, trl: bool = False
) -> ForeignJob:
    """Read the job of the Trainer's arguments without a file of Accelerate: FSDP, DeepSpeed or replicas.

    Args:
        path: The file, for errors.
        asked: The options.
        fields: Flags of a line, or fields of LLaMA-Factory's or TRL's YAML.
        prefix: Text before a field's name in the account, beside fields of DeepSpeed: `--` of a flag.
        trl: True if TRL's defaults replace the Trainer's.

    Raises:
        ConfigError: The job trains adapters, or has too few fields.
    """
    named = next((fields[name] for name in NAMED_JSON if fields.get(name) not in (None, "")), None)
    if named is not None:
        given = {name: value for name, value in fields.items() if name not in NAMED_JSON}
        inner = named if isinstance(named, Mapping) else zero.json_beside(path, str(named))
        return read_deepspeed(path, asked, inner, Account({}), trainer.arguments_of(given), prefix, trl=trl)
    if isinstance(written := fields.get("fsdp_config"), str):
        fields = {**fields, "fsdp_config": zero.json_beside(path, written)}
    account = trainer.arguments_of(fields)
    told = account.get("fsdp", default="")
    words = [str(each) for each in told] if isinstance(told, list) else str(told).lower().split()
    strategy = next((word.upper() for word in words if word.upper() in STRATEGIES.values()), FULL)
    sharded = bool(set(words) - {"false"}) or "fsdp_config" in fields or account.flag("use_fsdp")
    sharded = sharded or account.says("fsdp_config.fsdp_sharding_strategy")
    host = bool({*words} & {"offload"}) or account.flag("fsdp_config.fsdp_offload_params")
    again = account.flag("fsdp_config.fsdp_activation_checkpointing")
    precision = trainer.half_of(account, trl=trl) or "float32"
    run = run_of(
        asked, account, fsdp_degrees(account, asked.devices, sharded=sharded, strategy=strategy),
        model=model_of(asked, account, account.get(*trainer.NAMES), path), sequence=trainer.length_of(account, trl=trl),
        micro=account.number("per_device_train_batch_size", default=trainer.MICRO, why=trainer.MICRO_WHY),
        global_=asked.batch, accumulation=account.number("gradient_accumulation_steps"),
        recompute=1 if again else trainer.recomputed(account, trl=trl), precision=precision,
        path=path, offload="host" if host else "none",
    )  # fmt: skip
    stored = trainer.weights_of(account, precision, sharded=sharded)
    facts = (*compiled(account), *trainer.facts_of(account))
    return ForeignJob("fsdp", run | stored, account, facts, "accelerate")


NAMED_JSON = ("deepspeed", "deepspeed_config", "deepspeed_config_file")
"""Fields that name DeepSpeed's JSON: the Trainer's, a script's, of `accelerate launch`."""


PREFIX = "parallelism_config.parallelism_config_"


def fsdp_degrees(
    account: Account, devices: int, prefix: str = PREFIX, sharded: bool = True, strategy: str = "FULL_SHARD"
) -> Degrees:
    """Read the axes of FSDP's strategy and of Accelerate's parallelism_config.

    Args:
        account: The file's account.
        devices: The plan's devices.
        prefix: Text before `tp_size` and the others; axolotl has none, and longer names for two of the fields.
        sharded: True if the file has a section of FSDP; else gradients are all-reduced.
        strategy: FSDP's strategy without the field fsdp_sharding_strategy.

    Raises:
        ConfigError: The strategy is none of FSDP's.
    """
    tensor = account.number(f"{prefix}tp_size", "tensor_parallel_size")
    ring = account.number(f"{prefix}cp_size", "context_parallel_size", "sequence_parallel_degree")
    ulysses = account.number(f"{prefix}sp_size")
    replicas, shard = account.number(f"{prefix}dp_replicate_size"), account.number(f"{prefix}dp_shard_size", default=0)
    # Each rank of a group with different experts has samples of its own; only `shard` ranks cut a state.
    experts = account.number("expert_parallel_size") if not prefix else 1
    replicas *= experts
    told = str(account.get("fsdp_config.fsdp_sharding_strategy", default=strategy)).rpartition(".")[2]
    reshard = str(account.get("fsdp_config.fsdp_reshard_after_forward", default="")).rpartition(".")[2]
    if reshard:  # version 2 has true and false, and takes the words of version 1
        told = {"true": FULL, "false": GRADIENTS}.get(reshard.lower(), reshard)
    told = STRATEGIES.get(told, told)
    if told not in STRATEGIES.values():
        raise ConfigError.of("fsdp_sharding_strategy", told, "is no strategy of FSDP", ", ".join(STRATEGIES.values()))
    sync = "zero2" if told in (GRADIENTS, HYBRID_GRADIENTS) else "zero3"
    if told == NO_SHARD or not sharded or (shard == 1 and replicas > 1):
        sync = "allreduce"
    hybrid = None
    if told in (HYBRID, HYBRID_GRADIENTS):
        hybrid = account.number(
            "ranks of a node", default=min(8, devices), why="FSDP's hybrid strategies shard in a node"
        )
    return Degrees(
        tensor=tensor, by_sequence=tensor > 1, context=ring * ulysses, sync=sync,
        context_kind="ulysses" if ulysses > 1 else "ring", shard=shard if replicas > 1 and shard > 1 else hybrid,
        replicas=shard * replicas or None, experts=experts,
    )  # fmt: skip


def read_axolotl(path: Path, asked: Asked, tree: Mapping[str, Any]) -> ForeignJob:
    """Read the job of axolotl's YAML. Fields of fsdp_config may lack the prefix `fsdp_`."""
    plain = {f"fsdp_{name.removeprefix('fsdp_')}": value for name, value in (tree.get("fsdp_config") or {}).items()}
    account = Account({**tree, "fsdp_config": plain}, AXOLOTL)
    for name in ("load_in_8bit", "load_in_4bit"):
        if account.flag(name):
            raise ConfigError.of(name, True, "has weights of a format that no run of ours has", "a file without it")
    if account.get("adapter") is not None:
        raise ConfigError.of("adapter", account.get("adapter"), "trains no whole weights", "a file without adapter")
    for name, values in AGREED.items():
        account.agree(name, *values)
    if (named := account.get("deepspeed")) is not None:
        ring = account.number("context_parallel_size", "sequence_parallel_degree")
        if ring > 1:
            rule = "cuts sequences in a ring, which no plan of DeepSpeed has"
            raise ConfigError.of("context_parallel_size", ring, rule, "1, or a file with fsdp_config")
        return read_deepspeed(path, asked, zero.json_beside(path, str(named)), account)
    model = model_of(asked, account, account.get("base_model"), path)
    degrees = fsdp_degrees(account, asked.devices, prefix="", sharded=bool(plain))
    again = account.flag("gradient_checkpointing") or account.flag("fsdp_config.fsdp_activation_checkpointing")
    precision = precision_of(account)
    run = run_of(
        asked, account, degrees, model=model, sequence=account.get("sequence_len"),
        micro=account.number("micro_batch_size", default=1, why="axolotl's default"), global_=asked.batch,
        accumulation=account.number("gradient_accumulation_steps"), recompute=1 if again else "none",
        precision=precision, path=path,
        offload="host" if account.flag("fsdp_config.fsdp_offload_params") else "none",
    )  # fmt: skip
    # axolotl loads weights in bf16 (utils/config/__init__.py, normalize_config).
    # Only FSDP with mixed precision makes them float32 (trainer.weights_of).
    full = str(account.get("bf16", default=True)).lower() == "full"
    stored = stored_in_bf16() if precision == "bf16" and (full or not plain) else {}
    facts = [*compiled(account), *(["dispatch=deepep"] if degrees.experts > 1 else [])]
    plugins = [str(each).rpartition(".")[2] for each in account.get("plugins", default=())]
    if {*plugins} - {*PLUGINS}:
        account.leave("plugins")
    if account.flag("liger_fused_linear_cross_entropy") or "CutCrossEntropyPlugin" in plugins:
        facts.append("logits=slices")
    if account.flag("liger_rms_norm"):
        facts.append("norms=fast")
    return ForeignJob("axolotl", run | stored, account, tuple(facts))


def read_deepspeed(
    path: Path, asked: Asked, fields: Mapping[str, Any], outer: Account, line: Account | None = None,
    prefix: str = "--", *, trl: bool = False,
) -> ForeignJob:  # fmt: skip
    """Read the job of DeepSpeed's fields.

    Args:
        path: The file, for errors.
        asked: The options.
        fields: DeepSpeed's JSON, or the section of Accelerate's file with the same fields.
        outer: The account of the file that names the JSON.
        line: The Trainer's arguments, of the launcher's line or a YAML.
        prefix: Text before the names of these arguments in the account.
        trl: True if TRL's defaults replace the Trainer's.
    """
    inner, line = zero.account_of(fields), line or Account({})
    model = model_of(asked, outer, line.get(*trainer.NAMES) or outer.get("base_model"), path)
    passes = zero.automatic(inner, "gradient_accumulation_steps") or line.number(
        "gradient_accumulation_steps", default=outer.number("gradient_accumulation_steps")
    )
    step = asked.batch or zero.automatic(inner, "train_batch_size")
    micro = zero.automatic(inner, "train_micro_batch_size_per_gpu") or line.number(
        "per_device_train_batch_size",
        default=outer.number("micro_batch_size", default=0) or (trainer.MICRO if trl else 0),
        why=trainer.MICRO_WHY if trl else "",
    )
    context = ulysses_of(outer, inner)
    tensor = inner.number("tensor_parallel.autotp_size")
    if not micro:
        replicas = max(1, asked.devices // (context * tensor))
        micro = max(1, (step or replicas) // replicas // passes)
        outer.assume("per_device_train_batch_size", micro, "samples of a step / replicas / microbatches")
    usual = precision_of(outer)
    half = zero.half_of(inner) or trainer.half_of(line, trl=trl)
    if half is None and not (outer.says("mixed_precision") or outer.says("bf16") or outer.says("fp16")):
        outer.assume("precision", usual, "neither JSON nor line turns a half precision on")
    half = half or usual
    line.agree(half, "true")
    degrees = Degrees(
        tensor=tensor, experts=inner.number("expert_parallel.autoep_size"), sync=zero.sync_of(inner, half),
        context=context, context_kind="ulysses",
    )  # fmt: skip
    again = outer.flag("gradient_checkpointing") or trainer.recomputed(line, trl=trl) == 1
    if outer.says("gradient_checkpointing"):
        line.assumed.pop("gradient_checkpointing", None)
    run = run_of(
        asked, outer, degrees, model=model, micro=micro, global_=step, accumulation=passes, precision=half, path=path,
        sequence=trainer.length_of(line, trl=trl) or outer.get("sequence_len"),
        recompute=1 if again else "none", offload=zero.offload_of(inner), tf32=line.flag("tf32"),
    )  # fmt: skip
    if half != "float32":
        line.get(*trainer.WEIGHTS)  # DeepSpeed has float32 masters of any weights (runtime/bf16_optimizer.py)
    facts = (*zero.overlapped(inner), *compiled(line), *trainer.facts_of(line))
    outer.merge(inner, "deepspeed.")
    outer.merge(line, prefix)
    return ForeignJob("deepspeed-trainer", run, outer, facts, "deepspeed")


def ulysses_of(outer: Account, inner: Account) -> int:
    """Return the ranks that cut a sequence by heads: of Accelerate's parallelism_config, or of DeepSpeed's JSON."""
    by_deepspeed = outer.says(f"{PREFIX}cp_backend") and outer.get(f"{PREFIX}cp_backend") == "deepspeed"
    ranks = outer.number(f"{PREFIX}sp_size", *([f"{PREFIX}cp_size"] if by_deepspeed else []))
    for name in ("dp_replicate_size", "tp_size"):
        outer.agree(f"{PREFIX}{name}", "1")
    outer.get(f"{PREFIX}dp_shard_size")  # DeepSpeed cuts states over all replicas
    for name in ("sp_attn_implementation", "cp_attn_implementation"):
        outer.agree(f"{PREFIX}{name}", *FUSED)
    return max(ranks, inner.number("sequence_parallel_size"))


DISTRIBUTED = (
    ("fsdp", True), ("no", False), ("multi_gpu", False), ("multi_xpu", False), ("multi_npu", False),
    ("multi_hpu", False), ("multi_mlu", False),
)  # fmt: skip
"""Accelerate's distributed_type; True: states are cut by FSDP, False: gradients are all-reduced."""
OF_THE_LAUNCH = (
    "num_processes", "mixed_precision", "num_machines", "machine_rank", "main_process_ip", "main_process_port",
    "rdzv_backend", "same_network", "gpu_ids", "num_cpu_threads_per_process",
)  # fmt: skip
"""Flags of `accelerate launch` that replace fields of the file."""


def precision_of(account: Account) -> str:
    """Return the precision: bf16 unless the file sets fp16, or turns mixed precision off without FP8 (float32)."""
    told = str(account.get("bf16", default=True)).lower()
    usual = "float32" if told in ("false", "no", "off") and not account.flag("fp8") else "bf16"
    half = account.word("mixed_precision", known=PRECISIONS, default=usual)
    return "fp16" if account.flag("fp16") else str(half)


PRECISIONS = (("bf16", "bf16"), ("fp16", "fp16"), ("fp8", "bf16"), ("no", "float32"), ("false", "float32"))
"""Accelerate's words; fp8 casts the products of bf16 weights."""


def compiled(account: Account) -> tuple[str, ...]:
    """Return facts of torch.compile and FP8, set by Accelerate's dynamo_config and mixed_precision, or by axolotl."""
    dynamo = str(account.get("dynamo_config.dynamo_backend", default="no")).lower() not in ("no", "none")
    fused = ("fuses_elements=true",) if dynamo or account.flag("torch_compile") else ()
    low = account.flag("fp8") or str(account.get("mixed_precision", default="")).lower() == "fp8"
    return (*fused, *(("products=fp8",) if low else ()))
