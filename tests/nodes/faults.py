"""Runs over nodes with one failing node."""

from __future__ import annotations

import time
from pathlib import Path

from tests.nodes.network import Running
from tests.patience import PATIENCE_SECONDS
from tests.training.runs import lines_of

START_SECONDS = PATIENCE_SECONDS

FOR_EVER = 100_000
"""Steps."""


def wait_for_steps(out: Path, started: list[Running], steps: int = 3) -> None:
    end = time.monotonic() + START_SECONDS
    while not (out / "metrics.jsonl").exists() or len(lines_of(out)) < steps:
        ended = [one.text for one in started if one.process.poll() is not None]
        assert not ended, "\n".join(ended)
        assert time.monotonic() < end, "no step within a minute"
        time.sleep(0.05)
