"""The sections of a config, frozen and typed, one for each of the YAML file's. Rules that join them: rules.py.

No torch here: a bad config must fail in the time that reading it takes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from pydantic import BeforeValidator, Field, model_validator

from meshwright.config.kinds import with_kind
from meshwright.data.section import DataSection
from meshwright.models.section import Gpt2, Network
from meshwright.ranks.section import TransportName
from meshwright.registry import entries
from meshwright.section import Count, Positive, Rule, Seconds, Section, Share, Size, divisors, union_of
from meshwright.tensor.section import TensorSection, Whole

if TYPE_CHECKING:
    from meshwright.context.section import ContextKind
    from meshwright.data_parallel.section import Sync
    from meshwright.optim.section import Update
    from meshwright.pipeline.schedule import ScheduleRule

    ContextName: TypeAlias = str
    OptimizerName: TypeAlias = str
    ScheduleName: TypeAlias = str
    SinkName: TypeAlias = str
    SyncName: TypeAlias = str
    Model = Network
    Data = DataSection
    TensorParallel = TensorSection
else:
    ContextName = Literal[tuple(entries("contexts"))]
    OptimizerName = Literal[tuple(entries("optimizers"))]
    ScheduleName = Literal[tuple(entries("schedules"))]
    SinkName = Literal[tuple(entries("sinks"))]
    SyncName = Literal[tuple(entries("syncs"))]
    Model = union_of(entries("models"), "family", default="gpt2")
    Data = union_of(entries("data"), "kind")
    TensorParallel = union_of(entries("tensor"), "kind")


PRECISIONS = {
    "bf16": {"level": "O2", "dtype": "bf16"},
    "fp16": {"level": "O2", "dtype": "fp16"},
    "float32": {"level": "O0", "dtype": "float32"},
    "float64": {"level": "O0", "dtype": "float64"},
}
"""Precisions that a run file may name in a word: `precision: bf16`."""


class BatchSection(Section):
    """Samples (sequences, images): `global` a step, `micro` a microbatch of one replica (auto: all of its part)."""

    global_: Positive = Field(default=64, alias="global")
    micro: Positive | Literal["auto"] = "auto"


class DataParallel(Section):
    """`sync`: how replicas agree on a gradient; `bucket`: bytes reduced by one collective.

    `shard`: how many of the `size` ranks share one set of slices (hybrid sharding, HSDP); null: all of them. `expert`:
    how many of them share one set of experts (expert parallelism); tokens go to the ranks that hold their experts.
    """

    size: Positive = 1
    sync: SyncName = "allreduce"
    shard: Positive | None = None
    expert: Positive = 1
    bucket: Size = 16 * 2**20

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """The axes whose ranks need nothing of each other in a layer, with their sizes: shard groups, where there are
        several, and the ranks of one, or its groups of ranks that share experts."""
        shard = self.size if self.shard is None else self.shard
        groups = self.size // shard
        return (*((("replicate", groups),) if groups > 1 else ()), ("data", shard // self.expert))

    @property
    def expert_axes(self) -> tuple[tuple[str, int], ...]:
        """The axis whose ranks hold different experts, where there is one."""
        return (("expert", self.expert),) if self.expert > 1 else ()

    @property
    def token_axes(self) -> tuple[str, ...]:
        """The axes that split the batch's rows."""
        return tuple(name for name, _ in (*self.axes, *self.expert_axes))

    @property
    def strategy(self) -> Sync:
        """The registry's entry of the data-parallel strategy."""
        strategy: Sync = entries("syncs")[self.sync]
        return strategy

    @property
    def rules(self) -> tuple[Rule, ...]:
        return self.strategy.rules


class PipelineSection(Section):
    """Stages, one a rank of the `pipe` axis, each of `chunks` parts of contiguous layers.

    `placement`: which parts these are (pipeline/placement.py). `limit`: microbatches that a stage holds at once, where
    the schedule's order is not fixed, each counted once for every chunk that holds it; auto: axonn the number of
    stages, message-driven what memory allows. `partition`: layers of each stage, or of all stages' chunks in the
    model's order; auto: balanced by counted cost, with several chunks what the clock finds fastest; measured: what it
    finds fastest with times that are measured when the run begins.
    """

    size: Positive = 1
    chunks: Positive = 1
    placement: Literal["loop", "v"] = "loop"
    schedule: ScheduleName = "message-driven"
    limit: Positive | Literal["auto"] = "auto"
    partition: tuple[Count, ...] | Literal["auto", "measured"] = "auto"

    @property
    def rule(self) -> ScheduleRule:
        """The registry's entry of the schedule."""
        rule: ScheduleRule = entries("schedules")[self.schedule]
        return rule

    @property
    def words(self) -> str:
        """`1f1b`, `message-driven, v of 2 chunks`."""
        chunks = f", {self.placement} of {self.chunks} chunks" if self.chunks > 1 else ""
        return f"{self.schedule}{chunks}"

    @property
    def limit_by_memory(self) -> bool:
        """Whether memory says, when the run begins, how many microbatches a stage may hold."""
        return self.size > 1 and self.limit == "auto" and self.rule.by_memory


class ContextParallel(Section):
    """Every sequence cut over `size` ranks, also inside of attention, where the `kind` says what they send."""

    size: Positive = 1
    kind: ContextName = "ulysses"

    @property
    def strategy(self) -> ContextKind:
        """The registry's entry of the kind."""
        strategy: ContextKind = entries("contexts")[self.kind]
        return strategy

    @property
    def rules(self) -> tuple[Rule, ...]:
        return self.strategy.rules

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """The mesh's axis and its size; none where sequences are whole."""
        return (("context", self.size),) if self.size > 1 else ()

    @property
    def token_axes(self) -> tuple[str, ...]:
        """The axes that split tokens: gradients of uncut parameters are summed over them."""
        return tuple(name for name, _ in self.axes)


class Layout(Section):
    """How the job is laid over its ranks, and what carries its messages.

    `order`: the axes, outermost first: ranks that differ on the last one only are neighbours. Axes of size 1 may be
    left out. auto: replicate, data, pipe, expert, context, then the tensor section's. `ranks_per_node`: neighbours that
    share a node (topology.py); auto: as many as the launcher has started on one.
    """

    data: DataParallel = DataParallel()
    pipeline: PipelineSection = PipelineSection()
    context: ContextParallel = ContextParallel()
    tensor: TensorParallel = Whole()
    transport: Literal["auto", TransportName] = "auto"
    order: tuple[str, ...] | Literal["auto"] = "auto"
    ranks_per_node: Positive | Literal["auto"] = "auto"

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """The mesh's axes, outermost first. Those of one rank that `order` leaves out come before the others."""
        axes = (*self.data.axes, ("pipe", self.pipeline.size), *self.layer_axes)
        if self.order == "auto":
            return axes
        places = {name: place for place, name in enumerate(self.order)}
        return tuple(sorted(axes, key=lambda axis: places.get(axis[0], -1)))

    @property
    def layer(self) -> tuple[int, ContextParallel, TensorSection]:
        """How a layer is cut: what a rank runs and sends in it depends on nothing else of a layout."""
        return self.data.expert, self.context, self.tensor

    @property
    def layer_axes(self) -> tuple[tuple[str, int], ...]:
        """The axes whose ranks compute a layer together, and wait for each other in it."""
        return *self.data.expert_axes, *self.context.axes, *self.tensor.axes

    @property
    def peer_axes(self) -> tuple[str, ...]:
        """The axes whose ranks do a stage's tasks in one order: they meet inside of them."""
        data = ("data",) if self.data.strategy.slices else ()
        return *data, *(name for name, _ in self.layer_axes)

    @property
    def summary(self) -> str:
        """`data 2 (allreduce), pipe 2 (gpipe), row 2, col 2`: the axes outermost first; no stages, no pipe.

        With an order of the run's own: `branch 2, data 2 (allreduce), in this order`.
        """
        kinds = {"data": self.data.sync, "pipe": self.pipeline.words, "context": self.context.kind}
        notes = {name: f" ({kind})" for name, kind in kinds.items()}
        shown = [(name, size) for name, size in self.axes if name != "pipe" or size > 1]
        listed = ", ".join(f"{name} {size}{notes.get(name, '')}" for name, size in shown)
        return listed if self.order == "auto" else f"{listed}, in this order"

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The axes that split the batch's rows, or rows' sequences: each rank has losses of its own."""
        return *self.data.token_axes, *self.context.token_axes, *self.tensor.batch_axes

    @property
    def token_axes(self) -> tuple[str, ...]:
        """The axes that split the batch's tokens: gradients of uncut parameters are summed over them."""
        return *self.data.token_axes, *self.context.token_axes, *self.tensor.token_axes

    @property
    def world_size(self) -> int:
        return math.prod(size for _, size in self.axes)


class LossScale(Section):
    """Dynamic loss scaling for fp16: halved on overflow, doubled after `interval` good steps.

    An overflow skips the step; a run that skips `max_skips` in a row ends.
    """

    initial: Annotated[float, Field(gt=0)] = 65536.0
    interval: Positive = 2000
    max_skips: Positive = 25


class Precision(Section):
    """O0: all in `dtype`. O1: fp32 weights, autocast. O2: half weights, fp32 master weights and states.

    `accumulate`: what O2's gradients of several microbatches are added up in, and summed over ranks: float32, or as
    they are `stored`, in half precision, with half the memory and traffic (AxoNN, arXiv 2110.13005).
    `tf32`: a GPU multiplies float32 matrices in its tensor cores, with 10 bits of mantissa and sums in float32.
    """

    level: Literal["O0", "O1", "O2"] = "O0"
    dtype: Literal["float32", "float64", "bf16", "fp16"] = "float32"
    accumulate: Literal["float32", "stored"] = "float32"
    tf32: bool = True
    loss_scale: LossScale = LossScale()


def parse_every(value: object) -> object:
    """`{every: 2}` -> 2. Anything else is left to the type check."""
    return value["every"] if isinstance(value, dict) and value.keys() == {"every"} else value


class Offload(Section):
    """Master weights and moments off the device: in host memory, or in a memory-mapped file in the run's folder.

    `bucket`: elements that are on the device at once for the optimizer; `chunk`: buckets that one collective reduces.
    """

    to: Literal["none", "host", "disk"] = "none"
    bucket: Size = 16 * 2**20
    chunk: Positive = 4


class MemorySection(Section):
    """`empty_cache_every`: give the allocator's free memory back every so many steps (0: never; costs time).

    `recompute` (activation checkpointing): none; auto: groups of as many layers as a factor of the stage's layers that
    is nearest to the square root of the network's; {every: n}: of n layers; selective: the attention cores only.
    `summa`: how operands of 2-D products travel: gather: whole, weights once a step; whole: weights anew for each
    product; stream: in q panels; auto: as free memory allows.
    """

    recompute: Annotated[Literal["none", "auto", "selective"] | Positive, BeforeValidator(parse_every)] = "none"
    offload: Offload = Offload()

    empty_cache_every: Count = 0
    summa: Literal["auto", "gather", "whole", "stream"] = "auto"


class ScheduleSection(Section):
    """Learning rate: linear warm-up over `warmup` steps, the peak for the share `stable` of the others, then `decay`
    down to `floor` times the peak. With a `stable` share this is warmup-stable-decay (WSD, arXiv 2404.06395), for which
    `sqrt`, 1 - sqrt(progress), is the form of arXiv 2405.18392. `inverse-sqrt` is that of arXiv 1706.03762: the peak
    times sqrt(warmup / step), which knows no end of the run.
    """

    warmup: Count = 0
    stable: Share = 0.0
    decay: Literal["constant", "linear", "cosine", "sqrt", "inverse-sqrt"] = "constant"
    floor: Annotated[float, Field(ge=0, le=1)] = 0.1


class OptimizerSection(Section):
    """An update and its numbers. Weight decay acts on matrices only; `clip` bounds the global gradient norm."""

    name: OptimizerName = "adamw"
    lr: Annotated[float, Field(gt=0, le=1000)] = 3e-4
    betas: tuple[Share, Share] = (0.9, 0.95)
    epsilon: Annotated[float, Field(gt=0)] = 1e-8
    momentum: Share = 0.9
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    clip: Annotated[float, Field(gt=0)] | None = 1.0
    schedule: ScheduleSection = ScheduleSection()

    @property
    def update(self) -> Update:
        """The registry's entry of the optimizer."""
        update: Update = entries("optimizers")[self.name]
        return update

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rules that the optimizer has for the rest of the run."""
        return self.update.rules


class CheckpointSection(Section):
    """A checkpoint every `every` steps and at the end; the newest `keep` stay. `every: 0`: only at the end."""

    every: Count = 0
    keep: Positive = 3


class Validation(Section):
    """Held-out loss over `batches` global batches, every `every` steps (0: never)."""

    every: Count = 0
    batches: Positive = 8


class Check(Section):
    """Replicas compare hashes of their weights every `every` steps, and of all they save (0: never)."""

    every: Count = 1


class Metrics(Section):
    """`sinks`: who gets each step's numbers besides metrics.jsonl; `project`: under which name; `offline`: all stays in
    the run's folder. `peak_flops` of one device, for mfu: auto looks the device up, and says unknown where it is not
    listed.
    """

    sinks: tuple[SinkName, ...] = ("tensorboard",)
    project: Annotated[str, Field(min_length=1)] = "meshwright"
    offline: bool = True
    peak_flops: Annotated[float, Field(gt=0)] | Literal["auto"] = "auto"

    @model_validator(mode="before")
    @classmethod
    def read_old_field(cls, tree: object) -> object:
        """`tensorboard: false`, as version 0.1.0 had it."""
        if not isinstance(tree, dict) or not isinstance(tree.get("tensorboard"), bool) or "sinks" in tree:
            return tree
        rest = {name: value for name, value in tree.items() if name != "tensorboard"}
        return rest | {"sinks": ["tensorboard"] if tree["tensorboard"] else []}


class Logging(Section):
    """A run prints what is of this level or a later one. debug: a line for every step, with its phases; info: one now
    and then, and how the run begins and ends; warning: what may be wrong; error: what ends the run.
    """

    level: Literal["debug", "info", "warning", "error"] = "info"


class Timeout(Section):
    """Seconds. `join`: how long the ranks wait for each other at the start; `wait`: how long one may wait for another
    in a collective or for a message. Then every rank says where it is, and the job ends.
    """

    join: Seconds = 30.0
    wait: Seconds = 600.0


class Config(Section):
    """One run, whole."""

    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 1
    model: Model = Gpt2()
    weights: str | None = None
    """The Hugging Face folder, or name of one, whose weights the run starts from; null: it draws its own. A run file
    says `model: {from: ...}`, which gives the model's fields and the tokenizer as well."""
    data: Data = entries("data")["text"]()
    batch: BatchSection = BatchSection()
    layout: Layout = Layout()
    precision: Precision = Precision()
    memory: MemorySection = MemorySection()
    optimizer: OptimizerSection = OptimizerSection()
    steps: Positive = 1000
    checkpoint: CheckpointSection = CheckpointSection()
    validation: Validation = Validation()
    check: Check = Check()
    metrics: Metrics = Metrics()
    logging: Logging = Logging()
    device: Literal["auto", "cpu", "cuda"] = "auto"
    compile: Literal["auto", "islands", "none"] = "auto"
    """islands: what is element-wise between two products is compiled (tensor/islands.py); auto: on a GPU."""
    threads: Positive | Literal["auto"] = "auto"
    """CPU threads a rank; auto: the machine's cores divided by the ranks on it."""
    timeout: Timeout = Timeout()
    restarts: Count = 0
    """How often the launcher restarts a job that lost a worker, from its newest complete checkpoint."""

    @model_validator(mode="before")
    @classmethod
    def decide_kind_of_data(cls, tree: object) -> object:
        """Decide the kind of data once, here: who reads the config finds it written."""
        if not isinstance(tree, dict):
            return tree
        return tree | {"data": with_kind(tree.get("data", {}), tree.get("model"))}

    @property
    def micro(self) -> int:
        """Samples in one microbatch of one replica.

        auto: all of the replica's; with stages the largest part that makes two microbatches for each of them.
        """
        if self.batch.micro != "auto":
            return self.batch.micro
        sizes = dict(self.layout.axes)
        rows = math.prod(sizes[axis] for axis in self.layout.tensor.batch_axes)
        stages = self.layout.pipeline.size
        wanted = self.replica_batch // (2 * stages) if stages > 1 else self.replica_batch
        fitting = [size for size in divisors(self.replica_batch) if size <= wanted and size % rows == 0]
        return max(fitting, default=min(rows, self.replica_batch) if stages > 1 else self.replica_batch)

    @property
    def replica_batch(self) -> int:
        """Sequences that one data-parallel replica sees a step."""
        return self.batch.global_ // self.layout.data.size

    @property
    def num_microbatches(self) -> int:
        return self.replica_batch // self.micro

    @property
    def copies(self) -> tuple[str, int] | None:
        """The axis that cuts heads and how many of its neighbours hold the same ones, where it has more ranks than
        there are to deal out."""
        axis, (_, count) = self.layout.tensor.heads_axis, self.model.branches
        size = dict(self.layout.tensor.axes).get(axis, 1)
        return (axis, size // count) if size > count and size % count == 0 else None

    @property
    def widens_gradients(self) -> bool:
        """Whether half-precision weights have float32 gradients. A single microbatch adds nothing up."""
        return self.precision.accumulate == "float32" and self.num_microbatches > 1
