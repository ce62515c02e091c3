"""Measured steps of an H100 and an H200, compared with today's predictions."""

from __future__ import annotations

import json
import statistics
from typing import Any

import pytest

from benchmarks.one_gpu import CLUSTERS, COMMON, H100_HOST, MEASURED, RUNS, UNCOUNTED_STEPS, show
from meshwright.config import load_config
from meshwright.planner.plan.cluster import load_cluster
from meshwright.planner.plan.predict import Planner
from meshwright.training.decisions import resolve

ROWS = [row for row in json.loads(MEASURED.read_text()) if row["name"] in RUNS]
WITHOUT_ISLANDS = "small, no islands"


@pytest.mark.parametrize("row", ROWS, ids=[f"{row['gpu']}: {row['name']}" for row in ROWS])
def test_a_measured_step_is_predicted(row: dict[str, Any]) -> None:
    """From data sheets alone: time to 8 %, torch's allocated bytes to 2 %, the device's to 6 %. No plan has islands."""
    config = resolve(load_config("gpt2", [*COMMON.split(), *row["words"].split()]), H100_HOST).config
    found, predicted = row["found"], Planner(load_cluster(CLUSTERS[row["gpu"]])).predict(config)
    seconds = statistics.median(found["seconds"][UNCOUNTED_STEPS:])
    low = 0.79 if row["name"] == WITHOUT_ISLANDS else 0.92
    assert low <= predicted.seconds / seconds <= 1.08
    assert predicted.fullest.allocated == pytest.approx(found["allocated"], rel=0.02)
    assert predicted.fullest.total == pytest.approx(found["device_in_use"], rel=0.06)


def test_what_was_measured_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    show()
    printed = capsys.readouterr().out
    assert f"{len(ROWS)} runs: " in printed
    assert "plain loop, compiled" in printed
