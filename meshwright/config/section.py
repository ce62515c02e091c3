"""The base of all sections of a config, the kinds of numbers in them, and rules over fields.

This module imports no other module of config/, so that a strategy's own section (tensor/section.py, ...) can be
imported before the config that is composed of all sections.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Self, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, ValidationInfo, field_validator

from meshwright.ranks.errors import ConfigError, Problem

if TYPE_CHECKING:
    from meshwright.config import Config

_UNITS = {"k": 2**10, "m": 2**20, "g": 2**30}


def parse_counts(option: str, text: str, what: str, least: int) -> tuple[int, ...]:
    """Parse an option's list: `4, 2,4` -> (2, 4). Raises ConfigError for a word that is no number, or below `least`.

    `what`: the counted things, for the error text.
    """
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if not (word.isdecimal() and int(word) >= least):
            raise ConfigError.of(option, word, f"is not a number of {what}", f"{least} or more, such as 2,4,8")
    return tuple(sorted(set(map(int, words))))


def parse_size(value: object) -> object:
    """Parse a size: `16M` -> 16777216 (K, M and G are powers of 1024). Any other value is left to the type check."""
    if isinstance(value, str) and value[-1:].lower() in _UNITS and value[:-1].isdigit():
        return int(value[:-1]) * _UNITS[value[-1].lower()]
    return value


LARGEST = 2**48
"""The largest valid count. The divisors of any number up to this bound are found quickly."""

MOST_SHOWN = 120


def shown(value: object) -> str:
    """Format a value as in YAML: true, null, bare words. The middle of a long text is left out."""
    text = _shown(value)
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN // 2]} ... {text[-MOST_SHOWN // 4 :]}"


def can_share(count: int, members: int, parts: int) -> bool:
    """True if `count` branches (heads) can be shared by `parts` ranks.

    Either each rank has the same number of whole branches (`parts` divides `count`), or the same number of ranks share
    each branch and split its `members` evenly.
    """
    return count % parts == 0 or (parts % count == 0 and members % (parts // count) == 0)


def divisors(count: int) -> list[int]:
    """Return all positive divisors, ascending."""
    # Candidates up to the square root: counting to 2^48 would hang after a typing error.
    small = [candidate for candidate in range(1, math.isqrt(count) + 1) if count % candidate == 0]
    return small + [count // divisor for divisor in reversed(small) if divisor * divisor != count]


def listed(values: list[int], most: int = 12) -> str:
    """Format values as a short text, without the middle if there are more than `most`."""
    if len(values) > most:
        return ", ".join(map(str, values[: most - 1])) + f", ..., {values[-1]}"
    return ", ".join(map(str, values))


def at_most(bound: int, least: int = 1) -> str:
    """Format the values up to a bound as a short text: `8 or less`, or `1` if only `least` is valid."""
    return str(bound) if bound <= least else f"{bound} or less"


def multiples(of: int, near: int) -> str:
    """Format multiples as a short text, from the first one >= `near`: `16, 24, any multiple of 8`."""
    first = max(1, math.ceil(near / of)) * of
    return f"{first}, {first + of}, any multiple of {of}"


def even_near(odd: int) -> str:
    """Format the even numbers next to an odd one as a short text: `4, 6, any even number`."""
    return listed([even for even in (odd - 1, odd + 1) if even > 0]) + ", any even number"


def _shown(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case list() | tuple():
            return "[" + ", ".join(map(_shown, value)) + "]"
        case dict():
            return "{" + ", ".join(f"{key}: {_shown(item)}" for key, item in value.items()) + "}"
    return str(value)


Size = Annotated[int, Field(ge=1, le=LARGEST, examples=["16M"]), BeforeValidator(parse_size)]
Positive = Annotated[int, Field(ge=1, le=LARGEST)]
Count = Annotated[int, Field(ge=0, le=LARGEST)]
Layers = Annotated[int, Field(ge=1, le=10_000)]
"""A number of layers. Each layer is a Python object: building a mistyped 10^9 layers would take hours."""
Seconds = Annotated[float, Field(gt=0, le=10 * 365 * 86400)]
"""A wait of at most ten years, since the clocks of the libraries overflow beyond that."""
Share = Annotated[float, Field(ge=0, lt=1)]


_NUMBER = re.compile(r"[-+]?(0|[1-9]\d*)(\.\d*)?([eE][-+]?\d+)?")


def _leaves(annotation: Any) -> Iterator[Any]:
    """Yield the plain types of an annotation, through unions, `Annotated`, tuples and lists."""
    parts = get_args(annotation)
    if get_origin(annotation) is Annotated:
        parts = parts[:1]
    elif get_origin(annotation) not in (Union, UnionType, tuple, list):
        parts = ()
        yield annotation
    for argument in parts:
        yield from _leaves(argument)


class Section(BaseModel):
    """Base of all sections: frozen, and an unknown key is a mistake."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, allow_inf_nan=False, defer_build=True)

    def __copy__(self) -> Self:
        """Copy as pydantic does, but faster: no extra or private fields are copied. A search makes 10^6 copies."""
        copied = type(self).__new__(type(self))
        object.__setattr__(copied, "__dict__", self.__dict__.copy())
        object.__setattr__(copied, "__pydantic_fields_set__", self.__pydantic_fields_set__.copy())
        object.__setattr__(copied, "__pydantic_extra__", None)
        object.__setattr__(copied, "__pydantic_private__", None)
        return copied

    @field_validator("*", mode="before")
    @classmethod
    def refuse_slips(cls, value: object, info: ValidationInfo) -> object:
        """Refuse `steps: true`, since true is no 1, and `steps: "010"`, since a reader may take the text for 8."""
        annotation = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool) and annotation is not bool:
            raise ValueError("true and false are not numbers")
        for entry in value if isinstance(value, list | tuple) else (value,):
            if isinstance(entry, str) and not _NUMBER.fullmatch(entry):
                kinds, reads = set(_leaves(annotation)), False
                with suppress(ValueError):
                    reads = math.isfinite(float(entry))
                if reads and kinds & {int, float} and not kinds & {str, Path}:
                    raise ValueError("is a text, and no number as YAML 1.2 writes it")
        return value


def union_of(sections: Mapping[str, type[Section]], tag: str, default: str | None = None) -> Any:
    """Return the annotation of a field that holds one of the sections, chosen by the section's field `tag`."""
    classes = tuple(sections.values())

    def name(value: object) -> object:
        if isinstance(value, dict):
            return value.get(tag, default)
        return field_of(value, tag) if isinstance(value, classes) else None

    branches = tuple(Annotated[section, Tag(known)] for known, section in sections.items())
    return Annotated[Union[branches], Discriminator(name)]  # noqa: UP007 the members are known when it runs


def decides_nothing(value: object) -> bool:
    """True if a value is allowed for a field without effect."""
    return value is None or value is False or value in ("auto", "none", "no", "off")


def fields_meet(fields: Collection[str], others: Collection[str]) -> bool:
    """True if any field equals one of the others, is inside one, or contains one."""
    return any((f"{a}.").startswith(f"{b}.") or (f"{b}.").startswith(f"{a}.") for a in fields for b in others)


def field_of(section: Any, field: str) -> Any:
    """Return the value of a dotted name in a section or its dump."""
    if not isinstance(section, dict):
        return attrgetter(field)(section)
    name, _, rest = field.partition(".")
    return field_of(section[name], rest) if rest else section[name]


def leaves_of(tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Flatten a section's dump to dotted names: `{"data": {"size": 2}}` -> `{"data.size": 2}`."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= leaves_of(value, f"{above}{key}.") if isinstance(value, dict) else {above + key: value}
    return leaves


def with_field(section: Any, field: str, value: object) -> Any:
    """Return the section, or its dump, with one field changed. The caller checks the rules."""
    name, _, rest = field.partition(".")
    if rest:
        value = with_field(section[name] if isinstance(section, dict) else getattr(section, name), rest, value)
    # model_copy keeps the set of fields that the user wrote, and checks no rule.
    return section | {name: value} if isinstance(section, dict) else section.model_copy(update={name: value})


@dataclass(frozen=True)
class Rule:
    """A check of a config: a generator of problems over the fields that it reads.

    If one of these fields is itself mistaken, the rule is left out, and every other mistake is still reported.
    """

    reads: tuple[str, ...]
    check: Callable[[Config], Iterator[Problem]]


def rule(*reads: str) -> Callable[[Callable[[Config], Iterator[Problem]]], Rule]:
    """Make the decorated check a rule over the fields that it reads."""
    return lambda check: Rule(reads, check)
