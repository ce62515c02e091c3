"""The sections of a config, frozen and typed, one for each section of the YAML file.

The layout's sections are in layout.py, rules over several sections in rules.py. No torch is imported here, so that a
bad config fails at once.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self, TypeAlias

from pydantic import BeforeValidator, Field, model_validator

from meshwright.compute.bits.section import Bits, decided_bits
from meshwright.compute.models.preference_section import Preference
from meshwright.compute.models.section import Network
from meshwright.config.kinds import with_kind
from meshwright.config.layout import Layout
from meshwright.config.registry import default_family, entries
from meshwright.config.section import Count, Positive, Seconds, Section, Share, Size, divisors, union_of
from meshwright.data.section import DataSection
from meshwright.ranks.asked import Ranks
from meshwright.ranks.errors import ConfigError
from meshwright.ranks.grid import Grid
from meshwright.ranks.timeouts import Timeouts
from meshwright.strategies.memory.section import KEEPS_ALL, ActivationPolicy, policy_of

if TYPE_CHECKING:
    from meshwright.strategies.optim.section import Update

    ActivationName: TypeAlias = str
    OptimizerName: TypeAlias = str
    SinkName: TypeAlias = str
    Model = Network
    Data = DataSection
else:
    ActivationName = Literal[tuple(entries("activations"))]
    OptimizerName = Literal[tuple(entries("optimizers"))]
    SinkName = Literal[tuple(entries("sinks"))]
    Model = union_of(entries("models"), "family", default=default_family())
    Data = union_of(entries("data"), "kind")


GRAPHS = ("kernels", "blocks")
"""Values of `compile` with a graph for each layer."""


class Timeout(Section):
    """How long ranks wait for each other. Then every rank reports its place in the program, and the job ends."""

    join: Seconds = Timeouts.join
    """Seconds for all ranks to join, at the start."""
    wait: Seconds = Timeouts.wait
    """Seconds that one rank may wait for another in a collective or for a message."""


class BatchSection(Section):
    """Samples (sequences, images, pairs) of a step and of a microbatch."""

    global_: Positive = Field(default=64, alias="global")
    """Samples a step, of all replicas together; each accumulates global / layout.data.size / micro microbatches."""
    micro: Positive | Literal["auto"] = "auto"
    """Samples that a replica computes at once; fewer take less memory. auto: the replica's part, less with stages."""


class LossScale(Section):
    """Dynamic loss scaling for fp16: an overflow skips the step and halves the factor."""

    initial: Annotated[float, Field(gt=0)] = 65536.0
    """The factor on the loss at the first step."""
    interval: Positive = 2000
    """Steps without an overflow after which the factor doubles."""
    max_skips: Positive = 25
    """Steps in a row that may overflow, and be skipped, before the run ends."""


STORED = "meshwright.compute.tensor.products:PLAIN"
PRODUCTS = {"auto": STORED, "stored": STORED, "fp8": STORED, "float32": "meshwright.compute.tensor.widened:WIDENED"}
"""The products of a kit's layers, by precision.products. With fp8 some products are narrowed (tensor/fp8.py)."""


class Precision(Section):
    """The number formats of weights, products and gradients; a word sets a level and its dtype."""

    level: Literal["O0", "O1", "O2"] = "O0"
    """O0: all in dtype; O1: float32 weights, autocast; O2: half-precision weights, float32 masters and states."""
    dtype: Literal["float32", "float64", "bf16", "fp16"] = "float32"
    """The format of products: float32 or float64 with O0, bf16 or fp16 with O1 and O2."""
    accumulate: Literal["float32", "stored"] = "float32"
    """How O2 adds gradients up over microbatches and ranks; stored: in dtype, half the memory (arXiv 2110.13005)."""
    products: Literal["auto", "stored", "float32", "fp8"] = "auto"
    """fp8: of layers' linears in e4m3. Else of halves on a CPU: stored, or as float32; auto: float32 if faster."""
    tf32: bool = True
    """A GPU multiplies float32 matrices in its tensor cores: 10 bits of mantissa, sums in float32."""
    loss_scale: LossScale = LossScale()
    """The factor on the loss that keeps fp16's small gradients; no other dtype has one."""

    @property
    def in_fp8(self) -> bool:
        """True if linears of layers multiply in FP8."""
        return self.products == "fp8"

    @property
    def widens(self) -> bool:
        """True if products of half-precision tensors are computed as float32 products of the same numbers."""
        return self.products == "float32"


def parse_every(value: object) -> object:
    """Unwrap `{every: 2}` -> 2. Any other value is left to the type check."""
    return value["every"] if isinstance(value, dict) and value.keys() == {"every"} else value


class Offload(Section):
    """Master weights and moments off the device, which precision.level=O2 has."""

    to: Literal["none", "host", "disk"] = "none"
    """host: in the memory of the machine; disk: in a memory-mapped file in the run's folder."""
    bucket: Size = 16 * 2**20
    """Elements that the optimizer has on the device at once; a multiple of 128."""
    chunk: Positive = 4
    """Buckets that one collective reduces."""


class MemorySection(Section):
    """Memory for time: parts of a step that are computed or fetched again rather than kept."""

    recompute: Annotated[ActivationName | Positive, BeforeValidator(parse_every)] = KEEPS_ALL
    """The activations that are kept, computed again or moved: a policy, or {every: n} for groups of n layers."""
    offload: Offload = Offload()
    """Master weights and moments in host memory or on disk."""
    logits: Literal["auto"] | Size = "auto"
    """Bytes of a head's logits at a time; auto: 8 MiB in float32 on a CPU, 1 GiB on a GPU. A plan may choose a size."""
    empty_cache_every: Count = 0
    """Steps between two returns of the allocator's free memory, which cost time; 0: never."""
    summa: Literal["auto", "gather", "whole", "stream"] = "auto"
    """2-D operands travel whole, weights once a step (gather) or each time (whole), or in panels (stream)."""

    @property
    def policy(self) -> ActivationPolicy:
        """The activation policy."""
        return policy_of(self.recompute)


class Restarts(Section):
    """How a job that lost a rank continues; a number sets `times`."""

    times: Count = 0
    """How often the launcher starts the job again, from its newest complete checkpoint."""
    shrink: bool = False
    """A job that lost a rank continues with fewer replicas; under torchrun, with the ranks that torchrun starts."""

    @model_validator(mode="before")
    @classmethod
    def read_number(cls, value: object) -> object:
        """Accept a bare number, as in checkpoints of version 0.1."""
        return {"times": value} if isinstance(value, int) and not isinstance(value, bool) else value


class ScheduleSection(Section):
    """The learning rate over the run: up to its peak, optimizer.lr, then down.

    With a `stable` share this is warmup-stable-decay (WSD, arXiv 2404.06395), for which `sqrt`, 1 - sqrt(progress), is
    the form of arXiv 2405.18392. `inverse-sqrt` is that of arXiv 1706.03762: the peak times sqrt(warmup / step), which
    knows no end of the run.
    """

    warmup: Count = 0
    """Steps of warm-up: the rate rises linearly to its peak."""
    stable: Share = 0.0
    """The share of the steps after the warm-up that stay at the peak (WSD)."""
    decay: Literal["constant", "linear", "cosine", "sqrt", "inverse-sqrt"] = "constant"
    """The form of the way down; constant: the rate stays at its peak."""
    floor: Annotated[float, Field(ge=0, le=1)] = 0.1
    """The rate at the end, as a share of the peak."""


class OptimizerSection(Section):
    """How weights are stepped."""

    name: OptimizerName = "adamw"
    """The update."""
    lr: Annotated[float, Field(gt=0, le=1000)] = 3e-4
    """The learning rate at its peak."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    """AdamW's decay of the first and the second moment a step."""
    epsilon: Annotated[float, Field(gt=0)] = 1e-8
    """AdamW's addend to the root of the second moment."""
    momentum: Share = 0.9
    """The share of the last update that goes on into the next."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """The decay of matrices a step, times the rate; biases and norms have none."""
    clip: Annotated[float, Field(gt=0)] | None = 1.0
    """The largest norm of all gradients together, which larger ones are scaled down to; null: any."""
    schedule: ScheduleSection = ScheduleSection()
    """The learning rate over the run."""
    states: Literal["float32", "bf16"] = "float32"
    """The format of moments; bf16: half the memory, rounded at random after each step. A float64 run has float64."""
    masters: Literal["float32", "bf16"] = "float32"
    """The weights that O2 steps: float32 copies; or bf16, the weights themselves, rounded at random, without a copy."""

    @property
    def rounds(self) -> bool:
        """True if a step rounds tensors to bf16 stochastically."""
        return "bf16" in (self.states, self.masters)

    @property
    def update(self) -> Update:
        """The registry's entry of the optimizer."""
        update: Update = entries("optimizers")[self.name]
        return update


class CheckpointSection(Section):
    """Saved states of the run: weights, optimizer states, and its place in the data."""

    every: Count = 0
    """Steps between two checkpoints; there is one at the end in any case. 0: that one alone."""
    keep: Positive = 3
    """The number of newest checkpoints that stay."""
    best: bool = False
    """Write a checkpoint at each validation that is the best so far, and keep it in addition to the newest."""


class Validation(Section):
    """The loss on the held-out share, data.validation. `validation: none` switches it off."""

    every: Count = 0
    """Steps between two validations; 0: never."""
    batches: Positive = 8
    """Global batches that each is the mean of."""
    metric: Literal["loss", "accuracy"] = "loss"
    """The number that decides if a validation is better than another."""
    patience: Count = 0
    """The run ends after this number of validations in a row that are no better than the best (0: never)."""


class Check(Section):
    """Replicas compare hashes of weights and of all saved state: a flipped bit is found, and its rank named."""

    every: Count = 1
    """Steps between two comparisons; 0: never."""
    root_every: Count = 0
    """Steps between two roots in metrics.jsonl, of the weights that a step has read; 0: never."""
    sums: Literal["plugins", "always", "never"] = "plugins"
    """Follow a step's sums on meta tensors before ranks start: if a package's strategy takes part, always, never."""


class Metrics(Section):
    """Where each step's numbers go besides metrics.jsonl."""

    sinks: tuple[SinkName, ...] = ("tensorboard",)
    """The trackers of experiments that get them; []: none."""
    project: Annotated[str, Field(min_length=1)] = "meshwright"
    """The name under which trackers list the run."""
    # True: a run's config may be secret, and leaves the machine only on request.
    offline: bool = True
    """All stays on this machine, in the run's folder if the tracker can; false: trackers send it."""
    address: Annotated[str, Field(pattern=r"^[0-9A-Za-z.:-]+$")] = "127.0.0.1"
    """The address of rank 0's answers to prometheus; 0.0.0.0: every address of the host."""
    port: Annotated[int, Field(ge=1, le=65535)] = 9464
    """The port of /metrics, which prometheus asks."""
    peak_flops: Annotated[float, Field(gt=0)] | Literal["auto"] = "auto"
    """FLOP/s of one device, for mfu; auto: looked up by the device's name, unknown for a name that is not listed."""

    @model_validator(mode="before")
    @classmethod
    def read_old_field(cls, tree: object) -> object:
        """Accept `tensorboard: false`, the form of version 0.1.0."""
        if not isinstance(tree, dict) or not isinstance(tree.get("tensorboard"), bool) or "sinks" in tree:
            return tree
        rest = {name: value for name, value in tree.items() if name != "tensorboard"}
        return rest | {"sinks": ["tensorboard"] if tree["tensorboard"] else []}


class Logging(Section):
    """The lines that a run prints."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """debug: each step with its phases; info: a step now and then; warning; error: only the cause of the run's end."""


class Config(Section):
    """One run, whole."""

    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 1
    """The seed of weights, dropout and the order of samples; equal runs have equal bits on CPU."""
    model: Model = entries("models")[default_family()].model_validate({"family": default_family()})
    """The network: a name of `meshwright config model`, {base: NAME, ...}, {from: HF_FOLDER}, or a family's fields."""
    weights: str | None = None
    """The Hugging Face folder with the run's initial weights, set by model.from; null: random weights."""
    data: Data = entries("data")["text"]()
    """The samples: a corpus, its tokenizer, the length of a sample."""
    loss: Preference | None = None
    """The loss over pairs of answers, {kind: dpo, beta: 0.1}; null: the model's own loss of each text."""
    batch: BatchSection = BatchSection()
    """Samples of a step and of a microbatch."""
    layout: Layout = Layout()
    """How the job is laid over its ranks; auto: the planner decides when the run begins."""
    precision: Precision = Precision()
    """Number formats: float32, float64, bf16, fp16, or a section."""
    memory: MemorySection = MemorySection()
    """Recomputation, and storage off the device."""
    optimizer: OptimizerSection = OptimizerSection()
    """How weights are stepped."""
    steps: Positive = 1000
    """Optimizer steps of the run; each takes batch.global samples."""
    epochs: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Passes over the training data, in place of steps; becomes steps when the data is prepared."""
    checkpoint: CheckpointSection = CheckpointSection()
    """When the run is saved, and how many times over."""
    validation: Validation = Validation()
    """The held-out loss, and when it is measured; none: never."""
    check: Check = Check()
    """When replicas compare their weights; none: never."""
    bits: Bits = Bits()
    """Whether all layouts end with the same bits: usual, layout-free."""
    metrics: Metrics = Metrics()
    """Where each step's numbers go besides metrics.jsonl."""
    logging: Logging = Logging()
    """The lines that a run prints."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """The processors of ranks; auto: GPUs if there is one for each rank here, else CPUs."""
    compile: Literal["auto", "kernels", "blocks", "islands", "none"] = "auto"
    """blocks: a layer is a graph; kernels: with our Triton kernels; islands: loss, GELU compiled; auto: GPU: blocks."""
    threads: Positive | Literal["auto"] = "auto"
    """CPU threads a rank; auto: the machine's cores divided by the ranks on it."""
    timeout: Timeout = Timeout()
    """How long ranks wait for each other."""
    restarts: Restarts = Restarts()
    """How a job that lost a rank continues; none: the job ends."""

    @model_validator(mode="before")
    @classmethod
    def decide_kind_of_data(cls, tree: object) -> object:
        """Write the kind of data into the tree, so that every reader of the config finds a decided kind."""
        if not isinstance(tree, dict):
            return tree
        return tree | {"data": with_kind(tree.get("data", {}), tree.get("model"))}

    @model_validator(mode="after")
    def decide_bits(self) -> Self:
        """Write a value for each `auto` of `bits`. Here and not in decisions.py: no rank, machine or layout decides."""
        self.__dict__["bits"] = decided_bits(self)
        return self

    @property
    def in_graphs(self) -> bool:
        """True if each layer is a compiled graph."""
        return self.compile in GRAPHS

    @property
    def micro(self) -> int:
        """Samples in one microbatch of one replica.

        auto: all samples of the replica. With stages: the largest part that gives two microbatches a stage.
        """
        if self.batch.micro != "auto":
            return self.batch.micro
        sizes = dict(self.layout.axes)
        rows = math.prod(sizes[axis] for axis in self.layout.tensor.batch_axes)
        if self.bits.layout_free:
            rows = math.lcm(rows, self.bits.samples * self.layout.tensor.rows.parts)
        stages = self.layout.pipeline.size
        wanted = self.replica_batch // (2 * stages) if stages > 1 else self.replica_batch
        fitting = [size for size in divisors(self.replica_batch) if size <= wanted and size % rows == 0]
        # A rule refuses replicas without a sample, but other rules are still checked and read this property.
        whole = max(1, self.replica_batch)
        return max(fitting, default=min(rows, whole) if stages > 1 else whole)

    @property
    def replica_batch(self) -> int:
        """Samples of one data-parallel replica in a step."""
        return self.batch.global_ // self.layout.data.size

    @property
    def num_microbatches(self) -> int:
        return self.replica_batch // self.micro

    @property
    def batch_summary(self) -> str:
        """The parts of a step's batch in a sentence, with the common name for the number of microbatches."""
        count = self.num_microbatches
        replicas = f"{self.layout.data.size} replica" + "s" * (self.layout.data.size > 1)
        parts = f"{replicas} x {count} microbatch{'es' * (count > 1)} of {self.micro}"
        named = f"gradient accumulation over {count}" if count > 1 else "no gradient accumulation"
        return f"batch.global={self.batch.global_}: {parts} ({named})"

    @property
    def grid(self) -> Grid:
        """The grid of the run's ranks."""
        layout = self.layout
        # Layout-free bits may cut widths into parts on one device as well: then the mesh has this axis, with one rank.
        alone = (("tensor", 1),) if self.bits.cuts and "tensor" not in dict(layout.axes) else ()
        return Grid((*alone, *layout.axes), self.copies, (*alone, *layout.nesting))

    def ranks(self, name: str = "", status: Path | None = None) -> Ranks:
        """Describe the ranks that a launcher starts for this run. Raises ConfigError if a field says auto.

        Args:
            name: the job's name, as in Ranks.
            status: the folder of the ranks' records, as in Ranks.
        """
        layout, transport, device, threads = self.layout, self.layout.transport, self.device, self.threads
        if transport == "auto" or device == "auto" or threads == "auto":
            rule = "is no machine's: ranks are started with a config in which every auto is a value"
            raise ConfigError.of("ranks", "a config that says auto", rule, "mw.resolve(config)")
        # torch imports its compiler (1.8 s of a core for each rank) for tensors on the meta device, as in the planning
        # of stages, for recomputed activations, and for compiled layers. The import of Inductor (1.3 s) may look for a
        # GPU; GPU ranks must not be forked from such a process.
        if self.compile not in ("auto", "none") and device == "cpu":
            modules: tuple[str, ...] = ("torch._inductor.compile_fx", "torch.utils.cpp_extension")
        else:
            modules = ("torch._dynamo",) if layout.pipeline.size > 1 or self.memory.policy.recomputes else ()
        return Ranks(
            self.grid.axes, transport, device, threads, self.restarts.times, layout.token_axes,
            Timeouts(self.timeout.join, self.timeout.wait), status, name, self.grid.copies, self.grid.nesting,
            modules,
        )  # fmt: skip

    @property
    def copies(self) -> tuple[str, int] | None:
        """The axis that shards heads, and the number of neighbouring ranks that hold the same heads.

        None unless the axis has a multiple of the number of branches, and more ranks than branches.
        """
        axis, count = self.layout.tensor.heads_axis, self.model.branches.number
        size = dict(self.layout.tensor.axes).get(axis, 1)
        return (axis, size // count) if size > count and size % count == 0 else None

    @property
    def accumulates(self) -> bool:
        """True if a step adds up the gradients of several microbatches."""
        return self.num_microbatches > 1

    @property
    def widens_gradients(self) -> bool:
        """True if half-precision weights have float32 gradients. With one microbatch nothing is accumulated."""
        return self.precision.accumulate == "float32" and self.accumulates
