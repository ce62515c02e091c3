"""No better layout is left out: a dozen small spaces, each searched and predicted whole, with the planner's own models.

The search leaves out recomputation, offload and slices without need on purpose. Tight layouts are not
counted. With little memory, only or mostly layouts that recompute fit.

python -m pytest --long tests/planner/plan/test_whole_spaces.py
"""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.config import parse_config
from meshwright.planner.plan.cluster import load_cluster
from meshwright.planner.plan.estimate import Estimates
from meshwright.planner.plan.memory import verdict
from meshwright.planner.plan.predict import Planner
from meshwright.planner.plan.search import search, without_savings
from meshwright.planner.plan.space import SearchJob, fixed_fields, legal_layouts

GPT = {"layers": 2, "hidden": 64, "heads": 4, "positions": 64, "vocabulary": 512, "dropout": 0.0}
SIZES = {"layers": 2, "hidden": 64, "heads": 4, "vocabulary": 512}
LLAMA = SIZES | {"family": "llama", "key_value_heads": 2, "feed_forward": 128, "positions": 64}
BERT = SIZES | {"family": "bert", "positions": 64}
WIDE = GPT | {"hidden": 512, "heads": 8, "layers": 4}
FLAT, DATA = "layout.tensor.kind=none", "layout.pipeline.size=1"
HALVES = ("precision={level: O2, dtype: fp16}", "batch.global=64")
NO_MEMORY = ("memory.offload.to=none", "memory.recompute=none")

SPACES: dict[str, tuple[dict[str, Any], str, int, tuple[str, ...]]] = {
    "gpt2, data": (GPT, "dgx-a100", 2, (FLAT, DATA, *NO_MEMORY)),
    "gpt2, stages": (GPT, "hal", 2, (FLAT, "layout.pipeline.schedule=1f1b", *NO_MEMORY)),
    "gpt2, 1-D": (
        GPT,
        "dgx-h100",
        4,
        ("layout.tensor={kind: megatron, size: 2}", "layout.pipeline.schedule=1f1b", *NO_MEMORY),
    ),
    "gpt2, 2-D": (GPT, "summit", 8, (DATA, "layout.tensor={kind: tesseract, q: 2, d: 1}", *NO_MEMORY)),
    "gpt2, any kind": (GPT, "dgx-a100", 2, (DATA, *NO_MEMORY)),
    "gpt2, 4 devices": (GPT, "hal", 4, (FLAT, "layout.pipeline.schedule=axonn", *NO_MEMORY)),
    "gpt2, wide": (WIDE, "lassen", 2, (FLAT, "layout.pipeline.schedule=1f1b", *NO_MEMORY)),
    "gpt2, message-driven": (GPT, "dgx-a100", 2, (FLAT, "layout.pipeline.schedule=message-driven", *NO_MEMORY)),
    "llama": (LLAMA, "dgx-h100", 2, (DATA, *NO_MEMORY)),
    "bert": (BERT, "dgx-a100", 2, (DATA, *NO_MEMORY)),
    "gpt2, little memory": (WIDE, "summit", 2, (*HALVES, FLAT, "layout.pipeline.schedule=message-driven")),
    "gpt2, little memory, 1f1b": (WIDE, "summit", 4, (*HALVES, FLAT, "layout.pipeline.schedule=1f1b")),
}
LITTLE = {"gpt2, little memory": 1_550_000_000, "gpt2, little memory, 1f1b": 1_600_000_000}
"""Bytes of a device in spaces with less memory than the cluster's."""

IN_CI = ("gpt2, data", "bert")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in IN_CI else pytest.mark.long) for name in SPACES]
)
def test_the_search_leaves_nothing_better_out(name: str) -> None:
    model, where, devices, words = SPACES[name]
    run = parse_config({"model": model, "data": {"sequence": 64}, "batch": {"global": 8}}, words)
    cluster, fixed = load_cluster(where), fixed_fields(words)
    device = cluster.device.model_copy(update={"memory_bytes": LITTLE.get(name, cluster.device.memory_bytes)})
    cluster = cluster.model_copy(update={"device": device})
    models = Estimates(Planner(cluster))
    found = [one.seconds for one in search(run, cluster, devices, fixed=fixed, models=models).predictions]
    predictions = {
        config: models.planner.predict(config) for config in legal_layouts(SearchJob(run, cluster, devices, fixed))
    }
    fitting = {config for config, one in predictions.items() if verdict(one.fullest, cluster) == "fits"}
    seconds = {config: predictions[config].seconds for config in fitting}
    spared = {  # a layout without savings fits and is as fast: not predicted, unless estimated to be faster
        config
        for config in fitting
        if any(seconds.get(keeps, 1e9) <= seconds[config] for keeps in without_savings(config))
    }
    whole = sorted(seconds[config] for config in fitting - spared)
    assert len(found) >= min(5, len(whole))
    assert all(any(one == pytest.approx(other, rel=1e-9) for other in seconds.values()) for one in found)
    assert all(one <= other * (1 + 1e-9) for one, other in zip(found, whole, strict=False))
