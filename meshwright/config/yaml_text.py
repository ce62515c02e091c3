"""YAML text to plain values, and everything that is none refused before it costs memory or time.

YAML can say little that means much: ten aliases of ten aliases are a billion values, and brackets are free. A run file
needs neither, so that modest limits stop both.
"""

from __future__ import annotations

import re
from copy import deepcopy
from typing import Any

import yaml

MAX_LEVELS = 32
MAX_VALUES = 100_000
_TOO_DEEP = f"is nested deeper than {MAX_LEVELS} levels"


def plain_values(text: str) -> Any:
    """The values of a YAML text's only document; None where there is none. Raises yaml.YAMLError."""
    level = 0
    # Events come one after another, while nodes are composed by recursion, which the depth of a text would exhaust.
    for event in yaml.parse(text, _Loader):
        level += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if level > MAX_LEVELS:
            raise _Refused(_TOO_DEEP, event.start_mark)
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _measure(node, {})
        return loader.construct_document(node)
    finally:
        loader.dispose()


def complaint(error: yaml.YAMLError) -> str:
    """The parser's complaint on one line, with the line and column where a person looks for it."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{error.problem} at line {mark.line + 1}, column {mark.column + 1}"
    return " ".join(str(error).split())


class _Refused(yaml.MarkedYAMLError):
    """A text that YAML allows and a run does not need."""

    def __init__(self, problem: str, mark: yaml.Mark) -> None:
        super().__init__(problem=problem, problem_mark=mark)


def _measure(node: yaml.Node, known: dict[int, tuple[int, int] | None]) -> tuple[int, int]:
    """(values, levels) of a node with its aliases written out. `known`: by identity; None while it is looked at."""
    key = id(node)
    if key not in known:
        known[key] = None
        parts = list(node.value) if isinstance(node, yaml.CollectionNode) else []
        if isinstance(node, yaml.MappingNode):
            parts = [part for pair in node.value for part in pair]
        inner = [_measure(part, known) for part in parts]
        values, levels = 1 + sum(size for size, _ in inner), 1 + max((height for _, height in inner), default=0)
        if levels > MAX_LEVELS:
            raise _Refused(_TOO_DEEP, node.start_mark)
        if values > MAX_VALUES:
            raise _Refused(f"repeats its aliases into more than {MAX_VALUES:,} values", node.start_mark)
        known[key] = values, levels
    found = known[key]
    if found is None:
        raise _Refused("contains itself", node.start_mark)
    return found


class _Loader(yaml.SafeLoader):
    """YAML 1.2's floats: `3e-4` is a number, not a text. A key given twice is a mistake, not a silent replacement."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag not in ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"):
                raise _Refused("has a key that is no word", key.start_mark)
            if key.value in seen:
                raise _Refused(f"{key.value} is given twice", key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, OverflowError) as error:  # a date of month 13, a number of more digits than Python takes
            text = str(node.value)
            raise _Refused(f"holds {text[:20]}, which cannot be read", node.start_mark) from error


_Loader.yaml_implicit_resolvers = deepcopy(yaml.SafeLoader.yaml_implicit_resolvers)
_FLOAT = r"^[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+$"
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(_FLOAT), list("-+0123456789"))
