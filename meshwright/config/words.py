"""Words of other tools with our translations: keys, command options and values.

Sources: the arguments of transformers and Accelerate, the families' config.json, Megatron-LM, torchtitan, DeepSpeed,
nanoGPT, LitGPT and Axolotl. Letter case is ignored, and dashes equal underscores.
"""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.config.section import decides_nothing, shown

KEYS: Mapping[str, tuple[str, ...]] = {
    "layout.data.size={}": ("dp", "dp_size", "data_parallel_size", "dp_replicate"),
    "layout.data.size={} layout.data.sync=zero3": ("dp_shard", "data_parallel_shard_degree"),
    "layout.data.sync=allreduce": ("ddp",),
    "layout.data.sync=zero3": ("fsdp", "fsdp2"),
    "layout.data.sync={}": ("sharding_strategy", "fsdp_sharding_strategy"),
    "layout.data.sync=zero{}": ("zero_stage",),
    "layout.data.expert={}": ("ep", "ep_size", "expert_parallel_size", "expert_model_parallel_size"),
    "layout.tensor=megatron layout.tensor.size={}": (
        *("tp", "tp_size", "tensor_parallel_size", "tensor_model_parallel_size", "tensor_parallel_degree"),
    ),
    "layout.tensor=megatron layout.tensor.sequence_parallel={}": ("sp", "sequence_parallel"),
    "layout.pipeline.size={}": (
        *("pp", "pp_size", "pipeline_parallel_size", "pipeline_model_parallel_size", "pipeline_parallel_degree"),
    ),
    "layout.context.size={}": ("cp", "cp_size", "context_parallel_size", "context_parallel_degree"),
    "batch.micro={}": (
        *("micro_batch_size", "per_device_train_batch_size", "train_micro_batch_size_per_gpu", "local_batch_size"),
        *("batch_size", "mbs"),
    ),
    "batch.global={}": ("global_batch_size", "train_batch_size", "gbs"),
    "batch.micro=...": ("gradient_accumulation_steps", "grad_accum_steps"),
    "data.sequence={}": (
        *("seq_len", "seq_length", "sequence_len", "max_seq_len", "max_seq_length", "block_size", "cutoff_len"),
    ),
    "data.source={}": ("dataset", "datasets", "dataset_path", "train_file"),
    "steps={}": ("max_steps", "max_iters", "train_iters", "num_steps"),
    "epochs={}": ("num_train_epochs", "num_epochs"),
    "optimizer.lr={}": ("learning_rate", "max_lr"),
    "optimizer.clip={}": ("max_grad_norm", "grad_clip", "clip_grad", "gradient_clipping"),
    "optimizer.name={}": ("optim",),
    "optimizer.epsilon={}": ("adam_epsilon", "eps"),
    "optimizer.betas=[{}, 0.95]": ("adam_beta1", "beta1"),
    "optimizer.betas=[0.9, {}]": ("adam_beta2", "beta2"),
    "optimizer.schedule.warmup={}": ("warmup_steps", "warmup_iters", "lr_warmup_iters"),
    "optimizer.schedule.decay={}": ("lr_scheduler_type", "lr_scheduler", "lr_decay_style"),
    "precision={}": ("torch_dtype", "mixed_precision"),
    "precision=bf16": ("bf16",),
    "precision=fp16": ("fp16",),
    "memory.recompute=auto": ("gradient_checkpointing", "activation_checkpointing", "recompute_activations"),
    "memory.recompute=offload": (
        *("activation_offloading", "enable_activation_offloading", "offload_activations", "cpu_offloading"),
    ),
    "memory.offload=host": ("cpu_offload", "offload_optimizer"),
    "model.layers={}": ("n_layer", "n_layers", "num_layers", "num_hidden_layers"),
    "model.heads={}": ("n_head", "n_heads", "num_attention_heads"),
    "model.key_value_heads={}": ("n_kv_heads", "num_key_value_heads", "num_query_groups"),
    "model.hidden={}": ("n_embd", "hidden_size", "d_model"),
    "model.feed_forward={}": ("intermediate_size", "ffn_hidden_size", "d_ff"),
    "model.vocabulary={}": ("vocab_size",),
    "model.positions={}": ("max_position_embeddings", "n_positions"),
    "model.tied={}": ("tie_word_embeddings",),
    "model={{from: {}}}": ("model_name_or_path", "base_model"),
    "checkpoint.every={}": ("save_steps", "save_interval"),
    "checkpoint.keep={}": ("save_total_limit",),
    "validation.every={}": ("eval_steps", "eval_interval"),
    "validation.batches={}": ("eval_iters",),
    "metrics.sinks=[{}]": ("report_to",),
    "metrics.project={}": ("wandb_project",),
    "compile=auto": ("torch_compile",),
    "--out={}": ("output_dir", "out_dir"),
    "--resume": ("resume_from_checkpoint",),
}
"""Our fields and options -> the names in other tools. `{}` is the other tool's value, `...` a different number."""

NOTES: Mapping[str, str] = {
    "batch.micro=...": "microbatches a step are batch.global / layout.data.size / batch.micro",
}
"""The computation of a number that differs from the other tool's."""

VALUES: Mapping[str, Mapping[str, str]] = {
    "layout.data.sync": {
        "ddp dp no_shard horovod all_reduce": "allreduce",
        "shard_grad_op": "zero2",
        "full_shard hybrid_shard hsdp fsdp fsdp2 fully_shard": "zero3",
    },
    "layout.tensor.kind": {"tp 1d": "megatron", "2d 2.5d 3d summa optimus": "tesseract"},
    "layout.pipeline.schedule": {
        "afab": "gpipe",
        "pipedream interleaved1f1b interleaved": "1f1b",
        "zb zbv zero-bubble zbvzerobubble": "message-driven",
    },
    "layout.context.kind": {"a2a alltoall": "ulysses", "p2p": "ring"},
    "optimizer.name": {"adam adamw_torch adamw_torch_fused": "adamw"},
    "optimizer.schedule.decay": {"constant_with_warmup": "constant", "inverse_sqrt noam": "inverse-sqrt"},
    "precision": {
        "bfloat16 bf16-mixed bf16-true": "bf16",
        "float16 half 16-mixed": "fp16",
        "fp32": "float32",
        "fp64 double": "float64",
    },
    "precision.dtype": {"bfloat16": "bf16", "float16 half": "fp16", "fp32": "float32", "fp64": "float64"},
    "device": {"gpu": "cuda"},
    "layout.transport": {"nccl gloo": "torch", "openmpi mpich": "mpi"},
    "memory.recompute": {"full true": "auto", "false": "none", "op per_op": "ops"},
    "memory.offload.to": {"cpu": "host", "nvme": "disk"},
}
"""By field: the names of a choice in other tools, separated by blanks -> our choice."""

COMPARISONS: Mapping[str, Mapping[str, str]] = {
    "layout.data.sync": {
        "fsdp fsdp2 fully_shard": "python -m benchmarks.data_parallel --only zero3 compares zero3 with torch's FSDP2",
    },
}
"""By field and another tool's word: the command that compares our choice with that tool."""


def ours_for_key(key: str, value: object) -> str:
    """Translate another tool's key and value: `tp`, 2 -> `layout.tensor=megatron layout.tensor.size=2`.

    Empty for an unknown key.
    """
    word = key.rpartition(".")[2].lstrip("-").lower().replace("-", "_")
    ours = next((ours for ours, theirs in KEYS.items() if word in theirs), "")
    if ours and "{}" not in ours and decides_nothing(value):
        return f"leave it out; {ours} is what {key} would be"
    return ours.format(shown(value)) + (f" ({NOTES[ours]})" if ours in NOTES else "")


def ours_for_value(field: str, value: object, words: Mapping[str, Mapping[str, str]] = VALUES) -> str:
    """Translate another tool's word to our choice of a field; empty for an unknown word.

    `words`: the table; with COMPARISONS the result is the sentence on a comparison.
    """
    word = shown(value).lower()
    return next((ours for theirs, ours in words.get(field, {}).items() if word in theirs.split()), "")
