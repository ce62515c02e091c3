"""The `bits` section: whether the last bits of a run's result depend on the layout. No torch.

`layout-free` has two principles:

- Grains: every kernel gets operands of one shape, the shape of `samples` samples, in every microbatch, replica and
  stage.
- Sums without an order: each addend of grains, microbatches and ranks is rounded once to a multiple of one power of two
  and added as an integer (Demmel and Nguyen, "Fast reproducible floating-point summation", ARITH 2013, with a quantum
  that is fixed for the run).

Each `auto` becomes a number when a config is read. The decision reads the model, the batch and the length of sequences,
and no field of the layout. So one run file has one grain under every layout.

| field     | `auto` takes                                                                                           |
|-----------|--------------------------------------------------------------------------------------------------------|
| samples   | the most samples of at most 1024 tokens that divide every replica's part for 1 to 8 replicas           |
| tensor    | the largest legal power of two up to 8 that leaves 256 of the hidden width to a part, or 2             |
| sequence  | the largest legal power of two up to 8 that leaves 256 tokens to a run, or 2                           |
| hidden    | 2 if legal, else 1                                                                                     |
| attention | runs where rings are legal (no dropout) and a sequence has several runs, else heads                    |

With `compile: blocks` a layer is one graph, and with a `loss` over pairs a row's loss is one sum: all of these but
samples then take 1 and heads.

Smaller parts let more ranks in, and cost more on one device (`python -m benchmarks.bits --parts`).

If one of these fields has a value in the run file, the missing ones are 1 and `heads`: the values of runs that were
written before `auto` existed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from meshwright.compute.tensor.section import whole_layers
from meshwright.config.section import Positive, Rule, Section, can_share, divisors, listed, rule
from meshwright.ranks.errors import Problem

if TYPE_CHECKING:
    from meshwright.compute.models.section import Network
    from meshwright.config import Config

    Number = int
    Queries = str
else:
    Number = Positive | Literal["auto"]
    Queries = Literal["auto", "heads", "runs"]

AUTO: Any = "auto"
"""The default of numbers that are decided when a config is read (`decided_bits`); every reader finds a number."""

KIND, SAMPLES, TENSOR, SEQUENCE = "bits.kind", "bits.samples", "bits.tensor", "bits.sequence"
HIDDEN = "bits.hidden"

VECTOR = 16
"""Elements of a cache line in float32."""

WHOLE_VECTORS = 64
"""A block of a multiple of this number of elements has whole vectors on any processor, in any precision. Element-wise
operations compute the remaining elements of an incomplete vector with different code."""


class Bits(Section):
    """The layouts with equal bits; a single word sets `kind`."""

    kind: Literal["usual", "layout-free"] = "usual"
    """usual: runs of one layout end with equal bits; layout-free: runs of all layouts end with equal bits."""
    samples: Number = AUTO
    """layout-free: samples of a kernel call; auto: by tokens of a sample and the batch, if no bits field is written."""
    tensor: Number = AUTO
    """layout-free: parts of heads, widths and tables, one per kernel call; a multiple of tensor sizes; auto: 2 to 8."""
    hidden: Number = AUTO
    """layout-free: parts of the hidden width, one per kernel call; a multiple of layout.tensor.q; auto: <= 2."""
    sequence: Number = AUTO
    """layout-free: runs of a sequence, one per kernel call; a multiple of sizes that cut sequences; auto: 2 to 8."""

    attention: Queries = AUTO
    """layout-free: queries of a kernel call: whole sequences, or one run, for rings; auto: runs if rings are legal."""

    @property
    def layout_free(self) -> bool:
        """Whether all layouts end with the same bits."""
        return self.kind == "layout-free"

    @property
    def cuts(self) -> bool:
        """Whether layouts that split layers or sequences also end with the same bits."""
        return self.layout_free and self.tensor * self.hidden * self.sequence > 1

    def head_parts(self, model: Network) -> int:
        """Return the number of head groups that attention computes one at a time.

        A multiple of `bits.tensor`: each group is split further into a divisor of `bits.sequence`, as far as it has
        heads, so that Ulysses ranks receive whole groups.
        """
        _, heads, members, _ = model.branches
        group_heads, queries = max(heads // self.tensor, 1), members // max(self.tensor // heads, 1)
        return self.tensor * max(size for size in divisors(self.sequence) if can_share(group_heads, queries, size))


def _under_layout_free(field: str, *reads: str) -> Callable[[Callable[[Config], Iterator[Problem]]], Rule]:
    """Make a rule that is checked only under `bits.kind=layout-free`."""

    def bind(check: Callable[[Config], Iterator[Problem]]) -> Rule:
        return rule(field, KIND, *reads)(lambda config: check(config) if config.bits.layout_free else iter(()))

    return bind


@_under_layout_free(SAMPLES, "batch.global", "batch.micro", "layout.data.size", "layout.tensor")
def grains_fill_microbatches(config: Config) -> Iterator[Problem]:
    grain, replica = config.bits.samples, config.batch.global_ // config.layout.data.size
    micro, shares = config.batch.micro, config.layout.tensor.rows.parts
    rows, of = (replica, "a replica") if micro == "auto" or replica % grain else (micro, f"batch.micro={micro}")
    if replica % shares or rows % shares:
        return  # reported by the rules of the section that splits rows
    if rows // shares % grain:
        each = f", {rows // shares} of which are each rank's" if shares > 1 else ""
        rule_text = f"does not divide the {rows} samples of {of}{each}"
        yield Problem(SAMPLES, grain, rule_text, listed(divisors(rows // shares)))


@_under_layout_free("precision.loss_scale.initial", "precision")
def scales_are_powers_of_two(config: Config) -> Iterator[Problem]:
    scale = config.precision.loss_scale.initial
    mantissa = scale / 2.0 ** (int(scale).bit_length() - 1) if scale >= 1 else 0.0
    if config.precision.dtype == "fp16" and mantissa != 1:
        rule_text = "is no power of two, and bits.kind=layout-free moves the quantum of its sums with it"
        yield Problem("precision.loss_scale.initial", scale, rule_text, "1, 2, 4, ..., 65536, ...")


def no_power_of_two(field: str, count: int, why: str, valid: str = "") -> Problem | None:
    """Return the problem of a number of addends that is no power of two: a balanced tree cannot sum it."""
    lower = 2 ** (count.bit_length() - 1)
    if count == lower:
        return None
    return Problem(field, count, f"is no power of two, {why}", f"{lower}, {2 * lower}{valid}")


@_under_layout_free(TENSOR, "layout.tensor", "model")
def parts_are_equal(config: Config) -> Iterator[Problem]:
    """Require equal numbers of parts per rank, each a power of two: then a rank has a subtree of the tree of sums."""
    parts, tensor = config.bits.tensor, config.layout.tensor
    for cut in whole_layers(config, TENSOR, parts) if parts > 1 else ():
        if cut.problem is not None:
            yield cut.problem
    branches, adapter = config.model.branches, config.model.adapter
    if adapter is not None and adapter.dora and parts > branches.number:
        rule_text = f"shares {branches.field}={branches.number}, and model.adapter.dora needs whole columns in a part"
        yield Problem(TENSOR, parts, rule_text, listed(divisors(branches.number)), (branches.field,))
    size = tensor.inner_size
    sizes = [size for size in divisors(parts) if size == 1 or not parts // size & (parts // size - 1)]
    if size not in sizes:
        rule_text = f"does not divide bits.tensor={parts}, the parts that kernels get"
        if parts % size == 0:
            rule_text = f"leaves a rank {parts // size} of bits.tensor={parts} parts, and a tree adds up powers of two"
        yield Problem(tensor.inner_field, size, rule_text, f"{listed(sizes)}; or {TENSOR}={size}")


@_under_layout_free(HIDDEN, "layout.tensor", "model")
def parts_of_hidden_are_equal(config: Config) -> Iterator[Problem]:
    """Require a power of two, since a tree sums the parts, and parts of whole vectors."""
    parts, tensor = config.bits.hidden, config.layout.tensor
    size = tensor.inner_size if tensor.cuts_hidden else 1
    uneven = [(field, width) for field, width in config.model.widths if parts > 1 and width % (parts * VECTOR)]
    if problem := no_power_of_two(HIDDEN, parts, "whose sums a tree makes"):
        yield problem
    elif uneven:  # `widths` has latent widths too, which are between pairs
        field, width = uneven[0]
        rule_text = f"does not cut {field}={width} into parts of whole vectors of {VECTOR}"
        powers = [size for size in divisors(width // VECTOR) if not size & (size - 1)] if width % VECTOR == 0 else [1]
        yield Problem(HIDDEN, parts, rule_text, listed(powers), (field,))
    elif parts > 1 and config.model.adapter is not None and config.model.adapter.dora:
        yield Problem(HIDDEN, parts, "cuts inputs of linears, and model.adapter.dora needs whole columns", "1")
    elif config.model.adapter is not None and config.model.adapter.rank % parts:
        rank = config.model.adapter.rank
        rule_text = f"does not cut model.adapter.rank={rank} into equal parts"
        yield Problem(HIDDEN, parts, rule_text, listed(divisors(math.gcd(rank, parts))), ("model.adapter.rank",))
    elif parts % size:
        rule_text = f"does not divide bits.hidden={parts}, the parts of the hidden width that kernels get"
        hint = "" if size & (size - 1) else f"; or {HIDDEN}={size}"
        yield Problem(tensor.inner_field, size, rule_text, listed(divisors(parts)) + hint)


@_under_layout_free(
    SEQUENCE,
    "layout.tensor",
    "layout.context",
    "model",
    "data",
    "bits.samples",
    "bits.tensor",
    "bits.hidden",
    "bits.attention",
)
def runs_are_equal(config: Config) -> Iterator[Problem]:
    """Require runs of whole vectors, and equal numbers of runs per rank."""
    runs, tensor, context, model = config.bits.sequence, config.layout.tensor, config.layout.context, config.model
    for length in model.sequences(config):
        if length.number % runs or length.number == runs > 1:  # a sequence of one token is a head's, and is not cut
            rule_text = (
                f"does not cut {length.field}={length.number}{length.note} into equal runs of two tokens or more"
            )
            yield Problem(
                SEQUENCE, runs, rule_text, listed(divisors(length.number)[:-1] or [1]),
                length.reads or (length.field,),
            )  # fmt: skip
            return
        if problem := _kernels_are_whole_vectors(config, length.number):
            yield problem
            return
    why = "and a tree adds up what runs of queries give to a key (bits.attention=runs)"
    problem = no_power_of_two(SEQUENCE, runs, why, "; or bits.attention=heads")
    if config.bits.attention == "runs" and problem is not None:
        yield problem
        return
    again = tensor.inner_size if tensor.cuts_sequences else 1
    if runs % (context.size * again):
        field = "layout.context.size" if context.size > 1 else "layout.tensor.size"
        parts = " x ".join([str(size) for size in (context.size, again) if size > 1])
        rule_text = f"cuts sequences into {parts}, which does not divide bits.sequence={runs}"
        valid = listed(divisors(runs // again if runs % again == 0 else 1))
        if all(length.number % math.lcm(runs, context.size * again) == 0 for length in model.sequences(config)):
            valid += f"; or bits.sequence={math.lcm(runs, context.size * again)}"
        yield Problem(field, context.size if context.size > 1 else again, rule_text, valid)


def _kernels_are_whole_vectors(config: Config, tokens: int) -> Problem | None:
    """Return the problem of functions of the hidden width that would get incomplete vectors, or None.

    Functions of inner widths are padded (tensor/whole_vectors.py). Values that give whole vectors are suggested: fewer
    parts, or more samples per kernel.
    """
    bits, width = config.bits, config.model.hidden
    if not bits.cuts:
        return None

    def fits(samples: int, runs: int, parts: int) -> bool:
        return samples * tokens // runs * width // parts % WHOLE_VECTORS == 0

    if fits(bits.samples, bits.sequence, bits.hidden):
        return None
    field, parts = max((SEQUENCE, bits.sequence), (HIDDEN, bits.hidden), (TENSOR, bits.tensor), key=lambda cut: cut[1])
    fewer = [size for size in divisors(parts)[:-1] if field == SEQUENCE and fits(bits.samples, size, bits.hidden)]
    grain = config.micro // config.layout.tensor.rows.parts
    more = [
        samples
        for samples in divisors(max(grain, 1))
        if samples > bits.samples and fits(samples, bits.sequence, bits.hidden)
    ]
    rows = bits.samples * tokens // bits.sequence
    rule_text = (
        f"gives kernels {rows} tokens x {width // bits.hidden} of model.hidden={width}, and what is left "
        f"over of {WHOLE_VECTORS} elements is computed in another way"
    )
    valid = (f"{SAMPLES}={more[0]}, or {field}=" if more else "") + listed(fewer or [1])
    return Problem(field, parts, rule_text, valid)


@_under_layout_free("layout.context.size", "bits.tensor", SEQUENCE, "layout.tensor", "model")
def parts_of_heads_are_dealt_equally(config: Config) -> Iterator[Problem]:
    bits, context = config.bits, config.layout.context
    if context.size == 1 or not context.strategy.by_heads:
        return
    ranks = config.layout.tensor.inner_size
    if (parts := bits.head_parts(config.model)) % (ranks * context.size):
        rule_text = (
            f"does not divide the {parts} parts of heads that kernels get, {ranks} ranks' (bits.tensor, sequence)"
        )
        yield Problem("layout.context.size", context.size, rule_text, listed(divisors(max(parts // ranks, 1))))


@_under_layout_free("layout.context.kind", "layout.context", "bits.attention")
def rings_have_runs_of_queries(config: Config) -> Iterator[Problem]:
    context = config.layout.context
    if context.size > 1 and not context.strategy.by_heads and config.bits.attention == "heads":
        rule_text = "gives kernels of attention runs of queries, and bits.attention=heads whole sequences"
        yield Problem("layout.context.kind", context.kind, rule_text, "ulysses; or bits.attention=runs")


@_under_layout_free(TENSOR, HIDDEN, SEQUENCE, "model")
def layers_fall_into_blocks(config: Config) -> Iterator[Problem]:
    model, bits = config.model, config.bits
    why = f"cuts layers of a {model.family}, {model.uncut_because}" if model.uncut_because else ""
    experts = model.routing.num_experts
    for field, parts in ((TENSOR, bits.tensor), (HIDDEN, bits.hidden), (SEQUENCE, bits.sequence)):
        said = why
        if experts and field == HIDDEN:
            said = f"cuts inputs of layers, and those of model.experts.count={experts} are not cut"
        if said and parts > 1:
            yield Problem(field, parts, said, "1")


@_under_layout_free("compile", TENSOR, HIDDEN, SEQUENCE, "memory.recompute", "model")
def graphs_have_whole_layers(config: Config) -> Iterator[Problem]:
    """Require one graph of a layer in every layout: a compiler chooses the order of sums by graph and shapes."""
    if not config.in_graphs:
        return
    bits = config.bits
    for field, parts in ((TENSOR, bits.tensor), (HIDDEN, bits.hidden), (SEQUENCE, bits.sequence)):
        if parts > 1:
            rule_text = f"cuts layers, and compile={config.compile} makes a graph of a whole layer"
            yield Problem(field, parts, rule_text, "1; or compile=none", ("compile",))
    if config.memory.policy.attention:
        rule_text = f"takes attention out of the graphs of compile={config.compile}, and other graphs round otherwise"
        valid = "none, auto, offload, {every: n}; or compile=none"
        yield Problem("memory.recompute", config.memory.recompute, rule_text, valid, ("compile",))


REFUSED: tuple[tuple[str, Callable[[Config], object], str], ...] = (
    (
        "layout.tensor.kind",
        lambda config: None if config.layout.tensor.by_parts else config.layout.tensor.kind,
        "none, megatron, subgraph, tesseract",
    ),
    (
        "layout.context.kind",
        lambda config: (
            None
            if config.layout.context.size == 1 or config.layout.context.strategy.layout_free
            else config.layout.context.kind
        ),
        "ulysses",
    ),
    (
        "layout.data.sync",
        lambda config: None if config.layout.data.strategy.order_free else config.layout.data.sync,
        "allreduce, ring, rooted, server-gradient, zero1, zero2, zero3",
    ),
    (
        "precision.accumulate",
        lambda config: config.precision.accumulate if config.precision.accumulate != "float32" else None,
        "float32",
    ),
    ("compile", lambda config: config.compile if config.compile in ("islands", "kernels") else None, "none, blocks"),
)
"""Fields with values that are not layout-free yet: (field, the run's refused value or None, values to use instead)."""


@_under_layout_free(
    KIND, "layout.tensor", "layout.context", "layout.data.sync", "optimizer.name", "precision", "compile"
)
def what_is_summed_in_an_order(config: Config) -> Iterator[Problem]:
    for field, value_of, instead in REFUSED:
        if (value := value_of(config)) is not None:
            yield Problem(
                field, value, "has sums or kernels whose bits depend on the layout (bits.kind=layout-free)", instead
            )


MOST_RANKS = 8
"""Ranks of an axis that `auto` serves."""

ENOUGH_TOKENS = 1024
"""Tokens of a grain that `auto` takes at most: a pass over the parameters is 5 % of their products, of 512 10 %."""

LEAST = 256
"""Columns of a part, and tokens of a run, that `auto` leaves; fewer only to let two ranks in."""

LARGEST: Mapping[str, int] = {TENSOR: MOST_RANKS, SEQUENCE: MOST_RANKS, HIDDEN: 2}
"""The most parts that `auto` takes, in the order of decision."""

ALONE: Mapping[str, Any] = {"samples": 1, "tensor": 1, "hidden": 1, "sequence": 1, "attention": "heads"}
"""The values of fields beside a written one, and in the usual mode, which does not read any."""

_RULES = (parts_are_equal, parts_of_hidden_are_equal, runs_are_equal, layers_fall_into_blocks)


def decided_bits(config: Config) -> Bits:
    """Return the config's section `bits` with a value for each `auto`. Decided fields do not count as written."""

    def fits(values: dict[str, Any]) -> bool:
        """Return whether the model and its sequences have these parts on one device."""
        bits = Bits.model_construct(kind=config.bits.kind, **values)
        tried = config.model_copy(update={"bits": bits, "layout": type(config.layout)()})
        return not any(problem for rule in _RULES for problem in rule.check(tried))

    bits = config.bits
    written = {name: value for name in ALONE if (value := getattr(bits, name)) != "auto"}
    values = {**ALONE, **written}
    free = [name for name in ALONE if name not in written and (not written or name in bits.model_fields_set)]
    if not bits.layout_free:
        free = []
    elif config.in_graphs or config.loss is not None:  # graphs are of whole layers, and rows' sums of whole rows
        free = [name for name in free if name == "samples"]
    model = config.model
    if "samples" in free:
        # A divisor of every legal replica's part, of few tokens.
        batch = config.batch.global_
        replicas = math.lcm(*(size for size in range(1, MOST_RANKS + 1) if batch % size == 0))
        length = max((length.number for length in model.sequences(config)), default=ENOUGH_TOKENS)
        values["samples"] = max(
            size for size in divisors(batch // replicas) if size == 1 or size * length <= ENOUGH_TOKENS
        )
    tokens = values["samples"] * max((length.number for length in model.sequences(config)), default=0)
    rings = "attention" in free and model.cuts_context and not model.dropout
    sizes = {TENSOR: model.hidden, SEQUENCE: tokens, HIDDEN: model.hidden}
    for field, most in LARGEST.items():
        name = field.removeprefix("bits.")
        powers = [2**power for power in range(most.bit_length() - 1, 0, -1)]
        wanted = [count for count in powers if count == 2 or sizes[field] // count >= LEAST]
        if name in free:
            values[name] = next((count for count in wanted if fits({**values, name: count})), 1)
    if rings and values["sequence"] > 1:
        values["attention"] = "runs"
    fields_set = bits.model_fields_set - (ALONE.keys() - written.keys())
    return Bits.model_construct(_fields_set=fields_set, kind=bits.kind, **values)
