"""Jobs of NeMo AutoModel's YAML."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.planner.foreign.account import Account
from meshwright.planner.foreign.job import (
    Asked,
    Degrees,
    ForeignJob,
    Tree,
    harmless_sizes,
    layers_of,
    model_of,
    run_of,
    schedule_of,
    stored_in_bf16,
)
from meshwright.ranks.errors import ConfigError

SIZES = "model.config."
HARMLESS = f"""{harmless_sizes(SIZES)}
recipe seed step_scheduler.* dist_env.* checkpoint.* *dataset.* *dataloader.* *lr* loss_fn.fp32_upcast
loss_fn.ignore_index optimizer.lr optimizer.betas optimizer.weight_decay optimizer.eps optimizer.adam_w_mode
optimizer.bias_correction clip_grad_norm.* wandb* mlflow* rng* model.trust_remote_code model._target_
model.config.revision model.output_hidden_states tokenizer* distributed.mp_policy.* model.is_meta_device
distributed.pipeline.dtype distributed.pipeline.scale_grads* model.backend._target_ model.backend.enable_hf*
model.backend.fake* packed_sequence* model.backend.attn model.backend.linear model.backend.rms_norm
model.backend.rope* model.attn_implementation benchmark* nsys* launcher* slurm*
distributed._target_ distributed.pipeline.round* autopipeline._target_ autopipeline.round* autopipeline.scale_grads*
autopipeline.patch* distributed.pipeline.patch* parallelizer._target_ model.backend.te_fp8._target_ optimizer.foreach
model.load_base_model model.backend.enable_fsdp* ci.* timing* moe_metrics* optimizer.compress_state_dict
"""
"""Fields that change neither seconds nor bytes of a step, or only in ways that a plan cannot express."""


def read_automodel(path: Path, asked: Asked, tree: Mapping[str, Any]) -> ForeignJob:
    """Read the job of a recipe.

    Raises:
        ConfigError: The file has adapters, a schedule that this package lacks, or too few fields.
    """
    account = Account(tree, HARMLESS)
    if "peft" in tree:
        raise ConfigError.of("peft", "given", "trains no whole weights", "a file without peft")
    tensor, stages = number(account, "tp_size"), number(account, "pp_size")
    context, experts = number(account, "cp_size"), number(account, "ep_size")
    replicas = number(account, "dp_size", 0)
    hybrid = number(account, "dp_replicate_size")
    told = str(account.get(*piped("pp_schedule"), default="1f1b")).lower()
    model = model_of(asked, account, told_model(account), path)
    every = account.number(*piped("layers_per_stage"), default=0)
    chunks = 1
    if every and stages > 1 and told.startswith("inter"):
        chunks = max(1, -(-layers_of(model) // every) // stages)
    rest = max(1, asked.devices // (tensor * stages * context))
    if stages == 1:
        account.get(*piped("pp_microbatch_size"))  # no effect
    degrees = Degrees(
        tensor=tensor, by_sequence=account.flag("distributed.sequence_parallel"), stages=stages, chunks=chunks,
        schedule=schedule_of(told, "pp_schedule") if stages > 1 else "1f1b", context=context, experts=experts,
        expert_tensor=1 if experts > 1 and tensor == 1 else None,  # the mesh of experts has context ranks, too
        sync=sync_of(account, rest // hybrid, stages), shard=rest // hybrid if hybrid > 1 else None,
        replicas=replicas or None,
    )  # fmt: skip
    local = account.number("step_scheduler.local_batch_size")
    size = account.number(*piped("pp_microbatch_size"), default=local) if stages > 1 else local
    packed = account.number("packed_sequence.packed_sequence_size", default=0)
    run = run_of(
        asked, account, degrees, model=model,
        sequence=packed or account.get("dataset.seq_len", "dataset.seq_length"),
        micro=size, global_=account.number("step_scheduler.global_batch_size", default=0) or None,
        recompute=1 if account.flag(*AGAIN) else "none", precision="bf16", path=path,
    )  # fmt: skip
    facts = ["fuses_elements=true"] if account.flag("compile.enabled") else []
    if account.word("model.torch_dtype", "model.config.torch_dtype", known=DTYPES, default="bf16") == "float32":
        facts.append("slice_dtype=float32")
    else:
        run |= in_bf16(account)
    if not account.flag("distributed.defer_fsdp_grad_sync", default=True):  # without effect on torch's pipelines
        facts.append("sums=stages")
    loss = str(account.get("loss_fn._target_", default=""))
    if "FusedLinear" in loss or "Chunked" in loss:
        facts.append("logits=slices")
    elif loss and not loss.endswith(("MaskedCrossEntropy", "TEParallelCrossEntropy")):
        account.leave("loss_fn._target_")
    scaled = account.get("model.backend.te_fp8.recipe")
    if account.flag("fp8.enabled") or scaled:
        facts.append("products=mxfp8" if "mx" in str(scaled).lower() else "products=fp8")
    facts += experts_facts(account)
    return ForeignJob("automodel", run, account, (*facts, *degrees.expert_facts(asked.devices)), "automodel")


def experts_facts(account: Account) -> list[str]:
    """Return the facts on dispatcher and products of experts. Files of 2025 have `enable_deepep` for both."""
    facts = []
    sent = account.word("model.backend.dispatcher", known=DISPATCHERS, default=None)
    by = account.word("model.backend.experts", known=GROUPED, default=None)
    if sent is None and account.says("model.backend.enable_deepep"):
        deep = account.flag("model.backend.enable_deepep")
        sent, by = ("deepep", by or "together") if deep else ("allgather", by)
    if sent:
        facts.append(f"dispatch={sent}")
    if by:
        facts.append(f"experts={by}")
    return facts


def piped(name: str) -> tuple[str, str]:
    """Return the names of a field of the pipeline, of today and of 2025."""
    return f"distributed.pipeline.{name}", f"autopipeline.{name}"


AGAIN = ("distributed.activation_checkpointing", "parallelizer.activation_checkpointing")
GATHERS_AGAIN = (
    "distributed.reshard_after_forward", "distributed.moe.reshard_after_forward", "parallelizer.reshard_after_forward",
)  # fmt: skip
DISPATCHERS = (("deepep", "deepep"), ("hybridep", "hybridep"), ("torch", "allgather"))
"""AutoModel's dispatcher backends, each with our value of the fact `dispatch`: torch gathers tokens and sums outputs
(components/moe/layers.py, GroupedExperts)."""
GROUPED = (("te", "apart"), ("gmm", "together"), ("torch_mm", "together"))
"""AutoModel's backends of experts' products, each with our value of the fact `experts`."""


DTYPES = (
    ("auto", "bf16"), ("bf16", "bf16"), ("bfloat16", "bf16"), ("torch.bfloat16", "bf16"),
    ("fp32", "float32"), ("float32", "float32"), ("torch.float32", "float32"),
)  # fmt: skip
"""AutoModel's dtypes of parameters; FSDP2 casts float32 ones for each gather."""


def in_bf16(account: Account) -> Tree:
    """Return the run's fields for bf16 parameters: torch's optimizers have states of that dtype and no masters;
    Transformer Engine's FusedAdam has float32 states, and masters if asked."""
    told = str(account.get("optimizer._target_", default="torch.optim.AdamW"))
    fused = told.endswith("FusedAdam")
    if not fused and told not in ("torch.optim.AdamW", "torch.optim.Adam"):
        account.leave("optimizer._target_")
    if fused and account.flag("optimizer.master_weights"):
        return {}
    states = account.word("optimizer.exp_avg_dtype", known=DTYPES, default="float32") if fused else "bf16"
    return stored_in_bf16(states)


def number(account: Account, name: str, default: int = 1) -> int:
    """Return a size of the section `distributed`; `none` gives the default."""
    return account.number(f"distributed.{name}", default=default)


def told_model(account: Account) -> str | dict[str, Any] | None:
    """Return the Hub's name, or the sizes of `model.config` in the form of a config.json."""
    name = account.get("model.pretrained_model_name_or_path", f"{SIZES}pretrained_model_name_or_path")
    if name is not None:
        return str(name)
    model_type = str(account.get(f"{SIZES}_target_", default="")).rpartition(".")[2].removesuffix("Config").lower()
    sizes = account.section(SIZES.rstrip("."))
    sizes.setdefault("model_type", model_type)
    return sizes if model_type else None


def sync_of(account: Account, shard: int, stages: int) -> str:
    """Return our sync: FSDP2 gathers again in the backward pass unless the file says otherwise; DDP all-reduces."""
    sharded = account.word("distributed.strategy", known=(("fsdp2", True), ("ddp", False)), default=True)
    if shard == 1 or not sharded:
        return "allreduce"
    told = account.get(*GATHERS_AGAIN)
    if told is None:
        told = stages == 1
        account.assume(
            "distributed.reshard_after_forward", told, "FSDP2 in AutoModel gathers again unless there are stages"
        )
    return "zero3" if told else "zero2"
