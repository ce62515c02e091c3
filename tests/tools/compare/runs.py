"""Comparisons of made-up runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshwright.config import parse_config
from meshwright.planner.plan.cluster import load_cluster
from meshwright.planner.plan.memory import Memory
from meshwright.planner.plan.predict import Prediction
from meshwright.ranks.ledger import Traffic
from meshwright.strategies.pipeline.trace import Timeline
from meshwright.tools.compare.layouts import Contender
from meshwright.tools.compare.result import Comparison, Measurement
from meshwright.training.measured_run import MeasuredRun, RankFacts, SentCalls

MODEL = {"layers": 2, "hidden": 16, "heads": 2, "positions": 16, "vocabulary": 257, "dropout": 0.0}
STAGES = {"pipeline": {"size": 2}}


def contender(name: str = "one", layout: dict[str, Any] | None = None, **model: Any) -> Contender:
    bits = model.pop("bits", "usual")
    precision = {"precision": "float32"} if bits == "layout-free" else {}
    tree = {"model": MODEL | model, "data": {"sequence": 16}, "batch": {"global": 4}, "layout": layout or {}}
    tree |= {"bits": bits, **precision}
    return Contender(name, parse_config(tree), f"{name}.yaml")


def rank(
    number: int, stage: int = 0, weights: int = 100, sent: dict[tuple[str, str], tuple[int, int]] | None = None,
    peak: int = 1000,
) -> RankFacts:  # fmt: skip
    calls = tuple(SentCalls(*key, *counts) for key, counts in (sent or {}).items())
    return RankFacts(number, stage, {"weights": weights, "gradients": weights, "states": 2 * weights}, peak, calls)


def run(seconds: Sequence[float], losses: Sequence[float], ranks: Sequence[RankFacts]) -> MeasuredRun:
    phases = tuple({"passes": s / 2, "data_parallel": s / 4, "optimizer": s / 4} for s in seconds)
    return MeasuredRun(tuple(losses), tuple(seconds), phases, tuple(ranks))


def predicted(seconds: float, *stages: tuple[int, dict[str, int]]) -> Prediction:
    """Return a prediction. `stages`: the bytes of a stage's weights, and the bytes sent by the stage on each axis."""
    memory = tuple(Memory(w, w, 2 * w, activations=5, temporaries=1, context=500) for w, _ in stages)
    traffic = tuple({(axis, "send"): Traffic(1, size) for axis, size in sent.items()} for _, sent in stages)
    phases = {"passes": seconds, "data_parallel": 0.0, "optimizer": 0.0}
    here = load_cluster("two-cores")
    return Prediction(contender().config, here, seconds, phases, memory, traffic, Timeline(len(stages), ()), 0.0, 1.0)


def comparison(*rows: Measurement, **facts: Any) -> Comparison:
    return Comparison(
        "run", rows, **({"steps": 4, "rounds": 1, "device": "a CPU of 2 cores", "cluster": "here"} | facts)
    )
