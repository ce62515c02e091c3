"""The reader of YAML texts as plain values. Any other content is refused before it costs memory or time.

A short YAML text may expand to a huge value: nine levels of ten aliases each are a billion values, and every bracket
nests a level deeper. A run file needs neither, so modest limits refuse both.
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
    """Return the values of a YAML text's only document; None for an empty text. Raises yaml.YAMLError."""
    level = 0
    # Events are parsed one after another. Nodes are composed by recursion, and a deep text would exhaust the stack.
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
    """Format the parser's error as one line, with line and column counted from 1."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{error.problem} at line {mark.line + 1}, column {mark.column + 1}"
    return " ".join(str(error).split())


def told(error: yaml.YAMLError, wanted: str = "YAML") -> str:
    """Return the rule of a problem: `is no YAML: ... at line 3, column 7`. A number with two readings is valid YAML."""
    return complaint(error) if isinstance(error, _Ambiguous) else f"is no {wanted}: {complaint(error)}"


class _Refused(yaml.MarkedYAMLError):
    """An error: a text that YAML allows, but no run needs."""

    def __init__(self, problem: str, mark: yaml.Mark) -> None:
        super().__init__(problem=problem, problem_mark=mark)


class _Ambiguous(_Refused):
    """An error: a number that YAML 1.1 and a person read differently."""


def _measure(node: yaml.Node, known: dict[int, tuple[int, int] | None]) -> tuple[int, int]:
    """Count (values, levels) of a node with aliases expanded. `known`: results by node identity; None: in progress."""
    key = id(node)
    if key not in known:
        known[key] = None
        parts = list(node.value) if isinstance(node, yaml.CollectionNode) else []
        if isinstance(node, yaml.MappingNode):
            parts = [child for pair in node.value for child in pair]
        inner = [_measure(child, known) for child in parts]
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
    """The loader of every YAML text that a user writes: YAML 1.2's words and numbers.

    `3e-4` is a number, `yes` and `2024-01-01` are texts (a field of true and false takes the text `yes`). A number that
    YAML 1.1 and a reader disagree about is refused. A key given twice is a mistake, not a silent replacement.
    """

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
        if isinstance(node, yaml.ScalarNode) and node.tag in _NUMBERS and (meant := readings(str(node.value))):
            raise _Ambiguous(f"holds {node.value}, {meant}", node.start_mark)
        try:
            return super().construct_object(node, deep)
        except (ValueError, OverflowError) as error:  # a number of more digits than Python takes
            text = str(node.value)
            raise _Refused(f"holds {text[:20]}, which cannot be read", node.start_mark) from error


class _Dumper(yaml.SafeDumper):
    """The writer that quotes each text that `_Loader` would read as a number."""


def readings(text: str) -> str:
    """Explain a number that YAML 1.1 and a person read differently.

    Returns:
        The end of a sentence with the numbers to write, or nothing for a number that has one reading.
    """
    digits = text.replace("_", "").lstrip("+-")
    sign = "-" if text.startswith("-") else ""
    if ":" in text:
        seconds = 0.0
        for group in digits.split(":"):
            seconds = seconds * 60 + float(group)
        return f"which YAML 1.1 reads to the base 60: write {sign}{seconds:.15g}, or {text!r} in quotes for a text"
    if digits.lower().startswith("0b"):
        return f"which YAML 1.2 does not know: write {sign}{int(digits, 2)}, or {text!r} in quotes for a text"
    if "_" in text and not _THOUSANDS.fullmatch(text):
        return (
            f"whose _ does not part thousands: write {sign}{_without_zeros(digits)}, or {text!r} in quotes for a text"
        )
    if re.fullmatch(r"0\d.*", digits):
        octal = f" (or {sign}{int(digits, 8)}, the octal number)" if re.fullmatch("0+[1-7][0-7]+", digits) else ""
        return (
            f"which begins with a zero: write {sign}{_without_zeros(digits)}{octal}, or {text!r} in quotes for a text"
        )
    return ""


def _without_zeros(digits: str) -> str:
    """Strip leading zeros: `00.5` -> `0.5`, `010` -> `10`; `0x1F` is unchanged."""
    return re.sub(r"^0+(?=\d)", "", digits)


def yaml_text(tree: object, flow: bool = False) -> str:
    """Write plain values as a YAML text that `plain_values` reads back; `flow`: in brackets on a line."""
    width = 10**6 if flow else None
    text: str = yaml.dump(tree, Dumper=_Dumper, sort_keys=False, default_flow_style=flow, width=width)
    return text


_INT, _FLOAT, _BOOL = (f"tag:yaml.org,2002:{tag}" for tag in ("int", "float", "bool"))
_NUMBERS = (_INT, _FLOAT)
_GIVEN_UP = (_BOOL, "tag:yaml.org,2002:timestamp")
"""YAML 1.1's yes, no, on, off and dates: a date is a text, and a field of true and false takes such a text as well."""

_THOUSANDS = re.compile(r"[-+]?[1-9]\d{0,2}(_\d{3})+(\.\d*)?([eE][-+]?\d+)?")
_WITH_EXPONENT = re.compile(r"^[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+$")
_LEADING_ZERO = re.compile(r"^[-+]?0[\d_]+$")
_Loader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in known if tag not in _GIVEN_UP]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_BOOL, re.compile("^(true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
# The writer knows YAML 1.1's forms as well: other readers of a file take `yes` for true.
_Dumper.yaml_implicit_resolvers = deepcopy(yaml.SafeDumper.yaml_implicit_resolvers)
for _side in (_Loader, _Dumper):
    _side.add_implicit_resolver(_FLOAT, _WITH_EXPONENT, list("-+0123456789"))
    _side.add_implicit_resolver(_INT, _LEADING_ZERO, list("-+0"))
