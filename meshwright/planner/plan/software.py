"""The facts of a run's software that affect seconds and memory and are in neither config nor cluster file.

Defaults describe Meshwright's own runs. Each other program has a preset in configs/software, a file with facts and
sources. `plan --software NAME --fact name=value` and validation/ read presets. `recorder` and `on_device` build a
layer's recorder from the layer's facts; the other facts are read by the code that counts seconds and memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import BaseModel, Field, ValidationError, field_validator

from meshwright.config import Config
from meshwright.config.load import read_yaml, value_of_word
from meshwright.config.messages import problems_of
from meshwright.config.schema import GRAPHS
from meshwright.config.section import Positive, Section, Size
from meshwright.configs import shipped
from meshwright.planner.plan.cluster import AttentionKernel, Cluster, Device, Share
from meshwright.planner.plan.dispatched import experts_of_program
from meshwright.planner.plan.expert_ranks import SENT_ONCE, Dispatcher, ExpertRanks
from meshwright.planner.plan.recorder import SCALED_BY, LowProducts, Recomputed, Recorder
from meshwright.ranks.errors import ConfigError
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from meshwright.ranks.planned import planned_mesh
from meshwright.training.decisions import compiled_on
from meshwright.training.on_device import AsOnDevice, Attention

if TYPE_CHECKING:
    from meshwright.strategies.data_parallel.strategy import HeldBytes

CutBy = Literal["data", "tensor", "context", "stages", "experts"]
Communication = Literal["sums", "gathers", "layers", "experts"]
Sums = Literal["microbatch", "step", "stages"]


class Software(Section):
    """`attention`: how queries, keys and values are attended (on_device.py); None: fused where the device has such a
    kernel, else torch's own steps. `overlapped`: what is sent while the device computes: the sums of gradients, under
    the last backward pass; sharded weights as they are gathered and stepped ones as they are published; what a layer
    sends between its own products; rows to experts, under another microbatch's computation."""

    attention: Attention | None = None
    attention_kernel: AttentionKernel | None = None
    """A fused attention's generation, with its pace in Device.attentions and without repeated keys for queries that
    share one; None: torch's."""
    copies_values: bool = False
    """Whether a fused attention copies values with other strides than the keys', such as a part of a linear's result
    beside rotated keys. Then the linear's result is not kept."""
    heads: Literal["together", "apart"] = "together"
    """Whether one kernel computes all heads, or each head has one."""
    experts: Literal["together", "apart"] = "together"
    """Whether a GPU with torch's grouped product multiplies all experts' rows by one kernel, or each expert has its
    own."""
    dispatch: Dispatcher | None = None
    """How rows are sent to experts on other ranks: R rows by an all-to-all, each token once to a rank (deepep,
    hybridep), or all tokens to all (allgather); None: as our own runs do."""
    dispatch_sms: Size | Literal[0] = 0
    """Multiprocessors that a dispatcher's kernels take; 0: the dispatcher's default."""
    expert_tensor: Size | Literal[0] = 0
    """Ranks that cut one expert's matrices, of another program: with fewer than a layer's tensor ranks, these have
    different experts; 0: all tensor ranks of a layer."""
    expert_context: bool = False
    """Whether the ranks that hold parts of one sequence have different experts, of another program."""
    gelu: Literal["fused", "steps"] = "fused"
    """A kernel of its own, which torch has of GPT-2's since 1.12, or eight."""
    fuses_dropout: bool = False
    """Whether dropout and the sum with the residual after it are one kernel."""
    fuses_elements: bool = False
    """Whether consecutive element kernels are fused, as in torch.compile and Transformer Engine: intermediate tensors
    are not written."""
    compiles: bool = False
    """Whether the run's `compile` field determines the fusion of element kernels, as in our own runs."""
    norms: Literal["steps", "torch", "fast"] = "torch"
    """The kernels of norms. steps: an RMS norm has one kernel an operation, as in torch before 2.9. torch: torch's and
    Apex's, which reduce rows and columns at a share of the memory's pace (Device.norms). fast: tuned kernels at the
    whole pace."""
    logits: Literal["slices", "whole"] = "slices"
    """Whether the head holds the float32 logits of some tokens at a time, or of the whole microbatch."""
    products: Literal["stored"] | LowProducts = "stored"
    """The format of layers' products: the run's, or FP8 or MXFP8 with casts of the operands."""
    low_inputs: bool = False
    """Whether linears' inputs are kept for the backward pass in the format of `products`, in one order."""
    low_weights: Literal["copies", "alone"] | None = None
    """Whether linears' weights in the format of `products` are held beside the run's for a step, or alone in place of
    the run's; None: weights are cast for each microbatch."""
    recomputed: frozenset[Recomputed] = frozenset()
    """Results that are computed again in the backward pass instead of kept: of norms (layernorm), of experts'
    activations (moe_act), of the projections that widen latents (mla_up_proj)."""
    host_layers: Size | Literal[0] = 0
    """The number of the model's first layers with activations in host memory until their backward pass."""
    messages: Literal["whole", "split"] = "whole"
    """The message of a tensor rank to the next stage: the whole activation, which its peers also have, or 1/t, followed
    by a gather."""
    gradients: Literal["summed", "both", "wide"] = "summed"
    """Whether half-precision gradients are freed after the addition to float32 sums, or kept; wide: freed, and sums are
    float32 even in a step of one microbatch."""
    buffers_bytes: Size | Literal[0] = 0
    """Bytes of a process's buffers beyond ours: flat buffers for collectives."""
    workspaces_bytes: tuple[Size | Literal[0], Size | Literal[0]] = (0, 0)
    """Workspaces of products that torch counts as allocated: before Hopper, and from Hopper on."""
    streams_bytes: tuple[Size | Literal[0], Size | Literal[0]] = (0, 0)
    """Workspaces of the additional streams that multiply a model's experts."""
    layers_bytes: tuple[Size | Literal[0], Size | Literal[0]] = (0, 0)
    """Workspaces of products that run beside the messages between a layer's tensor ranks, cut by sequence."""
    sums: Sums = "microbatch"
    """How often sliced gradients are summed. microbatch: in every one. step: once a step; until then a rank holds whole
    gradients in the weights' dtype, as under no_sync of torch's FSDP. stages: once a step if there are several stages,
    as in torch's pipelines; whole gradients then have the sums' dtype."""
    slices: Literal["views", "copies"] = "views"
    """Whether parameters are views of the memory of gathers and sums, or are copied out and in."""
    builds: Literal["whole", "parts"] = "whole"
    """Whether a rank makes its whole model before slices are cut, or one part after another (a meta device)."""
    slice_dtype: Literal["run", "float32"] = "run"
    """The dtype of a rank's slices of half-precision weights and gradients. float32: each gather casts the masters."""
    optimizer: Literal["fused", "steps"] = "fused"
    """One kernel for many parameters, or STEPS_OF_ADAMW for each, as in torch's AdamW before 2.0."""
    rounding: Literal["random", "nearest"] = "random"
    """How a step rounds bf16 masters and states: with random bits, or to the nearest in the optimizer's own kernel."""
    widening: Literal["parts", "whole"] = "parts"
    """Whether an optimizer on the device has float32 copies of some half-precision gradients at a time, or of all."""
    publishes: Literal["gathers", "broadcasts"] = "gathers"
    """The collective for stepped slices: one gather a bucket, or one broadcast a rank."""
    one_process: bool = False
    """Whether one process drives all devices of a node, as in torch's DataParallel. Forward passes run in turn under
    the interpreter's lock (backward passes have threads below it), and every step creates each replica's parameters
    again. Otherwise each device has a process."""
    imbalance: Annotated[float, Field(ge=1)] = 1.0
    """Rows of the busiest rank of an expert group, relative to an even router; the other ranks wait. A run determines
    this factor, not its config. A capacity makes it 1."""
    stages: Literal["work", "even"] = "work"
    """Layers of stages without a written partition: by counted work; or even, if the stages divide the layers."""
    unpredicted: tuple[tuple[CutBy, Share], ...] = ()
    """By strategy, the share that processes held beyond predictions; for other strategies the device's share."""
    overlapped: frozenset[Communication] = frozenset(("sums", "gathers", "layers"))

    @field_validator("overlapped", "recomputed", mode="before")
    @classmethod
    def parse_words(cls, value: object) -> object:
        """`sums,gathers` -> both; `none` -> none."""
        return [word for word in value.split(",") if word not in ("", "none")] if isinstance(value, str) else value

    def fuses(self, config: Config, device_type: str) -> bool:
        """Return whether consecutive element kernels of layers are fused on a kind of device; the run's `compile` may
        determine this."""
        return self.fuses_elements or (self.compiles and compiled_on(config, device_type) in GRAPHS)

    def recorder(self, *, layers: bool = True, fuses: bool = False) -> Recorder:
        """Return the recorder of this software's layers, or of a part without layers, with products in the run's
        format. `fuses`: whether layers' element kernels are fused."""
        return Recorder(
            fuses_dropout=self.fuses_dropout,
            fuses_elements=self.fuses_elements or fuses,
            fast_norms=self.norms == "fast",
            products=self.products if layers and self.products != "stored" else None,
            low_inputs=self.low_inputs,
            recomputed=self.recomputed if layers else frozenset(),
            host_layers=self.host_layers if layers else 0,
        )

    def on_device(self, device_type: str) -> AsOnDevice:
        """Return a mode that makes meta tensors run the operations of this software's layers on a kind of device."""
        return AsOnDevice(
            device_type,
            self.attention or "torch",
            gelu_in_steps=self.gelu == "steps",
            heads_apart=self.heads == "apart",
            norms_in_steps=self.norms == "steps",
            keys_grouped=self.attention_kernel is not None,
            copies_values=self.copies_values,
        )

    def mesh(
        self,
        grid: Grid,
        token_axes: tuple[str, ...],
        device_type: str,
        capability: tuple[int, int] | None,
        recorder: Recorder,
    ) -> Mesh:
        """Return the first rank's mesh of a planned job, on a kind of device with a GPU's compute capability. The
        recorder records its collectives."""
        how = self.expert_ranks
        return planned_mesh(
            grid, 0, token_axes, device_type, recorder.started, self.imbalance, whole_logits=self.logits == "whole",
            capability=capability if self.experts == "together" else None,
            make_experts=None if how is None else partial(experts_of_program, how, fuses=self.fuses_elements),
        )  # fmt: skip

    @property
    def expert_ranks(self) -> ExpertRanks | None:
        """How the program deals experts and sends rows; None: as our own runs do."""
        return None if self.dispatch is None else ExpertRanks(self.dispatch, self.expert_tensor, self.expert_context)

    def apart_bytes(self, config: Config, held: HeldBytes) -> int:
        """Return the bytes of gradients beyond our own runs': half-precision gradients kept with float32 sums, or the
        second half of float32 sums if our own step of one microbatch is not widened."""
        precision = config.precision
        if self.gradients == "wide" and not config.widens_gradients:
            return held.gradients if precision.level == "O2" and precision.accumulate == "float32" else 0
        return held.weights if self.gradients == "both" and config.widens_gradients else 0

    def low_weight(self, device: Device) -> float:
        """Return the bytes of an element of a linear's half-precision weight beyond two, if weights in the products'
        format are held.

        Products take one order of a matrix (two orders are held), except products with one scale a tensor from
        BLACKWELL on. Transformer Engine: pytorch/utils.py, is_non_tn_fp8_gemm_supported, and the update_usage of
        float8_tensor.py and mxfp8_tensor.py.
        """
        if self.low_weights is None or self.products == "stored":
            return 0.0
        late = device.capability is not None and device.capability >= BLACKWELL
        orders = 1 if late and self.products not in SCALED_BY else 2
        size = orders * (1 + 1 / SCALED_BY.get(self.products, math.inf))
        return size - (HALF if self.low_weights == "alone" else 0)

    def on(self, device: Device) -> Software:
        """Return the software on a kind of device, with attention decided and workspaces added to the buffers."""
        attention = self.attention or ("torch" if device.attention_efficiency is None else "fused")
        late = device.capability is not None and device.capability >= HOPPER
        on_gpu = device.kind == "cuda"
        workspaces, streams, layers = (
            each[late] * on_gpu for each in (self.workspaces_bytes, self.streams_bytes, self.layers_bytes)
        )
        buffers = {"buffers_bytes": self.buffers_bytes + workspaces, "workspaces_bytes": (0, 0)}
        some = {"streams_bytes": (streams, streams), "layers_bytes": (layers, layers)}
        return self.model_copy(update={"attention": attention, **some, **buffers})

    def unpredicted_share(self, config: Config) -> float | None:
        """Return the share of a layout's strategy: the first used of experts, stages, context, tensor; else data."""
        layout = config.layout
        sizes = (
            ("experts", layout.data.expert), ("stages", layout.pipeline.size), ("context", layout.context.size),
            ("tensor", dict(layout.axes).get("tensor", 1)),
        )  # fmt: skip
        strategy = next((name for name, size in sizes if size > 1), "data")
        return next((share for name, share in self.unpredicted if name == strategy), None)

    def beside_bytes(self, config: Config) -> int:
        """Return the bytes of a process's permanent buffers and workspaces, for a software on a device."""
        streams = self.streams_bytes[0] if config.model.routing.num_experts else 0
        # Such products need activations that are cut by sequence.
        cut = dict(config.layout.axes).get("tensor", 1) > 1 and "tensor" in config.layout.tensor.token_axes
        overlaps = "layers" in self.overlapped and cut
        return self.buffers_bytes + streams + (self.layers_bytes[0] if overlaps else 0)


HOPPER = (9, 0)
"""The first compute capability with a larger workspace for products."""

BLACKWELL = (10, 0)
"""The first compute capability with FP8 products of matrices in any order."""
HALF = 2
"""Bytes of an element in half precision."""

STEPS_OF_ADAMW, STEPPED_BYTES = 9, 88
"""The number of kernels of an unfused AdamW, and the bytes read and written for an element: decay 8 bytes, each
moment's decay and sum 8 + 12, root, bias correction and epsilon 8 each, the quotient 16."""

OWN_SOFTWARE = Software(compiles=True)
OWN = "meshwright"
EXPERTS = "is how other programs send rows to experts: our own runs deal experts over layout.data.expert alone"
KEPT = "is of tensors that other programs keep in other formats or not at all: our own runs have memory.recompute"
FOREIGN = {
    **dict.fromkeys(("dispatch", "dispatch_sms", "expert_tensor", "expert_context"), EXPERTS),
    **dict.fromkeys(("copies_values", "low_inputs", "low_weights", "recomputed", "host_layers"), KEPT),
}
"""Facts that our own runs do not have, each with the rule that it breaks."""

ALL: tuple[Dispatcher, ...] = get_args(Dispatcher)


JobForm = Literal["toml", "flags", "arguments", "accelerate", "axolotl", "automodel", "nanotron", "deepspeed"]


class _Fact(BaseModel, extra="forbid", frozen=True):
    """A fact's value, and the text or code that is its source."""

    value: Any = Field(alias="is")  # a Section would refuse true and false for a field of any type
    source: str


class KnownMemory(Section):
    """Measured rows of a program's memory against predictions."""

    rows: Positive
    """The number of rows."""
    error: Share
    """The mean error, as a share."""
    most: Annotated[float, Field(ge=0)]
    """The largest share that a row held beyond its prediction."""
    of: str
    """The source of the rows, and the bytes that were counted."""
    by: dict[CutBy, Share] = Field(default_factory=dict)
    """By strategy, the share that 95 % of its rows hold at most beyond predictions (validation/strategies.py)."""


class _Preset(BaseModel, extra="forbid", frozen=True):
    """A file of configs/software."""

    program: str
    facts: dict[str, _Fact]
    layouts: dict[str, tuple[Any, ...]] = Field(default_factory=dict)
    """Values of layout fields that the program supports, by dotted name."""
    form: JobForm | None = None
    """The form of its job files."""
    syncs: dict[str, str] = Field(default_factory=dict)
    """The program's words for values of layout.data.sync."""
    contexts: dict[str, str] = Field(default_factory=dict)
    """The program's words for values of layout.context.kind."""
    memory: KnownMemory | None = None


@dataclass(frozen=True)
class Program:
    """A program by name. Fields that _Preset also has are as in the file; without `layouts` any layout is supported."""

    name: str
    title: str
    """The full name."""
    software: Software
    sources: dict[str, str]
    """The source of each fact that differs from our own runs."""
    layouts: dict[str, tuple[Any, ...]]
    form: JobForm | None
    syncs: dict[str, str]
    contexts: dict[str, str]
    memory: KnownMemory | None = None

    def on(self, cluster: Cluster) -> Cluster:
        """Return the cluster with the memory share of this program's rows in place of the device's."""
        if self.memory is None:
            return cluster
        device = cluster.device.model_copy(update={"unpredicted_share": self.memory.most})
        return cluster.model_copy(update={"device": device})


def load_program(name: str = OWN, facts: Sequence[str] = ()) -> Program:
    """Load a preset by its name and replace facts (`attention=steps`). Raises ConfigError with the valid values."""
    files = shipped("software")
    if name not in files:
        raise ConfigError.of("--software", name, "is no program that we know the facts of", ", ".join(files))
    preset = _Preset.model_validate(read_yaml(files[name]))
    said = {fact: each.value for fact, each in preset.facts.items()}
    if preset.memory is not None and preset.memory.by:
        said["unpredicted"] = tuple(preset.memory.by.items())
    for word in facts:
        fact, equals, text = word.partition("=")
        if not equals:
            raise ConfigError.of("--fact", word, "is no fact and value", "attention=fused, overlapped=sums,gathers")
        said[fact] = value_of_word(fact, text)
    try:
        software = Software.model_validate(said)
    except ValidationError as error:
        raise ConfigError(problems_of(error, [], Software)) from error
    if name == OWN and (foreign := next((fact for fact in FOREIGN if getattr(software, fact)), None)):
        written = next((word for word in facts if word.startswith(f"{foreign}=")), foreign)
        raise ConfigError.of("--fact", written, FOREIGN[foreign], "--software megatron-core")
    if software.low_weights and software.products == "stored":
        rule = "has no effect with products in the run's format"
        raise ConfigError.of("--fact", f"low_weights={software.low_weights}", rule, "--fact products=fp8, mxfp8")
    for fact, known in (("dispatch_sms", SENT_ONCE), ("expert_tensor", ALL), ("expert_context", ALL)):
        if getattr(software, fact) and software.dispatch not in known:
            rule = f"has no effect with dispatch={software.dispatch}"
            raise ConfigError.of("--fact", f"{fact}={getattr(software, fact)}", rule, f"dispatch={', '.join(known)}")
    sources = {fact: each.source for fact, each in preset.facts.items()}
    sources |= {word.partition("=")[0]: "--fact" for word in facts}
    layouts = dict(preset.layouts)
    if software.expert_tensor or software.expert_context:
        layouts["layout.tensor.sequence_parallel"] = (True,)  # whose ranks have tokens of their own to send
    return Program(
        name,
        preset.program,
        software,
        sources,
        layouts,
        preset.form,
        preset.syncs,
        preset.contexts,
        preset.memory,
    )


def with_imbalance(software: Software, config: Config, imbalance: float) -> Software:
    """Return the software with a run's imbalance of experts. Raises ConfigError for no factor or no effect."""
    if imbalance == 1:
        return software
    if not imbalance > 1:
        raise ConfigError.of("--imbalance", imbalance, "is the busiest rank's share of an even one", "1 or more")
    if not config.model.routing.num_experts:
        raise ConfigError.of("--imbalance", imbalance, "has no effect on a model without experts", "1")
    # A capacity gives every expert the same number of rows.
    if config.model.routing.droppable_pairs:
        rule = "has no effect with model.experts.capacity, which gives all ranks as many rows"
        raise ConfigError.of("--imbalance", imbalance, rule, "1, or model.experts.capacity=null")
    return software.model_copy(update={"imbalance": imbalance})
