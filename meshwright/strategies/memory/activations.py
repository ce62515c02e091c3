"""Assembly of an activation policy: the function that runs a model's layers or attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from meshwright.compute.model import Chunk, Run, at_once
from meshwright.config.registry import load_entry
from meshwright.ranks.mesh import Mesh
from meshwright.strategies.memory.section import Group

if TYPE_CHECKING:
    from meshwright.config import Config


class Layered(Protocol):
    """A model of layers."""

    def run_attention_by(self, run: Run) -> None:
        """Have each attention run by `run`."""

    def run_groups(self, groups: Sequence[Group], run: Run, *, keeps_rows: bool) -> None:
        """Have the wrapped groups run by `run`. keeps_rows: each part of a layer is run for itself."""


def apply_policy(config: Config, mesh: Mesh, model: Layered, chunks: Sequence[Chunk]) -> None:
    """Have the model run as the run's policy says. chunks: all chunks of the model."""
    policy = config.memory.policy
    run_by_policy(config, mesh, model, [group for chunk in chunks for group in policy.groups(config, chunk.layers)])


def run_by_policy(config: Config, mesh: Mesh, model: Layered, groups: Sequence[Group]) -> None:
    """Have the model's attention, or these groups of layers, run by the config's policy."""
    policy = config.memory.policy
    run: Run = load_entry(policy.make)(mesh) if policy.make else at_once
    if policy.attention:
        model.run_attention_by(run)
    by_groups = policy.by_groups
    model.run_groups(groups, run if by_groups else at_once, keeps_rows=by_groups and config.layout.data.in_pieces)
