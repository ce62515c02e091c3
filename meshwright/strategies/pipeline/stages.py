"""All stages of a run's pipeline as each rank knows them: chunks, placement, schedule, and tensors between stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from meshwright.compute.model import Chunk
from meshwright.compute.parameters.shard import ShardSpec
from meshwright.ranks.mailbox import MessageMeta, TensorMeta
from meshwright.strategies.pipeline.partition import ranges_of
from meshwright.strategies.pipeline.pipeline import message_forms
from meshwright.strategies.pipeline.placement import ChunkPlacement
from meshwright.strategies.pipeline.schedule import MESSAGE_DRIVEN, ONE_F_ONE_B, ScheduleRule

if TYPE_CHECKING:
    from meshwright.config import Config

_whole_chunks = cache(ChunkPlacement)
"""A search asks a hundred thousand times for few placements."""

ALONE_IN_FLIGHT = 2
"""Limit of a single stage (no pipeline) if rows are sent to experts while another microbatch's tasks run."""


@dataclass(frozen=True)
class Stages:
    """All stages of a pipeline, as every rank knows them."""

    chunks: tuple[Chunk, ...]
    """By position in the chain."""
    specs: dict[str, ShardSpec]
    """The specs of all parameters of the model. `tied`: a table held by the first and the last stage."""
    passing: tuple[tuple[TensorMeta, ...], ...]
    """The tensors sent from position i to i + 1."""
    placement: ChunkPlacement
    states: TensorMeta | None = None
    """The hidden states read by a head that is sharded over stages."""

    def of(self, stage: int) -> tuple[Chunk, ...]:
        """Return a stage's chunks."""
        return tuple(self.chunks[position] for position in self.placement.positions[stage])

    def ends(self, position: int) -> tuple[tuple[TensorMeta, ...], tuple[TensorMeta, ...]]:
        """Return (tensors that a position receives, tensors that the position sends)."""
        passing = ((), *self.passing, ())
        return passing[position], passing[position + 1]

    def message(self, stage: int) -> MessageMeta:
        """Return the tensors between a stage and its neighbours."""
        return message_forms(stage, self.placement, self.passing)


def chunks_of(partition: Sequence[int], head_over: tuple[str, ...] = ()) -> tuple[Chunk, ...]:
    """Return the chunks of a chain by position. `partition`: layers in each; `head_over`: as in Chunk."""
    runs = ranges_of(partition)
    return tuple(Chunk(run, position == 0, position == len(runs) - 1, head_over) for position, run in enumerate(runs))


def placement_of(config: Config) -> ChunkPlacement:
    """Return the placement of chunks on stages."""
    pipeline = config.layout.pipeline
    return _whole_chunks(pipeline.size, pipeline.chunks if pipeline.size > 1 else 1, pipeline.placement)


def piece_placement_of(config: Config, partition: Sequence[int]) -> ChunkPlacement:
    """Return the placement of pieces on stages if rows are sent as messages: a layer with experts is cut twice."""
    whole = placement_of(config)
    layers = ranges_of(partition)
    pieces = tuple(1 + 2 * sum(config.model.has_experts(layer) for layer in chunk_layers) for chunk_layers in layers)
    return ChunkPlacement(whole.num_stages, whole.num_chunks, whole.shape, pieces)


def rule_of(config: Config) -> ScheduleRule:
    """Return the run's schedule with the limit of microbatches in flight. A single stage has a limit of one, or of
    ALONE_IN_FLIGHT if rows are sent while another microbatch's tasks run."""
    settings = config.layout.pipeline
    if settings.size == 1:
        return MESSAGE_DRIVEN.limited(ALONE_IN_FLIGHT) if config.layout.data.in_pieces else ONE_F_ONE_B
    rule = settings.rule
    return rule if settings.limit == "auto" else rule.limited(settings.limit)
