"""`meshwright explain` and `train --explain`: a model under a run's layout, in tables. Nothing is trained.

The run is composed of recordings, as in the planner (compose.py). A pipeline's schedules are compared on the virtual
clock. A task's time is a share of the stage's counted work, which also decides how layers are divided into stages: F
takes a third and B two thirds; if B and W are separate tasks, each takes a third. Messages take no time, and
recomputation is not counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from rich.table import Column, Table

from meshwright.compute.model import Chunk
from meshwright.compute.models.chain import chain_of, split_name
from meshwright.compute.tensor.tesseract import TesseractLinear
from meshwright.config import Config
from meshwright.config.registry import entries
from meshwright.output import terminal
from meshwright.output.drawing import require_matplotlib
from meshwright.output.tables import print_table
from meshwright.planner.plan.buckets import Buckets
from meshwright.planner.plan.compose import Composition, compose_stages
from meshwright.planner.plan.network import Volume, volumes
from meshwright.planner.plan.recordings import Recordings, check_recorded
from meshwright.ranks.errors import ConfigError
from meshwright.ranks.grid import PIPE
from meshwright.ranks.ledger import MESSAGE, Traffic
from meshwright.ranks.machine import Machine
from meshwright.ranks.planned import planned_mesh
from meshwright.strategies.pipeline.clock import simulate
from meshwright.strategies.pipeline.partition import ranges_of
from meshwright.strategies.pipeline.schedule import ScheduleRule
from meshwright.strategies.pipeline.span import Timeline
from meshwright.strategies.pipeline.stages import rule_of
from meshwright.strategies.pipeline.task import Task, TaskKind
from meshwright.strategies.pipeline.trace import write_trace
from meshwright.training.decisions import resolve_layout
from meshwright.training.pictures import draw_timelines
from meshwright.training.rank_model import build_kit, build_model
from meshwright.training.stage_costs import shared_work

UNIT = "forward passes of a microbatch"
"""The clock's second: a microbatch's forward pass through the whole model."""


@dataclass(frozen=True)
class Explained:
    """A run's composed layout."""

    run: Composition
    layers: tuple[range, ...]
    """The layers at each position of the chain."""
    ranks_per_node: int
    """The layout's value; for "auto" the ranks that this process' launcher started on the node, or all ranks."""
    recordings: Recordings
    traffic: tuple[dict[tuple[str, str], Traffic], ...]
    """For each stage: traffic of the first rank in a step, by axis and verb."""

    def held(self, stage: int) -> str:
        """Name the parts of the model that the stage holds: `embeddings, layers 0-3`."""
        placement = self.run.placement
        runs = [self.layers[position] for position in placement.positions[stage]]
        words = ["embeddings"] if stage == 0 else []
        words += [f"layers {layers[0]}-{layers[-1]}" for layers in runs if layers]
        return ", ".join([*words, "head"] if stage == placement.last_stage else words)

    def volumes(self, stage: int) -> dict[tuple[str, str], Volume]:
        """Return bytes and messages of the stage's first rank, within the node and between nodes, by axis and verb."""
        return volumes(self.run.grid, self.ranks_per_node, self.run.ranks[stage], self.traffic[stage])


@dataclass(frozen=True)
class Forecast:
    """A pipeline's step on the virtual clock."""

    schedule: str
    """The run's schedule."""
    work: tuple[float, ...]
    """Share of the work at each position of the chain; the sum is 1."""
    shares: tuple[float, ...]
    """Share of the work of each stage."""
    limits: tuple[int, ...]
    """For each stage: the largest number of microbatches held, each counted once per chunk."""
    timelines: dict[str, Timeline]
    """A step under each schedule, in UNITs; under the run's schedule with the run's limit."""

    @property
    def chosen(self) -> Timeline:
        """The timeline of the run's schedule."""
        return self.timelines[self.schedule]


def explain(config: Config, trace: Path | None = None) -> Explained:
    """Print the tables of a run's layout.

    `trace`: the file for the trace of a pipeline's step on the virtual clock. A picture of all schedules is written
    next to this file, with the suffix .png. Raises ConfigError if there is no pipeline to trace, and as `compose`;
    PictureError without matplotlib.
    """
    stages = config.layout.pipeline.size
    if trace is not None and stages == 1:
        raise ConfigError.of("layout.pipeline.size", 1, "has no schedule to trace with --explain", "2 or more")
    if trace is not None:
        require_matplotlib("--trace")
    explained = compose(config)
    render(explained)
    if stages == 1:
        return explained
    predicted = forecast(explained)
    render_stages(explained, predicted)
    if trace is not None:
        write_trace(predicted.chosen, trace)
        draw_timelines(predicted.timelines, trace.with_suffix(".png"), UNIT)
        terminal.console().print(f"written: {trace}, {trace.with_suffix('.png')}", soft_wrap=True)
    return explained


def compose(config: Config) -> Explained:
    """Resolve the run for this machine and compose the layout.

    Raises ConfigError for a head that is sharded over stages.
    """
    check_recorded(config)
    machine, recordings = Machine.here(), Recordings()
    config = resolve_layout(config, machine).config
    partition = config.layout.pipeline.partition
    if isinstance(partition, str):  # left undecided for a single stage
        partition = (config.model.num_blocks,)
    run = Composition(config, compose_stages(config, recordings, partition), Buckets())
    traffic = (run.traffic(stage) for stage in range(len(run.stages)))
    # An axis of one rank sends nothing: left out, else the table would have rows of zeros.
    sent = ({key: entry for key, entry in ledger.items() if entry.calls} for ledger in traffic)
    ranks_per_node = config.layout.ranks_per_node
    if ranks_per_node == "auto":
        ranks_per_node = machine.ranks_here(config.layout.world_size)
    return Explained(run, ranges_of(partition), ranks_per_node, recordings, tuple(sent))


def forecast(explained: Explained) -> Forecast:
    """Simulate a step of the pipeline under the run's schedule, and under all others that can run the layout's chunks.

    The other schedules run with their default limits.
    """
    config = explained.run.config
    name, count, placement = config.layout.pipeline.schedule, config.num_microbatches, explained.run.placement
    stages = range(placement.num_stages)
    costs = shared_work(config, explained.recordings.outline(config).parameters, config.device)
    work = [sum(costs.layers[layer] for layer in layers) / costs.total for layers in explained.layers]
    work[0] += costs.embedding / costs.total
    work[-1] += costs.head / costs.total
    shares = tuple(sum(work[position] for position in placement.positions[stage]) for stage in stages)

    def timeline(rule: ScheduleRule) -> Timeline:
        # B and W each take as long as F. Without a split, B does the work of both.
        backward = 1 if rule.splits else 2

        def seconds(stage: int, task: Task) -> float:
            forward = work[placement.positions[stage][task.chunk]]
            # One second of the clock is thus a forward pass of the whole model, under every schedule.
            return forward * (backward if task.kind is TaskKind.BACKWARD else 1)

        return simulate(len(stages), count, rule, seconds, lambda start, end, message: 0.0, placement=placement)

    chosen, chunked = rule_of(config), placement.num_chunks > 1
    # A run of one stage has a schedule although the config names none.
    name = next((known for known, rule in entries("schedules").items() if rule is chosen), name)
    rules = {name: chosen} | {
        schedule: rule
        for schedule, rule in entries("schedules").items()
        # A schedule without chunks cannot run this layout.
        if schedule != name and (not chunked or placement.shape in rule.shapes)
    }
    limits = tuple(chosen.limit_at(stage, placement, count) for stage in stages)
    return Forecast(name, tuple(work), shares, limits, {schedule: timeline(rule) for schedule, rule in rules.items()})


def render(explained: Explained) -> None:
    """Print tables of the run, the weights and the traffic."""
    console = terminal.console()
    run, config = explained.run, explained.run.config
    specs = {parameter.name: parameter.spec for stage in run.stages for parameter in stage.parameters}
    console.print(f"{config.layout.world_size} ranks: {config.layout.summary}; the innermost axis is the closest")
    nodes = -(-run.grid.world_size // explained.ranks_per_node)  # the last node may have fewer ranks
    if nodes > 1:
        console.print(f"{nodes} nodes of {explained.ranks_per_node} ranks, neighbours together")
    console.print(config.batch_summary)
    whole = sum(math.prod(spec.shape) for spec in specs.values())  # by name: a tied table on two stages counts once
    elements = sum(parameter.num_elements for parameter in run.stages[0].parameters)
    console.print(f"{whole:,} parameters, {elements:,} on a rank")
    console.print(
        f"a step: {config.batch.global_} samples, {config.num_microbatches} microbatches of {config.micro} a replica, "
        f"{_rows(run):,} tokens of each on a rank"
    )
    print_table(console, _weights(run))
    products = _products(explained)
    if products.row_count:
        print_table(console, products)
    if explained.traffic[0]:
        print_table(console, _traffic(explained))


def render_stages(explained: Explained, predicted: Forecast) -> None:
    """Print two tables: the stages with parts and work, and a step under each schedule."""
    console, stages = terminal.console(), explained.run.stages
    table = Table(
        "stage", "holds", "parameters on a rank", "work", "microbatches held", "MB to neighbours", "to other nodes",
        "idle",
        title=f"Stages (idle: on the virtual clock, {predicted.schedule})",
    )  # fmt: skip
    idle_shares = predicted.chosen.idle_shares
    for stage, (plan, idle) in enumerate(zip(stages, idle_shares, strict=True)):
        sent = explained.volumes(stage).get((PIPE, MESSAGE), Volume())
        elements = sum(parameter.num_elements for parameter in plan.parameters)
        table.add_row(
            str(stage), explained.held(stage), f"{elements:,}", f"{predicted.shares[stage]:.1%}",
            str(predicted.limits[stage]), *_cells(sent)[:2], f"{idle:.1%}",
        )  # fmt: skip
    print_table(console, table)
    schedules = Table("schedule", UNIT, "idle", title="Schedules on the virtual clock: counted work, no latency")
    for name, timeline in predicted.timelines.items():
        mark = " (this run's)" if name == predicted.schedule else ""
        schedules.add_row(name + mark, f"{timeline.total_seconds:.2f}", f"{timeline.idle_share:.1%}")
    print_table(console, schedules)


def _rows(run: Composition) -> int:
    """Return the tokens of a microbatch on one rank, between two pairs of linears."""
    config = run.config
    tokens = config.micro * chain_of(config).tokens_per_sample(config)
    return tokens // run.grid.size(*config.layout.context.token_axes, *config.layout.tensor.batch_axes)


def _weights(run: Composition) -> Table:
    """Build the table of parameters. Of later blocks only parameters are listed that are frozen unlike block 0's."""
    name = Column("parameter", overflow="fold")
    table = Table(
        name, "whole", "on a rank", "cut by", "gradient summed over", title="Parameters (block 0 as all blocks)"
    )
    mesh = planned_mesh(run.grid, 0, run.config.layout.token_axes)
    first: dict[str, bool] = {}
    for parameter in run.stages[0].parameters:
        layer, inner = split_name(parameter.name)
        trained = parameter.spec.role.rule.trained
        # All blocks are sharded in the same way. Embeddings and head have no number.
        if layer is not None and first.setdefault(inner, trained) == trained and layer > 0:
            continue
        spec = replace(parameter.spec, tied=True) if parameter.name in run.tied else parameter.spec
        cut = ", ".join(
            f"dim {shard.dim} over {axis}" + (f" in {shard.copies} copies" if shard.copies > 1 else "")
            for axis, shard in spec.placements.items()
        )
        summed = ", ".join(spec.sum_axes(mesh)) if trained else "frozen"
        table.add_row(parameter.name, str(list(spec.shape)), str(list(parameter.shape)), cut or "-", summed or "-")
    return table


def _products(explained: Explained) -> Table:
    """Build the table of the stationary operand of each 2-D product; without rows if there are no such products."""
    run, config = explained.run, explained.run.config
    mesh = planned_mesh(run.grid, 0, config.layout.token_axes)
    # One layer is enough, since all are equal. The head is built if the first stage has one.
    chunk = Chunk(explained.layers[0][:1], True, len(run.stages) == 1)
    model, rows = build_model(config, build_kit(config, mesh), mesh, chunk), _rows(run)
    linears = {name: each for name, each in model.named_modules() if isinstance(each, TesseractLinear)}
    table = Table(Column("linear, Y = X W", overflow="fold"), "forward", "dX = dY W'", "dW = X' dY", "elements sent")
    for name, linear in linears.items():
        form, choice = linear.weights.form, linear.choice(rows)
        note = ", weights kept over the step" if form.keeps else ""
        # All linears of a run have the same form, decided once by the fullest rank.
        table.title = f"What stays ({'streamed in panels' if form.streams else 'gathered whole'}{note})"
        dy, dw = choice.dx.replace("Y", "dY"), choice.dw.replace("Y", "dY")
        sent = linear.sizes(rows).sent(choice, form)
        table.add_row(name, choice.forward, dy.replace("X", "dX"), dw.replace("W", "dW"), f"{sent:,}")
    return table


def _traffic(explained: Explained) -> Table:
    """Build the table of calls, bytes and messages (network.volumes), in total and to other nodes."""
    table = Table(
        "over", "verb", "calls", "MB", "to other nodes", "messages", "to other nodes",
        title="What rank 0 sends in a step (without the norm and the step report)",
    )  # fmt: skip
    traffic, by_verb = explained.traffic[0], explained.volumes(0)
    for (axis, verb), volume in sorted(by_verb.items()):
        table.add_row(axis, verb, f"{traffic[axis, verb].calls:,}", *_cells(volume))
    table.add_section()
    calls = sum(entry.calls for entry in traffic.values())
    table.add_row("in all", "", f"{calls:,}", *_cells(sum(by_verb.values(), Volume())))
    return table


def _cells(volume: Volume) -> tuple[str, str, str, str]:
    messages = volume.messages_inside + volume.messages_between
    in_all, between = (
        f"{count / 1e6:,.2f}" for count in (volume.bytes_inside + volume.bytes_between, volume.bytes_between)
    )
    return in_all, between, f"{messages:,}", f"{volume.messages_between:,}"
