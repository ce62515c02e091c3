"""The data section of text (windows of tokens), and the base of kinds with mixtures of sources. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from meshwright.config.registry import entries
from meshwright.config.section import Rule, rule
from meshwright.data.marks_section import AUTO, NONE
from meshwright.data.records_section import Picks, RecordSection
from meshwright.ranks.errors import ConfigError, Problem
from meshwright.ranks.foreign import read_json

if TYPE_CHECKING:
    from meshwright.config import Config
    from meshwright.data.files import ShowProgress

BLOCK = 1000
"""Number of consecutive samples with an exact share of each source of a mixture."""
MIXTURE = "mixture.json"


def parse_weights(value: object) -> object:
    """Convert `{a.txt: 3, b.txt: 1}` to ((a.txt, 3), (b.txt, 1)), since a config must be hashable."""
    return tuple(value.items()) if isinstance(value, Mapping) else value


def shares_of(weights: Mapping[str, float]) -> tuple[int, ...]:
    """Return integer shares of BLOCK in the ratio of the weights (largest remainder method)."""
    exact = [BLOCK * weight / sum(weights.values()) for weight in weights.values()]
    shares = [int(share) for share in exact]
    # Largest remainders first, of equal remainders the earlier source, so that shares are equal on every machine.
    by_remainder = sorted(range(len(exact)), key=lambda index: (shares[index] - exact[index], index))
    for index in by_remainder[: BLOCK - sum(shares)]:
        shares[index] += 1
    return tuple(shares)


@rule("data.mixture")
def every_source_has_a_share(config: Config) -> Iterator[Problem]:
    data = config.data
    assert isinstance(data, MixedSection), data
    for source, share in zip(data.weights, shares_of(data.weights) if data.mixture else (), strict=True):
        if not share:
            rule_text = f"is less than 1/{BLOCK} of the weights' sum, the least share of a source"
            yield Problem(f"data.mixture.{source}", data.weights[source], rule_text, "a larger weight, or leave it out")


class MixedSection(RecordSection):
    """Base of the kinds with samples from one source or a mixture of sources."""

    rules: ClassVar[tuple[Rule, ...]] = (*RecordSection.rules, every_source_has_a_share)
    reads_hub: ClassVar[bool] = True
    prepared_by: ClassVar[str] = "meshwright.data.mixture:prepare_sources"
    opened_by: ClassVar[str] = "meshwright.data.mixture:open_sources"

    mixture: Annotated[tuple[tuple[str, Annotated[float, Field(gt=0)]], ...], BeforeValidator(parse_weights)] = ()
    """Several sources and the weight of each, in place of source: {wiki.txt: 3, stdlib: 1}."""
    column: str | None = None
    """The key or column of a record's text; null: text."""

    @property
    def picks(self) -> Picks:
        return Picks(self.split, self.column)

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each source of a mixture."""
        return dict(self.mixture)

    def __hash__(self) -> int:
        """Hash the fields, since plans are cached by section, and a dict field has no hash."""
        return hash(self.model_dump_json())

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(self.weights) or (self.source,)

    @property
    def mixed(self) -> bool:  # type: ignore[override]
        return bool(self.mixture)

    def pack(self, config: Config, out: Path, progress: ShowProgress) -> Path:
        if self.mixture:
            rule_text = "is several sources, which are packed one by one"
            raise ConfigError.of("data.mixture", ", ".join(self.weights), rule_text, "prepare each by data.source")
        return super().pack(config, out, progress)

    def contents(self, folder: Path) -> object:
        if not self.mixture:
            return super().contents(folder)
        parts = read_json(folder / MIXTURE)["parts"]
        return [[entry["share"], entry["sha256"]] for entry in parts]


@rule("data.documents", "data.kind", "model.family", "layout.context")
def documents_are_kept_apart(config: Config) -> Iterator[Problem]:
    context, family = config.layout.context, config.model.family
    if not config.data.separate:
        return
    if not config.model.separates:
        names = [name for name, model in entries("models").items() if model.separates]
        valid = f"data.documents=joined, or model.family={', '.join(names)}"
        yield Problem("model.family", family, "attends over all of a sample, and its documents are separate", valid)
    if context.size > 1 and not context.strategy.documents:
        names = [name for name, strategy in entries("contexts").items() if strategy.documents]
        rule_text = "attends over all of a sample, and its documents are separate"
        yield Problem("layout.context.kind", context.kind, rule_text, ", ".join((*names, "or data.documents=joined")))


@rule("data.end", "data.documents")
def separate_documents_have_an_end(config: Config) -> Iterator[Problem]:
    data = config.data
    assert isinstance(data, TextData), data
    if data.separate and data.end == NONE:
        rule_text = "leaves nothing by which data.documents=separate tells documents apart"
        yield Problem("data.end", data.end, rule_text, f"{AUTO}, a token")


class TextData(MixedSection):
    """Windows of tokens, each token labelled with the next."""

    rules: ClassVar[tuple[Rule, ...]] = (*MixedSection.rules, documents_are_kept_apart, separate_documents_have_an_end)
    begins: ClassVar[bool] = True

    kind: Literal["text"] = "text"
    gives: ClassVar[str] = "tokens"
    samples_by: ClassVar[str] = "meshwright.data.sampler:token_samples"
    begin: str = AUTO
    """The token before a document: auto (from the tokenizer's files), none, or a token's text."""
    end: str = AUTO
    """The token after a document: auto (from the tokenizer's files), none, or a token's text."""
    documents: Literal["joined", "separate"] = "joined"
    """joined: a token sees all earlier tokens of the window; separate: only earlier tokens of the same document."""

    @property
    def separate(self) -> bool:  # type: ignore[override]
        return self.documents == "separate"
