"""`meshwright train --explain`: what a run's layout makes of the model, counted on tensors without numbers.

Nothing is trained and no process is started: rank 0's part is built on the meta device, and one step's forward and
backward pass runs over comms that only write their ledger, as if every token had a label.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rich.console import Console
from rich.table import Column, Table

from meshwright.build import Parts, build
from meshwright.comm import Traffic
from meshwright.config import Config
from meshwright.errors import ConfigError
from meshwright.grid import Grid
from meshwright.mesh import planned_mesh
from meshwright.shard import num_parameters
from meshwright.stages import empty_batch
from meshwright.tensor.tesseract import TesseractLinear

_BLOCK = re.compile(r"blocks\.(\d+)\.")


@dataclass(frozen=True)
class Plan:
    """Rank 0's parts, and what it sends in a step by axis and verb."""

    parts: Parts
    traffic: dict[tuple[str, str], Traffic]

    @property
    def rows(self) -> int:
        """Tokens of a microbatch that a rank computes between two pairs."""
        config, mesh = self.parts.config, self.parts.mesh
        return config.micro * self.parts.tokens_per_sample // mesh.size(*config.layout.tensor.batch_axes)


def plan_step(config: Config) -> Plan:
    """Build rank 0 and run a step of it without numbers.

    Raises ConfigError for fsdp, which torch alone lays out, and for O1: autocast does not know tensors without numbers.
    """
    if config.layout.data.sync == "fsdp":
        raise ConfigError.of(
            "layout.data.sync", "fsdp", "is laid out by torch: --explain cannot count it", "another sync"
        )
    if config.precision.level == "O1":
        raise ConfigError.of("precision.level", "O1", "casts by operator: --explain cannot count it", "O0, O2")
    layout = config.layout
    mesh = planned_mesh(Grid(layout.axes), 0, layout.token_axes)
    parts = build(config, mesh)
    mesh.ledger.traffic.clear()
    batches = [empty_batch(config, parts.kit, mesh.device) for _ in range(config.num_microbatches)]
    parts.passes.train(batches, dict.fromkeys(parts.model.labels, 1.0), lambda index: None)
    parts.strategy.finish()
    parts.strategy.publish()
    return Plan(parts, dict(mesh.ledger.traffic))


def render(plan: Plan) -> None:
    """Three tables: the run, the weights, the traffic."""
    console = Console(highlight=False)
    parts = plan.parts
    config, specs = parts.config, parts.specs
    held = sum(parameter.numel() for parameter in parts.module.parameters())
    console.print(f"{config.layout.world_size} ranks: {config.layout.summary}; the innermost axis is the closest")
    console.print(f"{num_parameters(list(specs.values())):,} parameters, {held:,} on a rank")
    console.print(
        f"a step: {config.batch.global_} samples, {config.num_microbatches} microbatches of {config.micro} a replica, "
        f"{plan.rows:,} tokens of each on a rank"
    )
    console.print(_weights(plan))
    if any(isinstance(module, TesseractLinear) for module in parts.module.modules()):
        console.print(_products(plan))
    if plan.traffic:
        console.print(_traffic(plan))


def _weights(plan: Plan) -> Table:
    """A block stands for all of them."""
    name = Column("parameter", overflow="fold")
    table = Table(
        name, "whole", "on a rank", "cut by", "gradient summed over", title="Parameters (block 0 as all blocks)"
    )
    for full, parameter in plan.parts.module.named_parameters():
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
    form = next(module for module in plan.parts.module.modules() if isinstance(module, TesseractLinear)).weights.form
    how = "streamed in panels" if form.streams else "gathered whole"
    kept = ", weights kept over the step" if form.keeps else ""
    name = Column("linear, Y = X W", overflow="fold")
    table = Table(name, "forward", "dX = dY W'", "dW = X' dY", "elements sent", title=f"What stays ({how}{kept})")
    for full, module in plan.parts.module.named_modules():
        block = _BLOCK.search(full)
        if not isinstance(module, TesseractLinear) or (block and block[1] != "0"):
            continue
        choice = module.choice(plan.rows)
        sent = module.sizes(plan.rows).sent(choice, form)
        dy, dw = choice.dx.replace("Y", "dY"), choice.dw.replace("Y", "dY")
        table.add_row(full, choice.forward, dy.replace("X", "dX"), dw.replace("W", "dW"), f"{sent:,}")
    return table


def _traffic(plan: Plan) -> Table:
    table = Table("over", "verb", "calls", "MB", title="What rank 0 sends in a step (without the norm and the pulse)")
    for (axis, verb), entry in sorted(plan.traffic.items()):
        table.add_row(axis, verb, f"{entry.calls:,}", f"{entry.sent_bytes / 1e6:,.2f}")
    calls = sum(entry.calls for entry in plan.traffic.values())
    sent = sum(entry.sent_bytes for entry in plan.traffic.values())
    table.add_section()
    table.add_row("in all", "", f"{calls:,}", f"{sent / 1e6:,.2f}")
    return table


def _shape(shape: tuple[int, ...]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"
