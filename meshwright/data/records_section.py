"""The base of data sections that read records of files: split and column. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, NamedTuple

from pydantic import Field

from meshwright.config.section import Rule, rule
from meshwright.data.forms_section import form_of, refusal_of
from meshwright.data.section import HUB, TokenSection
from meshwright.ranks.errors import Problem

if TYPE_CHECKING:
    from meshwright.config import Config


class Picks(NamedTuple):
    """The fields that choose among the records of a source."""

    split: str | None = None
    column: str | None = None


@rule("data.source", "data.mixture", "data.target", "data.kind")
def source_has_a_form(config: Config) -> Iterator[Problem]:
    data = config.data
    assert isinstance(data, RecordSection), data
    for source in data.sources if data.by_suffix else ():
        path = Path(source).expanduser()
        if path.is_file() and form_of(path) is None:
            reason, remedy = refusal_of(path)
            yield Problem("data.mixture" if data.mixed else "data.source", source, reason, remedy)


@rule("data.split", "data.column", "data.source", "data.mixture", "data.kind")
def picks_have_an_effect(config: Config) -> Iterator[Problem]:
    """Folders and data sets have splits, records have columns; names and prepared folders have neither."""
    data = config.data
    assert isinstance(data, RecordSection), data
    for name, value in data.picks._asdict().items():
        for source in data.sources if value is not None else ():
            path = Path(source).expanduser()
            if source in data.source_names:
                what = "is no file"
            elif (path / data.header).is_file():
                what = "was prepared already"
            elif name == "split" and path.is_file():
                what = "is one file, which has no splits"
            elif name == "column" and path.is_file() and form_of(path) == "text":
                what = "is one text, which has no columns"
            else:
                continue
            if not source.startswith(HUB):
                yield Problem(f"data.{name}", value, f"has no effect: data.source={source} {what}", "leave it out")


@rule("data.validation", "validation.every")
def validation_has_data(config: Config) -> Iterator[Problem]:
    if config.validation.every and not config.data.validation:
        rule_text = "measures on the share that is held out, and data.validation=0 holds out none"
        yield Problem("validation.every", config.validation.every, rule_text, "0, or data.validation=0.05")


class RecordSection(TokenSection):
    """Base of the kinds with samples from records of files (forms_section.py)."""

    rules: ClassVar[tuple[Rule, ...]] = (
        *TokenSection.rules,
        source_has_a_form,
        picks_have_an_effect,
        validation_has_data,
    )

    validation: Annotated[float, Field(ge=0, lt=0.5)] = 0.05
    """The share of the records, by characters, that is held out; 0: none, and the run does not validate."""
    split: str | None = None
    """The split of a folder or data set of several: train, test; null: the only one, and of hub:... its train split."""

    @property
    def picks(self) -> Picks:
        """The split, and the column if the kind has one."""
        return Picks(self.split)

    @property
    def by_suffix(self) -> bool:
        """Whether the suffix of a source says the form."""
        return True
