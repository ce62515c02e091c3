"""From pydantic's complaints to problems in our words: field, value, rule, and the values that would work.

What would work is read off the schema's own annotations, so that a message cannot drift from the check.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Literal

import annotated_types
from pydantic import BaseModel, BeforeValidator, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from meshwright.config.schema import Config
from meshwright.errors import Problem
from meshwright.models.section import Transformer
from meshwright.section import LARGEST, parse_size, shown

_KINDS: dict[type, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def problems_of(error: ValidationError, models: Sequence[str], root: type[BaseModel] = Config) -> list[Problem]:
    """One problem a field. `models`: the names that `model` may hold besides a section; `root`: what was read."""
    found: dict[tuple[str, ...], Problem] = {}
    for detail in error.errors():
        # A union complains once a branch, about the same field: the annotation says more than the complaints.
        place = _located(detail["loc"], root)
        found.setdefault(place.path, _problem(place, detail, models))
    return list(found.values())


@dataclass(frozen=True)
class _Place:
    """Where a complaint points to. `path`: the keys; `known`: those that may stand where the last one does; `parent`:
    the section that the last belongs to, None: another thing; `field`: what is known of the last, None: nothing."""

    path: tuple[str, ...]
    parent: type[BaseModel] | None
    known: tuple[str, ...]
    field: FieldInfo | None


def _located(location: Sequence[int | str], root: type[BaseModel]) -> _Place:
    """The place of a pydantic location, without the tags that it adds for unions' branches and plain lists' items."""
    path: list[str] = []
    known: tuple[str, ...] = ()
    field: FieldInfo | None = None
    branches: dict[str, Any] = {"": root}
    for part in map(str, location):
        if len(branches) > 1:  # a tagged union: this part says which
            branches = {"": branches[part]}
            continue
        (parent,) = branches.values()
        path.append(part)
        if typing.get_origin(parent) is tuple:
            field, known = FieldInfo.from_annotation(typing.get_args(parent)[0]), ()
        elif typing.get_origin(parent) is dict:
            keys, values = typing.get_args(parent)
            known = tuple(_choices(keys))
            field = FieldInfo.from_annotation(values) if part in known else None
        else:
            known, field = tuple(_keys(parent)), _field(parent, part)
        section = parent if typing.get_origin(parent) is None else None
        place = _Place(tuple(path), section, known, field)
        branches = {} if field is None else _nested(field.annotation)
        if not branches:
            break
    return place


def _nested(annotation: Any) -> dict[str, Any]:
    """What has keys of its own inside a field: sections by their tags, a mapping, a list of sections."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is dict or (origin is tuple and _sections(inner[0])):
        return {"": annotation}
    return _sections(annotation)


def nearest(word: str, known: Sequence[str]) -> str:
    """` (did you mean X?)` where a known word is close to the given one, else nothing."""
    close = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def _problem(place: _Place, detail: ErrorDetails, models: Sequence[str]) -> Problem:
    name, value = ".".join(place.path), shown(detail["input"])
    field = place.field
    if field is None:
        return Problem(name, value, "is an unknown key" + nearest(place.path[-1], place.known), ", ".join(place.known))
    sections = _sections(field.annotation)
    tag = "family" if place.parent is Config else "kind"
    match detail["type"]:
        case "union_tag_invalid":
            given = str(detail["ctx"]["tag"])
            return Problem(
                f"{name}.{tag}", given, "is none of the choices" + nearest(given, list(sections)), ", ".join(sections)
            )
        case "union_tag_not_found" if isinstance(detail["input"], dict):
            return Problem(f"{name}.{tag}", "nothing", "is missing", ", ".join(sections))
        case "missing" if not isinstance(detail["loc"][-1], int):  # else: an item of a list
            return Problem(name, "nothing", "is missing", _described(field.annotation, field.metadata))
        case "value_error" if not isinstance(detail["input"], bool):  # a check of ours, which says the rule
            return Problem(name, value, str(detail["ctx"]["error"]), _described(field.annotation, field.metadata))
    if name == "model":
        return Problem(name, value, "is neither a model's name nor a section", ", ".join(models))
    if sections:
        return Problem(name, value, "is not a section", _described(field.annotation))
    indices = list(takewhile(lambda part: isinstance(part, int), reversed(detail["loc"])))[::-1]
    item = f"at index {', '.join(map(str, indices))} " if indices and detail["type"] != "missing" else ""
    return Problem(name, value, item + _rule(field, detail), _described(field.annotation, field.metadata))


def _rule(field: FieldInfo, detail: ErrorDetails) -> str:
    """What the value breaks: a bound that it misses, a choice that it is not, a kind that it is not of."""
    choices = _choices(field.annotation)
    bounds = detail.get("ctx", {})
    match detail["type"]:
        case "greater_than_equal":
            return f"is less than {bounds['ge']:g}"
        case "greater_than":
            return f"is not above {bounds['gt']:g}"
        case "less_than_equal":
            return f"is more than {bounds['le']:g}"
        case "less_than":
            return f"is not below {bounds['lt']:g}"
        case "too_short":
            return "has too few items"
        case "finite_number":
            return "is not finite"
    text = shown(detail["input"])
    if typing.get_origin(field.annotation) is Literal:
        return "is none of the choices" + nearest(text, choices)
    kinds = [_kind(branch) for branch in _branches(field.annotation)]
    rule = f"is neither {' nor '.join(kinds)}" if len(kinds) > 1 else f"is not {kinds[0]}"
    return rule + nearest(text, choices)


def _described(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """The values that a field takes: its choices, its kind and bounds, a section's keys."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if sections := _sections(annotation):
        keys = dict.fromkeys(key for section in sections.values() for key in _keys(section))
        return "a section with the keys " + ", ".join(keys)
    if origin is dict:
        return f"a section with some of the keys {_described(inner[0])}"
    if origin is typing.Annotated:
        return _described(inner[0], [*_flat(inner[1:]), *metadata])
    if origin is Literal:
        return ", ".join(map(str, inner))
    if len(_branches(annotation)) > 1:
        return " or ".join(_described(branch, metadata) for branch in inner)
    if origin is tuple:
        return ("a list" if inner[-1] is Ellipsis else f"a list of {len(inner)}") + f", each {_described(inner[0])}"
    if annotation is types.NoneType:
        return "null"
    bounds = [text for item in metadata if (text := _bound(item))]
    size = any(isinstance(item, BeforeValidator) and item.func is parse_size for item in metadata)
    return " ".join([_KINDS[annotation], " and ".join(bounds)]).strip() + (", or a size such as 16M" if size else "")


def _flat(metadata: Sequence[Any]) -> list[Any]:
    """The metadata with pydantic's Field(...) taken apart into its bounds."""
    return [part for item in metadata for part in (item.metadata if isinstance(item, FieldInfo) else [item])]


def _bound(item: object) -> str:
    match item:
        case annotated_types.Ge(ge):
            return f">= {ge}"
        case annotated_types.Gt(gt):
            return f"> {gt}"
        case annotated_types.Le(le) if le == LARGEST:
            return ""  # a bound against slips, which is no help to who looks for a value
        case annotated_types.Le(le):
            return f"<= {le}"
        case annotated_types.Lt(lt):
            return f"< {lt}"
    return ""


def _kind(annotation: Any) -> str:
    """What one branch of an annotation takes, without its bounds: `a whole number`, `auto`."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _kind(inner[0])
    if origin is tuple:
        items = "names" if inner[0] is str else "numbers"
        return f"a list of {items}" if inner[-1] is Ellipsis else f"a list of {len(inner)} {items}"
    return _described(annotation)


def _branches(annotation: Any) -> tuple[Any, ...]:
    """A union's members; a plain annotation is its own only one."""
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if union else (annotation,)


def _choices(annotation: Any) -> list[str]:
    """The words that the annotation lists, of all its branches."""
    if typing.get_origin(annotation) is Literal:
        return [str(choice) for choice in typing.get_args(annotation)]
    return [choice for branch in typing.get_args(annotation) for choice in _choices(branch)]


def _field(section: type[BaseModel], key: str) -> FieldInfo | None:
    for name, field in section.model_fields.items():
        if key == (field.alias or name):
            return field
    return None


def _sections(annotation: Any) -> dict[str, type[BaseModel]]:
    """The sections that a field may hold, by their tags; one without a tag stands alone; none for a plain field."""
    found = {}
    for branch in _branches(annotation):
        section = typing.get_args(branch)[0] if typing.get_origin(branch) is typing.Annotated else branch
        if isinstance(section, type) and issubclass(section, BaseModel):
            found[_tag(section)] = section
    return found


def _tag(section: type[BaseModel]) -> str:
    for key in ("family", "kind"):
        if key in section.model_fields:
            return str(typing.get_args(section.model_fields[key].annotation)[0])
    return ""


def _keys(section: type[BaseModel]) -> list[str]:
    keys = [field.alias or name for name, field in section.model_fields.items()]
    return [*keys, "base"] if issubclass(section, Transformer) else keys
