"""Whose bits a run's result has: its layout's, or every layout's. No torch.

`layout-free` has two principles. A grain: every kernel gets operands of one shape, those of `samples` samples, in
whatever microbatch, replica or stage they are. And sums in which order cannot matter: what grains, microbatches and
ranks add up is rounded once to a multiple of one power of two, and added as integers (Demmel and Nguyen, "Fast
reproducible floating-point summation", ARITH 2013, with a quantum that is fixed for the run).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal

from meshwright.errors import Problem
from meshwright.section import Positive, Rule, Section, divisors, listed, rule

if TYPE_CHECKING:
    from meshwright.config import Config

KIND, SAMPLES = "bits.kind", "bits.samples"


class Bits(Section):
    """Which layouts end with the same bits; a word stands for the kind."""

    kind: Literal["usual", "layout-free"] = "usual"
    """usual: a layout ends with its own last bits, run after run; layout-free: all layouts end with the same ones."""
    samples: Positive = 1
    """layout-free: samples that a kernel gets at a time. More is faster where samples are short."""

    @property
    def layout_free(self) -> bool:
        """Whether all layouts end with the same bits."""
        return self.kind == "layout-free"


def _under_layout_free(field: str, *reads: str) -> Callable[[Callable[[Config], Iterator[Problem]]], Rule]:
    """A rule that asks nothing of a run whose bits are its layout's."""

    def bind(check: Callable[[Config], Iterator[Problem]]) -> Rule:
        return rule(field, KIND, *reads)(lambda config: check(config) if config.bits.layout_free else iter(()))

    return bind


@_under_layout_free(SAMPLES, "batch.global", "batch.micro", "layout.data.size")
def grains_fill_microbatches(config: Config) -> Iterator[Problem]:
    grain, replica = config.bits.samples, config.batch.global_ // config.layout.data.size
    micro = config.batch.micro
    if replica % grain:
        rule_text = f"does not divide the {replica} samples of a replica"
        yield Problem(SAMPLES, grain, rule_text, listed(divisors(replica)))
    elif micro != "auto" and micro % grain:
        yield Problem(SAMPLES, grain, f"does not divide batch.micro={micro}", listed(divisors(micro)))


@_under_layout_free(KIND, "precision")
def sums_have_digits(config: Config) -> Iterator[Problem]:
    if config.precision.dtype == "float64":
        rule_text = "adds multiples of 2^-52, which would take digits of precision.dtype=float64"
        yield Problem(KIND, config.bits.kind, rule_text, "usual, or precision.dtype=float32, bf16, fp16")


@_under_layout_free("precision.loss_scale.initial", "precision")
def scales_are_powers_of_two(config: Config) -> Iterator[Problem]:
    scale = config.precision.loss_scale.initial
    mantissa = scale / 2.0 ** (int(scale).bit_length() - 1) if scale >= 1 else 0.0
    if config.precision.dtype == "fp16" and mantissa != 1:
        rule_text = "is no power of two, and bits.kind=layout-free moves the quantum of its sums with it"
        yield Problem("precision.loss_scale.initial", scale, rule_text, "1, 2, 4, ..., 65536, ...")


REFUSED: tuple[tuple[str, Callable[[Config], object], str], ...] = (
    ("layout.tensor.kind", lambda config: config.layout.tensor.kind if config.layout.tensor.axes else None, "none"),
    ("layout.context.size", lambda config: config.layout.context.size if config.layout.context.size > 1 else None, "1"),
    (
        "layout.data.sync",
        lambda config: None if config.layout.data.strategy.order_free else config.layout.data.sync,
        "allreduce, ring, rooted, server-gradient, zero1, zero2, zero3",
    ),
    (
        "optimizer.name",
        lambda config: config.optimizer.name if config.optimizer.update.matrices else None,
        "adamw, sgd",
    ),
    (
        "precision.accumulate",
        lambda config: config.precision.accumulate if config.precision.accumulate != "float32" else None,
        "float32",
    ),
    ("compile", lambda config: config.compile if config.compile == "islands" else None, "none"),
)
"""Fields that are not layout-free yet: their value where a run has it, and the values to take instead."""


@_under_layout_free(
    KIND, "layout.tensor", "layout.context.size", "layout.data.sync", "optimizer.name", "precision", "compile",
)  # fmt: skip
def what_is_summed_in_an_order(config: Config) -> Iterator[Problem]:
    for field, value_of, instead in REFUSED:
        if (value := value_of(config)) is not None:
            yield Problem(
                field, value, "has sums or kernels whose bits depend on the layout (bits.kind=layout-free)", instead
            )
