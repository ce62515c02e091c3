"""The meaning of fields and strategies: the strings beneath their names in the source, read when somebody asks.

    size: Positive = 1
    \"\"\"Replicas of the model.\"\"\"

pydantic can read them while it makes a class (`use_attribute_docstrings`): 0.1 s of every command, most of which need
none of them. A strategy that is a class has its docstring's first sentence, as a section; any other the string beneath
the name that the registry, or a package's entry point, gives.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

from meshwright.config.registry import entries, where_from
from meshwright.config.section import Section


def field_meanings(section: type[Section]) -> dict[str, str]:
    """A line for each field of a section that has one, its own or that of the section which it is derived from."""
    lines: dict[str, str] = {}
    for base in reversed(section.__mro__):
        if issubclass(base, Section):
            lines |= _strings_of(base.__module__).get(base.__qualname__, {})
    return {name: line for name, line in lines.items() if name in section.model_fields}


def strategy_meaning(group: str, name: str) -> str:
    """A line on a strategy of the registry; empty where who made it wrote none."""
    entry = entries(group)[name]
    if isinstance(entry, type):
        return first_sentence(entry.__doc__ or "")
    module, _, attribute = where_from(group, name).partition(":")
    return _strings_of(module).get("", {}).get(attribute, "")


def first_sentence(text: str) -> str:
    """`A decoder. With experts.` -> `A decoder.`; abbreviations end no sentence, since a capital letter must follow."""
    return re.split(r"(?<=[.])\s+(?=[A-Z`])", " ".join(text.split()), maxsplit=1)[0]


@cache
def _strings_of(module: str) -> Mapping[str, Mapping[str, str]]:
    """By class of a module, and by the empty name for the module itself: the strings beneath names. Nothing where the
    source is not at hand, as in a notebook."""
    try:
        file = inspect.getsourcefile(sys.modules[module]) if module else None
    except TypeError:
        return {}
    if file is None or not Path(file).is_file():
        return {}
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    classes = {node.name: node.body for node in tree.body if isinstance(node, ast.ClassDef)}
    return {name: dict(_beneath(body)) for name, body in ({"": tree.body} | classes).items()}


def _beneath(body: Sequence[ast.stmt]) -> Iterator[tuple[str, str]]:
    """The names that are assigned and the string that stands right beneath each."""
    for statement, below in pairwise(body):
        match statement, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                yield name, " ".join(text.split())
