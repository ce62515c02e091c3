"""The section `loss`: direct preference optimization, and the rules of runs on preferences. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from meshwright.config.registry import entries
from meshwright.config.section import Section, rule
from meshwright.ranks.errors import Problem

if TYPE_CHECKING:
    from meshwright.config import Config


class Preference(Section):
    """A loss over pairs of answers, relative to the run's first weights (DPO, Rafailov et al., arXiv 2305.18290)."""

    kind: Literal["dpo"] = "dpo"
    """dpo: minus log sigmoid of beta times the difference of the two answers' log-ratios (equation 7)."""
    beta: Annotated[float, Field(gt=0, le=1000)] = 0.1
    """The factor of log-ratios; with a larger one the weights stay nearer to the first weights."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """The assumed share of pairs with chosen and rejected swapped by mistake (conservative DPO)."""


@rule("loss", "data.kind")
def pairs_have_a_loss(config: Config) -> Iterator[Problem]:
    loss, data = config.loss, config.data
    if data.rows > 1 and loss is None:
        rule_text = f"is the loss of one text, and data.kind={data.kind} gives pairs of answers"
        yield Problem("loss", "null", rule_text, "loss={kind: dpo, beta: 0.1}")
    if data.rows == 1 and loss is not None:
        kinds = ", ".join(name for name, section in entries("data").items() if section.rows > 1)
        rule_text = f"is a loss over pairs of answers, and data.kind={data.kind} gives none"
        yield Problem("loss", loss.kind, rule_text, f"null, or data.kind={kinds}")


@rule("loss", "bits")
def rows_are_summed_whole(config: Config) -> Iterator[Problem]:
    bits = config.bits
    for field, parts in (("tensor", bits.tensor), ("hidden", bits.hidden), ("sequence", bits.sequence)):
        if config.loss is not None and bits.layout_free and parts > 1:
            rule_text = f"adds up losses part by part, and loss.kind={config.loss.kind} needs the sum of a whole row"
            yield Problem(f"bits.{field}", parts, rule_text, "1; or bits.kind=usual")


@rule("loss", "model")
def experts_are_balanced_by_rows(config: Config) -> Iterator[Problem]:
    if config.loss is not None and config.model.routing.counts_first:
        rule_text = "counts the tokens of a batch of single texts, and loss.kind=dpo has two texts a sample"
        yield Problem("model.experts.balance_over", "batch", rule_text, "sequence")
