"""`meshwright train --explain`: what a run's layout makes of the model, in tables. Nothing is trained (plan.py)."""

from __future__ import annotations

import re
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

from meshwright.config import Config
from meshwright.errors import ConfigError
from meshwright.model import Chunk
from meshwright.parameters.shard import num_parameters
from meshwright.pipeline.trace import write_trace
from meshwright.ranks.grid import PIPE
from meshwright.ranks.mailbox import MESSAGE
from meshwright.ranks.topology import Volume, total
from meshwright.tensor.tesseract import TesseractLinear
from meshwright.tools.plan.counted_step import Plan, plan_every_stage, plan_step
from meshwright.tools.plan.forecast import UNIT, Forecast, forecast
from meshwright.training.timeline import draw_timelines

_BLOCK = re.compile(r"blocks\.(\d+)\.")


def explain(config: Config, trace: Path | None = None) -> None:
    """Print what the layout makes of the run; where asked, write the trace of a pipeline's step on the virtual clock,
    and beside it a picture of all schedules.

    Raises ConfigError where there is no pipeline to trace, and where plan_step does.
    """
    stages = config.layout.pipeline.size
    if trace is not None and stages == 1:
        raise ConfigError.of("layout.pipeline.size", 1, "has no schedule to trace with --explain", "2 or more")
    plan = plan_step(config)
    render(plan)
    if stages == 1:
        return
    plans = plan_every_stage(plan)
    made = forecast(plans)
    render_stages(plans, made)
    if trace is not None:
        write_trace(made.chosen, trace)
        draw_timelines(made.timelines, trace.with_suffix(".png"), UNIT)
        Console(highlight=False).print(f"written: {trace}, {trace.with_suffix('.png')}", soft_wrap=True)


def render(plan: Plan) -> None:
    """Three tables: the run, the weights, the traffic."""
    console = Console(highlight=False)
    parts = plan.parts
    config, specs = parts.config, parts.specs
    held = sum(parameter.numel() for parameter in parts.model.parameters())
    console.print(f"{config.layout.world_size} ranks: {config.layout.summary}; the innermost axis is the closest")
    if plan.topology.num_nodes > 1:
        console.print(f"{plan.topology.num_nodes} nodes of {plan.topology.ranks_per_node} ranks, neighbours together")
    console.print(f"{num_parameters(list(specs.values())):,} parameters, {held:,} on a rank")
    console.print(
        f"a step: {config.batch.global_} samples, {config.num_microbatches} microbatches of {config.micro} a replica, "
        f"{plan.rows:,} tokens of each on a rank"
    )
    console.print(_weights(plan))
    if any(isinstance(module, TesseractLinear) for module in parts.model.modules()):
        console.print(_products(plan))
    if plan.traffic:
        console.print(_traffic(plan))


def render_stages(plans: list[Plan], made: Forecast) -> None:
    """Two tables: what the stages hold and do, what each schedule would make of them."""
    console = Console(highlight=False)
    stages = Table(
        "stage", "holds", "parameters on a rank", "work", "microbatches held", "MB to neighbours", "to other nodes",
        "idle",
        title=f"Stages (idle: on the virtual clock, {made.schedule})",
    )  # fmt: skip
    for stage, (plan, idle) in enumerate(zip(plans, made.chosen.idle_shares, strict=True)):
        held = sum(parameter.numel() for parameter in plan.parts.model.parameters())
        sent = plan.volumes.get((PIPE, MESSAGE), Volume())
        stages.add_row(
            str(stage), _held(plan.parts.stages.chunks[stage]), f"{held:,}", f"{made.shares[stage]:.1%}",
            str(made.limits[stage]), _megabytes(sent.bytes_inside + sent.bytes_between),
            _megabytes(sent.bytes_between), f"{idle:.1%}",
        )  # fmt: skip
    console.print(stages)
    schedules = Table("schedule", UNIT, "idle", title="Schedules on the virtual clock: counted work, no latency")
    for name, timeline in made.timelines.items():
        mark = " (this run's)" if name == made.schedule else ""
        schedules.add_row(name + mark, f"{timeline.total_seconds:.2f}", f"{timeline.idle_share:.1%}")
    console.print(schedules)


def _held(chunk: Chunk) -> str:
    """`embeddings, layers 0-3`."""
    layers = [f"layers {chunk.layers[0]}-{chunk.layers[-1]}"] if len(chunk.layers) else []
    return ", ".join(["embeddings"] * chunk.first + layers + ["head"] * chunk.last)


def _weights(plan: Plan) -> Table:
    """A block stands for all of them."""
    name = Column("parameter", overflow="fold")
    table = Table(
        name, "whole", "on a rank", "cut by", "gradient summed over", title="Parameters (block 0 as all blocks)"
    )
    for full, parameter in plan.parts.model.named_parameters():
        block = _BLOCK.search(full)
        if block and block[1] != "0":
            continue
        spec = plan.parts.specs[full]
        cut = ", ".join(f"dim {dim} over {axis}" for dim, axis in spec.cuts)
        summed = ", ".join(spec.sum_axes(plan.parts.mesh))
        table.add_row(full, _shape(spec.shape), _shape(parameter.shape), cut or "-", summed or "-")
    return table


def _products(plan: Plan) -> Table:
    """What stays where it is in each 2-D product."""
    form = next(module for module in plan.parts.model.modules() if isinstance(module, TesseractLinear)).weights.form
    how = "streamed in panels" if form.streams else "gathered whole"
    kept = ", weights kept over the step" if form.keeps else ""
    name = Column("linear, Y = X W", overflow="fold")
    table = Table(name, "forward", "dX = dY W'", "dW = X' dY", "elements sent", title=f"What stays ({how}{kept})")
    for full, module in plan.parts.model.named_modules():
        block = _BLOCK.search(full)
        if not isinstance(module, TesseractLinear) or (block and block[1] != "0"):
            continue
        choice = module.choice(plan.rows)
        sent = module.sizes(plan.rows).sent(choice, form)
        dy, dw = choice.dx.replace("Y", "dY"), choice.dw.replace("Y", "dY")
        table.add_row(full, choice.forward, dy.replace("X", "dX"), dw.replace("W", "dW"), f"{sent:,}")
    return table


def _traffic(plan: Plan) -> Table:
    """Calls; bytes and messages (topology.py), of these those to other nodes."""
    table = Table(
        "over", "verb", "calls", "MB", "to other nodes", "messages", "to other nodes",
        title="What rank 0 sends in a step (without the norm and the step report)",
    )  # fmt: skip
    for (axis, verb), volume in sorted(plan.volumes.items()):
        table.add_row(axis, verb, f"{plan.traffic[axis, verb].calls:,}", *_cells(volume))
    table.add_section()
    calls = sum(entry.calls for entry in plan.traffic.values())
    table.add_row("in all", "", f"{calls:,}", *_cells(total(list(plan.volumes.values()))))
    return table


def _cells(volume: Volume) -> tuple[str, str, str, str]:
    messages = volume.messages_inside + volume.messages_between
    sent = _megabytes(volume.bytes_inside + volume.bytes_between)
    return sent, _megabytes(volume.bytes_between), f"{messages:,}", f"{volume.messages_between:,}"


def _megabytes(sent_bytes: int) -> str:
    return f"{sent_bytes / 1e6:,.2f}"


def _shape(shape: tuple[int, ...]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"
