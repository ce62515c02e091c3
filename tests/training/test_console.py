"""The printed line of a step: the share done, the time left and the utilisation next to the loss."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.training.console import RunDisplay, duration


def line(step: int, **numbers: Any) -> dict[str, Any]:
    return {
        "step": step, "loss": 2.0, "grad_norm": 1.0, "learning_rate": 1e-3, "peak_memory_bytes": 2**20,
        "mfu": None, "tokens_per_second": 10.0, "applied": True, "loss_scale": 1.0, "straggler": None,
        "step_seconds": 1.0, "phase_seconds": {"passes": 1.0}, "validation_loss": 2.5,
    } | numbers  # fmt: skip


def shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *lines: dict[str, Any], start: int = 0
) -> list[str]:
    """Return the lines that a run of 800 steps prints, one line a second."""
    clock = iter(range(1000))
    now = [0]
    monkeypatch.setattr("meshwright.training.console.time.monotonic", lambda: now[0])
    display = RunDisplay(start, 800, speaks=True, live=False)
    with display.bar:
        for one in lines:
            now[0] = next(clock)
            display.step(one)
    return capsys.readouterr().out.splitlines()


def test_share_time_and_utilisation(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    first, second, last = shown(monkeypatch, capsys, line(700), line(720, mfu=0.1234), line(800), start=699)
    assert first.startswith("step 700/800 (87 %)  loss 2.0000")
    assert "left" not in first  # no pace is known yet
    assert "MFU" not in first  # nor the device's peak
    assert "12.3 % MFU  validation loss 2.5000  0:04 left" in second  # 80 steps at 20 a second
    assert last.startswith("step 800/800 (100 %)")
    assert "left" not in last


@pytest.mark.parametrize(
    "seconds, text", [(0.4, "0:00"), (41, "0:41"), (59.6, "1:00"), (3599.7, "1:00:00"), (7501, "2:05:01")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
