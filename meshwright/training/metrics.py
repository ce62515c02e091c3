"""Metrics: one line of JSON a step, and the same numbers for trackers (sinks.py). Rank 0 writes in every layout."""

from __future__ import annotations

import errno
import json
import math
import os
import statistics
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from meshwright.compute.model import Costs
from meshwright.compute.models.chain import chain_of
from meshwright.compute.models.preferences import reward_metrics
from meshwright.compute.parameters.root import root_text
from meshwright.config import Config
from meshwright.config.schema import Precision
from meshwright.ranks.errors import MeshwrightError
from meshwright.ranks.foreign import open_plain, open_to_write, parse_json
from meshwright.ranks.grid import PIPE, Grid
from meshwright.ranks.machine import release_freed_memory
from meshwright.training.folder import write_whole
from meshwright.training.follow import METRICS
from meshwright.training.sinks import Tracker
from meshwright.training.step_report import StepReports

PAPER_TOKENS = 3e11
SECONDS_A_DAY = 86400

PEAK_FLOPS = {
    # Dense peaks by the vendor's data sheets, per device: half precision, TF32, float32, float64.
    "V100": (125e12, None, 15.7e12, 7.8e12),
    "A100": (312e12, 156e12, 19.5e12, 19.5e12),
    "H100": (989e12, 494.5e12, 67e12, 67e12),
    "H200": (989e12, 494.5e12, 67e12, 67e12),
}


def peak_flops(setting: float | str, device: torch.device, precision: Precision) -> float | None:
    """Return the configured peak of one device, or the data sheet's peak for the run's dtype of products; None if
    neither is known."""
    if not isinstance(setting, str):
        return setting
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    half, tf32, single, double = next((peaks for key, peaks in PEAK_FLOPS.items() if key in name), (None,) * 4)
    match precision.dtype:
        case "float64":
            return double
        case "float32":
            return tf32 if precision.tf32 and tf32 is not None else single
    return half


def paper_flops(products: Costs) -> float:
    """Count floating-point operations of one sample's step as in AxoNN (Singh and Bhatele 2022), after Narayanan 2021.

    Layers count with recomputed activations, in every run: 8 operations for each multiplication of the forward pass.
    Embedding and head count 6. For GPT-2 with s tokens the sum is 96 s l h² (1 + s/(6h) + V/(16 l h)).
    """
    return 8 * sum(products.layers) + 6 * (products.embedding + products.head)


def release_free_memory(device: torch.device) -> None:
    """Release the allocator's free memory: CUDA's cache, or glibc's heap on a CPU. Costs time in the next step."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        release_freed_memory()


@dataclass(frozen=True)
class StepWork:
    """The work of every step of a run. `flops`: the model's; `paper_flops`: counted by `paper_flops`.

    `droppable_pairs`: pairs of a token and an expert, in all layers and on all ranks that have the token; pairs over a
    capacity are dropped.
    """

    tokens: int
    flops: float
    paper_flops: float
    peak_flops: float | None
    """The peak of one device."""
    droppable_pairs: int = 0


def work_of(config: Config, device: torch.device) -> StepWork:
    """Compute the work of a step, over all ranks."""
    samples, chain = config.batch.global_, chain_of(config)
    copies = math.prod(size for _, size in config.layout.tensor.axes)
    return StepWork(
        tokens=samples * chain.tokens_per_sample(config),
        flops=samples * chain.flops_per_sample(config),
        paper_flops=samples * paper_flops(chain.products(config)),
        peak_flops=peak_flops(config.metrics.peak_flops, device, config.precision),
        droppable_pairs=samples * chain.tokens_per_sample(config) * config.model.routing.droppable_pairs * copies,
    )


def metrics_line(step_seconds: float, work: StepWork, reports: StepReports, grid: Grid) -> dict[str, Any]:
    """Compute a step's metrics from all ranks' reports, for rank 0. mfu is None without a known peak.

    sent_bytes: over each axis, and over each used set of axes (`data+depth`); the largest of any rank.
    dropped_share: the share of pairs of a token and an expert over the capacity, if there is a capacity.
    """
    sent = dict(zip(grid.axis_sets, reports.reduced("sent_bytes"), strict=True))
    rate, pairs = work.flops / step_seconds, work.droppable_pairs
    total = reports.reduced("pipeline_seconds")
    roots: list[list[int]] = reports["root"]
    stages: list[list[float]] = [[] for _ in range(grid.size(PIPE))]  # a rank's share of the longest pipeline phase
    for rank, seconds in enumerate(reports["task_seconds"]):
        stages[grid.coordinates(rank)[PIPE]].append(max(0.0, 1 - seconds / total))
    return {
        "tokens": work.tokens,
        "tokens_per_second": work.tokens / step_seconds,
        "step_seconds": step_seconds,
        "idle_shares": [statistics.mean(shares) for shares in stages],
        "days_for_300g_tokens": PAPER_TOKENS * step_seconds / work.tokens / SECONDS_A_DAY,
        "sent_bytes": {axes: count for axes, count in sent.items() if count or axes in grid.names},
        "flops_per_second": rate,
        "paper_flops_per_second": work.paper_flops / step_seconds,
        "mfu": rate / (work.peak_flops * len(reports["busy_seconds"])) if work.peak_flops else None,
        "utilisation": [
            None if math.isnan(busy) else min(1.0, busy / step_seconds) for busy in reports["busy_seconds"]
        ],
        **({"dropped_share": reports.reduced("dropped_pairs") / pairs} if pairs else {}),
        **reward_metrics(reports.reduced("rewards")),
        **({"root": root_text(word for parts in roots for word in parts)} if any(roots) else {}),
        **{name: reports.reduced(name) for name, metric in reports.table.items() if metric.shown},
    }


class MetricsWriter:
    """A log that appends lines to metrics.jsonl, and sends the numbers to trackers.

    A full disk or a removed folder costs lines, never the run: a warning names the lost lines.
    """

    def __init__(self, folder: Path, first_step: int, trackers: Mapping[str, Tracker] | None = None) -> None:
        """Open the log, without the lines of steps after `first_step`, which a resumed run writes again."""
        self.path = folder / METRICS
        _drop_after(self.path, first_step)
        self._descriptor: int | None = None
        self._losing = False
        self._in_place()
        self._trackers = dict(trackers or {})

    def write(self, line: Mapping[str, Any]) -> list[str]:
        """Append a step's line; return notes to the user: the first lost line, the end of losses, a new file."""
        notes = []
        # JSON has no literals for infinity and NaN (an overflow, a diverged run): "inf", "nan".
        odd = {key: str(value) for key, value in line.items() if isinstance(value, float) and not math.isfinite(value)}
        try:
            if not self._in_place():
                notes.append(
                    f"warning: {self.path} was removed during the run: it begins anew with step {line['step']}"
                )
            self._append(f"{json.dumps({**line, **odd})}\n".encode())
        except OSError as error:
            if not self._losing:
                lost = f"step {line['step']} and those that follow are not in it until it can be written again"
                notes.append(f"warning: {self.path} cannot be written: {error.strerror}; {lost}")
            self._losing = True
        else:
            if self._losing:
                notes.append(f"{self.path} is written again, from step {line['step']} on")
            self._losing = False
        return notes + self._show(line)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
        for tracker in self._trackers.values():
            with suppress(Exception):  # a tracker's last numbers may fail: a full disk, no network
                tracker.close()

    def _in_place(self) -> bool:
        """Return whether the open file is still the file at the path; if not, open a new file. Raises OSError."""
        with suppress(FileNotFoundError):
            if self._descriptor is not None and os.path.samestat(os.fstat(self._descriptor), self.path.stat()):
                return True
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = open_to_write(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        return self._losing  # a loss was reported before

    def _append(self, content: bytes) -> None:
        """Write the whole content or nothing: half a line is removed again. Raises OSError."""
        assert self._descriptor is not None, "an open file is in place"
        before = os.fstat(self._descriptor).st_size
        written = os.write(self._descriptor, content)
        if written < len(content):
            os.ftruncate(self._descriptor, before)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _show(self, line: Mapping[str, Any]) -> list[str]:
        """Send the line's numbers to each tracker; drop a tracker that fails."""
        notes, step = [], line["step"]
        numbers = {key: value for key, value in line.items() if isinstance(value, int | float) and key != "step"}
        for name, tracker in list(self._trackers.items()):
            try:
                tracker.write(step, numbers)
            except Exception as error:  # another package's code: on any error the run goes on without this tracker
                del self._trackers[name]
                cause = " ".join(str(error).split()) or type(error).__name__
                notes.append(f"warning: {name} cannot be written: {cause}; it ends before step {step}")
        return notes


def _drop_after(path: Path, step: int) -> None:
    """Drop the lines after a step, and a last line cut short by a kill.

    Raises:
        MeshwrightError: an earlier line is damaged; measured numbers are not dropped in silence.
    """
    if not path.exists():
        return
    lines = []
    with open_plain(path) as file:
        content = file.read()
    for line_number, line in enumerate(content.decode(errors="replace").splitlines(keepends=True), start=1):
        if not line.endswith("\n"):
            break
        try:
            if int(parse_json(line)["step"]) > step:
                break
        except (ValueError, KeyError, TypeError) as error:
            raise MeshwrightError(
                f"{path} line {line_number} is no step's metrics: mend the line, or move the file aside"
            ) from error
        lines.append(line)
    write_whole(path.parent, path.name, "".join(lines))  # a kill in between must not cost the lines of earlier steps
