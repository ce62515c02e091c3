"""Pairs that every Python machine has: a function of the standard library, and what its docstring says it does.

The source is the function without its docstring, the target the docstring's first paragraph on one line.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import warnings
from collections.abc import Iterator

from meshwright.data.corpus import STDLIB, documents

MOST_CHARACTERS = 4096
"""Of a function's source: longer ones are left out, they are no more than a few in a hundred."""


def docstring_pairs() -> Iterator[tuple[str, str]]:
    """(function, summary) for all of the standard library, in the order of its files and of their lines."""
    for text in documents(STDLIB):
        yield from function_pairs(text)


def function_pairs(text: str) -> Iterator[tuple[str, str]]:
    """(function, summary) for each documented function of a module, nested ones and methods too.

    Left out are functions that do nothing but carry a docstring, those of more than MOST_CHARACTERS, and modules that
    this version of Python cannot read.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # of another's source: nothing the user could mend
            module = ast.parse(text)
    except SyntaxError:
        return
    lines = text.splitlines(keepends=True)
    functions = [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for function in sorted(functions, key=lambda node: (node.lineno, node.col_offset)):
        documented = ast.get_docstring(function)
        if documented is None or len(function.body) == 1:
            continue
        code, summary = _without_docstring(lines, function), _first_paragraph(documented)
        if summary and len(code) <= MOST_CHARACTERS:
            yield code, summary


def _without_docstring(lines: list[str], function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """The function's lines but those of its docstring, from `def` on, moved to the left margin."""
    docstring = function.body[0]
    first, last = docstring.lineno - 1, docstring.end_lineno or docstring.lineno
    kept = lines[function.lineno - 1 : first] + lines[last : function.end_lineno]
    return textwrap.dedent("".join(kept)).strip()


def _first_paragraph(docstring: str) -> str:
    return " ".join(inspect.cleandoc(docstring).split("\n\n")[0].split())
