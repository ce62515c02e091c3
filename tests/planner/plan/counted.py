"""Configs of runs that the planner and a real run both count."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from meshwright.config import Config
from meshwright.planner.plan.predict import Prediction
from tests.oracle.tensor import config_for
from tests.planner.plan.clusters import FLAT as SWITCH
from tests.planner.plan.measured import Measured

DTYPES = ("float32", "float64", "bf16", "fp16")

DEVICE = {"kind": "cpu", "peak_flops_per_second": dict.fromkeys(DTYPES, 1e11)}

CPU = SWITCH.model_copy(update={"device": SWITCH.device.model_copy(update=DEVICE)})

WHOLE = {"kind": "none"}

MEGATRON = {"kind": "megatron", "size": 2}

CUT = MEGATRON | {"sequence_parallel": True}

FLAT = {"kind": "tesseract", "q": 2, "d": 1}

DEEP = {"kind": "tesseract", "q": 2, "d": 2}

SUBGRAPHS = [
    {"kind": "subgraph", "size": 2, "common": common, "branch": branch}
    for common, branch in product(("all", "one"), ("attention-core", "attention", "block"))
]

HALVES = {"precision": {"level": "O2", "dtype": "bf16"}}

GATHER = {"memory": {"summa": "gather"}}
"""SUMMA's form, fixed beforehand: ranks that choose a form at the start exchange the sizes of memory."""


def batch(data: int) -> dict[str, int]:
    return {"global": 24 * data, "micro": 8}


def synced(sync: str, data: int = 2, tensor: dict[str, Any] = WHOLE, **changes: Any) -> Config:
    """Return a run with three microbatches a replica."""
    layout = {"data": {"size": data, "sync": sync, "bucket": 8192}, "tensor": tensor}
    return config_for("gpt2", tensor, data, **({"batch": batch(data), "layout": layout} | changes))


def summa(tensor: dict[str, Any], form: str, samples: int = 8, microbatches: int = 2) -> Config:
    """Return a run with enough samples to make the planned gradient of a tied table small compared to the other
    memory."""
    sizes = {"global": microbatches * samples, "micro": samples}
    return config_for("gpt2", tensor, memory={"summa": form}, batch=sizes)


OFFLOADED = {"offload": {"to": "host", "bucket": 4096, "chunk": 2}}


def counts(predicted: Prediction, stage: int, real: Measured) -> Iterator[str]:
    """Yield the differences between a prediction and a run; all counts must be equal."""
    sent = {key: (entry.calls, entry.sent_bytes) for key, entry in predicted.traffic[stage].items()}
    for key in sorted(sent.keys() | real.sent.keys()):
        if sent.get(key) != real.sent.get(key):
            yield f"sent {key}: predicted {sent.get(key)}, really {real.sent.get(key)}"
    memory = predicted.memory[stage]
    planned = memory.weights, memory.gradients, memory.states
    if planned != (real.weights, real.gradients, real.states):
        yield f"weights, gradients, states: predicted {planned}, really {real.weights, real.gradients, real.states}"
