"""DeepSpeed's JSON: stage, host memory, communication under computation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.planner.foreign.account import Account
from meshwright.ranks.errors import ConfigError
from meshwright.ranks.foreign import parse_json

HARMLESS = """
steps_per_print wall_clock_breakdown *_log* *monitor* tensorboard* wandb* *profile* csv_* optimizer.params*
scheduler* gradient_clipping zero_allow_untested_optimizer _* fp16.loss* fp16.initial* fp16.hyst*
fp16.min* fp16.auto* bf16.loss* bf16.initial* bf16.hyst* bf16.min* bf16.auto* *round_robin* *stage3_max* *comment*
*sub_group_size *stage3_gather_16bit* *contiguous* *reduce_scatter *bucket_size *pin_memory prescale_gradients *buffer_*
*allgather_partitions *param_pers* *ignore_unused* checkpoint* *zero3_init_flag *zero3_save* *fast_init warmup_ratio
*nvme_path aio* dump_state seed *sanity* *gradient_predivide* train_batch_size comms_config* *pipeline_read
*pipeline_write deepspeed_multinode_launcher deepspeed_hostfile
"""
"""DeepSpeed's fields that a plan does not express, or that repeat the default."""
FIELDS = {"zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu", "fp16", "bf16", "optimizer"}
"""Fields of which DeepSpeed's JSON has one or more."""
STAGES = ("allreduce", "zero1", "zero2", "zero3")
"""Our value of `layout.data.sync` by DeepSpeed's stage."""
PRESETS = {f"zero{stage}{offload}": (stage, bool(offload)) for stage in range(4) for offload in ("", "_offload")}
"""ms-swift's names of JSON files: stage, and whether states (at stage 3 parameters, too) are in host memory."""


def json_beside(path: Path, name: str) -> dict[str, Any]:
    """Read the JSON that a file names, in the file's folder or in the current one; a name of PRESETS needs no file.

    Raises:
        ConfigError: Neither folder has the JSON.
    """
    if name in PRESETS:
        stage, host = PRESETS[name]
        return {"zero_optimization": {"stage": stage} | ({"offload_optimizer": {"device": "cpu"}} if host else {})}
    found: dict[str, Any] = parse_json(file_beside(path, name).read_text(encoding="utf-8"))
    return found


def file_beside(path: Path, name: str) -> Path:
    """Return the path of a file that a job names, in the job's folder or in the current one.

    Raises:
        ConfigError: Neither folder has the file.
    """
    file = next((each for each in (path.parent / name, Path(name)) if each.is_file()), None)
    if file is None:
        raise ConfigError.of("--from", path, f"names {name}, which is not here", f"that file at {path.parent / name}")
    return file


def account_of(fields: Mapping[str, Any]) -> Account:
    """Return an account of DeepSpeed's fields, in which Adam is read as the optimizer."""
    account = Account(fields, HARMLESS)
    account.agree("optimizer.type", "adam", "adamw")
    return account


def sync_of(account: Account, half: str) -> str:
    """Return our `layout.data.sync` of a stage. With bf16 stage 0 cuts float32 states as stage 1 does
    (runtime/bf16_optimizer.py)."""
    field = "zero_optimization.stage"
    sync: str = account.word(field, "zero_stage", known=tuple(enumerate(STAGES)), default=STAGES[0])
    if sync == STAGES[0] and half == "bf16":
        account.assume(field, 1, "with bf16 DeepSpeed's stage 0 cuts float32 states over replicas")
        return STAGES[1]
    return sync


def offload_of(account: Account) -> str:
    """Return our `memory.offload`: the farthest memory of the optimizer's states and the parameters."""
    places = [
        str(account.get(f"zero_optimization.offload_{held}.device", f"offload_{held}_device", default="none"))
        for held in ("optimizer", "param")
    ]
    if account.flag("zero_optimization.cpu_offload"):  # before 2021
        places.append("cpu")
    return "disk" if "nvme" in places else "host" if "cpu" in places else "none"


def overlapped(account: Account) -> tuple[str, ...]:
    """Return the fact of communication under computation, if the fields have overlap_comm."""
    return ("overlapped=sums,gathers",) if account.flag("zero_optimization.overlap_comm") else ()


def half_of(account: Account) -> str | None:
    """Return fp16 or bf16 if a field turns one on; None: neither, or `auto`."""
    names = (("fp16", ("fp16.enabled",)), ("bf16", ("bf16.enabled", "bfloat16.enabled")))
    return next((half for half, fields in names if account.flag(*fields)), None)


def automatic(account: Account, name: str) -> int | None:
    """Return a number of DeepSpeed's JSON; None for `auto`, which the Trainer decides."""
    value = account.get(name)
    return None if value in (None, "auto") else int(value)
