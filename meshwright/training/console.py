"""A run's display: a progress bar on a terminal; on other outputs a line every SECONDS_BETWEEN_LINES or more."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Literal

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from meshwright.output import terminal
from meshwright.training.step_report import Straggler

LEVELS = ("debug", "info", "warning", "error")
LogLevel = Literal["debug", "info", "warning", "error"]

SECONDS_BETWEEN_LINES = 10.0
SECONDS_BETWEEN_STRAGGLERS = 300.0


class RunDisplay:
    """A display of steps and losses, with a bar while `bar` is entered.

    Args:
        speaks: print at all; true on rank 0 only.
        live: draw the bar if the output is a terminal.
        level: the least important level that is printed (config/schema.py's Logging).
    """

    def __init__(self, first_step: int, steps: int, *, speaks: bool, live: bool, level: LogLevel = "info") -> None:
        self._least = LEVELS.index(level)
        self.console = terminal.console(quiet=not speaks)
        self.steps = steps
        self._first_shown: tuple[int, float] | None = None
        """The first step shown, and the time of showing it; both are the base for the time left."""
        self._last_line = 0.0
        self._last_straggler = -SECONDS_BETWEEN_STRAGGLERS
        self._draws = live and self.console.is_terminal and level == "info"
        self.bar = Progress(
            TextColumn("training", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}", markup=False),
            console=self.console,
            disable=not speaks or not self._draws,
        )
        self._task = self.bar.add_task("training", total=steps, completed=first_step, facts="")

    def step(self, line: Mapping[str, Any]) -> None:
        """Show a finished step's metrics."""
        facts = f"loss {line['loss']:.4f}  gradient norm {line['grad_norm']:.3f}  rate {line['learning_rate']:.2e}"
        facts += f"  {line['peak_memory_bytes'] / 2**20:,.0f} MiB  {line['tokens_per_second']:,.0f} tokens/s"
        if line["mfu"] is not None:  # else the device's peak is unknown
            facts += f"  {100 * line['mfu']:.3g} % MFU"
        if "validation_loss" in line:
            facts += f"  validation loss {line['validation_loss']:.4f}"
        if not line["applied"]:
            facts += f"  overflow: step skipped, loss scale {line['loss_scale']:g}"
        if (left := self._seconds_left(line["step"])) is not None:
            facts += f"  {duration(left)} left"
        self.bar.update(self._task, completed=line["step"], facts=facts)
        due = time.monotonic() - self._last_line > SECONDS_BETWEEN_LINES or line["step"] == self.steps
        if not self._draws and (due or LEVELS.index("debug") >= self._least or "validation_loss" in line):
            self._last_line = time.monotonic()
            self.say(f"step {line['step']}/{self.steps} ({100 * line['step'] // self.steps} %)  {facts}")
            phases = (f"{phase} {seconds:.3f} s" for phase, seconds in line["phase_seconds"].items())
            self.say(f"  {', '.join(phases)}, of {line['step_seconds']:.3f} s", level="debug")
        if line["straggler"] is not None and time.monotonic() - self._last_straggler > SECONDS_BETWEEN_STRAGGLERS:
            self._last_straggler = time.monotonic()
            self.say(f"step {line['step']}: {Straggler(**line['straggler'])}", level="warning")

    def _seconds_left(self, step: int) -> float | None:
        """Estimate the seconds until the last step by the pace since the first step shown, including work between the
        steps (checkpoints, validation). None for the first step shown, which has no pace yet, and for the last."""
        now = time.monotonic()
        first, since = self._first_shown = self._first_shown or (step, now)
        return (now - since) / (step - first) * (self.steps - step) if first < step < self.steps else None

    def say(self, *lines: str, level: LogLevel = "info") -> None:
        """Print lines of a level without disturbing the bar."""
        for line in lines if LEVELS.index(level) >= self._least else ():
            self.console.print(line, soft_wrap=True)


def duration(seconds: float) -> str:
    """Format seconds as minutes and seconds (`0:41`), from one hour on with hours (`2:05:00`)."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
