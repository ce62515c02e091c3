"""Entry functions of training workers with planted events. Each patches this process alone."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from meshwright.ranks.launch import Rank
from meshwright.strategies.data_parallel import assembly
from meshwright.strategies.optim.optimizer import Optimizer
from meshwright.training import loop, worker
from meshwright.training import step as step_module
from meshwright.training.checkpoint import writer
from meshwright.training.checkpoint.manifest import Manifest
from meshwright.training.loop import Trainer
from meshwright.training.metrics import MetricsWriter


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dies_at(call: int, function: Callable[..., Any], *, after: bool) -> Callable[..., Any]:
    """Return the function, except that the `call`-th call (from 1) ends this process before or after the work."""
    count = 0

    def wrapped(*arguments: Any, **named: Any) -> Any:
        nonlocal count
        count += 1
        if count == call and not after:
            die()
        result = function(*arguments, **named)
        if count == call:
            die()
        return result

    return wrapped


_write_line = MetricsWriter.write


def half_a_line(self: MetricsWriter, line: dict[str, Any]) -> list[str]:
    if line["step"] == 5:
        self._append(b'{"step": 5, "lo')
        die()
    return _write_line(self, line)


MOMENTS: dict[str, tuple[object, str, Callable[..., Any]]] = {
    "backward": (step_module, "replica_backward", dies_at(5, step_module.replica_backward, after=True)),
    "optimizer": (Optimizer, "begin", dies_at(5, Optimizer.begin, after=True)),
    "first step": (Optimizer, "begin", dies_at(1, Optimizer.begin, after=False)),
    "shard": (writer, "write_shard", dies_at(2, writer.write_shard, after=True)),
    "manifest": (Manifest, "write", dies_at(2, Manifest.write, after=True)),
    "metrics": (MetricsWriter, "write", half_a_line),
}


def killed(rank: Rank, *, moment: str, victim: int, **arguments: Any) -> None:
    """`kill -9` the rank `victim` at a moment of the first attempt, in the fifth step or the second checkpoint."""
    owner, name, deed = MOMENTS[moment]
    doomed = rank.environment.rank == victim and rank.environment.attempt == 0
    with patch.object(owner, name, deed) if doomed else nullcontext():
        worker.train_rank(rank, **arguments)


def counting(rank: Rank, *, counts: Path, **arguments: Any) -> None:
    """Write the number of parameters with drawn initial values to a file for each rank."""
    with patch.object(assembly, "draw_values", wraps=assembly.draw_values) as drawing:
        worker.train_rank(rank, **arguments)
    (counts / str(rank.environment.rank)).write_text(str(drawing.call_count))


def interrupting(rank: Rank, *, launcher: int, **arguments: Any) -> None:
    """Send Ctrl-C to the launcher in the fifth step."""
    turn = Trainer.turn

    def interrupt(self: Trainer, *words: Any) -> Any:
        if self.step == 4 and rank.environment.rank == 1:
            os.kill(launcher, signal.SIGINT)
            while not rank.stop.requested:
                pass
        return turn(self, *words)

    with patch.object(Trainer, "turn", interrupt):
        worker.train_rank(rank, **arguments)


def counting_releases(rank: Rank, *, out: Path, **arguments: Any) -> None:
    """Write the number of releases of free memory to `releases-RANK`."""
    with patch.object(loop, "release_free_memory", wraps=loop.release_free_memory) as release:
        worker.train_rank(rank, out=out, **arguments)
    Path(out, f"releases-{rank.environment.rank}").write_text(str(release.call_count))


def names_modules(rank: Rank, *, out: Path, **arguments: Any) -> None:
    """Write the names of all modules that this process has imported by the end of the first step."""
    turn = Trainer.turn

    def named(self: Trainer, *parts: Any) -> Any:
        result = turn(self, *parts)
        path = Path(out, "modules.txt")
        if not path.exists():
            path.write_text("\n".join(sorted(sys.modules)))
        return result

    with patch.object(Trainer, "turn", named):
        worker.train_rank(rank, out=out, **arguments)


def corrupted(rank: Rank, *, victim: int, at: int, **arguments: Any) -> None:
    """Flip a low bit of a weight of the rank `victim` before step `at` of the first attempt."""

    def flip(weights: Tensor) -> None:
        weights.view(torch.int64)[5] ^= 1

    _damaged(rank, victim, at, flip, arguments)


def spoiled(rank: Rank, *, victim: int, at: int, **arguments: Any) -> None:
    """Write NaN into weights of the rank `victim` before step `at` of the first attempt."""
    _damaged(rank, victim, at, lambda weights: weights[:9].fill_(torch.nan), arguments)


def _damaged(
    rank: Rank,
    victim: int,
    at: int,
    damage: Callable[[Tensor], object],
    arguments: Any,
) -> None:
    turn = Trainer.turn

    def damaging(self: Trainer, *words: Any) -> Any:
        if self.step == at - 1 and rank.environment.rank == victim and rank.environment.attempt == 0:
            damage(self.parts.strategy.weights[0].values)
        return turn(self, *words)

    with patch.object(Trainer, "turn", damaging):
        worker.train_rank(rank, **arguments)


def straggles(rank: Rank, *, straggler: int, **arguments: Any) -> None:
    """Lengthen each backward pass of the rank `straggler` by 150 ms."""
    backward = step_module.replica_backward

    def slow(*parts: Any) -> Any:
        time.sleep(0.15 if rank.environment.rank == straggler else 0.0)
        return backward(*parts)

    with patch.object(step_module, "replica_backward", slow):
        worker.train_rank(rank, **arguments)


def validating(rank: Rank, *, losses: dict[str, float], dies_in: int = 0, **arguments: Any) -> None:
    """Return these losses by step from the validations of rank 0, and other losses from rank 1. Unless the run resumes,
    rank 1 dies in step `dies_in`, after all earlier checkpoints are written."""
    turn = Trainer.turn

    def dying(self: Trainer, *words: Any) -> Any:
        if self.step == dies_in - 1 and rank.environment.rank == 1 and not arguments["resume"]:
            while any((arguments["out"] / "checkpoints").glob(".partial-*")):
                time.sleep(0.01)
            die()
        return turn(self, *words)

    def validate(parts: Any, *_: Any) -> dict[str, float]:
        step = parts.mesh.recorder.step
        loss = losses[str(step)] if rank.environment.rank == 0 else 9.0 + step
        return {"validation_loss": loss, "validation_accuracy": -loss}

    with patch.object(Trainer, "turn", dying), patch.object(worker, "validate", validate):
        worker.train_rank(rank, **arguments)


def loses_rank_2(rank: Rank, **arguments: Any) -> None:
    """Kill the third rank of a job in the fifth step, if the job has a third rank."""
    killed(rank, moment="optimizer", victim=2, **arguments)
