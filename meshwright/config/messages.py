"""Pydantic's errors in our words: field, value, broken rule, and the valid values.

The valid values are read from pydantic's JSON schema of the sections, so that a message always agrees with the check.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from functools import cache
from itertools import takewhile
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from meshwright.config.schema import Config
from meshwright.config.section import LARGEST, shown
from meshwright.config.shorthand import SHORTHANDS, Shorthand
from meshwright.config.words import COMPARISONS, ours_for_key, ours_for_value
from meshwright.ranks.errors import NOTHING, Problem
from meshwright.ranks.remedies import LEFT_OUT, remedies_of

UNKNOWN = "is an unknown key"

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
"""Rules by pydantic's type of error. Any other error is a value of a wrong kind, or outside of the choices."""

_TYPES = {
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "string": "a text",
    "null": "null",
}
_BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


def problems_of(error: ValidationError, models: Sequence[str], root: type[BaseModel] = Config) -> list[Problem]:
    """Return one problem for each mistaken field.

    Args:
        models: the names that are allowed for `model` in place of a section.
        root: the class that was read.
    """
    schema = _schema_of(root)
    problems: dict[str, Problem] = {}
    for detail in error.errors():
        path, known, field = _located(detail["loc"], schema)
        name = ".".join(path)
        if field is None:
            problem = _unknown(name, detail["input"], known, schema if root is Config else {})
        else:
            problem = _problem(name, field, detail, models)
        # A union reports the same field once for each branch: the first problem, made from the schema, is enough.
        problems.setdefault(name, problem)
    return list(problems.values())


def word_for_option(option: str, value: str) -> str:
    """Translate an option that is a field, or another tool's word for one: `--steps`, 5 -> `steps=5`; "" if unknown."""
    name = option.removeprefix("--").replace("-", "_")
    fields = [path for path in paths_in(_schema_of(Config)) if name in (path, path.rpartition(".")[2])]
    return ours_for_key(option, value) or " or ".join(f"{field}={value}" for field in fields)


def nearest_choice(field: str, word: object, choices: Sequence[str]) -> str:
    """Suggest the choice that another tool's word means, or else a similar choice, as `nearest` does."""
    ours, compared = ours_for_value(field, word), ours_for_value(field, word, COMPARISONS)
    if ours not in choices:
        return nearest(shown(word), choices)
    return f" (did you mean {ours}?)" + (f": {compared}" if compared else "")


def nearest(word: str, known: Sequence[str]) -> str:
    """Return ` (did you mean X?)` if a known word is similar to the given one, else an empty text."""
    close = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


@cache
def _schema_of(root: type[BaseModel]) -> Schema:
    schema = root.model_json_schema()
    whole: Schema = inlined(schema, schema.get("$defs", {}))
    return whole


def inlined(node: Any, definitions: Schema) -> Any:
    """Return the schema with every reference replaced by its definition.

    A section's own description is stored as `about`, because the description of the field may replace `description`.
    """
    if isinstance(node, list):
        return [inlined(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        section = inlined(definitions[node["$ref"].rpartition("/")[2]], definitions)
        return {**section, "about": section.get("description", "")} | {k: v for k, v in node.items() if k != "$ref"}
    return {key: inlined(value, definitions) for key, value in node.items() if key != "$defs"}


def _located(location: Sequence[int | str], root: Schema) -> tuple[list[str], Sequence[str], Schema | None]:
    """Translate a pydantic location, without the tags of unions' branches and the indices of plain lists.

    Returns:
        The keys of the path; the keys that are allowed in place of the last one; the schema of the last key (None for
        an unknown key).
    """
    path: list[str] = []
    known: Sequence[str] = ()
    field: Schema | None = root
    for key in map(str, location):
        assert field is not None
        sections = sections_in(field)
        if len(sections) > 1:  # a tagged union: this part names the branch
            field = sections[key]
            continue
        path.append(key)
        parent = next(iter(sections.values()), field)
        if "items" in parent:
            known, field = (), parent["items"]
        elif "properties" in parent:
            known, field = list(parent["properties"]), parent["properties"].get(key)
            if "layout" in root.get("properties", ()):  # a run file may also have these keys, which are no fields
                known += {"": ["plan"], "model": ["base", "from"]}.get(".".join(path[:-1]), [])
        else:
            known = choices_of(parent["propertyNames"])
            field = parent["additionalProperties"] if key in known else None
        if field is None or not ("propertyNames" in field or sections_in(field) or sections_in(field.get("items", {}))):
            break  # an unknown key, a plain value or a list of plain values, all without keys inside
    return path, known, field


def _problem(name: str, field: Schema, detail: ErrorDetails, models: Sequence[str]) -> Problem:
    """Return the problem of a known field."""
    value, sections = shown(detail["input"]), sections_in(field)
    tag = f"{name}.{'family' if name == 'model' else 'kind'}"
    match detail["type"]:
        case "union_tag_invalid":
            given = str(detail["ctx"]["tag"])
            rule = "is none of the choices" + nearest_choice(tag, given, list(sections))
            return Problem(tag, given, rule, ", ".join(sections))
        case "union_tag_not_found" if isinstance(detail["input"], dict):
            return Problem(tag, NOTHING, "is missing", ", ".join(sections))
        case "missing" if not isinstance(detail["loc"][-1], int):  # else: an item of a list
            return Problem(name, NOTHING, "is missing", described(field))
        case "value_error" if not isinstance(detail["input"], bool):  # one of our checks, with the rule as its text
            return Problem(name, value, str(detail["ctx"]["error"]), described(field))
    if name == "model":
        return Problem(name, value, "is neither a model's name nor a section", ", ".join(models))
    if sections:
        short = SHORTHANDS.get(name, Shorthand())
        words = ("none", short.off), (f"its {short.number}, a number", short.number), (f"its {short.word}", short.word)
        forms = [text for text, stands in (*words, ("auto", name == "layout")) if stands]
        return Problem(name, value, "is not a section", ", or ".join((described(field), *forms)))
    indices = list(takewhile(lambda key: isinstance(key, int), reversed(detail["loc"])))[::-1]
    item = f"at index {', '.join(map(str, indices))} " if indices and detail["type"] != "missing" else ""
    return Problem(name, value, item + _rule(name, field, detail), described(field))


def _unknown(name: str, value: object, known: Sequence[str], root: Schema) -> Problem:
    """Return the problem of an unknown key: another tool's word, a slip, or a field of another section.

    `root`: the schema of the run's config; empty if anything else was read.
    """
    last = name.rpartition(".")[2]
    if root and (ours := ours_for_key(name, value)):
        mend = tuple({name: LEFT_OUT, **remedy} for remedy in remedies_of(name, ours) if name not in remedy)
        return Problem(name, shown(value), f"{UNKNOWN}, another tool's word", ours, mend=(*mend, {name: LEFT_OUT}))
    elsewhere = [path for path in paths_in(root) if path.rpartition(".")[2] == last and path != name]
    close = nearest(last, known) or (f" (did you mean {' or '.join(elsewhere)}?)" if len(elsewhere) in (1, 2) else "")
    return Problem(name, shown(value), UNKNOWN + close, ", ".join(known), mend=({name: LEFT_OUT},))


def _rule(name: str, field: Schema, detail: ErrorDetails) -> str:
    """Name the bound that the value violates, the choices that exclude the value, or the kinds that are allowed."""
    if detail["type"] in _RULES:
        return _RULES[detail["type"]].format(**detail.get("ctx", {}))
    kinds, choices = [described(branch, brief=True) for branch in _branches(field)], choices_of(field)
    if len(kinds) > 1:
        rule = f"is neither {' nor '.join(kinds)}"
    else:
        rule = "is none of the choices" if choices else f"is not {kinds[0]}"
    return rule + nearest_choice(name, detail["input"], choices)


def paths_in(field: Schema, before: str = "") -> list[str]:
    """Return the dotted names of all fields of a section and of its nested sections, of every kind."""
    paths: dict[str, None] = {}
    for section in sections_in(field).values():
        for name, inner in section["properties"].items():
            path = f"{before}.{name}".removeprefix(".")
            paths |= dict.fromkeys([path, *paths_in(inner, path)])
    return list(paths)


def described(field: Schema, brief: bool = False) -> str:
    """Describe a field's valid values: choices, kind and bounds, or a section's keys. `brief`: without bounds."""
    if sections := sections_in(field):
        keys = dict.fromkeys(key for section in sections.values() for key in section["properties"])
        return "a section with the keys " + ", ".join(keys)
    if "anyOf" in field:
        return " or ".join(described(branch, brief) for branch in field["anyOf"])
    if "propertyNames" in field:
        return f"a section with some of the keys {described(field['propertyNames'])}"
    choices = choices_of(field)
    if not choices and field["type"] == "array":
        fixed = field.get("prefixItems", [])
        item, size = (fixed[0], f" of {len(fixed)}") if fixed else (field["items"], "")
        if not brief:
            return f"a list{size}, each {described(item)}"
        return f"a list{size or ' of'} {'names' if item.get('type') == 'string' else 'numbers'}"
    type_text = ", ".join(choices) or _TYPES[field["type"]]
    if brief:
        return type_text
    bounds = [f"{sign} {field[key]}" for key, sign in _BOUNDS.items() if field.get(key, LARGEST) != LARGEST]
    sizes = "".join(f", or a size such as {example}" for example in field.get("examples", ()))
    return " ".join([type_text, " and ".join(bounds)]).strip() + sizes


def _branches(field: Schema) -> list[Schema]:
    """Return the members of a union; for a plain field, the field alone."""
    return list(field.get("anyOf") or field.get("oneOf") or [field])


def choices_of(field: Schema) -> list[str]:
    """Return the words that all branches of a field list."""
    options = [option for branch in _branches(field) for option in branch.get("enum", [branch.get("const")])]
    return [str(option) for option in options if option is not None]


def sections_in(field: Schema) -> dict[str, Schema]:
    """Return the sections that a field may hold, by tag ("" for a section without one). Empty for a plain field."""
    sections: dict[str, Schema] = {}
    for branch in _branches(field):
        if properties := branch.get("properties"):
            tags = (properties[key].get("const", "") for key in ("family", "kind") if key in properties)
            sections[str(next(tags, ""))] = branch
    return sections
