"""The sections of a config, frozen and typed, one for each of the YAML file's. The layout's: layout.py; rules that
join them: rules.py.

No torch here: a bad config must fail in the time that reading it takes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from pydantic import BeforeValidator, Field, model_validator

from meshwright.config.kinds import with_kind
from meshwright.config.layout import Layout
from meshwright.data.section import DataSection
from meshwright.models.section import Gpt2, Network
from meshwright.registry import entries
from meshwright.section import Count, Positive, Rule, Seconds, Section, Share, Size, divisors, union_of

if TYPE_CHECKING:
    from meshwright.optim.section import Update

    OptimizerName: TypeAlias = str
    SinkName: TypeAlias = str
    Model = Network
    Data = DataSection
else:
    OptimizerName = Literal[tuple(entries("optimizers"))]
    SinkName = Literal[tuple(entries("sinks"))]
    Model = union_of(entries("models"), "family", default="gpt2")
    Data = union_of(entries("data"), "kind")


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
    best: bool = False
    """Write one at each validation that is the best so far, and keep it beside the newest."""


class Validation(Section):
    """Held-out loss over `batches` global batches, every `every` steps (0: never)."""

    every: Count = 0
    batches: Positive = 8
    metric: Literal["loss", "accuracy"] = "loss"
    """The number by which a validation is better than another."""
    patience: Count = 0
    """The run ends after so many validations in a row that are no better than the best (0: never)."""


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
    epochs: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Passes over the training data, in place of steps; becomes steps when the data is prepared."""
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
    def batch_summary(self) -> str:
        """The parts of a step's batch in a sentence, with the number of microbatches by the name others give it."""
        count = self.num_microbatches
        replicas = f"{self.layout.data.size} replica" + "s" * (self.layout.data.size > 1)
        parts = f"{replicas} x {count} microbatch{'es' * (count > 1)} of {self.micro}"
        named = f"gradient accumulation over {count}" if count > 1 else "no gradient accumulation"
        return f"batch.global={self.batch.global_}: {parts} ({named})"

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
