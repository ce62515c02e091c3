"""A run's layout as an interactive page: one HTML file (page.html, a Jinja2 template) that loads nothing from a
network.

The page shows each rank's place in the grid, and the blocks of every weight in the colours of the owners. Collectives
are arrows with byte counts. A step on the virtual clock is computed again by the page when sliders move (clock.js). All
other numbers are equal to the tables' (tables.py).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from meshwright.compute.models.chain import split_name
from meshwright.planner.explain.tables import Explained, Forecast
from meshwright.planner.plan.compose import Composition, unit_layers
from meshwright.planner.plan.memory import Parameter
from meshwright.planner.plan.recorder import Kernel, Program, Start
from meshwright.ranks.errors import ConfigError
from meshwright.ranks.grid import PIPE, Grid
from meshwright.ranks.ledger import VERBS, Traffic
from meshwright.ranks.planned import planned_mesh
from meshwright.strategies.pipeline.task import TaskKind

SCRIPTS = Path(__file__).parent
"""The folder of the template and of the page's JavaScript."""

ROW, WIDE = 8, 1.6
"""Largest number of ranks in a row along the innermost axis; the grid's ratio of width to height."""
CELL_WIDTH, CELL_HEIGHT, GAP, TITLE = 74, 46, 8, 20
"""Pixels: width and height of a rank's cell, the gap between blocks of cells, and the height of a block's title."""

WORDS = {
    "rank": "a process with a device of its own; a run of n devices has ranks 0 to n - 1",
    "axis": "a direction of the grid: ranks that differ on one axis alone form a group, and talk to each other",
    "data": "replicas: ranks with the same weights and other samples, whose gradients are summed",
    "pipe": "stages: each holds some layers, and passes activations on to the next",
    "tensor": "1-D: every matrix is cut along its columns, the next one along its rows",
    "row, col": "2-D: every matrix is cut into q x q blocks, and activations with it",
    "depth": "2.5-D: several such squares, each with other samples",
    "branch": "sub-graphs: heads, and parts of the feed-forward layer, are dealt out whole",
    "context": "every sequence is cut into pieces; attention brings them together, in a ring or head by head",
    "expert": "ranks with different experts, to whom tokens travel and come back",
    "all_reduce": "a sum over the group that each member gets",
    "reduce_scatter, all_gather": "the two halves of an all_reduce: each gets a part of the sum; each gets all parts",
    "all_to_all": "each member sends every other a piece of its own",
    "F, B, W": "a microbatch forward, backward, and its weights' gradients where these are a task of their own",
    "microbatch": "some samples of a replica that go through the model together",
    "idle": "the share of a step in which a stage does no task",
}
"""The page's glossary."""


def write_page(explained: Explained, predicted: Forecast, path: Path, name: str) -> None:
    """Write the page to `path`. `name`: the run's name, for the title.

    Raises ConfigError if the page cannot be written.
    """
    loader = FileSystemLoader(SCRIPTS)
    templates = Environment(loader=loader, autoescape=True, trim_blocks=True, undefined=StrictUndefined)
    templates.policies["json.dumps_kwargs"] = {}  # axes in the order of the grid, not of the alphabet
    config = explained.run.config
    page = templates.get_template("page.html").render(
        title=f"{name}: {config.layout.summary}",
        ranks=config.layout.world_size,
        batch=config.batch_summary,
        words=WORDS,
        facts=page_facts(explained, predicted),
        # Not escaped, since these are files of this package. All other text is.
        scripts=[Markup((SCRIPTS / file).read_text(encoding="utf-8")) for file in ("clock.js", "page.js")],
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError.of("--page", path, f"cannot be written ({error.strerror})", "a path that can") from error


def page_facts(explained: Explained, predicted: Forecast) -> dict[str, Any]:
    """Return the page's data, for JSON."""
    run = explained.run
    stages = range(len(run.stages))
    holders: list[list[int]] = [[] for _ in stages]
    for rank in range(run.grid.world_size):
        holders[run.grid.coordinates(rank)[PIPE]].append(rank)
    sendings = [row for stage in stages for row in sent_rows(run, stage)]
    return {
        "grid": drawn_grid(run.grid),
        "ranksPerNode": explained.ranks_per_node,
        "stages": [
            {"first": run.ranks[stage], "ranks": holders[stage], "holds": explained.held(stage)} for stage in stages
        ],
        "weights": list(weight_blocks(explained, holders)),
        "groups": {axes: run.grid.groups(*axes.split("+")) for axes in sorted({row["axes"] for row in sendings})},
        "sendings": sendings,
        "passes": list(passes_in_order(run)),
        "clock": clock_facts(explained, predicted),
    }


def drawn_grid(grid: Grid) -> dict[str, Any]:
    """Return each rank's cell in pixels, and the boxes around ranks with an equal index on an outer axis.

    The innermost axis runs from left to right. The blocks of an outer axis are arranged in the number of columns that
    makes the picture a little wider than high: with two axes the outer one runs downwards.
    """
    levels = [level for level in grid.nesting if level[1] > 1] or [grid.nesting[-1]]
    shapes = _columns_and_sizes([size for _, size in levels])
    ranks: list[dict[str, Any]] = []
    boxes: list[dict[str, Any]] = []

    def draw(level: int, x: float, y: float) -> None:
        """Draw the ranks of the axes from `level` inwards at (x, y), in order."""
        if level == len(levels):
            ranks.append({"x": x, "y": y, "at": grid.coordinates(len(ranks))})
            return
        (name, size), (columns, width, height) = levels[level], shapes[level]
        for index in range(size):
            left, top = x + index % columns * (width + GAP), y + index // columns * (height + GAP)
            if level == len(levels) - 1:
                draw(level + 1, left, top)
            else:
                boxes.append({"title": f"{name} {index}", "x": left, "y": top, "width": width, "height": height})
                draw(level + 1, left + GAP, top + TITLE)

    draw(0, 0, 0)
    return {
        "axes": [{"name": name, "size": size} for name, size in grid.axes],
        "inner": levels[-1][0], "cell": [CELL_WIDTH, CELL_HEIGHT], "ranks": ranks, "boxes": boxes,
        "width": max(rank["x"] for rank in ranks) + CELL_WIDTH + GAP * (len(levels) - 1),
        "height": max(rank["y"] for rank in ranks) + CELL_HEIGHT + GAP * (len(levels) - 1),
    }  # fmt: skip


def _columns_and_sizes(sizes: Sequence[int]) -> list[tuple[int, float, float]]:
    """Return for each axis, outermost first: the number of columns of blocks, and a block's width and height."""
    shapes: list[tuple[int, float, float]] = []
    width, height = float(CELL_WIDTH), float(CELL_HEIGHT)
    for index, size in enumerate(reversed(sizes)):
        columns = min(size, ROW)
        if index:  # the number of columns closest to the wanted ratio
            shape = {n: n * (width + GAP) / (-(-size // n) * (height + GAP)) for n in range(1, size + 1)}
            columns = min(shape, key=lambda n: abs(math.log(shape[n] / WIDE)))
        shapes.append((columns, width, height))
        rows = -(-size // columns)
        # A block of the next axis contains all these blocks, with a margin around and a title above.
        width = columns * (width + GAP) + GAP
        height = rows * (height + GAP) + TITLE
    return shapes[::-1]


def weight_blocks(explained: Explained, holders: Sequence[Sequence[int]]) -> Iterator[dict[str, Any]]:
    """Yield each weight with the blocks, and for each block the ranks that hold a copy.

    Of equal layers only the first of a stage is listed. `holders`: the ranks of each stage.
    """
    run, config = explained.run, explained.run.config
    alike = explained.recordings.outline(config).alike
    shown: dict[str, tuple[Parameter, str, list[int]]] = {}
    for stage, plan in enumerate(run.stages):
        firsts = {alike[layer] for layer in range(config.model.num_blocks)}
        firsts |= {explained.layers[position].start for position in run.placement.positions[stage]}
        # Of equal stages only the first one's buckets are planned. The order of parameters is equal in all.
        for parameter, like in zip(plan.parameters, run.stages[run.like[stage]].parameters, strict=True):
            layer, _ = split_name(parameter.name)
            if layer is None or layer in firsts:
                shown.setdefault(parameter.name, (parameter, like.name, []))[2].append(stage)
    mesh = planned_mesh(run.grid, 0, config.layout.token_axes)
    for name, (parameter, like_name, stages) in shown.items():
        spec = replace(parameter.spec, tied=True) if name in run.tied else parameter.spec
        blocks: defaultdict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = defaultdict(list)
        for rank in (rank for stage in stages for rank in holders[stage]):
            box = spec.box(run.grid, rank)
            if box.num_elements:
                blocks[box.offsets, box.lengths].append(rank)
        bucket = next(each for each in run.buckets[run.like[stages[0]]] if like_name in each.names)
        yield {
            "name": name, "shape": list(spec.shape), "stages": stages,
            "cut": {axis: shard.dim for axis, shard in spec.placements.items()},
            "owner": None if spec.owner is None else spec.owner[0],
            "summed": list(spec.sum_axes(mesh)), "slices": bucket.num_elements // bucket.stepped_elements,
            "frozen": not spec.role.rule.trained,
            "blocks": [
                {"offsets": list(offsets), "lengths": list(lengths), "ranks": ranks}
                for (offsets, lengths), ranks in blocks.items()
            ],
        }  # fmt: skip


def sent_rows(run: Composition, stage: int) -> Iterator[dict[str, Any]]:
    """Yield the ledger of the stage's first rank in a step, by task, part, axes and verb.

    `others` in a row: for verbs with a root, the bytes that each other member of the group sends to the root. The root
    only receives, so the ledger has none.
    """
    rows: defaultdict[tuple[str, str, str, str], Traffic] = defaultdict(Traffic)
    others: defaultdict[tuple[str, str, str, str], int] = defaultdict(int)
    for sending in run.sendings(stage):
        for event in sending.program.events:
            if isinstance(event, Start) and VERBS[event.verb].direction == "to root":
                size = len(run.grid.group(run.ranks[stage], *event.axes.split("+")))
                sent_bytes = VERBS[event.verb].sent_bytes(event.payload_bytes, size, is_root=False)
                key = sending.task, sending.part, event.axes, event.verb
                others[key] += sending.times * event.times * sent_bytes
        for (axes, verb), traffic in sending.program.traffic.items():
            rows[sending.task, sending.part, axes, verb].include(traffic.scaled(sending.times))
    for (task, segment, axes, verb), traffic in rows.items():
        if traffic.calls:
            peers = {peer: entry.sent_bytes for peer, entry in traffic.by_peer.items() if entry.calls}
            yield {
                "stage": stage, "task": task, "part": segment, "axes": axes, "verb": verb, "calls": traffic.calls,
                "bytes": traffic.sent_bytes, "direction": VERBS[verb].direction, "peers": peers,
                "others": others[task, segment, axes, verb],
            }  # fmt: skip


def passes_in_order(run: Composition) -> Iterator[dict[str, Any]]:
    """Yield the products and collectives of the first microbatch's tasks, in starting order, by part of the model.

    Parts with equal programs are listed once.
    """
    seen: set[tuple[int, TaskKind]] = set()
    for stage, plan in enumerate(run.stages):
        for unit in (unit for chunk in plan.chunks for unit in chunk.units):
            layers = unit_layers(unit)
            ends = "embeddings" if stage == 0 and unit is plan.chunks[0].units[0] else "head"
            # A longer group of layers is extrapolated from recordings of two layers and of one.
            segment = (
                "layers {}-{}".format(*layers[:2]) if len(layers) > 1 else f"layer {layers[0]}" if layers else ends
            )
            for task_kind in run.kinds:
                key = id(unit.recording.programs), task_kind
                if key not in seen:
                    seen.add(key)
                    steps = steps_of(unit.recording.programs[task_kind][0])
                    yield {"stage": stage, "part": segment, "task": str(task_kind), "steps": steps}


def steps_of(program: Program) -> list[dict[str, Any]]:
    """Return the collectives of a program, and between collectives the floating-point operations of products."""
    steps: list[dict[str, Any]] = []
    for event in program.events:
        if isinstance(event, Start):
            steps.append({
                "axes": event.axes, "verb": event.verb, "bytes": event.payload_bytes, "times": event.times,
                "direction": VERBS[event.verb].direction,
                "peers": {} if event.root is None else {event.root: event.payload_bytes},
            })  # fmt: skip
        elif isinstance(event, Kernel) and event.flops:
            if not steps or "flops" not in steps[-1]:
                steps.append({"flops": 0.0, "products": 0})
            steps[-1]["flops"] += event.times * event.flops
            steps[-1]["products"] += event.times
    return steps


def clock_facts(explained: Explained, predicted: Forecast) -> dict[str, Any]:
    """Return the run's pipeline and the step on the virtual clock; the page compares its own computation with these."""
    config, placement = explained.run.config, explained.run.placement
    spans = predicted.chosen.tasks
    return {
        "stages": placement.num_stages, "chunks": placement.num_chunks, "shape": placement.shape,
        "microbatches": config.num_microbatches, "schedule": predicted.schedule, "work": predicted.work,
        # None if the schedule alone decides: the limits of a fixed order differ between stages.
        "limit": None if config.layout.pipeline.limit == "auto" else config.layout.pipeline.limit,
        "spans": [[span.stage, span.name, span.start_seconds, span.end_seconds] for span in spans],
    }  # fmt: skip
