"""The operators of a serial step and of the plain loop's.

    python -m benchmarks.step_profile [--rounds N] [FIELD=VALUE ...]

Milliseconds of one CPU thread by torch's profiler, without the time of inner operators: medians of the rounds, in turns
of both loops. FIELD=VALUE: a field of the run's config (compile=blocks). Self time of a Python function is the autograd
Function's. The profiler takes some microseconds an operator, so that many small operators weigh too much.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from contextlib import ExitStack

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import baselines, ours
from benchmarks.contender import Place, Step
from meshwright.ranks.machine import keep_freed_memory

SHOWN = 25
"""Operators in the table."""


def self_milliseconds(step: Step) -> dict[str, float]:
    """Return each operator's self time in a step, in milliseconds."""
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as made:
        step()
    return {event.key: event.self_cpu_time_total / 1e3 for event in made.key_averages()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("fields", nargs="*", metavar="FIELD=VALUE")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    options = dict(field.split("=", 1) for field in arguments.fields)
    spent: list[defaultdict[str, list[float]]] = [defaultdict(list), defaultdict(list)]
    with ExitStack() as stack:
        alone = Place(0, 1)
        mine = stack.enter_context(ours.train(alone, **{"layout.transport": "torch"}, **options))
        plain = stack.enter_context(baselines.plain(alone))
        for _ in range(3):
            mine()
            plain()
        for _ in range(arguments.rounds):
            for step, times in zip((mine, plain), spent, strict=True):
                for name, milliseconds in self_milliseconds(step).items():
                    times[name].append(milliseconds)
    train, loop = ({name: statistics.median(values) for name, values in times.items()} for times in spent)
    print(f"{'operator':52s} {'ours':>8s} {'plain':>8s}")
    for name in sorted({**train, **loop}, key=lambda name: -max(train.get(name, 0.0), loop.get(name, 0.0)))[:SHOWN]:
        print(f"{name[:52]:52s} {train.get(name, 0.0):8.2f} {loop.get(name, 0.0):8.2f}")
    print(f"{'all':52s} {sum(train.values()):8.2f} {sum(loop.values()):8.2f}")


if __name__ == "__main__":
    main()
