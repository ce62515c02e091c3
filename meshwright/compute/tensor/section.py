"""The tensor sections of a layout: the facts on each kind of tensor parallelism for config and planner. No torch.

| kind      | axes            | batch rows split over | divides                                                     |
|-----------|-----------------|-----------------------|-------------------------------------------------------------|
| none      | -               | -                     | nothing                                                     |
| megatron  | tensor          | -                     | branches, widths, tables; sequence_parallel: sequences too  |
| tesseract | depth, row, col | depth, row            | branches, widths, tables                                    |

sub-graphs: subgraph/section.py. To add a kind, write a subclass of TensorSection and one line in the registry
(docs/extending.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self, cast

from meshwright.config.registry import load_entry
from meshwright.config.section import Positive, Rule, Section, at_most, can_share, divisors, field_of, listed, rule
from meshwright.ranks.errors import ConfigError, Problem

if TYPE_CHECKING:
    from meshwright.compute.tensor.arithmetic import Arithmetic
    from meshwright.compute.tensor.kit import Kit
    from meshwright.config import Config
    from meshwright.ranks.mesh import Mesh


@dataclass(frozen=True)
class Cut:
    """A number of the model or the data that a layout divides into equal parts."""

    field: str
    """The field of the number; or a text, if `reads` lists the fields that determine the number."""
    number: int
    by: str
    """The layout's field that sets the number of parts."""
    parts: int
    note: str = ""
    """Text after the number in messages."""
    reads: tuple[str, ...] = ()
    """The fields that determine the number; empty: `field`."""

    @property
    def problem(self) -> Problem | None:
        """The problem of a layout with unequal parts, or None."""
        if self.number % self.parts == 0:
            return None
        rule_text = f"does not divide {self.field}={self.number}{self.note}"
        return Problem(self.by, self.parts, rule_text, listed(divisors(self.number)), self.reads or (self.field,))


@dataclass(frozen=True)
class PaddedCut(Cut):
    """The rows of padded tables: for any number of rows, another padding makes the parts equal.

    `field`: the field of `multiple`; tables are padded to a multiple of this number of rows.
    """

    multiple: int = 1

    @property
    def problem(self) -> Problem | None:
        if self.number % self.parts == 0:
            return None
        rule_text = f"is no multiple of {self.parts}, into which layout.tensor cuts the padded tables"
        valid = f"{self.parts * self.multiple}, any multiple of {self.parts}"
        return Problem(self.field, self.multiple, rule_text, valid, self.reads)


@dataclass(frozen=True)
class HeadsCut(Cut):
    """Branches of `members` equal parts each, such as key-value heads with several queries.

    With more parts than branches, several parts share a branch, and each has some of the members.
    """

    members: int = 1

    @property
    def problem(self) -> Problem | None:
        if can_share(self.number, self.members, self.parts):
            return None
        rule_text = f"does not divide {self.field}={self.number}{self.note}"
        many = [self.number * each for each in divisors(self.members)[1:]]
        valid = listed([*divisors(self.number), *many])
        return Problem(self.by, self.parts, rule_text, valid, self.reads or (self.field,))


class Rows(NamedTuple):
    """Distribution of a microbatch's rows over ranks between pairs; by default each rank has all rows."""

    parts: int = 1
    """Number of ranks that split the rows; the number of rows must be a multiple."""
    at_once: int = 1
    """Number of these parts on a rank between the two linears of a pair."""
    by: str = ""
    """Text before the number of parts in messages: the fields that set it."""
    leads: int = 1
    """Number of ranks in a group with one computing rank (the first); the others wait."""


class TensorSection(Section):
    """Base of the tensor sections: by itself, one that divides nothing. Subclasses add fields and `kind`, a Literal."""

    kind: str
    """How a layer is cut over ranks."""

    axis_fields: ClassVar[tuple[tuple[str, str], ...]] = ()
    """The mesh's axes, outermost first, each with the section's field of the axis size."""
    kit_class: ClassVar[str]
    """The kit's class, `module:attribute`; the first argument is the mesh."""
    kit_fields: ClassVar[Mapping[str, str]] = {}
    """The config field for each argument of the kit's class, besides the mesh."""
    rules: ClassVar[tuple[Rule, ...]] = ()
    """Rules on combinations with other fields, checked for layouts of this kind."""
    idle_alone: ClassVar[tuple[str, ...]] = ()
    """Fields without effect if the layout has one tensor rank."""
    gives_effect_to: ClassVar[tuple[str, ...]] = ()
    """Fields of other sections that have an effect with this kind, and by default with no other."""
    heads_axis: ClassVar[str] = ""
    """The axis that shards attention's heads, if several ranks of the axis can hold the same key-value head
    (tensor/copies.py)."""
    holds_experts: ClassVar[bool] = False
    """Whether the kit has feed-forwards of experts."""
    by_parts: ClassVar[str] = ""
    """The class of the kit that multiplies part by part, for `bits: layout-free` (bits/section.py); "": not supported.
    """
    inner_axis: ClassVar[str] = ""
    """The axis that splits activations between the two linears of a pair."""
    inner_field: ClassVar[str] = "layout.tensor.size"
    """The field of the inner axis's size."""
    cuts_hidden: ClassVar[bool] = False
    """Whether the inner axis also splits the width between pairs."""
    batch_axes: ClassVar[tuple[str, ...]] = ()
    """The axes that split a microbatch's rows."""
    by_size: ClassVar[bool] = False
    """Whether a rank's work and messages are not proportional to the microbatch's size."""

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """The mesh's axes and sizes, outermost first."""
        return tuple([(axis, getattr(self, field)) for axis, field in self.axis_fields])

    @property
    def token_axes(self) -> tuple[str, ...]:
        """The axes that split tokens; gradients of parameters that are not sharded are summed over these axes."""
        return self.batch_axes

    @property
    def cuts_sequences(self) -> bool:
        """Whether the inner axis cuts sequences between pairs."""
        return self.inner_axis in self.token_axes and self.inner_axis not in self.batch_axes

    @property
    def inner_size(self) -> int:
        """The size of the inner axis."""
        return dict(self.axes).get(self.inner_axis, 1)

    @property
    def same_activation(self) -> str:
        """The inner axis if all ranks of the axis hold the whole activation between layers; else empty."""
        split = self.cuts_hidden or self.inner_axis in (*self.batch_axes, *self.token_axes)
        return "" if split else self.inner_axis

    @property
    def rows(self) -> Rows:
        """The distribution of a microbatch's rows over ranks."""
        return Rows()

    @property
    def replica(self) -> tuple[TensorSection, int]:
        """The section of ranks that hold a layer once, and the number of such groups in this section. A group computes
        a layer as data-parallel replicas do: for a share of a microbatch's rows, without messages to the others."""
        return self, 1

    @property
    def replica_of_ends(self) -> tuple[TensorSection, int]:
        """The section of ranks that hold embeddings and heads once, without settings of layers alone; and the number of
        such groups."""
        return self.replica

    @property
    def words(self) -> str:
        """The name of the kind in tables, with the settings that change a rank's work; empty if nothing is sharded."""
        cut = ", cut by sequence" if self.cuts_sequences else ""
        return f"{self.kind}{cut}" if self.axes else ""

    def cuts(self, config: Config) -> Iterator[Cut]:
        """Fields of the model and the data that the kind divides, with the divisors."""
        yield from ()

    @classmethod
    def candidates(cls, devices: int) -> Iterator[Self]:
        """Yield the sections that a planner tries on `devices` devices. Sizes must divide this number."""
        yield from ()

    def kit_settings(self, config: Config) -> Mapping[str, Any]:
        """Return the values of `kit_fields`; a subclass may add arguments that are not config fields."""
        return {name: field_of(config, field) for name, field in self.kit_fields.items()}

    def kit(self, config: Config, mesh: Mesh, arithmetic: Arithmetic | None = None) -> Kit:
        """Make the kit of a rank. The kit's package and torch are imported here, not before.

        Args:
            config: the run's config.
            mesh: the rank's mesh.
            arithmetic: the computation on each rank; None: the kit's default.

        Raises:
            ConfigError: the kit is of another package and takes no arithmetic.
        """
        computes = {} if arithmetic is None else {"arithmetic": arithmetic}
        make = load_entry(self.by_parts if arithmetic is not None and arithmetic.in_order else self.kit_class)
        takes = signature(make).parameters.values()
        if computes and not any(each.name == "arithmetic" or each.kind is each.VAR_KEYWORD for each in takes):
            rule = f"is a kit that takes no arithmetic, which bits={config.bits.kind} needs"
            raise ConfigError.of("layout.tensor", self.kind, rule, "`arithmetic`, or **computes, in its __init__")
        return cast("Kit", make(mesh, **computes, **self.kit_settings(config)))


def whole_layers(config: Config, by: str, parts: int) -> Iterator[Cut]:
    """Yield the cuts of a kit that shards all layers and tables: branches, widths, padded rows."""
    model = config.model
    heads = model.branches
    yield HeadsCut(heads.field, heads.number, by, parts, members=heads.members)
    for field, width in model.widths:
        yield Cut(field, width, by, parts)
    padded = ("model.vocabulary_multiple", model.padded_rows, by, parts)
    yield PaddedCut(*padded, reads=tuple(field for field, _ in model.tables), multiple=model.vocabulary_multiple)


class Whole(TensorSection):
    """No tensor parallelism: a rank holds whole layers."""

    kind: Literal["none"] = "none"
    kit_class: ClassVar[str] = "meshwright.compute.tensor.serial:SerialKit"
    holds_experts: ClassVar[bool] = True
    by_parts: ClassVar[str] = "meshwright.compute.tensor.megatron:MegatronKit"

    @classmethod
    def candidates(cls, devices: int) -> Iterator[Self]:
        yield cls()


@rule("layout.tensor", "model.family")
def sequences_can_be_cut(config: Config) -> Iterator[Problem]:
    tensor, model = config.layout.tensor, config.model
    if isinstance(tensor, Megatron) and tensor.sequence_parallel and next(model.sequences(config), None) is None:
        rule_text = f"cuts the positions of an image, over which the norms of a {model.family} are taken"
        yield Problem("layout.tensor.sequence_parallel", True, rule_text, "false")


class Megatron(TensorSection):
    """1-D: heads, inner widths and the vocabulary split over ranks (Megatron-LM)."""

    kind: Literal["megatron"]
    size: Positive
    """Ranks that a layer is cut over."""
    sequence_parallel: bool = False
    """Tokens of norms and dropout are split over the same ranks: less memory, the same bytes sent."""

    axis_fields: ClassVar[tuple[tuple[str, str], ...]] = (("tensor", "size"),)
    kit_class: ClassVar[str] = "meshwright.compute.tensor.megatron:MegatronKit"
    kit_fields: ClassVar[Mapping[str, str]] = {"sequence_parallel": "layout.tensor.sequence_parallel"}
    rules: ClassVar[tuple[Rule, ...]] = (sequences_can_be_cut,)
    idle_alone: ClassVar[tuple[str, ...]] = ("sequence_parallel",)
    heads_axis: ClassVar[str] = "tensor"
    holds_experts: ClassVar[bool] = True
    by_parts: ClassVar[str] = kit_class
    inner_axis: ClassVar[str] = "tensor"

    @property
    def token_axes(self) -> tuple[str, ...]:
        return ("tensor",) if self.sequence_parallel else ()

    def cuts(self, config: Config) -> Iterator[Cut]:
        yield from whole_layers(config, "layout.tensor.size", self.size)
        for length in config.model.sequences(config) if self.sequence_parallel else ():
            note = f"{length.note}, as sequence_parallel asks"
            yield Cut(length.field, length.number, "layout.tensor.size", self.size, note, length.reads)
            if length.number % self.size:
                return  # later lengths are computed from this one

    @classmethod
    def candidates(cls, devices: int) -> Iterator[Self]:
        for size in divisors(devices)[1:]:
            yield cls(kind="megatron", size=size)
            yield cls(kind="megatron", size=size, sequence_parallel=True)


@rule("layout.tensor")
def depth_is_at_most_q(config: Config) -> Iterator[Problem]:
    tensor = config.layout.tensor
    if isinstance(tensor, Tesseract) and tensor.d > tensor.q:
        rule_text = f"is more than layout.tensor.q={tensor.q}: beyond 3-D, layout.data.size does the same for less"
        yield Problem("layout.tensor.d", tensor.d, rule_text, at_most(tensor.q))


class Tesseract(TensorSection):
    """2-D (d = 1: Optimus, SUMMA), 2.5-D and 3-D (d = q): blocks of everything on [q, q, d] ranks."""

    kind: Literal["tesseract"]
    q: Positive
    """Number of rows and of columns of ranks; q x q x d ranks share a layer."""
    d: Positive = 1
    """Number of such squares, each with 1/d of the batch; at most q."""

    axis_fields: ClassVar[tuple[tuple[str, str], ...]] = (("depth", "d"), ("row", "q"), ("col", "q"))
    kit_class: ClassVar[str] = "meshwright.compute.tensor.tesseract:TesseractKit"
    kit_fields: ClassVar[Mapping[str, str]] = {"policy": "memory.summa"}
    rules: ClassVar[tuple[Rule, ...]] = (depth_is_at_most_q,)
    gives_effect_to: ClassVar[tuple[str, ...]] = ("memory.summa",)
    heads_axis: ClassVar[str] = "col"
    batch_axes: ClassVar[tuple[str, ...]] = ("depth", "row")
    by_size: ClassVar[bool] = True
    by_parts: ClassVar[str] = "meshwright.compute.bits.tesseract:ExactTesseract"
    inner_axis: ClassVar[str] = "col"
    inner_field: ClassVar[str] = "layout.tensor.q"
    cuts_hidden: ClassVar[bool] = True

    @property
    def replica(self) -> tuple[TensorSection, int]:
        return self.model_copy(update={"d": 1}), self.d

    @property
    def rows(self) -> Rows:
        return Rows(self.d * self.q, by="layout.tensor.d x q = ")

    def cuts(self, config: Config) -> Iterator[Cut]:
        yield from whole_layers(config, "layout.tensor.q", self.q)
        for field in config.model.latent_fields:
            if (width := getattr(config.model, field)) is not None:
                yield Cut(f"model.{field}", width, "layout.tensor.q", self.q)
        if config.model.adapter is not None:
            yield Cut("model.adapter.rank", config.model.adapter.rank, "layout.tensor.q", self.q)

    @classmethod
    def candidates(cls, devices: int) -> Iterator[Self]:
        for q in range(2, math.isqrt(devices) + 1):
            for d in range(1, q + 1):
                if devices % (q * q * d) == 0:
                    yield cls(kind="tesseract", q=q, d=d)
