"""A step of a rank, counted on tensors without numbers.

Nothing is trained and no process is started: a rank's part is built on the meta device, and one step's forward and
backward passes run over comms that only write their ledger, as if every token had a label.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.config import Config
from meshwright.decisions import resolve_layout
from meshwright.environment import read_environment
from meshwright.errors import ConfigError
from meshwright.launch import joined
from meshwright.machine import Machine
from meshwright.parts import Parts, build, empty_batch
from meshwright.ranks.grid import PIPE, Grid
from meshwright.ranks.ledger import Traffic
from meshwright.ranks.planned import planned_mesh
from meshwright.ranks.topology import Topology, Volume


@dataclass(frozen=True)
class Plan:
    """A rank's parts, and what it sends in a step by axis and verb."""

    parts: Parts
    traffic: dict[tuple[str, str], Traffic]

    @property
    def rows(self) -> int:
        """Tokens of a microbatch that a rank computes between two pairs."""
        config, mesh = self.parts.config, self.parts.mesh
        return config.micro * self.parts.tokens_per_sample // mesh.size(*config.layout.tensor.batch_axes)

    @property
    def topology(self) -> Topology:
        """The job's nodes: of as many ranks as the layout says, else as this process's launcher has started here.

        Without either all ranks start here.
        """
        layout = self.parts.config.layout
        here = read_environment().local_world_size if joined() else layout.world_size
        return Topology(self.parts.mesh.grid, here if layout.ranks_per_node == "auto" else layout.ranks_per_node)

    @property
    def volumes(self) -> dict[tuple[str, str], Volume]:
        """Of what it sends, what stays inside of its node, by axis and verb."""
        return self.topology.volumes(self.parts.mesh.rank, self.traffic)


def plan_step(config: Config, rank: int = 0) -> Plan:
    """Build a rank and run a step of it without numbers.

    Raises ConfigError for fsdp, which torch alone lays out, and for O1: autocast does not know meta tensors.
    """
    data = config.layout.data
    if data.strategy.whole:
        rule_text = f"{data.strategy.unplanned}: --explain cannot count it"
        raise ConfigError.of("layout.data.sync", data.sync, rule_text, "another sync")
    if config.precision.level == "O1":
        raise ConfigError.of("precision.level", "O1", "casts by operator: --explain cannot count it", "O0, O2")
    config = resolve_layout(config, Machine.here()).config
    layout = config.layout
    mesh = planned_mesh(Grid(layout.axes), rank, layout.token_axes)
    parts = build(config, mesh)
    mesh.ledger.traffic.clear()
    batches = [empty_batch(config, parts.kit, parts.model.inside, mesh.device) for _ in range(config.num_microbatches)]
    parts.pipeline.train(batches, dict.fromkeys(parts.model.labels, 1.0), lambda index: None)
    parts.strategy.finish()
    parts.strategy.publish()
    return Plan(parts, dict(mesh.ledger.traffic))


def plan_every_stage(first: Plan) -> list[Plan]:
    """Of each stage the rank with the coordinates of the first's. `first`: of a rank of stage 0."""
    config, mesh = first.parts.config, first.parts.mesh  # which has been decided, and measured
    coordinates = mesh.grid.coordinates(mesh.rank)
    ranks = [mesh.grid.rank(coordinates | {PIPE: stage}) for stage in range(1, config.layout.pipeline.size)]
    return [first, *(plan_step(config, rank) for rank in ranks)]
