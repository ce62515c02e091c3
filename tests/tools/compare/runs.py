"""Comparisons whose runs are made up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshwright.config import parse_config
from meshwright.tools.compare.layouts import Contender
from meshwright.tools.compare.result import Comparison, Measurement, Predicted, StagePrediction
from meshwright.tools.compare.run import MeasuredRun, RankFacts, SentCalls

MODEL = {"layers": 2, "hidden": 16, "heads": 2, "positions": 16, "vocabulary": 257, "dropout": 0.0}
STAGES = {"pipeline": {"size": 2}}


def contender(name: str = "one", layout: dict[str, Any] | None = None, **model: Any) -> Contender:
    tree = {"model": MODEL | model, "data": {"sequence": 16}, "batch": {"global": 4}, "layout": layout or {}}
    return Contender(name, parse_config(tree), f"{name}.yaml")


def rank(
    number: int, stage: int = 0, weights: int = 100, sent: dict[tuple[str, str], tuple[int, int]] | None = None,
    peak: int = 1000,
) -> RankFacts:  # fmt: skip
    calls = tuple(SentCalls(*key, *counts) for key, counts in (sent or {}).items())
    return RankFacts(number, stage, {"weights": weights, "gradients": weights, "states": 2 * weights}, peak, calls)


def run(seconds: Sequence[float], losses: Sequence[float], ranks: Sequence[RankFacts]) -> MeasuredRun:
    phases = tuple({"pipeline": s / 2, "data_parallel": s / 4, "optimizer": s / 4} for s in seconds)
    return MeasuredRun(tuple(losses), tuple(seconds), phases, tuple(ranks))


def predicted(seconds: float, *stages: tuple[int, dict[str, int]]) -> Predicted:
    parts = tuple(
        StagePrediction(
            {"weights": w, "gradients": w, "states": 2 * w, "activations": 5, "temporaries": 1, "framework": 500}, sent
        )
        for w, sent in stages
    )
    return Predicted(seconds, {"pipeline": seconds, "data_parallel": 0.0, "optimizer": 0.0}, parts)


def comparison(*rows: Measurement, **facts: Any) -> Comparison:
    return Comparison(
        "run", rows, **({"steps": 4, "rounds": 1, "device": "a CPU of 2 cores", "cluster": "here"} | facts)
    )
