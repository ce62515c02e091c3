"""Pydantic's errors in our words: field, value, rule, and the values that would work.

The valid values are read off the JSON schema that pydantic makes of the sections, so that a message cannot drift from
the check.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from meshwright.config.schema import Config
from meshwright.errors import Problem
from meshwright.section import LARGEST, shown

Schema = dict[str, Any]
"""A JSON schema, without references."""

_RULES = {
    "greater_than_equal": "is less than {ge:g}",
    "greater_than": "is not above {gt:g}",
    "less_than_equal": "is more than {le:g}",
    "less_than": "is not below {lt:g}",
    "too_short": "has too few items",
    "finite_number": "is not finite",
}
"""Rules by pydantic's type of error; any other error is a value of the wrong kind, or none of the choices."""

_TYPES = {
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "string": "a text",
    "null": "null",
}
_BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


def problems_of(error: ValidationError, models: Sequence[str], root: type[BaseModel] = Config) -> list[Problem]:
    """One problem a field. `models`: the names that `model` may hold besides a section; `root`: what was read."""
    schema = root.model_json_schema()
    schema = _inlined(schema, schema.get("$defs", {}))
    problems: dict[str, Problem] = {}
    for detail in error.errors():
        path, known, field = _located(detail["loc"], schema)
        name = ".".join(path)
        if field is None:
            unknown = "is an unknown key" + nearest(path[-1], known)
            problem = Problem(name, shown(detail["input"]), unknown, ", ".join(known))
        else:
            problem = _problem(name, field, detail, models)
        # A union complains once a branch, about the same field: the schema says more than the complaints.
        problems.setdefault(name, problem)
    return list(problems.values())


def nearest(word: str, known: Sequence[str]) -> str:
    """` (did you mean X?)` where a known word is close to the given one, else nothing."""
    close = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def _inlined(node: Any, definitions: Schema) -> Any:
    """The schema with every reference replaced by what it refers to."""
    if isinstance(node, list):
        return [_inlined(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _inlined(definitions[node["$ref"].rpartition("/")[2]], definitions)
    return {key: _inlined(value, definitions) for key, value in node.items() if key != "$defs"}


def _located(location: Sequence[int | str], root: Schema) -> tuple[list[str], Sequence[str], Schema | None]:
    """The keys that a pydantic location leads through, the keys that may stand where the last one does, and the last
    one's schema (None: no section knows it); without the tags that pydantic adds for unions' branches and the indices
    of plain lists."""
    path: list[str] = []
    known: Sequence[str] = ()
    field: Schema | None = root
    for part in map(str, location):
        assert field is not None
        sections = _sections(field)
        if len(sections) > 1:  # a tagged union: this part says which branch
            field = sections[part]
            continue
        path.append(part)
        parent = next(iter(sections.values()), field)
        if "items" in parent:
            known, field = (), parent["items"]
        elif "properties" in parent:
            known, field = list(parent["properties"]), parent["properties"].get(part)
            if path[:-1] == ["model"]:
                known.append("base")
        else:
            known = _choices(parent["propertyNames"])
            field = parent["additionalProperties"] if part in known else None
        if field is None or not ("propertyNames" in field or _sections(field) or _sections(field.get("items", {}))):
            break  # an unknown key, a plain value or a list of plain values: nothing inside has a key of its own
    return path, known, field


def _problem(name: str, field: Schema, detail: ErrorDetails, models: Sequence[str]) -> Problem:
    """The problem of a field that exists."""
    value, sections = shown(detail["input"]), _sections(field)
    tag = f"{name}.{'family' if name == 'model' else 'kind'}"
    match detail["type"]:
        case "union_tag_invalid":
            given = str(detail["ctx"]["tag"])
            return Problem(tag, given, "is none of the choices" + nearest(given, list(sections)), ", ".join(sections))
        case "union_tag_not_found" if isinstance(detail["input"], dict):
            return Problem(tag, "nothing", "is missing", ", ".join(sections))
        case "missing" if not isinstance(detail["loc"][-1], int):  # else: an item of a list
            return Problem(name, "nothing", "is missing", _described(field))
        case "value_error" if not isinstance(detail["input"], bool):  # a check of ours, which says the rule
            return Problem(name, value, str(detail["ctx"]["error"]), _described(field))
    if name == "model":
        return Problem(name, value, "is neither a model's name nor a section", ", ".join(models))
    if sections:
        return Problem(name, value, "is not a section", _described(field))
    indices = list(takewhile(lambda part: isinstance(part, int), reversed(detail["loc"])))[::-1]
    item = f"at index {', '.join(map(str, indices))} " if indices and detail["type"] != "missing" else ""
    return Problem(name, value, item + _rule(field, detail), _described(field))


def _rule(field: Schema, detail: ErrorDetails) -> str:
    """The bound that the value misses, the choices that it is none of, or the kinds that it is not of."""
    if detail["type"] in _RULES:
        return _RULES[detail["type"]].format(**detail.get("ctx", {}))
    kinds, choices = [_described(branch, brief=True) for branch in _branches(field)], _choices(field)
    if len(kinds) > 1:
        rule = f"is neither {' nor '.join(kinds)}"
    else:
        rule = "is none of the choices" if choices else f"is not {kinds[0]}"
    return rule + nearest(shown(detail["input"]), choices)


def _described(field: Schema, brief: bool = False) -> str:
    """The values that a field takes: its choices, its kind and bounds, a section's keys. `brief`: without bounds."""
    if sections := _sections(field):
        keys = dict.fromkeys(key for section in sections.values() for key in section["properties"])
        return "a section with the keys " + ", ".join(keys)
    if "anyOf" in field:
        return " or ".join(_described(branch, brief) for branch in field["anyOf"])
    if "propertyNames" in field:
        return f"a section with some of the keys {_described(field['propertyNames'])}"
    choices = _choices(field)
    if not choices and field["type"] == "array":
        fixed = field.get("prefixItems", [])
        item, size = (fixed[0], f" of {len(fixed)}") if fixed else (field["items"], "")
        if not brief:
            return f"a list{size}, each {_described(item)}"
        return f"a list{size or ' of'} {'names' if item.get('type') == 'string' else 'numbers'}"
    kind = ", ".join(choices) or _TYPES[field["type"]]
    if brief:
        return kind
    bounds = [f"{sign} {field[key]}" for key, sign in _BOUNDS.items() if field.get(key, LARGEST) != LARGEST]
    sizes = "".join(f", or a size such as {example}" for example in field.get("examples", ()))
    return " ".join([kind, " and ".join(bounds)]).strip() + sizes


def _branches(field: Schema) -> list[Schema]:
    """A union's members; a plain field is its own only one."""
    return list(field.get("anyOf") or field.get("oneOf") or [field])


def _choices(field: Schema) -> list[str]:
    """The words that a field lists, of all its branches."""
    options = [option for branch in _branches(field) for option in branch.get("enum", [branch.get("const")])]
    return [str(option) for option in options if option is not None]


def _sections(field: Schema) -> dict[str, Schema]:
    """The sections that a field may hold, by their tags; one without a tag stands alone; none for a plain field."""
    sections: dict[str, Schema] = {}
    for branch in _branches(field):
        if properties := branch.get("properties"):
            tags = (properties[key].get("const", "") for key in ("family", "kind") if key in properties)
            sections[str(next(tags, ""))] = branch
    return sections
