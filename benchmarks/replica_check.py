"""The cost of comparing replicas: steps of the reference model with and without the check in turns, and hashes alone.

    python -m benchmarks.replica_check [--ranks N] [--rounds N] [--steps N]

Each round takes `steps` steps of the train loop with `check.every` 1 and `steps` with 0, in the same processes. Seconds
are the first rank's CPU time, so that other work on the machine counts less; the ratio is of the medians. Hashes: CPU
milliseconds for 10^8 float32 weights on one thread, with SHA-256 and torch's vector_norm for comparison.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from benchmarks.ours import RandomRows, reference_config
from meshwright.config import Config
from meshwright.config.schema import Check
from meshwright.ranks.agreement import hash_bits, same_everywhere
from meshwright.ranks.comm import RankGroup, SoloComm
from meshwright.ranks.launch import Rank, run
from meshwright.training.loop import Trainer
from meshwright.training.parts import build

HASHED = 10**7


def worker(rank: Rank, config: Config, rounds: int, steps: int) -> list[tuple[float, float]]:
    """Run one rank; return seconds a step, with and without the check, by round."""
    trainer = Trainer(build(config, rank.mesh), RandomRows(config))
    _timed(trainer, config, 1, 2)
    found = []
    for turn in range(rounds):
        order = (1, 0) if turn % 2 else (0, 1)
        seconds = {every: _timed(trainer, config, every, steps) for every in order}
        found.append((seconds[1], seconds[0]))
    return found


def _timed(trainer: Trainer, config: Config, every: int, steps: int) -> float:
    """Return the median CPU seconds of a step."""
    checked = config.model_copy(update={"check": Check(every=every)})
    trainer.parts = replace(trainer.parts, config=checked)
    seconds = []
    for _ in range(steps):
        before = time.process_time()
        trainer.turn(None)
        seconds.append(time.process_time() - before)
    return statistics.median(seconds)


def _milliseconds(call: Callable[[], Any]) -> float:
    """Return the least of ten calls, scaled to 10^8 weights."""
    seconds = []
    for _ in range(10):
        before = time.process_time()
        call()
        seconds.append(time.process_time() - before)
    return min(seconds) * 1e3 * 10**8 / HASHED


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    weights, alone = torch.randn(HASHED), SoloComm(RankGroup("", (0,), 0))
    calls: dict[str, Callable[[], Any]] = {
        "hash_bits": lambda: hash_bits(weights),
        "the start's comparison": lambda: same_everywhere(weights, alone),
        "SHA-256": lambda: hashlib.sha256(weights.numpy().data),
        "vector_norm": lambda: torch.linalg.vector_norm(weights),
    }
    for name, call in calls.items():
        milliseconds = _milliseconds(call)
        print(f"10^8 weights: {name} in {milliseconds:.1f} ms, {400 / milliseconds:.1f} GB/s")
    config = reference_config({"layout.data.size": asked.ranks, "layout.transport": "torch"})
    arguments = {"config": config, "rounds": asked.rounds, "steps": asked.steps}
    rounds = run("benchmarks.replica_check:worker", config.ranks(), **arguments)[0]
    checked, plain = (statistics.median(column) for column in zip(*rounds, strict=True))
    ratios = sorted(checked_seconds / plain_seconds for checked_seconds, plain_seconds in rounds)
    print(
        f"{asked.ranks} ranks: {checked * 1e3:.0f} ms of CPU a step compared, {plain * 1e3:.0f} ms not; of the medians "
        f"{checked / plain:.3f}, by round from {ratios[0]:.3f} to {ratios[-1]:.3f}"
    )


if __name__ == "__main__":
    main()
