"""One line of JSON a step, and the same numbers for TensorBoard. Rank 0 writes, whatever the layout."""

from __future__ import annotations

import json
import math
import resource
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from meshwright.allocator import release_freed_memory
from meshwright.build import Parts
from meshwright.errors import MeshwrightError
from meshwright.families import family_of
from meshwright.grid import PIPE, Grid
from meshwright.model import Costs
from meshwright.optim.optimizer import StepResult
from meshwright.train.step_report import StepReport

PAPER_TOKENS = 3e11
SECONDS_A_DAY = 86400

PEAK_FLOPS = {
    # Dense half-precision peaks by the vendor's data sheets, per device.
    "V100": 125e12,
    "A100": 312e12,
    "H100": 989e12,
    "H200": 989e12,
}


def peak_flops(setting: float | str, device: torch.device) -> float | None:
    """The configured peak of one device, or the data sheet's; None where neither is known."""
    if not isinstance(setting, str):
        return setting
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in PEAK_FLOPS.items() if key in name), None)


def paper_flops(products: Costs) -> float:
    """Floating-point operations of a sample's step as AxoNN counts them (Singh and Bhatele 2022), after Narayanan 2021.

    Layers run forward twice, since activations are recomputed, whether the run does so or not: 8 a multiplication of
    their forward pass; the rest 6. For GPT-2 that is 96 s l h² (1 + s/(6h) + V/(16 l h)) of s tokens.
    """
    return 8 * sum(products.layers) + 6 * (products.begin + products.end)


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory this rank has held: the allocator's on a GPU, the process's resident set on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def release_free_memory(device: torch.device) -> None:
    """Give the allocator's free memory back: CUDA's cache, or glibc's heap on a CPU. Costs time in the next step."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        release_freed_memory()


class BusyClock:
    """How long this rank's device has worked. On a CPU: the process's CPU time over its threads.

    A rank that spins while it waits (MPI) counts as busy. On a GPU: the driver's utilisation, sampled once a step;
    not a number where nvidia-ml-py, through which torch asks the driver, is not installed.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._driver = device.type == "cuda" and find_spec("pynvml") is not None
        self._cpu, self._wall = time.process_time(), time.perf_counter()

    def lap(self) -> float:
        """Busy seconds since the last call."""
        cpu, wall = time.process_time(), time.perf_counter()
        busy = (cpu - self._cpu) / torch.get_num_threads()
        if self.device.type == "cuda":
            share = torch.cuda.utilization(self.device) / 100 if self._driver else math.nan
            busy = share * (wall - self._wall)
        self._cpu, self._wall = cpu, wall
        return busy


@dataclass(frozen=True)
class StepWork:
    """What every step of a run computes. `flops`: of the model; `paper_flops`: as the paper counts them."""

    tokens: int
    flops: float
    paper_flops: float
    peak_flops: float | None
    """Of one device."""


def work_of(parts: Parts) -> StepWork:
    """The work of a step, over all ranks."""
    config = parts.config
    samples, products = config.batch.global_, family_of(config).products(config)
    peak = peak_flops(config.metrics.peak_flops, parts.mesh.device)
    tokens, flops = samples * parts.tokens_per_sample, samples * parts.flops_per_sample
    return StepWork(tokens, flops, samples * paper_flops(products), peak)


@dataclass(frozen=True)
class StepFacts:
    """What the loop knows of a step beside the reports. `phase_seconds`: this rank's."""

    step: int
    result: StepResult
    loss_scale: float
    step_seconds: float
    phase_seconds: Mapping[str, float]


def metrics_line(facts: StepFacts, work: StepWork, reports: Sequence[StepReport], grid: Grid) -> dict[str, Any]:
    """A step's metrics. mfu is 'unknown' without a known peak.

    sent_bytes: over each axis, and over those sets of axes (`data+depth`) that were used; the sender's that sent most.
    """
    sent = {axes: max(report.sent_bytes[index] for report in reports) for index, axes in enumerate(grid.axis_sets)}
    rate = work.flops / facts.step_seconds
    line: dict[str, Any] = {
        "step": facts.step,
        "loss": sum(report.loss for report in reports) / facts.loss_scale,
        "tokens": work.tokens,
        "tokens_per_second": work.tokens / facts.step_seconds,
        "step_seconds": facts.step_seconds,
        "phase_seconds": dict(facts.phase_seconds),
        "idle_shares": _idle_shares(reports, grid),
        "days_for_300g_tokens": PAPER_TOKENS * facts.step_seconds / work.tokens / SECONDS_A_DAY,
        "learning_rate": facts.result.learning_rate,
        "grad_norm": facts.result.gradient_norm,
        "loss_scale": facts.loss_scale,
        "applied": facts.result.applied,
        "peak_memory_bytes": max(report.peak_memory_bytes for report in reports),
        "sent_bytes": {axes: count for axes, count in sent.items() if count or "+" not in axes},
        "flops_per_second": rate,
        "paper_flops_per_second": work.paper_flops / facts.step_seconds,
        "mfu": rate / (work.peak_flops * len(reports)) if work.peak_flops else "unknown",
        "utilisation": [_share(report.busy_seconds, facts.step_seconds) for report in reports],
    }
    return line


def _idle_shares(reports: Sequence[StepReport], grid: Grid) -> list[float]:
    """Of each stage: the part of the longest rank's pipeline phase in which it did no task, the mean of its ranks."""
    total = max(report.pipeline_seconds for report in reports)
    stages: list[list[float]] = [[] for _ in range(grid.size(PIPE))]
    for rank, report in enumerate(reports):
        stages[grid.index(rank, PIPE)].append(max(0.0, 1 - report.task_seconds / total))
    return [statistics.mean(shares) for shares in stages]


def _share(busy_seconds: float, step_seconds: float) -> float | str:
    return "unknown" if math.isnan(busy_seconds) else min(1.0, busy_seconds / step_seconds)


class MetricsWriter:
    """Appends lines to metrics.jsonl, and scalars to TensorBoard event files where asked."""

    def __init__(self, folder: Path, first_step: int, *, tensorboard: bool) -> None:
        """Lines of steps after `first_step` are dropped: a resumed run writes them again."""
        self.path = folder / "metrics.jsonl"
        _drop_after(self.path, first_step)
        self._file = self.path.open("a", encoding="utf-8")
        self._board = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step + 1)

    def write(self, line: Mapping[str, Any]) -> None:
        try:
            self._file.write(json.dumps({key: _in_json(value) for key, value in line.items()}) + "\n")
            self._file.flush()
        except OSError as error:  # most likely a full disk
            raise MeshwrightError(f"{self.path} cannot be written: {error.strerror}") from error
        if self._board is not None:
            for key, value in line.items():
                if isinstance(value, int | float) and key != "step":
                    self._board.add_scalar(key, value, line["step"])

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


def _in_json(value: Any) -> Any:
    """JSON has no word for the numbers of an overflow or a diverged run: "inf", "nan"."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _drop_after(path: Path, step: int) -> None:
    """Keep the lines up to a step. A last line that a kill cut short is dropped too."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if not line.endswith("\n") or json.loads(line)["step"] > step:
            break
        kept.append(line)
    partial = path.with_suffix(".partial")
    partial.write_text("".join(kept), encoding="utf-8")
    partial.rename(path)  # a kill in between must not cost the lines of earlier steps
