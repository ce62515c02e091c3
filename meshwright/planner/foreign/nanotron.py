"""Jobs of nanotron's YAML."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.planner.foreign.account import Account
from meshwright.planner.foreign.job import (
    FUSED,
    Asked,
    Degrees,
    ForeignJob,
    harmless_sizes,
    model_of,
    run_of,
    schedule_of,
)
from meshwright.ranks.errors import ConfigError

SIZES = "model.model_config."
HARMLESS = f"""{harmless_sizes(SIZES)}
checkpoints.* data_stages* general.* lighteval* logging.* metrics_logging* profiler* tokenizer.*
optimizer.*learning_rate* optimizer.optimizer_factory.adam* optimizer.optimizer_factory.torch_adam*
optimizer.weight_decay* optimizer.clip_grad tokens.limit*
tokens.train_steps tokens.val_check* model.init_method* model.make_vocab* s3_upload*
model.ddp_bucket_cap_mb
"""
"""Fields that change neither seconds nor bytes of a step, or only in ways that a plan cannot express."""


MODES = (("all_reduce", False), ("reduce_scatter", True))
"""Modes of tensor parallelism; True: sequences are cut between layers."""
DTYPES = (("bfloat16", "bf16"), ("float16", "fp16"), ("float32", "float32"))


def read_nanotron(path: Path, asked: Asked, tree: Mapping[str, Any]) -> ForeignJob:
    """Read the job of a run.

    Raises:
        ConfigError: The pipeline's engine has no counterpart here, or the file has too few fields.
    """
    account = Account(tree, HARMLESS)
    engine = str(account.get("parallelism.pp_engine", default="1f1b"))
    stages = account.number("parallelism.pp")
    sizes = account.section(SIZES.rstrip("."))
    sizes.setdefault("model_type", "llama")
    if "moe_config" in sizes and asked.model is None and sizes["moe_config"]:
        rule = "has experts, whose sizes are read of a known model"
        raise ConfigError.of(f"{SIZES}moe_config", "given", rule, "--model NAME")
    stage = account.number("optimizer.zero_stage", default=0)
    degrees = Degrees(
        tensor=account.number("parallelism.tp"),
        by_sequence=account.word("parallelism.tp_mode", known=MODES, default=False),
        stages=stages, schedule=schedule_of(engine, "pp_engine") if stages > 1 else "1f1b",
        context=account.number("parallelism.context_parallel_size"),
        experts=account.number("parallelism.expert_parallel_size"), sync="zero1" if stage else "allreduce",
        replicas=account.number("parallelism.dp", default=0) or None,
    )  # fmt: skip
    account.agree("optimizer.accumulate_grad_in_fp32", "true")
    account.agree("optimizer.optimizer_factory.name", "adam", "adamw")
    account.agree(f"{SIZES}_attn_implementation", *FUSED)
    tokens = "tokens."
    again = account.flag("parallelism.recompute_layer")
    facts = ("overlapped=sums,gathers,layers",) if account.flag("parallelism.tp_linear_async_communication") else ()
    run = run_of(
        asked, account, degrees, model=model_of(asked, account, sizes if "hidden_size" in sizes else None, path),
        sequence=account.get(f"{tokens}sequence_length"), micro=account.number(f"{tokens}micro_batch_size"),
        global_=None, accumulation=account.number(f"{tokens}batch_accumulation_per_replica"),
        recompute=1 if again else "none", path=path,
        precision=account.word("model.dtype", known=DTYPES, default="bf16"),
    )  # fmt: skip
    return ForeignJob("nanotron", run, account, facts, "nanotron")
