"""The reference of a run's fields: for each field the default, the valid values and a line on the meaning.

The reference is made from the sections (json_schema.py, meanings.py) and the registry, including strategies of other
packages. `meshwright config` prints the reference, and docs/config.md is generated from the same facts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache

from meshwright.config.json_schema import config_schema
from meshwright.config.load import model_names
from meshwright.config.meanings import strategy_meaning
from meshwright.config.messages import Schema, choices_of, described, inlined, paths_in, sections_in
from meshwright.config.registry import NAMED_BY
from meshwright.config.section import shown
from meshwright.config.shorthand import PRECISIONS, SHORTHANDS
from meshwright.config.words import ours_for_key
from meshwright.ranks.errors import ConfigError


@dataclass(frozen=True)
class FieldFacts:
    """One field.

    default: the default as written in a file; empty if the field is required or holds a section.
    strategies: the strategies of the registry that the field may name, with a line on each.
    kinds: the section's kinds with these facts, if the field differs between kinds.
    """

    name: str
    meaning: str
    default: str
    valid: str
    strategies: tuple[tuple[str, str], ...] = ()
    kinds: tuple[str, ...] = ()


@dataclass(frozen=True)
class SectionFacts:
    """One section; if a section has several kinds, one kind."""

    name: str
    kind: str
    about: str
    fields: tuple[FieldFacts, ...]


@dataclass(frozen=True)
class Topic:
    """The facts on a name: the field, and the sections that the field may hold.

    short: the bare values that are accepted in place of a section.
    """

    name: str
    fields: tuple[FieldFacts, ...]
    sections: tuple[SectionFacts, ...]
    short: str = ""


PLAN = FieldFacts(
    "plan", "Beside `layout: auto` alone: the cluster that the planner plans for, and how many of its devices.", "",
    "a section of cluster (a name, or a file of calibrate) and devices (a whole number >= 1)",
)  # fmt: skip
"""A section of the run file, but no field of the config: with the layout found, the section is removed."""


def topic_of(name: str) -> Topic:
    """Return the topic of a dotted name, with or without a section's kind (`layout.tensor.megatron.size`).

    The empty name is the whole run. Raises ConfigError for an unknown field.
    """
    if name == PLAN.name:
        return Topic(name, (PLAN,), ())
    nodes, path, is_field = [("", _root())], list[str](), False
    for word in filter(None, name.split(".")):
        kinds = [
            (word, sections[word]) for _, node in nodes if len(sections := sections_in(node)) > 1 and word in sections
        ]
        fields = [
            (tag or outer, section["properties"][word])
            for outer, node in (() if kinds else nodes)
            for tag, section in sections_in(node).items()
            if word in section["properties"]
        ]
        if not kinds and not fields:
            field_name = ".".join(path)
            strategies = dict(_strategies(field_name, nodes[0][1]))
            if word in strategies and not sections_in(nodes[0][1]):
                return Topic(f"{field_name}={word}", (FieldFacts(field_name, strategies[word], "", word),), ())
            raise _no_such_field(name, word, [node for _, node in nodes])
        nodes, is_field = kinds or fields, not kinds
        path += [word] * is_field
    field_name = ".".join(path)
    tags = [node for _, node in nodes if "const" in node]
    if tags:
        choices = {"enum": [node["const"] for node in tags], "type": "string"}
        nodes = [
            ("", {key: value for node in reversed(tags) for key, value in node.items() if key != "const"} | choices)
        ]
    held = dict.fromkeys(section for _, node in nodes for section in _sections(field_name, node))
    facts = _merged([(tag, _field(field_name, node)) for tag, node in nodes]) if is_field else ()
    return Topic(field_name, facts, tuple(held), short_form(field_name) if is_field else "")


def all_sections() -> list[Topic]:
    """Return the topics of all sections, the run first and each section before its nested sections."""
    return [topic for path in ("", *paths_in(_root())) if (topic := topic_of(path)).sections]


@cache
def _root() -> Schema:
    """Return the schema of a run's fields, with references resolved."""
    schema = config_schema()
    root: Schema = inlined(schema, schema["$defs"])
    return root


def short_form(name: str) -> str:
    """Describe the bare values that are accepted in place of a section; empty if none are."""
    if name == "precision":
        return f"{', '.join(PRECISIONS)}: a level and its dtype"
    if name == "model":
        return f"a name: {', '.join(model_names())}"
    if name == "layout":
        return "auto: the planner decides when the run begins, and plan says where"
    short = SHORTHANDS.get(name)
    if short is None:
        return ""
    forms = [(short.word, "a word is its"), (short.number, "a number is its"), (short.off, "none makes 0 of its")]
    return ", ".join(f"{what} {field}" for field, what in forms if field)


def _field(name: str, node: Schema) -> FieldFacts:
    sections, default = sections_in(node), node.get("default", "")
    if "examples" in node and default % 2**20 == 0:
        default = f"{default // 2**20}M"
    valid = described(node)
    if sections:
        kinds = f" of the kind {', '.join(sections)}" if len(sections) > 1 else ""
        valid = f"a section{kinds}" + (" or null" if "anyOf" in node else "")
    given = "" if sections and default is not None else shown(default)
    return FieldFacts(name, node.get("description", ""), given, valid, _strategies(name, node))


def _strategies(name: str, node: Schema) -> tuple[tuple[str, str], ...]:
    """Return the strategies that a field may name, or that choose the field's section, each with its meaning."""
    sections = sections_in(node)
    by_kind = [f"{name}.kind", f"{name}.family"] if len(sections) > 1 else [name]
    group = next((group for group, field in NAMED_BY.items() if field in by_kind), None)
    if group is None:
        return ()
    names = sections or choices_of(node) or choices_of(node.get("items", {}))
    return tuple((choice, strategy_meaning(group, choice)) for choice in names)


def _sections(name: str, node: Schema) -> Iterator[SectionFacts]:
    """Yield the sections that a field may hold, without the field that names the kind."""
    for tag, section in sections_in(node).items():
        fields = [
            _field(f"{name}.{key}".removeprefix("."), inner)
            for key, inner in section["properties"].items()
            if "const" not in inner
        ]
        fields += [] if name else [PLAN]
        about = " ".join(str(section.get("about", section.get("description", ""))).split())
        yield SectionFacts(name, tag, about, tuple(fields))


def _merged(fields: Sequence[tuple[str, FieldFacts]]) -> tuple[FieldFacts, ...]:
    """Merge a field's facts over the kinds of a section: kinds with equal facts share one entry."""
    alike: dict[FieldFacts, list[str]] = defaultdict(list)
    for tag, facts in fields:
        alike[facts].append(tag)
    if len(alike) == 1:
        return tuple(alike)
    return tuple(
        FieldFacts(facts.name, facts.meaning, facts.default, facts.valid, facts.strategies, tuple(kinds))
        for facts, kinds in alike.items()
    )


def _no_such_field(name: str, word: str, nodes: Sequence[Schema]) -> ConfigError:
    """Return the error for an unknown field, with our word for it, a similar name, or the same name elsewhere."""
    if ours := ours_for_key(name, "N"):
        return ConfigError.of("FIELD", name, "is another tool's word", ours)
    here = [sections_in(node) for node in nodes]
    known = dict.fromkeys(key for each in here for section in each.values() for key in section["properties"])
    known |= dict.fromkeys(tag for each in here for tag in each if tag)
    paths = [*paths_in(_root()), PLAN.name]
    names = {path.rpartition(".")[2]: path for path in reversed(paths)}
    meant = [path for path in paths if path.rpartition(".")[2] == word]
    meant = meant or [names.get(close) or close for close in get_close_matches(word, [*known, *names], n=1)]
    hint = f" (did you mean {' or '.join(meant)}?)" if meant else ""
    return ConfigError.of("FIELD", name, "is no field" + hint, ", ".join(known) or "a field that has none in it")
