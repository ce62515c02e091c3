"""What a search found, as a table for a terminal and as plain values for a script."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from meshwright.config import Config, dump_tree
from meshwright.models.chain import chain_of
from meshwright.tools.plan.output import layout_text, parts_text, rate_text, seconds_text
from meshwright.tools.plan.predict import Prediction
from meshwright.tools.plan.search import Found, Loser
from meshwright.train.phases import PHASES

WIDTH = 180
"""Columns, where no terminal says how many there are."""


def as_dict(found: Found) -> dict[str, Any]:
    """For `--json`: seconds, bytes, floating-point operations a second and device."""
    job = found.job
    return {
        "cluster": job.cluster.name,
        "devices": job.devices,
        "counts": asdict(found.counts),
        "layouts": [_prediction_dict(made) for made in found.predictions],
        "losers": [_loser_dict(loser, found.predictions[0]) for loser in found.losers],
        "absent": {kind: str(problem) for kind, problem in found.absent.items()},
    }


def render(found: Found) -> None:
    """What was searched, the fastest, and why other strategies lose."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    job, counts = found.job, found.counts
    here = job.cluster.devices_per_node
    nodes = found.predictions[0].config.layout.ranks_per_node
    console.print(
        f"{job.devices} devices of {job.cluster.name} ({nodes} of a node's {here}), "
        f"{job.cluster.device.memory / 1e9:.1f} GB each; a step of {job.run.batch.global_} samples"
    )
    console.print(
        f"{counts.legal:,} legal layouts: {counts.too_full:,} too full with weights, gradients and states alone, "
        f"{counts.unfit:,} with all else; {counts.too_slow:,} too slow by their estimates, "
        f"{counts.dominated:,} recompute for nothing; {counts.predicted:,} predicted"
    )
    console.print(_fastest(found))
    if found.losers:
        console.print(_losers(found))
    for kind, problem in found.absent.items():
        console.print(f"no legal layout of kind {kind}: {problem}")


def flops_per_device(made: Prediction) -> float:
    """A second, of the model's products: what is computed twice does not count."""
    config = made.config
    samples = config.batch.global_ / made.seconds / config.layout.world_size
    return chain_of(config).flops_per_sample(config) * samples


def _peak_share(made: Prediction) -> float:
    return flops_per_device(made) / made.cluster.device.peak[made.config.precision.dtype]


def _tokens_per_second(made: Prediction) -> float:
    config = made.config
    return chain_of(config).tokens_per_sample(config) * config.batch.global_ / made.seconds


def _fastest(found: Found) -> Table:
    device = found.job.cluster.device
    table = Table(
        "", Column("layout", overflow="fold"), Column("step", justify="right"), Column("tokens/s", justify="right"),
        Column("flop/s\na device", justify="right"), Column("of\npeak", justify="right"),
        Column("idle in\npipeline", justify="right"), Column("GB", justify="right"),
        Column("of", justify="right"), Column("memory by part", overflow="fold"),
        title="The fastest that fit (predicted)",
    )  # fmt: skip
    for place, made in enumerate(found.predictions, 1):
        memory = made.fullest
        idle = f"{made.timeline.idle_share:.1%}" if made.config.layout.pipeline.size > 1 else "-"
        table.add_row(
            str(place), layout_text(made.config), seconds_text(made.seconds), f"{_tokens_per_second(made):,.0f}",
            rate_text(flops_per_device(made)), f"{_peak_share(made):.1%}", idle, f"{memory.total / 1e9:.2f}",
            f"{memory.total / device.memory:.0%}", parts_text(memory),
        )  # fmt: skip
    return table


def _losers(found: Found) -> Table:
    table = Table(
        "strategy", Column("its best", overflow="fold"), Column("step", justify="right"),
        Column("why", overflow="fold"),
        title="The best of each other strategy, and why it loses",
    )  # fmt: skip
    for loser in found.losers:
        seconds = "-" if loser.prediction is None else seconds_text(loser.prediction.seconds)
        table.add_row(loser.strategy, layout_text(loser.config), seconds, why(loser, found.predictions[0]))
    return table


def why(loser: Loser, best: Prediction) -> str:
    """`does not fit: ...`, with the largest part; or `1.30 x as long: most in the pipeline, ...`."""
    if loser.prediction is None:
        parts = asdict(loser.memory)
        most = max(parts, key=lambda part: parts[part])
        alone = "" if loser.whole else " before it computes anything"
        room = best.cluster.device.memory
        return (
            f"does not fit: {loser.memory.total / 1e9:.2f} GB of {room / 1e9:.2f}{alone}, most for {most} "
            f"({parts[most] / 1e9:.2f} GB)"
        )
    made = loser.prediction
    later = {phase: made.phases.get(phase, 0.0) - best.phases.get(phase, 0.0) for phase in PHASES}
    phase = max(later, key=lambda name: later[name])
    idle = f", idle {made.timeline.idle_share:.1%} of it" if loser.config.layout.pipeline.size > 1 else ""
    return f"{made.seconds / best.seconds:.2f} x as long: most in {phase}, {seconds_text(later[phase])} more{idle}"


def _prediction_dict(made: Prediction) -> dict[str, Any]:
    return {
        "layout": layout_text(made.config),
        "seconds": made.seconds,
        "tokens_per_second": _tokens_per_second(made),
        "flops_per_device": flops_per_device(made),
        "peak_share": _peak_share(made),
        "idle_share": made.timeline.idle_share,
        "phases": made.phases,
        "memory": asdict(made.fullest),
        "config": _changed(made.config),
    }


def _changed(config: Config) -> dict[str, Any]:
    """What the planner decides."""
    tree = dump_tree(config)
    return {section: tree[section] for section in ("layout", "batch", "memory")}


def _loser_dict(loser: Loser, best: Prediction) -> dict[str, Any]:
    return {
        "strategy": loser.strategy,
        "layout": layout_text(loser.config),
        "seconds": None if loser.prediction is None else loser.prediction.seconds,
        "memory": asdict(loser.memory),
        "why": why(loser, best),
        "config": _changed(loser.config),
    }
