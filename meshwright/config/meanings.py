"""The meaning of fields and strategies: the docstrings beneath the names in the source, read on demand.

    size: Positive = 1
    \"\"\"Replicas of the model.\"\"\"

pydantic can read these docstrings while a class is made (`use_attribute_docstrings`), but this costs every command
0.1 s, and most commands need none. The meaning of a strategy that is a class is the first sentence of the class
docstring. The meaning of any other strategy is the string beneath the name in the registry or the entry point.
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
    """Return the docstring of each field of a section, by field name; a base class may document the field."""
    lines: dict[str, str] = {}
    for base in reversed(section.__mro__):
        if issubclass(base, Section):
            lines |= _strings_of(base.__module__).get(base.__qualname__, {})
    return {name: line for name, line in lines.items() if name in section.model_fields}


def strategy_meaning(group: str, name: str) -> str:
    """Return a line on a strategy of the registry; empty if its author wrote none."""
    entry = entries(group)[name]
    if isinstance(entry, type):
        return first_sentence(entry.__doc__ or "")
    module, _, attribute = where_from(group, name).partition(":")
    return _strings_of(module).get("", {}).get(attribute, "")


def first_sentence(text: str) -> str:
    """Cut a text after one sentence: `A decoder. With experts.` -> `A decoder.`

    A sentence ends before a capital letter or a backtick, so that most abbreviations end none.
    """
    return re.split(r"(?<=[.])\s+(?=[A-Z`])", " ".join(text.split()), maxsplit=1)[0]


@cache
def _strings_of(module: str) -> Mapping[str, Mapping[str, str]]:
    """Return the strings beneath the names of a module: class name -> name -> string, with "" for the module itself.

    Empty if the module has no source file, as in a notebook.
    """
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
    """Yield each assigned name that a string directly follows, and the string."""
    for statement, below in pairwise(body):
        match statement, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                yield name, " ".join(text.split())
