"""Reads Python sources: syntax trees, and imported names."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from functools import cache
from pathlib import Path


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imported_names(nodes: Iterable[ast.AST]) -> list[str]:
    """Return the dotted name of each import among the nodes of a module, inside functions too."""
    names: list[str] = []
    for node in nodes:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names
