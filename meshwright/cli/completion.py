"""Completion of a command in a shell: names of runs, fields and their values.

Fields are read off the schema that is shipped, which takes no pydantic; where other packages bring strategies, off the
schema with these in it, for which the config is imported: 0.3 s more.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from typing import Any

import typer

from meshwright.configs import SCHEMA, shipped

Schema = Mapping[str, Any]


def complete_shipped(kind: str) -> Callable[[str], list[str]]:
    """A completer of our runs', clusters' or programs' names, where a file may stand in their place: files are the
    shell's own to complete."""
    return lambda incomplete: [name for name in shipped(kind) if name.startswith(incomplete)]


def complete_field(incomplete: str) -> list[str]:
    """Fields and sections by their dotted names, as `meshwright config` takes them."""
    return [word.removesuffix("=") for word in _names(_schema(), incomplete)]


def complete_word(ctx: typer.Context, incomplete: str) -> list[str]:
    """`field=` words, and values behind the sign. bash takes `=` for a word of its own: the field is then among the
    words before it, and the answer the value alone."""
    schema, before = _schema(), [*(ctx.params.get("overrides") or ())]
    if before[-1:] == ["="]:
        return list(_values(schema, "".join(before[-2:-1]), incomplete))
    if not incomplete and before and "=" not in before[-1] and before[-2:-1] != ["="]:  # right behind the sign
        return list(_values(schema, before[-1], ""))
    field, equals, value = incomplete.partition("=")
    if equals:
        return [f"{field}={known}" for known in _values(schema, field, value)]
    words = list(_names(schema, incomplete))
    while len(words) == 1:  # a shell ends a single word with a space, and this one goes on
        field = words[0].removesuffix("=")
        if words[0].endswith("."):
            more = list(_names(schema, words[0]))
        else:
            # Each value that the field lists, and the word without one, for a value that nobody lists.
            more = [f"{field}={value}" for value in _values(schema, field, "")]
            more = more if len(more) > 1 else [f"{field}=", *more]
        if words == more:
            break
        words = more
    return words


def _names(schema: Schema, incomplete: str) -> Iterator[str]:
    """The keys that a dotted beginning may go on with: `layout.`, `steps=`."""
    *parents, last = incomplete.split(".")
    nodes = [schema]
    for parent in parents:
        nodes = [inner for node in nodes for key, inner in _keys(schema, node) if key == parent]
    above = "".join(f"{parent}." for parent in parents)
    ends: dict[str, str] = {}
    for key, inner in (pair for node in nodes for pair in _keys(schema, node)):
        if key.startswith(last) and not inner.get("deprecated") and "description" in inner:
            is_section = next(_keys(schema, inner), None) is not None
            ends[key] = "." if is_section or ends.get(key) == "." else "="
    yield from (f"{above}{key}{end}" for key, end in ends.items())


def _values(schema: Schema, field: str, beginning: str) -> Iterator[str]:
    """The values that a field lists, and its default."""
    nodes = [schema]
    for part in field.split("."):
        nodes = [inner for node in nodes for key, inner in _keys(schema, node) if key == part]
    found: dict[str, None] = {}
    for node in nodes:
        for branch in _branches(schema, node):
            listed = branch.get("enum", [branch["const"]] if "const" in branch else [])
            found |= dict.fromkeys(map(_spelt, [*listed, *([True, False] if branch.get("type") == "boolean" else [])]))
        if isinstance(node.get("default"), str | int | float):
            found |= {_spelt(node["default"]): None}
    yield from (value for value in found if value.startswith(beginning))


def _keys(schema: Schema, node: Schema) -> Iterator[tuple[str, Schema]]:
    for branch in _branches(schema, node):
        yield from branch.get("properties", {}).items()


def _branches(schema: Schema, node: Schema) -> Iterator[Schema]:
    """A schema's alternatives, with references followed."""
    if "$ref" in node:
        node = {**schema["$defs"][node["$ref"].rpartition("/")[2]]}
    inner = [*node.get("oneOf", ()), *(node.get("anyOf", ()) if "properties" not in node else ())]
    if not inner:
        yield node
    for branch in inner:
        yield from _branches(schema, branch)


def _spelt(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _schema() -> Schema:
    """The schema of run files, with the strategies of other packages."""
    if any(group.startswith("meshwright.") for group in metadata.entry_points().groups):
        from meshwright.config.json_schema import run_schema

        return run_schema()
    ours: Schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    return ours
