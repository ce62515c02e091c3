"""From pydantic's complaints to problems in our words: field, value, rule, and the values that would work.

What would work is read off the schema's own annotations, so that a message cannot drift from the check.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Sequence
from typing import Any, Literal

import annotated_types
from pydantic import BaseModel, BeforeValidator, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from meshwright.config.schema import Config, Model, parse_size
from meshwright.errors import Problem

_KINDS: dict[type, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def problems_of(error: ValidationError, models: Sequence[str]) -> list[Problem]:
    """One problem a field. `models`: the names that `model` may hold besides a section."""
    details: dict[tuple[str, ...], ErrorDetails] = {}
    for detail in error.errors():
        # A union complains once a branch, about the same field: the annotation says more than the complaints.
        details.setdefault(field_path(detail["loc"]), detail)
    return [_problem(path, detail, models) for path, detail in details.items()]


def field_path(location: Sequence[int | str]) -> tuple[str, ...]:
    """The keys of a pydantic location, without the tags that it adds for unions' branches and list items."""
    path: list[str] = []
    section: type[BaseModel] | None = Config
    for part in location:
        path.append(str(part))
        section = _section(section, str(part))
        if section is None:
            break
    return tuple(path)


def nearest(word: str, known: Sequence[str]) -> str:
    """` (did you mean X?)` where a known word is close to the given one, else nothing."""
    close = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def shown(value: object) -> str:
    """A value as the user wrote it in YAML: true, null, bare words."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case list() | tuple():
            return "[" + ", ".join(map(shown, value)) + "]"
        case dict():
            return "{" + ", ".join(f"{key}: {shown(item)}" for key, item in value.items()) + "}"
    return str(value)


def _problem(path: tuple[str, ...], detail: ErrorDetails, models: Sequence[str]) -> Problem:
    name, value = ".".join(path), shown(detail["input"])
    parent = _section_at(path[:-1])
    field = _field(parent, path[-1])
    if field is None:
        known = _keys(parent)
        return Problem(name, value, "is an unknown key" + nearest(path[-1], known), ", ".join(known))
    section = _model_in(field.annotation)
    if section is Model:
        return Problem(name, value, "is neither a model's name nor a section", ", ".join(models))
    if section is not None:
        return Problem(name, value, "is not a section", "a section with the keys " + ", ".join(_keys(section)))
    index = detail["loc"][-1]
    item = f"at index {index} " if isinstance(index, int) and detail["type"] != "missing" else ""
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
        case "finite_number":
            return "is not finite"
    text = shown(detail["input"])
    if typing.get_origin(field.annotation) is Literal:
        return "is none of the choices" + nearest(text, choices)
    kinds = [_kind(branch) for branch in _branches(field.annotation)]
    rule = f"is neither {' nor '.join(kinds)}" if len(kinds) > 1 else f"is not {kinds[0]}"
    return rule + nearest(text, choices)


def _described(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """The values that a plain field takes: its choices, or its kind and bounds."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _described(inner[0], [*_flat(inner[1:]), *metadata])
    if origin is Literal:
        return ", ".join(map(str, inner))
    if len(_branches(annotation)) > 1:
        return " or ".join(_described(branch, metadata) for branch in inner)
    if origin is tuple:
        return f"a list of {len(inner)}, each {_described(inner[0])}"
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
    return f"a list of {len(inner)} numbers" if origin is tuple else _described(annotation)


def _branches(annotation: Any) -> tuple[Any, ...]:
    """A union's members; a plain annotation is its own only one."""
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if union else (annotation,)


def _choices(annotation: Any) -> list[str]:
    """The words that the annotation lists, of all its branches."""
    if typing.get_origin(annotation) is Literal:
        return [str(choice) for choice in typing.get_args(annotation)]
    return [choice for branch in typing.get_args(annotation) for choice in _choices(branch)]


def _section(section: type[BaseModel] | None, key: str) -> type[BaseModel] | None:
    """The sub-section that `key` holds, or None for a plain field or an unknown key."""
    field = _field(section, key) if section is not None else None
    return _model_in(field.annotation) if field is not None else None


def _section_at(path: Sequence[str]) -> type[BaseModel]:
    section: type[BaseModel] | None = Config
    for part in path:
        section = _section(section, part)
    assert section is not None, f"{path} is no section"
    return section


def _field(section: type[BaseModel], key: str) -> FieldInfo | None:
    for name, field in section.model_fields.items():
        if key == (field.alias or name):
            return field
    return None


def _model_in(annotation: Any) -> type[BaseModel] | None:
    for branch in _branches(annotation):
        if isinstance(branch, type) and issubclass(branch, BaseModel):
            return branch
    return None


def _keys(section: type[BaseModel]) -> list[str]:
    keys = [field.alias or name for name, field in section.model_fields.items()]
    return [*keys, "base"] if section is Model else keys
