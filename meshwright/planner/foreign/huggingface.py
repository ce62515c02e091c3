"""Jobs of transformers' Trainer: Accelerate's YAML, axolotl's YAML, DeepSpeed's JSON with a launcher's line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.planner.foreign.account import Account
from meshwright.planner.foreign.job import FUSED, Asked, Degrees, ForeignJob, model_of, run_of
from meshwright.ranks.errors import ConfigError
from meshwright.ranks.foreign import parse_json

HARMLESS = """
compute_environment debug distributed_type downcast_bf16 enable_cpu_affinity machine_rank main_* num_machines rdzv*
same_network tpu_* use_cpu fsdp_config.*_state_dict_type fsdp_config.*auto_wrap* fsdp_config.*wrap*
fsdp_config.*ram_efficient* fsdp_config.*orig_params fsdp_config.*sync_module_states fsdp_config.*backward_prefetch*
fsdp_config.*forward_prefetch fsdp_config.*limit_all_gathers fsdp_config.*min_num_params fsdp_config.*version gpu_ids
deepspeed_config.zero3_* deepspeed_config.deepspeed_multinode_launcher deepspeed_config.*init_flag
deepspeed_config.*16bit*
"""
AXOLOTL = (
    HARMLESS
    + """
dataset* chat_template* test_datasets* val_set_size output_dir wandb* mlflow* hub_* num_epochs max_steps
lr_scheduler* learning_rate cosine_* tf32 resume_* logging_* warmup* *evals_per* *saves_per* save_* eval_*
weight_decay special_tokens* tokenizer* tokens strict adam_* max_grad_norm shuffle* group_by_length
train_on_inputs model_type trust_remote_code gradient_checkpointing_kwargs*
local_rank early_stopping* fsdp fsdp_version seed push_* remove_unused* use_tensorboard pad_to_sequence_len attention
flex_attn*
"""
)
AGREED = {
    "attn_implementation": FUSED, "flash_attention": FUSED,
    "optimizer": ("adamw", "adamw_hf", "adamw_torch", "adamw_torch_fused"),
}  # fmt: skip
"""axolotl's fields, each with the values that a plan assumes."""
PLUGINS = ("LigerPlugin", "CutCrossEntropyPlugin", "ExpertParallelPlugin")
"""axolotl's plugins that do nothing without a field of their own, or have a fact of ours."""
ZERO = ("allreduce", "zero1", "zero2", "zero3")
"""Our value of `layout.data.sync` by DeepSpeed's stage."""
FULL, NO_SHARD, GRADIENTS, HYBRID, HYBRID_GRADIENTS = (
    "FULL_SHARD", "NO_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"
)  # fmt: skip
STRATEGIES = {"1": FULL, "2": GRADIENTS, "3": NO_SHARD, "4": HYBRID, "5": HYBRID_GRADIENTS}
"""FSDP's strategies by number; Accelerate writes either the number or the word."""


def read_accelerate(path: Path, asked: Asked, tree: Mapping[str, Any]) -> ForeignJob:
    """Read the job of a file of `accelerate config`: FSDP of version 1 and 2, parallelism_config, DeepSpeed."""
    account = Account({name: value for name, value in tree.items() if name != "deepspeed_config"}, HARMLESS)
    ranks = account.number("num_processes", default=asked.devices, why="--devices")
    if ranks != asked.devices:
        account.assume("num_processes", asked.devices, f"--devices; the file says {ranks}")
    if (zero := tree.get("deepspeed_config")) is not None:
        named = zero.get("deepspeed_config_file")
        return read_deepspeed(path, asked, json_beside(path, str(named)) if named else zero, account)
    micro = account.number("per_device_train_batch_size", default=1, why="the Trainer's arguments are not in this file")
    run = run_of(
        asked, account, fsdp_degrees(account, asked.devices), model=model_of(asked, account, None, path), sequence=None,
        micro=micro, global_=asked.batch, accumulation=account.number("gradient_accumulation_steps"),
        recompute=1 if account.flag("fsdp_config.fsdp_activation_checkpointing") else "none",
        precision=precision_of(account), path=path,
        offload="host" if account.flag("fsdp_config.fsdp_offload_params") else "none",
    )  # fmt: skip
    return ForeignJob("fsdp", run, account, compiled(account), "accelerate")


PREFIX = "parallelism_config.parallelism_config_"


def fsdp_degrees(account: Account, devices: int, prefix: str = PREFIX, sharded: bool = True) -> Degrees:
    """Read the axes of FSDP's strategy and of Accelerate's parallelism_config.

    Args:
        account: The file's account.
        devices: The plan's devices.
        prefix: Text before `tp_size` and the others; axolotl has none, and longer names for two of the fields.
        sharded: True if the file has a section of FSDP; else gradients are all-reduced.

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
    told = str(account.get("fsdp_config.fsdp_sharding_strategy", default=FULL)).rpartition(".")[2]
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
    if (zero := account.get("deepspeed")) is not None:
        ring = account.number("context_parallel_size", "sequence_parallel_degree")
        if ring > 1:
            rule = "cuts sequences in a ring, which no plan of DeepSpeed has"
            raise ConfigError.of("context_parallel_size", ring, rule, "1, or a file with fsdp_config")
        return read_deepspeed(path, asked, json_beside(path, str(zero)), account)
    model = model_of(asked, account, account.get("base_model"), path)
    degrees = fsdp_degrees(account, asked.devices, prefix="", sharded=bool(plain))
    again = account.flag("gradient_checkpointing") or account.flag("fsdp_config.fsdp_activation_checkpointing")
    run = run_of(
        asked, account, degrees, model=model, sequence=account.get("sequence_len"),
        micro=account.number("micro_batch_size", default=1, why="axolotl's default"), global_=asked.batch,
        accumulation=account.number("gradient_accumulation_steps"), recompute=1 if again else "none",
        precision=precision_of(account), path=path,
        offload="host" if account.flag("fsdp_config.fsdp_offload_params") else "none",
    )  # fmt: skip
    facts = [*compiled(account), *(["dispatch=deepep"] if degrees.experts > 1 else [])]
    plugins = [str(each).rpartition(".")[2] for each in account.get("plugins", default=())]
    if {*plugins} - {*PLUGINS}:
        account.leave("plugins")
    if account.flag("liger_fused_linear_cross_entropy") or "CutCrossEntropyPlugin" in plugins:
        facts.append("logits=slices")
    return ForeignJob("axolotl", run, account, tuple(facts))


def json_beside(path: Path, name: str) -> dict[str, Any]:
    """Read the JSON that a file names, in the file's folder or in the current one.

    Raises:
        ConfigError: Neither folder has the JSON.
    """
    file = next((each for each in (path.parent / name, Path(name)) if each.is_file()), None)
    if file is None:
        raise ConfigError.of(
            "--from", path, f"names {name}, which is not here", f"DeepSpeed's JSON at {path.parent / name}"
        )
    found: dict[str, Any] = parse_json(file.read_text(encoding="utf-8"))
    return found


def read_deepspeed(
    path: Path, asked: Asked, fields: Mapping[str, Any], outer: Account, flags: Mapping[str, str] | None = None
) -> ForeignJob:
    """Read the job of DeepSpeed's fields.

    Args:
        path: The file, for errors.
        asked: The options.
        fields: DeepSpeed's JSON, or the section of Accelerate's file with the same fields.
        outer: The account of the file that names the JSON.
        flags: The flags of the launcher's line that names the JSON.
    """
    inner, line = Account(fields, DEEPSPEED_HARMLESS), Account(dict(flags or {}), TRAINER_HARMLESS)
    model = model_of(asked, outer, line.get("model_name_or_path", "model") or outer.get("base_model"), path)
    passes = automatic(inner, "gradient_accumulation_steps") or line.number(
        "gradient_accumulation_steps", default=outer.number("gradient_accumulation_steps")
    )
    step = asked.batch or automatic(inner, "train_batch_size")
    micro = automatic(inner, "train_micro_batch_size_per_gpu") or line.number(
        "per_device_train_batch_size", default=outer.number("micro_batch_size", default=0)
    )
    if not micro:
        micro = max(1, (step or asked.devices) // asked.devices // passes)
        outer.assume("per_device_train_batch_size", micro, "samples of a step / ranks / microbatches")
    ulysses = outer.number("parallelism_config.parallelism_config_sp_size")
    degrees = Degrees(
        tensor=inner.number("tensor_parallel.autotp_size"), experts=inner.number("expert_parallel.autoep_size"),
        sync=inner.word("zero_optimization.stage", "zero_stage", known=tuple(enumerate(ZERO)), default=ZERO[0]),
        context=ulysses, context_kind="ulysses",
    )  # fmt: skip
    places = [
        str(inner.get(f"zero_optimization.offload_{held}.device", f"offload_{held}_device", default="none"))
        for held in ("optimizer", "param")
    ]
    again = line.flag("gradient_checkpointing") or outer.flag("gradient_checkpointing")
    usual = precision_of(outer)
    half = "fp16" if inner.flag("fp16.enabled") else "bf16" if inner.flag("bf16.enabled") else usual
    run = run_of(
        asked, outer, degrees, model=model, micro=micro, global_=step, accumulation=passes, precision=half, path=path,
        sequence=line.get("max_seq_length", "max_seq_len", "block_size", "max_length") or outer.get("sequence_len"),
        recompute=1 if again else "none", offload="disk" if "nvme" in places else "host" if "cpu" in places else "none",
    )  # fmt: skip
    facts = ("overlapped=sums,gathers",) if inner.flag("zero_optimization.overlap_comm") else ()
    outer.merge(inner, "deepspeed.")
    outer.merge(line, "--")
    return ForeignJob("deepspeed-trainer", run, outer, facts, "deepspeed")


OF_THE_LINE = ("per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing")
"""Flags of the Trainer that a plan reads from a line `accelerate launch --config_file`."""
DEEPSPEED_HARMLESS = """
steps_per_print wall_clock_breakdown *_log* *monitor* tensorboard* wandb* *profile* csv_* optimizer.params.*
optimizer.type scheduler* gradient_clipping zero_allow_untested_optimizer _* fp16.loss* fp16.initial* fp16.hyst*
fp16.min* fp16.auto* *round_robin* *stage3_max* *comment* *sub_group_size *stage3_gather_16bit* *contiguous*
*reduce_scatter *bucket_size *pin_memory prescale_gradients *buffer_* *allgather_partitions *param_persistence*
*ignore_unused* checkpoint* *zero3_init_flag *zero3_save* *fast_init warmup_ratio *nvme_path aio* dump_state seed
*sanity* *gradient_predivide* train_batch_size
"""
"""DeepSpeed's fields that a plan does not express, or that repeat the default."""
TRAINER_HARMLESS = """
output* learning* num_train* max_steps log* save* eval* warmup* weight* lr* seed dataset* do_* report* data* num_gpus
num_nodes master* hostfile include deepspeed tf32 overwrite* run_name hub* push* train_file validation* nproc* nnodes
node* rdzv* preprocessing* trust_remote_code
"""


def automatic(account: Account, name: str) -> int | None:
    """Return a number of DeepSpeed's JSON; None for `auto`, which the Trainer decides."""
    value = account.get(name)
    return None if value in (None, "auto") else int(value)


def precision_of(account: Account) -> str:
    """Return the precision: bf16 unless the file sets fp16 or turns mixed precision off (float32)."""
    told = str(account.get("bf16", default=True)).lower()
    if told == "full":  # weights without float32 masters
        account.leave("bf16")
    usual = "float32" if told in ("false", "no", "off") else "bf16"
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
