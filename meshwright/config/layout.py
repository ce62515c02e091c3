"""The config's layout: which axes a job's ranks form, and how each is used."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, TypeAlias

from meshwright.ranks.section import TransportName
from meshwright.registry import entries
from meshwright.section import Count, Positive, Rule, Section, Size, union_of
from meshwright.tensor.section import TensorSection, Whole

if TYPE_CHECKING:
    from meshwright.data_parallel.section import Sync
    from meshwright.pipeline.schedule import ScheduleRule

    SyncName: TypeAlias = str
    ScheduleName: TypeAlias = str
    TensorParallel = TensorSection
else:
    SyncName = Literal[tuple(entries("syncs"))]
    ScheduleName = Literal[tuple(entries("schedules"))]
    TensorParallel = union_of(entries("tensor"), "kind")


class DataParallel(Section):
    """`sync`: how replicas agree on a gradient; `bucket`: bytes reduced by one collective."""

    size: Positive = 1
    sync: SyncName = "allreduce"
    bucket: Size = 16 * 2**20

    @property
    def strategy(self) -> Sync:
        """The registry's entry of the data-parallel strategy."""
        strategy: Sync = entries("syncs")[self.sync]
        return strategy

    @property
    def rules(self) -> tuple[Rule, ...]:
        return self.strategy.rules


class PipelineSection(Section):
    """Stages of contiguous layers, one a rank of the `pipe` axis.

    `limit`: microbatches that a stage holds at once, where the schedule's order is not fixed; auto: axonn the number of
    stages, message-driven what memory allows. `partition`: layers a stage; auto: balanced by counted cost; measured: by
    time, measured when the run begins.
    """

    size: Positive = 1
    schedule: ScheduleName = "message-driven"
    limit: Positive | Literal["auto"] = "auto"
    partition: tuple[Count, ...] | Literal["auto", "measured"] = "auto"

    @property
    def rule(self) -> ScheduleRule:
        """The registry's entry of the schedule."""
        rule: ScheduleRule = entries("schedules")[self.schedule]
        return rule

    @property
    def limit_by_memory(self) -> bool:
        """Whether memory says, when the run begins, how many microbatches a stage may hold."""
        return self.size > 1 and self.limit == "auto" and self.rule.by_memory


class Layout(Section):
    """How the job is laid over its ranks, and what carries its messages.

    `order`: the axes, outermost first: ranks that differ on the last one only are neighbours. Axes of size 1 may be
    left out. auto: data, pipe, then the tensor section's. `ranks_per_node`: neighbours that share a node (topology.py);
    auto: as many as the launcher has started on one.
    """

    data: DataParallel = DataParallel()
    pipeline: PipelineSection = PipelineSection()
    tensor: TensorParallel = Whole()
    transport: Literal["auto", TransportName] = "auto"
    order: tuple[str, ...] | Literal["auto"] = "auto"
    ranks_per_node: Positive | Literal["auto"] = "auto"

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """The mesh's axes, outermost first. Those of one rank that `order` leaves out come before the others."""
        axes = (("data", self.data.size), ("pipe", self.pipeline.size), *self.tensor.axes)
        if self.order == "auto":
            return axes
        places = {name: place for place, name in enumerate(self.order)}
        return tuple(sorted(axes, key=lambda axis: places.get(axis[0], -1)))

    @property
    def summary(self) -> str:
        """`data 2 (allreduce), pipe 2 (gpipe), row 2, col 2`: the axes outermost first; no stages, no pipe.

        With an order of the run's own: `branch 2, data 2 (allreduce), in this order`.
        """
        notes = {"data": f" ({self.data.sync})", "pipe": f" ({self.pipeline.schedule})"}
        shown = [(name, size) for name, size in self.axes if name != "pipe" or size > 1]
        listed = ", ".join(f"{name} {size}{notes.get(name, '')}" for name, size in shown)
        return listed if self.order == "auto" else f"{listed}, in this order"

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The axes that split the batch's rows."""
        return ("data", *self.tensor.batch_axes)

    @property
    def token_axes(self) -> tuple[str, ...]:
        """The axes that split the batch's tokens: gradients of uncut parameters are summed over them."""
        return ("data", *self.tensor.token_axes)

    @property
    def world_size(self) -> int:
        return math.prod(size for _, size in self.axes)
