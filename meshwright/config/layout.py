"""The config's sections on the layout of a job over its ranks. No torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, TypeAlias

from meshwright.compute.tensor.section import TensorSection, Whole
from meshwright.config.registry import entries
from meshwright.config.section import Count, Positive, Section, Size, union_of
from meshwright.ranks.transports import TransportName

if TYPE_CHECKING:
    from meshwright.compute.context.section import ContextKind
    from meshwright.strategies.data_parallel.section import Sync
    from meshwright.strategies.pipeline.schedule import ScheduleRule

    ContextName: TypeAlias = str
    ScheduleName: TypeAlias = str
    SyncName: TypeAlias = str
    TensorParallel = TensorSection
else:
    ContextName = Literal[tuple(entries("contexts"))]
    ScheduleName = Literal[tuple(entries("schedules"))]
    SyncName = Literal[tuple(entries("syncs"))]
    TensorParallel = union_of(entries("tensor"), "kind")


class DataParallel(Section):
    """Data parallelism: replicas of the model, each with a part of the batch, and the reduction of gradients."""

    size: Positive = 1
    """Replicas of the model; each takes batch.global / size samples a step."""
    sync: SyncName = "allreduce"
    """How gradients are reduced over replicas, and which ranks keep optimizer states, gradients and weights."""
    shard: Positive | None = None
    """The number of ranks that share one set of slices (HSDP); null: all `size`. zero1, zero2 and zero3 have slices."""
    expert: Positive = 1
    """The number of ranks, out of `size`, that share one set of a model's experts (expert parallelism)."""
    exchange: Literal["blocking", "messages"] = "blocking"
    """How rows are sent to experts: blocking: a layer waits; messages: while other microbatches' tasks run."""
    bucket: Size | Literal["auto"] = "auto"
    """Bytes that one collective reduces; auto: 16 MiB, and for more than 16 ranks 1 MiB a rank."""

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """The axes without messages of activations in a layer, with sizes: `replicate` (if shard groups), `data`.

        `data` counts the ranks of a shard group; with sharded experts, the group's subgroups of `expert` ranks.
        """
        shard = self.size if self.shard is None else self.shard
        groups = self.size // shard
        return (*((("replicate", groups),) if groups > 1 else ()), ("data", shard // self.expert))

    @property
    def expert_axes(self) -> tuple[tuple[str, int], ...]:
        """The axis that shards experts, if any."""
        return (("expert", self.expert),) if self.expert > 1 else ()

    @property
    def in_pieces(self) -> bool:
        """True if a layer is split at the exchange of rows with experts, and other tasks run during the exchange."""
        return self.exchange != "blocking" and self.expert > 1

    @property
    def token_axes(self) -> tuple[str, ...]:
        """The axes that split the batch's rows."""
        return tuple(name for name, _ in (*self.axes, *self.expert_axes))

    @property
    def strategy(self) -> Sync:
        """The registry's entry of the data-parallel strategy."""
        strategy: Sync = entries("syncs")[self.sync]
        return strategy


class PipelineSection(Section):
    """Pipeline parallelism: stages of contiguous layers, one a rank of the `pipe` axis."""

    size: Positive = 1
    """Stages."""
    chunks: Positive = 1
    """Parts of the model that a stage has; more make waits shorter and messages more."""
    placement: Literal["loop", "v"] = "loop"
    """Which parts these are: loop: every size-th part; v: from the first stage to the last and back."""
    schedule: ScheduleName = "message-driven"
    """How a stage chooses its next task."""
    limit: Positive | Literal["auto"] = "auto"
    """Microbatches in flight at a stage, of each chunk; auto: axonn the number of stages, message-driven by memory."""
    partition: tuple[Count, ...] | Literal["auto", "measured"] = "auto"
    """Layers of each stage's chunks in the model's order; auto: by counted cost; measured: by times at the start."""
    head: Literal["last", "spread"] = "last"
    """The stages with the head's table: the last, or every stage a part of the classes (vocabulary parallelism)."""

    @property
    def rule(self) -> ScheduleRule:
        """The registry's entry of the schedule."""
        rule: ScheduleRule = entries("schedules")[self.schedule]
        return rule

    @property
    def words(self) -> str:
        """`1f1b`, `message-driven, v of 2 chunks`, `message-driven, head over stages`."""
        chunks = f", {self.placement} of {self.chunks} chunks" if self.chunks > 1 else ""
        return f"{self.schedule}{chunks}{', head over stages' if self.head == 'spread' else ''}"

    @property
    def limit_by_memory(self) -> bool:
        """True if memory limits the microbatches in flight, so that the limit is decided when the run begins."""
        return self.size > 1 and self.limit == "auto" and self.rule.by_memory


class ContextParallel(Section):
    """Context parallelism: every sequence cut over ranks, also inside of attention."""

    size: Positive = 1
    """Ranks that a sequence is cut over."""
    kind: ContextName = "ulysses"
    """How these ranks reach each other's keys and values inside of attention."""

    @property
    def strategy(self) -> ContextKind:
        """The registry's entry of the kind."""
        strategy: ContextKind = entries("contexts")[self.kind]
        return strategy

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """The mesh's axis and its size; empty if sequences are not split."""
        return (("context", self.size),) if self.size > 1 else ()

    @property
    def token_axes(self) -> tuple[str, ...]:
        """The axes that split tokens: gradients of uncut parameters are summed over them."""
        return tuple(name for name, _ in self.axes)


def part_of_axis(mention: str) -> tuple[str, int | None]:
    """Parse a word of `order`: `row:2` -> ("row", 2); `row`, the remaining part of the axis, -> ("row", None)."""
    name, _, size = mention.partition(":")
    return (name, int(size)) if size.isdecimal() and int(size) > 0 else (mention, None)


class Layout(Section):
    """How the job is laid over ranks, and the carrier of messages. Ranks: data x pipeline x context x tensor.

    In `order` axes of size 1 may be left out. An axis that is named again is split: `row:2` is a part of size 2, and
    the last mention is the remaining part, so that [row:2, col:2, row, col] numbers a square of ranks by blocks. auto:
    replicate, data, pipe, expert, context, then the axes of the tensor section.
    """

    data: DataParallel = DataParallel()
    """Replicas of the model, and the reduction of gradients."""
    pipeline: PipelineSection = PipelineSection()
    """Stages of contiguous layers."""
    context: ContextParallel = ContextParallel()
    """Every sequence cut over ranks, also inside of attention."""
    tensor: TensorParallel = Whole()
    """Every layer cut over ranks."""
    transport: Literal["auto", TransportName] = "auto"
    """The carrier of messages; threads: ranks in one process; auto: installed MPI on CPUs, else torch (gloo, NCCL)."""
    order: tuple[str, ...] | Literal["auto"] = "auto"
    """The axes, outermost first: ranks that differ on the last alone are neighbours; row:2 is a part of an axis."""
    ranks_per_node: Positive | Literal["auto"] = "auto"
    """Neighbours that share a node; auto: the number of ranks that the launcher has started on one."""

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """The mesh's axes, outermost first. Axes of one rank that `order` omits precede the others."""
        axes = (*self.data.axes, ("pipe", self.pipeline.size), *self.layer_axes)
        if self.order == "auto":
            return axes
        places = [part_of_axis(mention)[0] for mention in self.order]
        return tuple(sorted(axes, key=lambda axis: places.index(axis[0]) if axis[0] in places else -1))

    @property
    def nesting(self) -> tuple[tuple[str, int], ...]:
        """The axes with their sizes, outermost first. An axis that `order` splits appears once for each part."""
        mentions = [] if self.order == "auto" else [part_of_axis(mention) for mention in self.order]
        left = dict(self.axes)
        if len({name for name, _ in mentions}) == len(mentions):
            return self.axes
        alone = [axis for axis in self.axes if axis[0] not in dict(mentions)]
        nested = []
        for name, size in mentions:
            nested.append((name, size or left.get(name, 1)))
            left[name] = left.get(name, 1) // (size or 1)
        return *alone, *nested

    @property
    def layer(self) -> tuple[int, ContextParallel, TensorSection]:
        """The parts of a layout that determine the kernels and messages of a layer."""
        return self.data.expert, self.context, self.tensor

    @property
    def layer_axes(self) -> tuple[tuple[str, int], ...]:
        """The axes with ranks that compute a layer together and wait for each other inside the layer."""
        return *self.data.expert_axes, *self.context.axes, *self.tensor.axes

    @property
    def peer_axes(self) -> tuple[str, ...]:
        """The axes with ranks that run a stage's tasks in one order, since the tasks contain collectives."""
        data = ("data",) if self.data.strategy.slices else ()
        return *data, *(name for name, _ in self.layer_axes)

    @property
    def summary(self) -> str:
        """The axes outermost first: `data 2 (allreduce), pipe 2 (gpipe), row 2, col 2`. One stage: no `pipe`.

        With an `order` in the run: `branch 2, data 2 (allreduce), in this order`.
        """
        kinds = {"data": self.data.sync, "pipe": self.pipeline.words, "context": self.context.kind}
        notes = {name: f" ({strategy})" for name, strategy in kinds.items()}
        shown = [(name, size) for name, size in self.nesting if name != "pipe" or size > 1]
        listed = ", ".join(f"{name} {size}{notes.get(name, '')}" for name, size in shown)
        return listed if self.order == "auto" else f"{listed}, in this order"

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The axes that split the batch's rows, or the sequences of rows. Each rank computes different losses."""
        return *self.data.token_axes, *self.context.token_axes, *self.tensor.batch_axes

    @property
    def token_axes(self) -> tuple[str, ...]:
        """The axes that split the batch's tokens: gradients of uncut parameters are summed over them."""
        return *self.data.token_axes, *self.context.token_axes, *self.tensor.token_axes

    @property
    def world_size(self) -> int:
        return math.prod(size for _, size in self.axes)
