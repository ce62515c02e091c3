"""Assembles a rank's pipeline: chunks with a schedule, mailboxes and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from torch import nn

from meshwright.compute.model import EMBEDDINGS, Model
from meshwright.compute.parameters.gradients import Gradients
from meshwright.ranks.grid import EXPERT, PIPE
from meshwright.ranks.mesh import Mesh
from meshwright.strategies.pipeline.pieces import Exchanges, PieceStage, PiecewiseChunks
from meshwright.strategies.pipeline.pipeline import Pipeline, Synchronises
from meshwright.strategies.pipeline.placement import ChunkPlacement
from meshwright.strategies.pipeline.stage import Portions, RunForward, Stage
from meshwright.strategies.pipeline.stages import Stages, piece_placement_of, rule_of

if TYPE_CHECKING:
    from meshwright.config import Config

MakeStage = Callable[..., Stage]
"""make(model, gradients, ...): a Stage that computes in the run's precision."""


Tables = Callable[[], Sequence[nn.Parameter]]


class Trains(Synchronises, Protocol):
    """A data-parallel strategy that runs forward passes."""

    gradients: Gradients

    @property
    def forward(self) -> RunForward:
        """A stage's forward pass."""


def build_pipeline(
    config: Config, mesh: Mesh, models: Sequence[Model], stages: Stages, strategy: Trains, make: MakeStage = Stage,
    *, portions: Portions | None = None, begins: int = EMBEDDINGS, heads: Sequence[Model] = (), tables: Tables = list,
) -> Pipeline:  # fmt: skip
    """Build a rank's pipeline.

    Args:
        models: this rank's chunks.
        begins: the first part of the chain with a trained parameter.
        heads: the pieces of a stage with a head sharded over stages, if the run trains with one.
        tables: returns the parameters shared by both ends of the chain, if this rank holds both ends.
    """
    index, placement = mesh.index(PIPE), stages.placement
    local_stages = [
        make(
            model,
            strategy.gradients,
            run=strategy.forward,
            chunk_index=chunk_index,
            portions=portions,
            learns=begins < chunk.parts[0],
        )
        for chunk_index, (model, chunk) in enumerate(zip(models, stages.of(index), strict=True))
    ]
    data = config.layout.data
    piecewise = None
    if data.in_pieces and mesh.device.type != "meta":
        in_pieces = piece_placement_of(config, [len(chunk.layers) for chunk in stages.chunks])
        whole = zip(local_stages, in_pieces.numbers[index], strict=True)
        pieces = [PieceStage(stage, numbers[0]) for stage, numbers in whole]
        piecewise = PiecewiseChunks(pieces, in_pieces, Exchanges(mesh.comm(EXPERT)))
    elif heads:
        piecewise = _with_spread_head(heads, stages, strategy.gradients, mesh, make)
    # In a v one rank has the first and the last chunk; message timing decides which adds to a tied table first.
    share_tables(strategy.gradients, tables, mesh, placement if piecewise is None else piecewise.placement)
    peers = mesh.comm(*(config.layout.peer_axes if config.layout.pipeline.size > 1 or data.in_pieces else ()))
    mailbox, forms = mesh.mailbox(PIPE, ring=placement.is_ring), stages.message(index)
    return Pipeline(local_stages, rule_of(config), mesh, peers, mailbox, forms, strategy, placement, piecewise)


def _with_spread_head(
    heads: Sequence[Model], stages: Stages, gradients: Gradients, mesh: Mesh, make: MakeStage
) -> PiecewiseChunks:
    """Return a stage with its part of a head that is sharded over stages."""
    placement = ChunkPlacement(stages.placement.num_stages, spreads_head=True)
    numbered = enumerate(zip(heads, placement.numbers[mesh.index(PIPE)], strict=True))
    pieces = [
        PieceStage(make(head, gradients, chunk_index=chunk_index), numbers[0])
        for chunk_index, (head, numbers) in numbered
    ]
    return PiecewiseChunks(pieces, placement, Exchanges(mesh.comm(PIPE)), stages.states)


def share_tables(
    gradients: Gradients, tables: Tables, mesh: Mesh, placement: ChunkPlacement
) -> None:  # fmt: skip
    """Give each of two chunks of a stage that share a tied table its own memory for gradients, summed at the end."""
    last = placement.numbers[mesh.index(PIPE)][-1][-1]
    for parameter in tables() if last else ():
        gradients.share(parameter, (0, last))
