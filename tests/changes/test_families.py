"""Files of the package for a family of models that is there already, counted in the package itself.

A file counts for a family if the file's code has a name of the family: the `model.family`, a model_type, a class of
ours or of transformers. Docstrings and comments may name a family in passing, and do not count. A module that is
imported by counted files alone counts, too: nothing else needs the module. Sizes (configs) are data, and do not count.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Set
from functools import cache
from pathlib import Path

import pytest

from meshwright.config.registry import OURS, load_entry
from tests.sources import imported_names, tree_of

PACKAGE = Path(__file__).parents[2] / "meshwright"
BOUND = 5
FAMILIES = {"gemma": 3, "phi": 3, "gpt-oss": 5, "deepseek": 5, "qwen3-next": 5, "qwen3.5": 4}
"""Families with a section of their own: each adds a model or a part of a layer."""
KINDS = {
    "qwen2": 1, "qwen3": 2, "mistral": 1, "mixtral": 2, "qwen2_moe": 1, "qwen3_moe": 2, "smollm3": 1, "olmo2": 1,
    "olmo3": 1,
}  # fmt: skip
"""Classes of transformers that are sizes and fields of Llama's section, by model_type."""


def words_of(tree: ast.Module) -> Iterator[str]:
    """The names and texts of a module's code."""
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            yield node.value
        elif isinstance(node, ast.ClassDef | ast.alias):
            yield node.name
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr


@cache
def modules() -> dict[Path, str]:
    """The words of every module of the package."""
    return {path: "\n".join(words_of(tree_of(path))) for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def importers() -> dict[Path, set[Path]]:
    """The modules that import each module of the package."""
    dotted = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in modules()}
    found: dict[Path, set[Path]] = {path: set() for path in modules()}
    for path in modules():
        for name in imported_names(ast.walk(tree_of(path))):
            for module in {name, name.rpartition(".")[0]} & set(dotted):
                found[dotted[module]].add(path)
    return found


def files_of(names: Set[str]) -> set[str]:
    """The files of the package for a family with these names."""
    named = re.compile("|".join(rf"(?<![\w.-]){re.escape(name)}(?![\w.-])" for name in names))
    counted = {path for path, words in modules().items() if named.search(words)}
    while more := {path for path, by in importers().items() if by and by <= counted} - counted:
        counted |= more
    return {str(path.relative_to(PACKAGE)) for path in counted}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_needs_few_files(family: str) -> None:
    converter = load_entry(OURS["convert"][family])
    kinds = getattr(converter, "kinds", {})
    names = {family, converter.__name__, converter.section.__name__, *converter.model_types}
    files = files_of(names | {f"{kind.architecture}ForCausalLM" for kind in kinds.values()})
    assert len(files) == FAMILIES[family] <= BOUND, sorted(files)
    assert {"config/registry.py"} < files


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_type_of_llama_needs_few_files(kind: str) -> None:
    files = files_of({kind})
    assert len(files) == KINDS[kind] <= BOUND, sorted(files)
    assert "families/llama/convert.py" in files


def test_each_family_of_decoders_is_counted() -> None:
    converters = {name: load_entry(value) for name, value in OURS["convert"].items()}
    llama = load_entry(OURS["convert"]["llama"])
    rotary = {name for name, converter in converters.items() if llama.__mro__[1] in converter.__mro__}
    assert rotary - {"llama"} == set(FAMILIES)
    assert set(llama.kinds) - {"llama"} == set(KINDS)


def test_code_counts_and_docstrings_do_not() -> None:
    told = ast.parse('"""Of an olmo2."""\nx = 1  # olmo2\n\n\ndef f():\n    """Of an olmo2."""\n')
    assert "olmo2" not in "\n".join(words_of(told))
    assert "olmo2" in list(words_of(ast.parse('if kind in ("olmo2", "olmo3"):\n    pass\n')))
    assert files_of({"PackedSource"}) >= {"training/convert/mxfp4.py", "families/llama/convert_gpt_oss.py"}
