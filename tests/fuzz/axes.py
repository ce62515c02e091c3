"""The axes of a run and their values. A case is one value of each; `tree_of` makes the case's run file.

No rule here says which values go together: the config's rules refuse a case that is not legal (draw.py).
"""

from __future__ import annotations

import json
import math
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from tests.data.dialogues import make_tokenizer

Value = str | int | None
Case = dict[str, Value]
"""A value of each axis. None: the run file leaves the field out."""

DELTA_NETS: dict[str, Any] = {
    "head_width": 4, "rotary_width": 2, "attention_layers": [False, True], "linear_key_width": 4,
    "linear_value_width": 3, "convolution": 4, "feed_forward": 48,
}  # fmt: skip

MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"family": "gpt2", "tied": True},
    "gpt2-untied": {"family": "gpt2", "tied": False},
    "llama": {
        "family": "llama", "feed_forward": 48, "head_width": 4, "head_norms": True, "biases": ["query-key-value"],
    },
    "deepseek": {
        "family": "deepseek", "feed_forward": 48, "query_rank": 12, "key_value_rank": 12, "head_width": 4,
        "rotary_width": 4, "value_width": 6, "later_tokens": 1,
    },
    "gpt-oss": {
        "family": "gpt-oss", "feed_forward": 12, "window": 5, "gate_limit": 7.0,
        "experts": {"count": 6, "per_token": 6, "balance": 0.3},
    },
    "qwen3-next": {"family": "qwen3-next", **DELTA_NETS},
    "qwen3.5-experts": {
        "family": "qwen3.5", **DELTA_NETS,
        "experts": {"count": 4, "per_token": 4, "width": 12, "shared": 12, "shared_gate": True},
    },
    "bert": {"family": "bert", "norm_order": "original"},
    "bert-megatron": {"family": "bert", "norm_order": "megatron", "next_sentence": False},
    "transformer": {"family": "transformer", "feed_forward": 48, "label_smoothing": 0.0},
    "t5": {
        "family": "t5", "feed_forward": 48, "head_width": 3, "distance_buckets": 8, "distance_max": 10,
        "label_smoothing": 0.1,
    },
    "vit": {"family": "vit", "image": 6, "patch": 2, "channels": 1},
    "resnext": {"family": "resnext", "image": 8, "channels": 1, "path_width": 2, "stem": "small"},
}  # fmt: skip
ROUTED: dict[str, dict[str, Any]] = {
    "gpt-oss": {"experts": {"count": 6, "per_token": 2, "balance": 0.3}, "gate_limit": 0.05},
    "qwen3.5-experts": {
        "experts": {"count": 4, "per_token": 2, "width": 12, "shared": 12, "shared_gate": True, "balance": 0.3},
    },
}  # fmt: skip
"""Fields in float64: a token's choice of experts, and a clamp that acts. In other precisions both jump by rounding."""

TENSORS: dict[str, dict[str, Any]] = {
    "none": {"kind": "none"},
    **{f"megatron-{p}": {"kind": "megatron", "size": p} for p in (2, 3, 4)},
    **{f"sequence-{p}": {"kind": "megatron", "size": p, "sequence_parallel": True} for p in (2, 3, 4)},
    **{f"tesseract-{q}x{d}": {"kind": "tesseract", "q": q, "d": d} for q, d in ((1, 1), (2, 1), (2, 2))},
    **{f"subgraph-{p}": {"kind": "subgraph", "size": p} for p in (2, 3)},
}

CONTEXTS: dict[str, dict[str, Any]] = {
    f"{kind}-{c}": {"kind": kind, "size": c} for kind, c in (("ulysses", 2), ("ulysses", 3), ("ring", 2), ("ring", 3))
}

VOCABULARIES: dict[str, tuple[int, int, int]] = {
    "whole": (372, 12, 12),
    "padded": (361, 24, 11),
    "hollow": (361, 768, 7),
    "real": (50257, 192, 10),
}
"""Tokens, the multiple to which tokens are padded, and a classifier's classes.

hollow: with 3 or 4 ranks the last hold nothing but padding. real: GPT-2's numbers; other families have the real ones.
"""
REAL = {
    "bert": 30522, "t5": 32128, "llama": 49152, "deepseek": 129280, "gpt-oss": 201088, "qwen3-next": 151936,
    "qwen3.5": 248320,
}  # fmt: skip

PRECISIONS: dict[str, dict[str, Any]] = {
    "float64": {"level": "O0", "dtype": "float64"},
    "float32": {"level": "O0", "dtype": "float32"},
    "O1-bf16": {"level": "O1", "dtype": "bf16"},
    "O2-bf16": {"level": "O2", "dtype": "bf16"},
    "O2-fp16": {"level": "O2", "dtype": "fp16"},
    "O2-fp8": {"level": "O2", "dtype": "bf16", "products": "fp8"},
}

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"name": "adamw", "epsilon": 1e-3},
    "sgd": {"name": "sgd"},
    "momentum": {"name": "momentum"},
}
"""With a small epsilon, Adam's first steps are the gradients' signs, and rounding decides small gradients' signs."""

FROZEN: dict[str, list[str]] = {
    "biases": ["*.bias"],
    "first": ["blocks.0.*"],
    "matrices": ["blocks.*.weight"],
    "outside": ["[!b]*"],
}
"""Patterns that leave something to train in each model; `outside`: the embeddings and the head."""
ADAPTERS: dict[str, dict[str, Any]] = {
    "of all linears": {},
    "of some": {"on": ["query_key_value", "blocks.0.*"], "rslora": True},
    "with magnitudes": {"dora": True},
}

AXES: dict[str, tuple[Value, ...]] = {
    "model": tuple(MODELS),
    "layers": (1, 2, 3),
    "heads": (4, 6, 12),
    "vocabulary": tuple(VOCABULARIES),
    "sequence": (8, 12),
    "documents": (None, None, None, "separate"),
    "precision": ("float64", "float64", "float64", "float32", "O1-bf16", "O2-bf16", "O2-fp16"),
    "data": (1, 1, 1, 2, 2, 3, 4),
    "sync": (None, "allreduce", "zero1", "zero2", "zero3", "ring", "rooted", "server-gradient", "server-loss"),
    "shard": (None, None, None, 2),
    "bucket": (None, 1024, 8192),
    "stages": (1, 1, 1, 2, 2, 3, 4),
    "chunks": (None, None, None, 2, 3),
    "placement": (None, None, None, "loop", "v"),
    "schedule": (None, "gpipe", "1f1b", "axonn", "message-driven"),
    "limit": (None, 1, 2),
    "partition": (None, "measured", "head-alone", "embedding-alone", "uneven"),
    "head": (None, None, None, "spread"),
    "tensor": tuple(TENSORS),
    "context": (*[None] * 8, *CONTEXTS),
    "common": (*[None] * 6, "all", "one"),
    "branch": (*[None] * 6, "attention-core", "attention", "block"),
    "order": (None, "reversed", "pipe-first"),
    "microbatches": (1, 2, 4),
    "recompute": ("none", "auto", 1, 2, "selective"),
    "offload": (None, "host", "disk"),
    "summa": (None, "gather", "whole", "stream"),
    "clip": (None, 0.5),
    "optimizer": tuple(OPTIMIZERS),
    "frozen": (None, None, None, *FROZEN),
    "adapter": (None, None, None, *ADAPTERS),
    "loss": (None, None, None, None, "dpo"),
}  # fmt: skip
"""A value listed twice is drawn twice as often: small groups are quick, and most tensor layouts have no branches."""

FIELDS: dict[str, tuple[str, ...]] = {
    "model": ("model.family", "model.tied", "data.documents"),
    "layers": ("model.layers", "model.stage_blocks", "model.attention_layers"),
    "heads": ("model.heads", "model.key_value_heads", "model.paths", "model.hidden"),
    "vocabulary": ("model.vocabulary", "model.vocabulary_multiple", "model.classes"),
    "sequence": ("data.sequence", "the sequence", "the target", "model.positions"),
    "documents": ("data.documents", "model.family"),
    "precision": ("precision",),
    "data": ("layout.data.size", "batch.global"),
    "sync": ("layout.data.sync",),
    "shard": ("layout.data.shard",),
    "bucket": ("layout.data.bucket",),
    "stages": ("layout.pipeline.size", "layout.pipeline.head"),
    "chunks": ("layout.pipeline.chunks",),
    "placement": ("layout.pipeline.placement",),
    "schedule": ("layout.pipeline.schedule",),
    "limit": ("layout.pipeline.limit",),
    "partition": ("layout.pipeline.partition",),
    "head": ("layout.pipeline.head",),
    "tensor": ("layout.tensor",),
    "context": ("layout.context",),
    "common": ("layout.tensor.common",),
    "branch": ("layout.tensor.branch",),
    "order": ("layout.order",),
    "microbatches": ("batch.micro",),
    "recompute": ("memory.recompute",),
    "offload": ("memory.offload",),
    "summa": ("memory.summa",),
    "clip": ("optimizer.clip",),
    "optimizer": ("optimizer",),
    "frozen": ("model.frozen",),
    "adapter": ("model.adapter", "bits.kind"),
    "loss": ("loss", "data.kind", "model.experts", "model.later_tokens"),
}
"""The fields that an axis writes: if a rule refuses one of these fields, another value of the axis may be legal."""

GLOBAL_BATCH, POSITIONS, HIDDEN, STEPS = 24, 24, 24, 2


def tree_of(case: Case) -> dict[str, Any]:
    """Return the run file of a case."""
    model = _model(case)
    images = model["family"] in ("vit", "resnext")
    data = ({"source": "digits"} if images else {"sequence": case["sequence"]}) | _given(case, "documents")
    if case["loss"] is not None:
        data |= {"kind": "preferences", "source": ".", "tokenizer": str(chat_tokenizer())}
    return {
        "seed": 3,
        "model": model,
        "data": data,
        "loss": None if case["loss"] is None else {"kind": case["loss"], "beta": 0.3},
        "batch": {"global": GLOBAL_BATCH, "micro": max(1, GLOBAL_BATCH // case["data"] // case["microbatches"])},
        "layout": _layout(case, _blocks(model)),
        "precision": PRECISIONS[case["precision"]] | _loss_scale(case),
        "memory": {"recompute": case["recompute"]} | _given(case, "summa") | _offload(case),
        "optimizer": {"lr": 1e-2, "clip": case["clip"], "schedule": {"warmup": 1}} | OPTIMIZERS[case["optimizer"]],
        "steps": STEPS,
    }


def _loss_scale(case: Case) -> dict[str, Any]:
    """Return a scale for fp16 with which gradients above 1, of delta nets and of losses over pairs, do not overflow.

    Rounding would decide whether a gradient overflows.
    """
    larger = case["loss"] is not None or "linear_key_width" in MODELS[str(case["model"])]
    return {"loss_scale": {"initial": 1024.0}} if larger and case["precision"] == "O2-fp16" else {}


@cache
def chat_tokenizer() -> Path:
    """Return a tokenizer with a chat template, which a run on pairs names.

    The folder's name is fixed, so that a run file in found/ can be run again.
    """
    return make_tokenizer(Path(tempfile.gettempdir()) / "meshwright-fuzz-tokenizer")


def read_cases(path: Path) -> list[Case]:
    """Return the cases of a file; an axis that the file does not have is left out of the run file."""
    return [dict.fromkeys(AXES) | json.loads(line) for line in path.read_text().splitlines()]


def _given(case: Case, axis: str) -> dict[str, Any]:
    """Return the field with the axis's name, or no field if the case leaves the field out."""
    return {} if case[axis] is None else {axis: case[axis]}


def _model(case: Case) -> dict[str, Any]:
    model = {"hidden": HIDDEN, "dropout": 0.0, **MODELS[case["model"]]}
    if case["precision"] == "float64":
        model |= ROUTED.get(str(case["model"]), {})
    tokens, multiple, classes = VOCABULARIES[case["vocabulary"]]
    model["vocabulary_multiple"] = multiple
    if case["frozen"] is not None:
        model["frozen"] = FROZEN[case["frozen"]]
    if case.get("adapter") is not None:
        model["adapter"] = {"rank": 4, "begin": "random", **ADAPTERS[str(case["adapter"])]}
    if model["family"] == "resnext":
        layers = case["layers"]
        return model | {
            "stage_blocks": [1] * layers if layers < 3 else [2, 1],
            "paths": case["heads"],
            "classes": classes,
        }
    model |= {"layers": case["layers"], "heads": case["heads"]}
    if model["family"] == "vit":
        return model | {"classes": classes}
    if model["family"] in ("llama", "gpt-oss", "qwen3-next", "qwen3.5"):
        model |= {"key_value_heads": case["heads"] // 2}
    if "linear_key_width" in model:
        model |= {"linear_key_heads": case["heads"] // 2, "linear_value_heads": case["heads"]}
    real = REAL.get(model["family"], tokens) if case["vocabulary"] == "real" else tokens
    return model | {"vocabulary": real, "positions": POSITIONS}


def _blocks(model: dict[str, Any]) -> int:
    """Return the number of links of the model's chain."""
    if model["family"] == "resnext":
        return sum(model["stage_blocks"])
    return model["layers"] * (2 if model["family"] in ("t5", "transformer") else 1)


def _layout(case: Case, blocks: int) -> dict[str, Any]:
    pipeline = {"size": case["stages"]}
    for axis in ("chunks", "placement", "schedule", "limit", "head"):
        pipeline |= _given(case, axis)
    if case["partition"] is not None:
        pipeline["partition"] = partition_of(case["partition"], blocks, case["stages"] * (case["chunks"] or 1))
    layout = {
        "data": {"size": case["data"], **_given(case, "sync"), **_given(case, "shard"), **_given(case, "bucket")},
        "pipeline": pipeline,
        "tensor": TENSORS[case["tensor"]] | _given(case, "common") | _given(case, "branch"),
        "transport": "torch",
    }
    if case["context"] is not None:
        layout["context"] = CONTEXTS[case["context"]]
    return layout if case["order"] is None else layout | {"order": _order(case)}


def partition_of(name: str, blocks: int, stages: int) -> str | list[int]:
    """Return the layers of each stage, legal or not (no stage to be alone on, an empty stage between)."""
    if name == "measured" or stages == 1:
        return name if name == "measured" else [blocks]
    if name == "uneven":
        return [blocks - (stages - 1), *[1] * (stages - 1)]
    full = [blocks // (stages - 1) + (index < blocks % (stages - 1)) for index in range(stages - 1)]
    return [*full, 0] if name == "head-alone" else [0, *full]


def tensor_axes(case: Case) -> dict[str, int]:
    """Return sizes of the tensor layout's axes by name, outermost first."""
    tensor = TENSORS[case["tensor"]]
    match tensor["kind"]:
        case "megatron":
            return {"tensor": tensor["size"]}
        case "tesseract":
            return {"depth": tensor["d"], "row": tensor["q"], "col": tensor["q"]}
        case "subgraph":
            return {"branch": tensor["size"]}
    return {}


def layer_axes(case: Case) -> dict[str, int]:
    """Return sizes of the axes that cut a layer by name, outermost first."""
    context = {} if case["context"] is None else {"context": CONTEXTS[case["context"]]["size"]}
    return context | tensor_axes(case)


def world_size(case: Case) -> int:
    return case["data"] * case["stages"] * math.prod(layer_axes(case).values())


def _order(case: Case) -> list[str]:
    groups = ["replicate"] * (case["shard"] is not None and case["data"] > case["shard"])
    names = [*groups, "data", "pipe", *layer_axes(case)]
    return names[::-1] if case["order"] == "reversed" else ["pipe", *[name for name in names if name != "pipe"]]


def _offload(case: Case) -> dict[str, Any]:
    """Return an offload with several buckets in a tiny model; a real vocabulary would have thousands of this size."""
    if case["offload"] is None:
        return {}
    bucket = 2**16 if case["vocabulary"] == "real" else 256
    chunk = {} if case["sync"] == "zero3" else {"chunk": 2}  # zero3 sums a layer at once
    return {"offload": {"to": case["offload"], "bucket": bucket, **chunk}}
