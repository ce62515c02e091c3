"""The config's nouns: frozen typed models, one a section of the YAML file. Rules that join sections: rules.py.

No torch here: a bad config must fail in the time that reading it takes.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, ValidationInfo, field_validator

_UNITS = {"k": 2**10, "m": 2**20, "g": 2**30}


def parse_size(value: object) -> object:
    """`16M` -> 16777216: K, M and G count in powers of 1024. Anything else is left to the type check."""
    if isinstance(value, str) and value[-1:].lower() in _UNITS and value[:-1].isdigit():
        return int(value[:-1]) * _UNITS[value[-1].lower()]
    return value


Size = Annotated[int, BeforeValidator(parse_size), Field(ge=1)]
Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """Base of all sections: frozen, and an unknown key is a mistake."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def refuse_truth(cls, value: object, info: ValidationInfo) -> object:
        """`steps: true` is a slip of the pen, not a 1."""
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation is not bool:
            raise ValueError("true and false are not numbers")
        return value


class Transformer(Section):
    """What all models have. Letters as in the glossary: L layers, H hidden, A heads, V vocabulary."""

    layers: Positive = 12
    hidden: Positive = 768
    heads: Positive = 12
    dropout: Share = 0.1
    norm_epsilon: Annotated[float, Field(gt=0)] = 1e-5
    vocabulary_multiple: Positive = 64
    """The rows of the token table (of a classifier: the classes) are padded to a multiple of this; the padding is
    masked out of the softmax."""

    @property
    def inner(self) -> int:
        """N: the width of the feed-forward layer."""
        return 4 * self.hidden

    def padded(self, rows: int) -> int:
        """`rows` up to the next multiple of vocabulary_multiple."""
        return math.ceil(rows / self.vocabulary_multiple) * self.vocabulary_multiple


class TextTransformer(Transformer):
    """A Transformer over tokens."""

    positions: Positive = 1024
    vocabulary: Positive = 50257

    @property
    def padded_vocabulary(self) -> int:
        return self.padded(self.vocabulary)


class Gpt2(TextTransformer):
    """A GPT-2 style decoder."""

    family: Literal["gpt2"] = "gpt2"
    tied: bool = True


class Bert(TextTransformer):
    """BERT: masked language model and, with `next_sentence`, next-sentence prediction."""

    family: Literal["bert"]
    positions: Positive = 512
    vocabulary: Positive = 30522
    norm_epsilon: Annotated[float, Field(gt=0)] = 1e-12
    norm_order: Literal["original", "megatron"] = "original"
    """original: a norm after each residual sum; megatron: at the input of each sub-layer, and one at the end."""
    next_sentence: bool = True


class Vit(Transformer):
    """A Vision Transformer: square images in square patches, a class token, a linear classifier."""

    family: Literal["vit"]
    image: Positive = 224
    patch: Positive = 16
    channels: Positive = 3
    classes: Positive = 1000
    norm_epsilon: Annotated[float, Field(gt=0)] = 1e-12
    dropout: Share = 0.0

    @property
    def positions(self) -> int:
        """Patches and the class token."""
        return (self.image // self.patch) ** 2 + 1


def _family(model: object) -> object:
    """The tag of a model's section, gpt2 where it names none."""
    if isinstance(model, dict):
        return model.get("family", "gpt2")
    return model.family if isinstance(model, Gpt2 | Bert | Vit) else None


Model = Annotated[
    Annotated[Gpt2, Tag("gpt2")] | Annotated[Bert, Tag("bert")] | Annotated[Vit, Tag("vit")], Discriminator(_family)
]


class Data(Section):
    """Where the data comes from. `source`: stdlib, a text/jsonl/parquet file or folder, or a prepared folder.

    For images: digits, or a folder of class folders; `tokenizer` and `sequence` are of texts.
    """

    source: str = "stdlib"
    tokenizer: str = "bytes"
    """bytes, bpe:SIZE (trained on the source), or a tokenizer.json file. A prepared folder brings its own."""
    sequence: Positive = 256
    validation: Annotated[float, Field(gt=0, lt=0.5)] = 0.05
    """The share of the documents (of each class's images) that is held out."""


class Batch(Section):
    """Samples (sequences, images): `global` a step, `micro` a microbatch of one replica (auto: all of its part)."""

    global_: Positive = Field(default=64, alias="global")
    micro: Positive | Literal["auto"] = "auto"


Sync = Literal["server-loss", "server-gradient", "rooted", "allreduce", "ring", "zero1", "fsdp"]


class DataParallel(Section):
    """`sync`: how replicas agree on a gradient; `bucket`: bytes reduced by one collective."""

    size: Positive = 1
    sync: Sync = "allreduce"
    bucket: Size = 16 * 2**20


class Whole(Section):
    """No tensor parallelism: every rank of a replica's one holds whole layers."""

    kind: Literal["none"] = "none"

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        return ()

    @property
    def batch_axes(self) -> tuple[str, ...]:
        return ()

    @property
    def token_axes(self) -> tuple[str, ...]:
        return ()


class Megatron(Section):
    """1-D: heads, inner widths and the vocabulary split over `size` ranks; sequence_parallel: norms and dropout too."""

    kind: Literal["megatron"]
    size: Positive
    sequence_parallel: bool = False

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        return (("tensor", self.size),)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        return ()

    @property
    def token_axes(self) -> tuple[str, ...]:
        return ("tensor",) if self.sequence_parallel else ()


class Tesseract(Section):
    """2-D (d = 1: Optimus, SUMMA), 2.5-D and 3-D (d = q): blocks of everything on [q, q, d] ranks."""

    kind: Literal["tesseract"]
    q: Positive
    d: Positive = 1

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        return (("depth", self.d), ("row", self.q), ("col", self.q))

    @property
    def batch_axes(self) -> tuple[str, ...]:
        return ("depth", "row")

    @property
    def token_axes(self) -> tuple[str, ...]:
        return ("depth", "row")


def _kind(tensor: object) -> object:
    """The tag of a tensor section."""
    if isinstance(tensor, dict):
        return tensor.get("kind")
    return tensor.kind if isinstance(tensor, Whole | Megatron | Tesseract) else None


TensorParallel = Annotated[
    Annotated[Whole, Tag("none")] | Annotated[Megatron, Tag("megatron")] | Annotated[Tesseract, Tag("tesseract")],
    Discriminator(_kind),
]


class Layout(Section):
    """How the job is laid over its ranks, and what carries its messages."""

    data: DataParallel = DataParallel()
    tensor: TensorParallel = Whole()
    transport: Literal["auto", "torch", "mpi"] = "auto"

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """The mesh's axes, outermost first."""
        return (("data", self.data.size), *self.tensor.axes)

    @property
    def summary(self) -> str:
        """`data 2 (allreduce), row 2, col 2`: the axes outermost first."""
        sizes = [f"{name} {size}" for name, size in self.axes]
        return ", ".join([f"{sizes[0]} ({self.data.sync})", *sizes[1:]])

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


class LossScale(Section):
    """Dynamic loss scaling for fp16: halved on overflow, doubled after `interval` good steps."""

    initial: Annotated[float, Field(gt=0)] = 65536.0
    interval: Positive = 2000


class Precision(Section):
    """O0: all in `dtype`. O1: fp32 weights, autocast. O2: half weights, fp32 master weights and states."""

    level: Literal["O0", "O1", "O2"] = "O0"
    dtype: Literal["float32", "float64", "bf16", "fp16"] = "float32"
    loss_scale: LossScale = LossScale()


class Memory(Section):
    """`empty_cache_every`: give the allocator's free memory back every so many steps (0: never; costs time).

    `summa`: how operands of 2-D products travel: gathered whole, streamed in q panels, or as free memory allows.
    """

    empty_cache_every: Count = 0
    summa: Literal["auto", "gather", "stream"] = "auto"


class Schedule(Section):
    """Learning rate: linear warm-up over `warmup` steps, then `decay` down to `floor` times the peak."""

    warmup: Count = 0
    decay: Literal["constant", "linear", "cosine"] = "constant"
    floor: Annotated[float, Field(ge=0, le=1)] = 0.1


class Optimizer(Section):
    """torch's AdamW or SGD. Weight decay acts on matrices only; `clip` bounds the global gradient norm."""

    name: Literal["adamw", "sgd", "momentum"] = "adamw"
    lr: Annotated[float, Field(gt=0)] = 3e-4
    betas: tuple[Share, Share] = (0.9, 0.95)
    epsilon: Annotated[float, Field(gt=0)] = 1e-8
    momentum: Share = 0.9
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    clip: Annotated[float, Field(gt=0)] | None = 1.0
    schedule: Schedule = Schedule()


class Checkpoint(Section):
    """A checkpoint every `every` steps and at the end; the newest `keep` stay. `every: 0`: only at the end."""

    every: Count = 0
    keep: Positive = 3


class Validation(Section):
    """Held-out loss over `batches` global batches, every `every` steps (0: never)."""

    every: Count = 0
    batches: Positive = 8


class Metrics(Section):
    """`peak_flops` of one device, for mfu: auto looks the device up and says unknown where it is not listed."""

    tensorboard: bool = True
    peak_flops: Annotated[float, Field(gt=0)] | Literal["auto"] = "auto"


class Config(Section):
    """One run, whole."""

    seed: Count = 1
    model: Model = Gpt2()
    data: Data = Data()
    batch: Batch = Batch()
    layout: Layout = Layout()
    precision: Precision = Precision()
    memory: Memory = Memory()
    optimizer: Optimizer = Optimizer()
    steps: Positive = 1000
    checkpoint: Checkpoint = Checkpoint()
    validation: Validation = Validation()
    metrics: Metrics = Metrics()
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: Positive | Literal["auto"] = "auto"
    """CPU threads a rank; auto: the machine's cores divided by the ranks on it."""
    restarts: Count = 0
    """How often the launcher restarts a job that lost a worker, from its newest complete checkpoint."""

    @property
    def micro(self) -> int:
        """Sequences in one microbatch of one replica."""
        return self.replica_batch if self.batch.micro == "auto" else self.batch.micro

    @property
    def replica_batch(self) -> int:
        """Sequences that one data-parallel replica sees a step."""
        return self.batch.global_ // self.layout.data.size

    @property
    def num_microbatches(self) -> int:
        return self.replica_batch // self.micro
