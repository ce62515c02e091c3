"""Arguments of transformers' Trainer: of a launch line, of LLaMA-Factory's YAML, of TRL's YAML."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from meshwright.planner.foreign.account import Account
from meshwright.planner.foreign.job import FUSED, Tree, stored_in_bf16
from meshwright.ranks.errors import ConfigError

HARMLESS = """
output* learning* num_train* max_steps log* save* eval* warmup* weight_decay lr* seed dataset* do_* report* data_path
data_dir num_gpus num_nodes master* hostfile include overwrite* run_name hub* push* train_file validation* nproc*
nnodes node* rdzv* preprocess* trust_remote_code *num_proc* cache_dir template stage plot_loss max_samples
val_size resume* ddp_timeout ddp_find* adam_* max_grad_norm metric* load_best* remove_unused* group_by_length
use_fast* tokenizer* image_* is_multimodal dataloader* lazy_preprocess per_device_eval* do_eval do_train config_file
main_process* machine_rank num_machines rdzv_backend same_network deepspeed_multinode_launcher debug report_to
finetuning_type use_peft use_lora chat_template* shuffle* split* fp8_backend version overwrite_cache
multi_gpu use_fsdp use_deepspeed fsdp_config.*wrap* fsdp_config.*state_dict_type fsdp_config.*prefetch*
fsdp_config.*orig_params fsdp_config.*limit_all_gathers fsdp_config.*sync_module* fsdp_config.*ram_efficient*
fsdp_config.*min_num_params fsdp_config.*version gradient_checkpointing_kwargs* include_* remove_* epochs n_epochs
disable_tqdm model_revision rope_scaling* eos_token pad_token assistant_only_loss completion_only_loss average_tokens*
torchrun_* local_rank max_restarts tee standalone bf16_full_eval fp16_full_eval
"""
"""Arguments that change neither seconds nor bytes of a step."""
LENGTHS = ("max_seq_length", "max_seq_len", "max_length", "model_max_length", "cutoff_len", "block_size")
"""Names of the tokens of a sequence: of TRL, of scripts, of LLaMA-Factory."""
TRL, TRL_LENGTH = "TRL's default", 1024
"""The source of a value that TRL replaces (SFTConfig), and its tokens of a sequence."""
MICRO, MICRO_WHY = 8, "the Trainer's default"
"""Samples of a microbatch without per_device_train_batch_size, and the source."""
TRL_LAUNCHES: Mapping[str, Mapping[str, Any]] = {
    "single_gpu": {"distributed_type": "NO", "mixed_precision": "bf16"},
    "multi_gpu": {"distributed_type": "MULTI_GPU", "mixed_precision": "bf16"},
    "fsdp1": {"distributed_type": "FSDP", "mixed_precision": "bf16"},
    "fsdp2": {"distributed_type": "FSDP", "mixed_precision": "bf16"},
    **{f"zero{stage}": {"mixed_precision": "bf16", "deepspeed_config": {"zero_stage": stage}} for stage in (1, 2, 3)},
}
"""Files of Accelerate that `trl --accelerate_config` has by name (trl/accelerate_configs)."""
TRL_COMMAND = re.compile(r"(?:^|/)trl(?:$|/.*\.py$|\.scripts\b)")
"""A word that starts TRL: the command, a script in TRL's folder, a module."""
OF_FACTORY = ("finetuning_type", "stage", "template", "cutoff_len")
"""Fields of LLaMA-Factory's YAML that TRL's has not."""
WEIGHTS = ("torch_dtype", "dtype")
"""Names of the dtype of loaded weights: of TRL until 2025 and of ms-swift, of TRL since."""
ACCUMULATION = "accelerator_config.gradient_accumulation_kwargs"
BF16, FLOAT32 = ("bf16", "bfloat16", "torch.bfloat16"), ("float32", "fp32", "torch.float32", "false")
"""Words for these dtypes; false turns LLaMA-Factory's pure_bf16 off."""
NAMES = ("model_name_or_path", "model_name", "model_id", "model")
OPTIMIZERS = ("adamw", "adamw_hf", "adamw_torch", "adamw_torch_fused", "adamw_apex_fused")
"""Words for an AdamW with float32 states, as a plan assumes."""
ADAPTERS = (
    ("finetuning_type", ("lora", "freeze", "oft")), ("use_peft", ("true",)), ("use_lora", ("true",)),
    ("lora_enable", ("true",)), ("load_in_4bit", ("true",)), ("load_in_8bit", ("true",)),
    ("tuner_type", ("lora", "lora_llm", "adalora")), ("train_type", ("lora", "adalora")), ("q_lora", ("true",)),
)  # fmt: skip
"""Fields of adapters and of weights in low formats, each with the values that train no whole weights."""


def arguments_of(fields: Mapping[str, Any]) -> Account:
    """Return the account of a line's flags or a YAML's fields, with names in small letters and underscores. A flag
    without a value is true; flags of FSDP are fields of fsdp_config.

    Raises:
        ConfigError: The job trains adapters, or weights of a low format.
    """
    tree = {name.replace("-", "_"): True if value == "" else value for name, value in fields.items()}
    inner = tree.get("fsdp_config")
    moved = {name: tree.pop(name) for name in list(tree) if name.startswith("fsdp_") and name != "fsdp_config"}
    if isinstance(inner, Mapping) or moved:
        given = inner if isinstance(inner, Mapping) else {}
        tree["fsdp_config"] = moved | {f"fsdp_{name.removeprefix('fsdp_')}": value for name, value in given.items()}
    refuse_adapters(tree)
    account = Account(tree, HARMLESS)
    account.agree("optim", *OPTIMIZERS)
    account.agree("attn_implementation", *FUSED)
    account.agree("flash_attn", "auto", "fa2", "fa3", *FUSED)
    account.agree("tuner_type", "full")
    account.agree("train_type", "full")
    return account


def refuse_adapters(fields: Mapping[str, Any]) -> None:
    """Raise ConfigError for a field of ADAPTERS."""
    for name, values in ADAPTERS:
        if str(fields.get(name, "")).lower() in values:
            raise ConfigError.of(name, fields[name], "trains no whole weights", f"a file without {name}")


def is_trainer(fields: Mapping[str, Any]) -> bool:
    """Return True if fields are the Trainer's: a model's name, or samples of a device."""
    return bool({"model_name_or_path", "per_device_train_batch_size"} & {name.replace("-", "_") for name in fields})


def starts_trl(words: Sequence[str]) -> bool:
    """Return True if a command's words start TRL; a flag's value, such as `--output_dir out/trl`, does not."""
    return any(
        TRL_COMMAND.search(word) and not word.startswith("-") and (word.endswith(".py") or not before.startswith("--"))
        for before, word in pairwise(("", *words))
    )


def length_of(account: Account, *, trl: bool = False) -> Any:
    """Return the tokens of a sequence, or None."""
    return account.get(*LENGTHS, default=TRL_LENGTH, why=TRL) if trl else account.get(*LENGTHS)


def half_of(account: Account, *, trl: bool = False) -> str | None:
    """Return fp16 or bf16 if an argument, or TRL's default, says so. With FP8 Accelerate casts to bf16, also if bf16 is
    false (utils/modeling.py, get_mixed_precision_context_manager)."""
    word = str(account.get("mixed_precision", default="")).lower()
    half = next((half for half in ("fp16", "bf16") if account.flag(half) or word == half), None)
    if half is None and (word == "fp8" or account.flag("fp8")):
        return "bf16"
    if half is None and trl and not account.says("bf16"):
        account.assume("bf16", True, TRL)
        return "bf16"
    return half


def recomputed(account: Account, *, trl: bool = False) -> int | str:
    """Return our `memory.recompute`. LLaMA-Factory and TRL compute layers again unless a field turns this off."""
    factory = account.says("finetuning_type") and not account.flag("disable_gradient_checkpointing")
    usual = factory or trl
    if not account.says("gradient_checkpointing"):
        why = TRL if trl else "LLaMA-Factory's default" if factory else "the Trainer's default"
        account.assume("gradient_checkpointing", usual, why)
    return 1 if account.flag("gradient_checkpointing", default=usual) else "none"


def weights_of(account: Account, precision: str, *, sharded: bool) -> Tree:
    """Return the run's fields for weights that are loaded and kept in bf16; nothing for float32 weights.

    FSDP with mixed precision makes loaded weights float32 (Accelerate: fsdp_utils.py, fsdp2_prepare_model;
    accelerator.py, prepare_model). Replicas, and FSDP without mixed precision, have no float32 masters.

    Args:
        account: The arguments' account.
        precision: The mixed precision: bf16, fp16, or float32 for none.
        sharded: True if FSDP cuts the weights.
    """
    name = next((each for each in WEIGHTS if account.says(each)), "pure_bf16")
    pure = name == "pure_bf16" and account.flag(name)
    word = "bf16" if pure else str(account.get(name, default="float32")).lower()
    if sharded and precision != "float32":
        return {}
    if word in BF16 and precision != "fp16":
        return stored_in_bf16()
    if word not in FLOAT32:  # auto: the checkpoint's dtype, which is not in the file
        account.leave(name)
    return {}


def facts_of(account: Account) -> tuple[str, ...]:
    """Return facts of the arguments: sums of gradients in every microbatch; Liger's kernels, which are a head that
    holds the logits of some tokens at a time, and fused norms."""
    sums = ("sums=microbatch",) if account.flag(f"{ACCUMULATION}.sync_each_batch") else ()
    if not account.flag("use_liger_kernel", "enable_liger_kernel", "use_liger"):
        return sums
    facts = (("fused_linear_cross_entropy", "logits=slices"), ("rms_norm", "norms=fast"))
    return (*sums, *(fact for name, fact in facts if account.flag(f"liger_kernel_config.{name}", default=True)))
