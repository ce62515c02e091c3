"""Completion of a command in a shell: names of runs, fields and values.

Fields are read from the shipped schema, without pydantic. If another package registers strategies, the schema is made
anew with these strategies: the config is imported, 0.3 s more.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from typing import Any

import typer

from meshwright.configs import SCHEMA, shipped

Schema = Mapping[str, Any]


def complete_shipped(folder: str) -> Callable[[str], list[str]]:
    """Return a completer of the shipped names of a kind: runs, clusters or software.

    The argument may also be a file; the shell itself completes files.
    """
    return lambda incomplete: [name for name in shipped(folder) if name.startswith(incomplete)]


def complete_field(incomplete: str) -> list[str]:
    """Complete the dotted name of a field or a section, for `meshwright config`."""
    return [word.removesuffix("=") for word in _names(_schema(), incomplete)]


def complete_word(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete a `field=` word, or the value after the sign.

    bash splits words at `=`: then the field is an earlier word, and the answer is the value alone.
    """
    schema, before = _schema(), [*(ctx.params.get("overrides") or ())]
    if before[-1:] == ["="]:
        return list(_values(schema, "".join(before[-2:-1]), incomplete))
    if not incomplete and before and "=" not in before[-1] and before[-2:-1] != ["="]:  # directly after the sign
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
            # Each listed value; for a field with at most one, the word without a value as well.
            more = [f"{field}={value}" for value in _values(schema, field, "")]
            more = more if len(more) > 1 else [f"{field}=", *more]
        if words == more:
            break
        words = more
    return words


def _names(schema: Schema, incomplete: str) -> Iterator[str]:
    """Yield the dotted names that begin with `incomplete`, each with the sign that follows: `layout.`, `steps=`."""
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
    """Yield a field's listed values and the default value that begin with `beginning`."""
    nodes = [schema]
    for name in field.split("."):
        nodes = [inner for node in nodes for key, inner in _keys(schema, node) if key == name]
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
    """Yield the alternatives of a schema's node, with references resolved."""
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
    """Return the schema of run files, with the strategies of other packages."""
    if any(group.startswith("meshwright.") for group in metadata.entry_points().groups):
        from meshwright.config.json_schema import run_schema

        return run_schema()
    ours: Schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    return ours
