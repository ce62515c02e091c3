"""The repository's rules that a program can check: sizes, sentences, strategies known only in certain folders."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from meshwright.config import Config
from meshwright.config.registry import BASES, OURS, load_entry
from meshwright.config.section import Section
from tests.sources import imported_names

ROOT = Path(__file__).resolve().parent.parent

GLOSSARY_ROWS = 30


def test_the_glossary_is_short() -> None:
    """Coined words are the first table; the second has the field's (test_glossary.py)."""
    coined = (ROOT / "docs/glossary.md").read_text().split("\n## ", 1)[0]
    rows = [line for line in coined.splitlines() if line.startswith("| ")]
    assert len(rows) - 1 <= GLOSSARY_ROWS, f"{len(rows) - 1} coined words"


DECISION_WORDS = 4500
"""The most words of docs/decisions.md and all pages in docs/decisions/ together."""

PAGE_WORDS = 1500
MADE = ("config.md", "bits_table.md")


def words_of(page: Path) -> int:
    return len(page.read_text().split())


def test_decisions_are_short() -> None:
    """Dates, alternatives and failed tries; explanations are in the other pages."""
    index, pages = ROOT / "docs/decisions.md", sorted((ROOT / "docs/decisions").rglob("*.md"))
    assert len(pages) > 10
    assert sum(words_of(page) for page in (index, *pages)) < DECISION_WORDS
    assert [page.name for page in pages if f"(decisions/{page.name})" not in index.read_text()] == []


def test_pages_are_short() -> None:
    """A page is read at one sitting; docs/config.md and docs/bits_table.md are made by commands."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    assert len(pages) > 80
    words = {str(page.relative_to(ROOT)): words_of(page) for page in pages if page.name not in MADE}
    assert {name: count for name, count in words.items() if count > PAGE_WORDS} == {}


PACKAGE = ROOT / "meshwright"

FUNCTION_LINES = 60


def modules() -> list[Path]:
    return sorted((ROOT / "meshwright").rglob("*.py"))


def test_docstrings_are_sentences_with_a_subject() -> None:
    """A docstring that opens with `Of the` or `What the` leans on the name above it."""
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in modules()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if line.lstrip().startswith(('"""Of ', '"""What ', '"""As '))
    ]
    assert found == []


def test_functions_are_short() -> None:
    sizes = {
        f"{path.name}:{node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path in modules()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    assert len(sizes) > 1000
    assert {name: lines for name, lines in sizes.items() if lines > FUNCTION_LINES} == {}


def imports_of_tests(source: str) -> Iterator[str]:
    """Yield the test modules that a source imports."""
    for name in imported_names(ast.walk(ast.parse(source))):
        yield from (part for part in name.split(".") if part.startswith("test_") and name.startswith("tests."))


def test_test_files_are_no_libraries() -> None:
    """A reader of a test opens modules of helpers (tests/oracle/, FOLDER/*.py), and no second test file."""
    paths = [path for folder in ("tests", "benchmarks", "validation") for path in (ROOT / folder).rglob("*.py")]
    assert len(paths) > 400
    found = {str(path.relative_to(ROOT)): [*imports_of_tests(path.read_text())] for path in paths}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "source",
    ["from tests.ranks.test_mesh import run", "from tests.ranks import test_mesh", "import tests.ranks.test_mesh"],
)
def test_an_imported_test_file_is_found(source: str) -> None:
    assert list(imports_of_tests(source)) == ["test_mesh"]


ROOMS = {
    "models": {"models", "families"},
    "tensor": {"tensor", "subgraph"},
    "schedules": {"pipeline"},
    "contexts": {"context"},
    "syncs": {"data_parallel"},
    "optimizers": {"optim"},
    "activations": {"memory"},
    "data": {"data", "families"},
    "sinks": {"training"},
    "metrics": {"training"},
}
"""The folders that may distinguish strategies of a group which runs name."""

OTHER_WORDS = {
    ("none", ""),  # for offload, recompute, the launcher: no tensor section
    ("auto", ""),  # left to a run's decisions
    ("offload", "planner/plan/page.py"), ("offload", "tools/verify/job.py"),  # of the optimizer's states
    ("megatron", "families/bert/model.py"), ("megatron", "families/bert/convert.py"),  # the order of BERT's norms
    ("tensorboard", "config/schema.py"),  # a field of version 0.1.0
    ("tensorboard", "tools/doctor.py"),  # a package
    ("ring", "planner/plan/network.py"),  # the links of a cluster's devices
    ("pairs", "tools/evaluate/texts.py"), ("pairs", "cli/weights.py"),  # the records of a packed folder
    ("text", "tools/evaluate/texts.py"),
}  # fmt: skip
"""Words that are also a strategy's name, and the files that mean another thing."""


def strategy_names(source: str, file: str) -> Iterator[str]:
    """Yield strategies' names that a file compares with, matches, or looks up by, in conditions and mappings' keys."""
    rooms = {*file.removesuffix(".py").split("/")}
    foreign = {name: group for group in ROOMS if not rooms & ROOMS[group] for name in OURS[group]}
    for node in ast.walk(ast.parse(source)):
        words: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            words = [inner for side in (node.left, *node.comparators) for inner in ast.walk(side)]
        elif isinstance(node, ast.MatchValue):
            words = [node.value]
        elif isinstance(node, ast.Dict):  # a key of a batch, or of a result, may be called images
            words = [key for key in node.keys if key is not None and foreign.get(getattr(key, "value", "")) != "data"]
        for word in words:
            name = word.value if isinstance(word, ast.Constant) else None
            if isinstance(name, str) and name in foreign and not {(name, ""), (name, file)} & OTHER_WORDS:
                yield f"{file}:{node.lineno}: {name}"


def sections_of(base: type[Section]) -> Iterator[type[Section]]:
    for section in base.__subclasses__():
        yield section
        yield from sections_of(section)


def foreign_sections(source: str, file: str) -> Iterator[str]:
    """Yield the sections of a strategy that a file distinguishes by isinstance, or matches. An assert is allowed."""
    rooms = {*file.split("/")} - {"compute", "strategies"}
    general = {load_entry(base) for base in BASES.values()} | {Config}
    foreign = {
        s.__name__ for s in sections_of(Section) if s not in general and not {*s.__module__.split(".")[1:-1]} & rooms
    }
    tree = ast.parse(source)
    known = {id(node.test) for node in ast.walk(tree) if isinstance(node, ast.Assert)}
    for node in ast.walk(tree):
        classes: list[ast.AST] = []
        if (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) in ("isinstance", "issubclass")
            and id(node) not in known
        ):
            classes = list(ast.walk(node.args[1]))
        elif isinstance(node, ast.MatchClass):
            classes = [node.cls]
        yield from (f"{file}:{c.lineno}: {c.id}" for c in classes if isinstance(c, ast.Name) and c.id in foreign)


FILES = sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if path.stem != "registry")


def test_strategies_are_told_apart_in_their_own_rooms_alone() -> None:
    """A strategy is found by the registry and used by its facts, so another package can add a strategy."""
    sources = {file: (PACKAGE / file).read_text() for file in FILES}
    assert [found for file, source in sources.items() for found in strategy_names(source, file)] == []
    assert [found for file, source in sources.items() for found in foreign_sections(source, file)] == []


@pytest.mark.parametrize(
    "planted",
    [
        'if config.layout.data.sync == "zero3": pass',
        'if config.layout.pipeline.schedule in ("gpipe", "1f1b"): pass',
        'match config.optimizer.name:\n  case "adamw": pass',
        'KITS = {"tesseract": None}',
        'if config.data.kind != "spans": pass',
        "if isinstance(config.layout.tensor, Megatron): pass",
        "if issubclass(section, T5 | Bert): pass",
        "match config.layout.tensor:\n  case Subgraph(size=2): pass",
    ],
)
def test_a_planted_comparison_is_seen(planted: str) -> None:
    seen = [*strategy_names(planted, "planner/plan/space.py"), *foreign_sections(planted, "planner/plan/space.py")]
    assert seen, planted


BUILT = {"Module", "Context", "Heads", "Kit", "UsesIslands", "Gradients", "LossScaler", "KeyValueCache"}
"""Classes with attributes that only methods of the class may write, and all classes that inherit from these."""

OF_TORCH = {"data", "grad", "grad_dtype"}
"""Attributes of a parameter, which torch has others write."""


def declared_by(node: ast.ClassDef) -> set[str]:
    """Return the attributes of a class: fields, and targets of assignments to `self`."""
    fields = [inner for inner in node.body if isinstance(inner, ast.Assign | ast.AnnAssign)]
    targets = [
        each for field in fields for each in (field.targets if isinstance(field, ast.Assign) else [field.target])
    ]
    names = {inner.id for target in targets for inner in ast.walk(target) if isinstance(inner, ast.Name)}
    return names | {attribute for base, attribute, _ in writes_of(node) if base == "self"}


def bases_of(node: ast.ClassDef) -> set[str]:
    """Return the names of a class's bases, without modules and arguments of types."""
    return {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases}


def writes_of(tree: ast.AST) -> Iterator[tuple[str, str, int]]:
    """Yield (object, attribute, line) of every assignment to an attribute, by `setattr` as well."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield ast.unparse(node.value), node.attr, node.lineno
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
            yield ast.unparse(node.args[0]), "setattr", node.lineno


@cache
def tree_of(file: str) -> ast.Module:
    return ast.parse((PACKAGE / file).read_text())


def classes_of(tree: ast.Module) -> list[ast.ClassDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


@cache
def built_classes() -> dict[str, set[str]]:
    """Return the attributes of each class of the package in BUILT, or below a class in BUILT."""
    classes = [node for file in FILES for node in classes_of(tree_of(file))]
    built, known = set(BUILT), 0
    while len(built) > known:
        known = len(built)
        built |= {node.name for node in classes if bases_of(node) & built}
    attributes: dict[str, set[str]] = {name: set() for name in built}
    for node in classes:
        if node.name in built:
            attributes[node.name] |= declared_by(node)
    return attributes


def written_from_outside(tree: ast.Module) -> list[str]:
    """Return assignments to attributes of finished modules, kits, contexts and the like, outside of the classes."""
    attributes = set[str]().union(*built_classes().values()) - OF_TORCH | {"setattr"}
    for node in classes_of(tree):
        if node.name not in built_classes():  # another class, which may have an attribute of the same name
            attributes -= declared_by(node)
    return [
        f"{line}: {base}.{attribute}"
        for base, attribute, line in writes_of(tree)
        if base not in ("self", "ctx") and attribute in attributes
    ]


def test_attributes_of_finished_modules_are_written_by_their_own_methods() -> None:
    """A reader of a class then sees all possible values of the class's attributes."""
    found = {file: written_from_outside(tree_of(file)) for file in FILES}
    assert {file: lines for file, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "planted",
    [
        "for module in model.modules():\n    module.run = recomputed",
        "model.groups = ()",
        "model.context.heads = heads",
        "setattr(module, name, child)",
        "def build(kit):\n    model = make(kit)\n    model.run_group, model.keeps_rows = run, True",
        "module.by_block: object = None",
        "self.gradients.user = 0",
        "router.loads += 1",
    ],
)
def test_a_planted_write_is_seen(planted: str) -> None:
    assert written_from_outside(ast.parse(planted))


def told_policies(source: str, file: str) -> Iterator[str]:
    """Yield the places at which a file distinguishes values of memory.recompute."""
    if "memory" in file.split("/"):
        return
    for node in ast.walk(ast.parse(source)):
        told: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            told = [node.left, *node.comparators]
        elif isinstance(node, ast.Match):
            told = [node.subject]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
            told = [node.args[0]]
        elif isinstance(node, ast.Subscript):
            told = [node.slice]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
            told = list(node.args[:1])
        inner = (part for one in told for part in ast.walk(one))
        if any(isinstance(part, ast.Attribute) and part.attr == "recompute" for part in inner):
            yield f"{file}:{node.lineno}"


def test_an_activation_policy_is_treated_by_its_facts() -> None:
    """No file outside of memory/ compares the word; tensors computed again, kept or moved are facts of the policy."""
    assert [found for file in FILES for found in told_policies((PACKAGE / file).read_text(), file)] == []


@pytest.mark.parametrize(
    "planted",
    [
        "if config.memory.recompute != KEEPS_ALL: pass",
        'if memory.recompute in ("auto", "ops"): pass',
        "again = isinstance(config.memory.recompute, int)",
        "match config.memory.recompute:\n  case 1: pass",
        "mode = MODES.get(str(config.memory.recompute))",
        "share = SHARES[config.memory.recompute]",
    ],
)
def test_a_planted_comparison_of_policies_is_seen(planted: str) -> None:
    assert [*told_policies(planted, "planner/plan/estimate.py")] == ["planner/plan/estimate.py:1"]
    assert [*told_policies(planted, "strategies/memory/section.py")] == []
