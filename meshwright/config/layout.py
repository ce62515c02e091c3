"""The config's layout: which axes a job's ranks form, and how each is used."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from meshwright.registry import entries
from meshwright.section import Count, Positive, Section, Size, union_of
from meshwright.tensor.section import TensorSection, Whole

Sync = Literal["server-loss", "server-gradient", "rooted", "allreduce", "ring", "zero1", "fsdp"]


class DataParallel(Section):
    """`sync`: how replicas agree on a gradient; `bucket`: bytes reduced by one collective."""

    size: Positive = 1
    sync: Sync = "allreduce"
    bucket: Size = 16 * 2**20


if TYPE_CHECKING:
    TensorParallel = TensorSection
else:
    TensorParallel = union_of(entries("tensor"), "kind")


class Pipeline(Section):
    """Stages of contiguous layers, one a rank of the `pipe` axis.

    `limit`: microbatches that a stage of schedule axonn or message-driven holds at once; auto: axonn the number of
    stages, message-driven what memory allows. `partition`: layers a stage; auto: balanced by counted cost; measured: by
    time, measured when the run begins.
    """

    size: Positive = 1
    schedule: Literal["gpipe", "1f1b", "axonn", "message-driven"] = "message-driven"
    limit: Positive | Literal["auto"] = "auto"
    partition: tuple[Count, ...] | Literal["auto", "measured"] = "auto"


class Layout(Section):
    """How the job is laid over its ranks, and what carries its messages.

    `order`: the axes, outermost first: ranks that differ on the last one only are neighbours. Axes of size 1 may be
    left out. auto: data, pipe, then the tensor section's. `ranks_per_node`: neighbours that share a node (topology.py);
    auto: as many as the launcher has started on one.
    """

    data: DataParallel = DataParallel()
    pipeline: Pipeline = Pipeline()
    tensor: TensorParallel = Whole()
    transport: Literal["auto", "torch", "mpi"] = "auto"
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
