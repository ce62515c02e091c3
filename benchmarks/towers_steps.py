"""The measurement of benchmarks/towers.py, which registers the example's strategies first."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks import ours
from benchmarks.contender import Option, Place, Step
from benchmarks.interleave import measure, plan_arguments, plan_of, write_json
from meshwright.config import Config
from meshwright.output.drawing import new_figure
from meshwright.ranks.launch import Rank, run
from meshwright.ranks.machine import Machine
from meshwright.training.decisions import resolve
from meshwright.training.parts import build
from meshwright.training.step import train_step
from tests.harness import counted_step

ONE, SHARED, TOWERS = "one rank", "rows on 2", "towers on 2"
LAYOUTS = {
    ONE: "{kind: towers, size: 1}",
    SHARED: "{kind: towers, size: 1, replicas: 2}",
    TOWERS: "{kind: towers, size: 2}",
}
DRAWN_OF = 12
"""The shortest of these steps is drawn, since other processes may be at work."""

COLOURS = {
    "image": "#2b6cb0", "text": "#e8890c", "exchange": "#c92a2a", "loss": "#5f3dc4", "backward": "#90a4ae",
    "sums": "#e599a5", "optimizer": "#37474f",
}  # fmt: skip

Spans = list[tuple[str, float, float]]
"""Name, begin and end of a rank's work, in seconds."""


def options_of(layout: str) -> dict[str, Option]:
    """Return the fields of a run."""
    model = "{family: towers, layers: 4, hidden: 256, heads: 8, embedding: 128, image: 16, patch: 4, vocabulary: 64}"
    sizes: dict[str, Option] = {"batch.global": 64, "batch.micro": 64}
    return {"model": model, "data": "{kind: shapes}", "layout.tensor": LAYOUTS[layout]} | sizes


@contextmanager
def train(place: Place, **options: Option) -> Iterator[Step]:
    """Yield steps on batches of shapes, drawn before the measurement."""
    config = resolve(ours.reference_config(options), Machine.here()).config
    assert config.threads != "auto", "a worker's threads"
    torch.set_num_threads(config.threads)
    batches = [config.data.open(config, Path()).train.samples(64 * index, 64) for index in range(4)]
    with ours.open_layout(config) as mesh:
        parts, taken = build(config, mesh), iter(range(sys.maxsize))
        yield lambda: train_step(parts, batches[next(taken) % len(batches)]).loss


def show_bytes() -> list[dict[str, object]]:
    """Print a row a layout: parameters of a rank, and the bytes sent in a step. Nothing is run."""
    table = Table(title="by the ledger: parameters of the fullest rank, KB that a rank sends in a step")
    for head in ("layout", "parameters", "vectors of towers", "vectors of rows", "gradients", "all"):
        table.add_column(head, justify="left" if head == "layout" else "right")
    rows: list[dict[str, object]] = []
    for layout in LAYOUTS:
        config = resolve(ours.reference_config(options_of(layout)), Machine.here()).config
        ranks = [counted_step(config, rank) for rank in range(config.layout.world_size)]
        held = max(sum(x.numel() for x in parts.model.parameters()) for parts in ranks)
        sent = {verb: [0.0] for verb in ("tower", "all_gather", "reduce_scatter", "all_reduce")}
        for (axis, verb), traffic in ranks[0].mesh.ledger.traffic.items():
            sent["tower" if axis == "tower" else verb].append(traffic.sent_bytes / 1e3)
        tower, gradients = sum(sent["tower"]), sum(sent["all_reduce"])
        shared = sum(sent["all_gather"]) + sum(sent["reduce_scatter"])
        cells = (tower, shared, gradients, tower + shared + gradients)
        table.add_row(layout, f"{held:,}", *(f"{cell:,.1f}" for cell in cells))
        rows.append({"layout": layout, "parameters": held, "tower": tower, "rows": shared, "gradients": gradients})
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    return rows


def spans_of(rank: Rank, config: Config) -> list[Spans]:
    """Take some steps, and return the spans of each on this rank."""
    torch.set_num_threads(1)
    parts, spans, begun = build(config, rank.mesh), Spans(), dict[int, float]()
    batch = config.data.open(config, Path()).train.samples(0, config.batch.global_)

    def timed(name: str, function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            start = time.perf_counter()
            result = function(*arguments)
            spans.append((name, start, time.perf_counter()))
            return result

        return call

    def watch(name: str, module: nn.Module) -> None:
        module.register_forward_pre_hook(lambda module, _: begun.update({id(module): time.perf_counter()}))
        module.register_forward_hook(lambda module, *_: spans.append((name, begun[id(module)], time.perf_counter())))

    model: Any = parts.model
    for pair in (model.inputs, *model.blocks.values(), model.vectors):
        for tower, module in pair.items():
            watch(tower, module)
    model.kit.meet, model.kit.all_rows = timed("exchange", model.kit.meet), timed("exchange", model.kit.all_rows)
    model.loss = timed("loss", model.loss)
    strategy: Any = parts.strategy
    strategy.arrivals = timed("passed", strategy.arrivals)  # called when the backward pass is over
    steps: list[Spans] = []
    for step in range(DRAWN_OF):
        rank.mesh.world.barrier()
        spans.clear()
        begin = time.perf_counter()
        train_step(parts, batch, step, observe=lambda: spans.append(("sums", 0.0, time.perf_counter())))
        end = time.perf_counter()
        moments = {name: (start, stop) for name, start, stop in spans}
        passed, summed = moments["passed"][0], moments["sums"][1]
        rest = [("backward", moments["loss"][1], passed), ("sums", passed, summed), ("optimizer", summed, end)]
        work = [span for span in spans if span[0] in ("image", "text", "exchange")]
        steps.append([("step", begin, end), ("loss", *moments["loss"]), *work, *rest])  # an exchange may be in the loss
    return steps


def draw(picture: Path) -> None:
    """Draw a step of each layout: a row a rank, on one axis of time."""
    figure = new_figure(9, 3.2, 110)
    axes, labels = figure.subplots(), []
    for layout in LAYOUTS:
        config = resolve(ours.reference_config(options_of(layout)), Machine.here()).config
        steps: list[list[Spans]] = list(zip(*run(spans_of, config, config=config), strict=True))
        ranks = min(steps, key=lambda ranks: ranks[0][0][2] - ranks[0][0][1])
        begin = min(spans[0][1] for spans in ranks)
        for rank, spans in enumerate(ranks):
            row = len(labels)
            labels.append(f"{layout}, rank {rank}")
            for name, start, end in spans[1:]:
                axes.barh(row, 1e3 * (end - start), left=1e3 * (start - begin), color=COLOURS[name], height=0.7)
    for name, colour in COLOURS.items():
        axes.barh(0, 0, color=colour, label=name)
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlabel("ms from the begin of a step")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=len(COLOURS), frameon=False)
    figure.savefig(picture)


def measure_towers() -> None:
    parser = plan_arguments("Towers on sub-grids against one rank and against shared rows.")
    parser.add_argument("--transport", choices=["torch", "mpi"], default="torch")
    parser.add_argument("--picture", type=Path, metavar="FILE.png", help="draw a step of each layout")
    parser.add_argument("--only", nargs="+", choices=["bytes", "steps"], default=["bytes", "steps"])
    arguments = parser.parse_args()
    tables = {"bytes": show_bytes()} if "bytes" in arguments.only else {}
    if "steps" in arguments.only:
        made = [ours.configured(layout, arguments.transport, options_of(layout)) for layout in LAYOUTS]
        contenders = [replace(each, factory="benchmarks.towers_steps:train") for each in made]
        title = "a step of two towers, ranks of one thread"
        tables["steps"] = measure(title, contenders, plan_of(arguments), [ONE, SHARED])
    write_json(arguments.json, tables)
    if arguments.picture is not None:
        draw(arguments.picture)
