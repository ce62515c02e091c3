"""Imports go down only: the floors of the package, read from import statements."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.sources import imported_names, tree_of

PACKAGE = Path(__file__).resolve().parent.parent / "meshwright"

BOXES = (
    "ranks", "output", "config", "parity", "compute", "strategies", "data", "training", "planner", "tools", "families",
    "cli",
)  # fmt: skip
"""The folders of the package in the order of imports: each imports only earlier folders."""

FLOORS: dict[str, int] = {
    # 0: facts. No torch.
    "ranks/errors": 0, "ranks/remedies": 0, "ranks/environment": 0, "ranks/launchers": 0, "ranks/machine": 0,
    "ranks/streams": 0, "ranks/imports": 0, "ranks/foreign": 0, "ranks/transports": 0, "ranks/timeouts": 0,
    "ranks/grid": 0, "ranks/asked": 0, "output": 0, "config": 0, "config/registry": 0, "config/section": 0,
    "configs": 0, "section": 0, "version": 0,
    # 1: ranks and their values.
    "ranks": 1, "compute/model": 1, "compute/parameters": 1, "compute/precision": 1,
    # 2: folders that never import each other.
    "compute/context": 2, "compute/tensor": 2, "strategies/data_parallel": 2, "strategies/optim": 2,
    "strategies/pipeline": 2, "strategies/memory": 2,
    # 3: a kit made of the layers in tensor; models, written against the kit.
    "compute/subgraph": 3, "compute/models": 3,
    # 4: modules that make a run of the parts.
    "training/parts": 4, "training/rank_model": 4, "training/fp8_note": 4, "training/all_stages": 4,
    "training/on_device": 4, "training/stage_costs": 4, "training/decisions": 4,
    "training/checkpoint": 4, "training/convert": 4, "data": 4, "ranks/launch": 4,
    # 4 too: a rank's sums, followed before the rank starts.
    "training/typed": 4,
    # 4 too: equal bits. parts.py and sections name bits as a text, and no module imports it.
    "compute/bits": 4,
    # 5: the run. The core ends here.
    "training": 5,
    # 5 too: the comparison with one process, for any program.
    "parity": 5,
    # 6: modules that ask questions of a run, before, during and after the run.
    "planner": 6, "tools": 6,
    # 6 too: modules of one family alone, with the family's measures. The registry names a family; no module imports it.
    "families": 6,
    # On top.
    "__main__": 7, "cli": 7, "api": 7, "__init__": 7, "compute": 7, "strategies": 7,
}  # fmt: skip
"""The floor of each room, which is a folder or a module. A module belongs to the longest name that begins its path."""

ROOMS_APART = 2

MODULES = sorted(PACKAGE.rglob("*.py"))


SECTION = "section"
"""A strategy's section.py (or `..._section.py`) is in the strategy's folder, and on floor 0.

The config is composed of all sections. A section names the classes to build as text, `module:attribute`, and imports
these classes nowhere, not inside of functions either.
"""


def is_section(name: str) -> bool:
    return name == SECTION or name.endswith(f"_{SECTION}")


def room_named(parts: tuple[str, ...]) -> str:
    """Return the room of a module, by folders and file name. A section is no part of its folder."""
    if any(map(is_section, parts)):
        return SECTION
    beginnings = ("/".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((room for room in beginnings if room in FLOORS), "__init__")


def room_of(path: Path) -> str:
    """Return the room of a module of the package."""
    return room_named(path.relative_to(PACKAGE).with_suffix("").parts)


def nodes_of(path: Path) -> Iterator[ast.AST]:
    """Yield all nodes of a module; on floor 0 without imports for a type checker."""
    tree = tree_of(path)
    if FLOORS[room_of(path)] > 0:
        yield from ast.walk(tree)
        return
    typed = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    skipped = {inner for node in typed for part in node.body for inner in ast.walk(part)}
    yield from (node for node in ast.walk(tree) if node not in skipped)


@cache
def imports_of(path: Path) -> list[str]:
    """Return the dotted names of all imports of a module, at the top or inside a function."""
    return imported_names(nodes_of(path))


def rooms_imported(path: Path) -> Iterator[str]:
    for name in imports_of(path):
        first, *parts = name.split(".")
        if first == "meshwright" and parts:
            yield room_named(tuple(parts))


IMPORT_DEPTH = 20
"""The most modules in the longest chain of imports, at tops of modules. This bound may only go down."""


def imports_run(node: ast.AST, lazy: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the imports that run at a module's import; `lazy`: also in functions. No import for type checkers."""
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, ast.Import | ast.ImportFrom):
            yield inner
        elif isinstance(inner, ast.If) and ast.unparse(inner.test) == "TYPE_CHECKING":
            yield from imports_run(ast.Module(inner.orelse, []), lazy)
        elif lazy or not isinstance(inner, ast.FunctionDef):
            yield from imports_run(inner, lazy)


@cache
def modules_imported(lazy: bool) -> dict[str, set[str]]:
    """Return, for each module of the package, the imported modules of the package."""
    named = {".".join(("meshwright", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
             for path in MODULES}  # fmt: skip
    imported: dict[str, set[str]] = {name: set() for name in named}
    for name, path in named.items():
        for node in imports_run(tree_of(path), lazy):
            if isinstance(node, ast.Import):
                imported[name] |= {alias.name for alias in node.names if alias.name in named}
            else:
                wanted = [(f"{node.module}.{alias.name}", str(node.module)) for alias in node.names]
                imported[name] |= {full if full in named else base for full, base in wanted if {full, base} & {*named}}
    return imported


def reached(imported: dict[str, set[str]], start: str) -> set[str]:
    """Return the modules that a module imports, directly or through others."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        fresh = imported[waiting.pop()] - found
        found |= fresh
        waiting += fresh
    return found


def test_the_longest_chain_of_imports() -> None:
    imported = modules_imported(lazy=False)
    depth: dict[str, int] = {}
    for name in TopologicalSorter(imported).static_order():  # raises CycleError if modules import each other
        depth[name] = 1 + max((depth[below] for below in imported[name]), default=0)
    assert max(depth.values()) <= IMPORT_DEPTH


def test_no_imports_go_in_a_circle() -> None:
    """Imports inside functions count, since these only delay a circle until a call."""
    imported = modules_imported(lazy=True)
    below = {name: reached(imported, name) for name in imported}
    circles = {tuple(sorted(other for other in below[name] if name in below[other])) for name in imported}
    assert circles == {()}, "modules that reach each other"


SECTIONS = [path for path in MODULES if is_section(path.stem)]


@pytest.mark.parametrize("path", SECTIONS, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_sections_import_no_room(path: Path) -> None:
    """Any module that may import the config may import sections, so sections import facts alone."""
    facts = {room for room, floor in FLOORS.items() if floor == 0} - {"config"}
    assert set(rooms_imported(path)) <= facts


@pytest.mark.parametrize("path", sorted((PACKAGE / "ranks").rglob("*.py")), ids=lambda path: path.stem)
def test_ranks_know_no_config(path: Path) -> None:
    nodes = imports_run(tree_of(path), lazy=True)
    assert not [node for node in nodes if isinstance(node, ast.ImportFrom) and "meshwright.config" in str(node.module)]


def test_every_folder_is_a_box() -> None:
    """configs/ holds files for people, and one module that finds the files."""
    assert {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()} == {*BOXES, "configs"}


def box_of(module: str) -> str:
    """Return the box of a module by name: the package's face is above all boxes, and sections are the config's."""
    parts = module.split(".")[1:]
    if any(map(is_section, parts)) or parts[:1] == ["configs"]:
        return "config"
    return parts[0] if parts and parts[0] in BOXES else "ranks" if parts == ["version"] else "face"


def test_boxes_import_one_way() -> None:
    order = {box: place for place, box in enumerate((*BOXES, "face"))}
    pairs = {(name, other) for name, imported in modules_imported(lazy=True).items() for other in imported}
    assert {pair for pair in pairs if order[box_of(pair[0])] < order[box_of(pair[1])]} == set()


def test_parity_needs_ranks_alone() -> None:
    """The distributions of both (packaging/) need ranks alone, too."""
    imported = modules_imported(lazy=True)
    for box, allowed in (("ranks", {"ranks"}), ("parity", {"ranks", "parity"})):
        files = {name for name in imported if name.split(".")[1:2] == [box]}
        assert {box_of(other) for name in files for other in imported[name]} <= allowed


def test_imports_go_down() -> None:
    mistakes = []
    for path in MODULES:
        room = room_of(path)
        for imported in set(rooms_imported(path)) - {room, "__init__"}:
            if FLOORS[imported] > FLOORS[room]:
                mistakes.append(f"{path}: {room} (floor {FLOORS[room]}) imports {imported} above it")
            if FLOORS[room] == FLOORS[imported] == ROOMS_APART:
                mistakes.append(f"{path}: {room} imports {imported}: rooms of floor {ROOMS_APART} know each other")
    assert not mistakes


def face_imports(path: Path) -> list[str]:
    """Return imports of the package itself, which has names of every floor."""
    return [
        name
        for name in imports_of(path)
        if name.split(".")[0] == "meshwright" and room_named(tuple(name.split(".")[1:])) == "__init__"
    ]


def test_nobody_below_imports_the_face() -> None:
    top = max(FLOORS.values())
    found = {str(path): face_imports(path) for path in MODULES if FLOORS[room_of(path)] < top}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize("planted", ["import meshwright", "from meshwright import build", "import meshwright as mw"])
def test_a_planted_import_of_the_face_is_seen(planted: str, tmp_path: Path) -> None:
    room = tmp_path / "parts.py"
    room.write_text(f"def late():\n    {planted}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.test_layers.PACKAGE", tmp_path)
        assert face_imports(room)


def test_libraries_stay_in_their_rooms() -> None:
    """Floor 0 imports no torch. Ranks and the launcher import `torch.distributed`; the launcher uses its store.

    doctor imports `torch.distributed` and `mpi4py` to report both.
    """
    mistakes = []
    for path in MODULES:
        room, doctor = room_of(path), path.stem == "doctor"
        roots = {name.split(".")[0] for name in imports_of(path)}
        distributed = any(name.startswith("torch.distributed") for name in imports_of(path))
        if FLOORS[room] == 0 and "torch" in roots:
            mistakes.append(f"{path}: torch on floor 0")
        if distributed and not room.startswith("ranks") and not doctor:
            mistakes.append(f"{path}: torch.distributed")
        if "mpi4py" in roots and not room.startswith("ranks") and not doctor:
            mistakes.append(f"{path}: mpi4py")
    assert not mistakes


def test_one_place_reads_the_environment_and_nothing_is_unpickled() -> None:
    mistakes = []
    for path in MODULES:
        used = {f"{node.value.id}.{node.attr}" for node in ast.walk(tree_of(path)) if isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)}  # fmt: skip
        forbidden = {"torch.load"} | ({"os.environ", "os.getenv"} if room_of(path) != "ranks/environment" else set())
        mistakes += [f"{path}: {name}" for name in used & forbidden]
        mistakes += [f"{path}: {n}" for n in imports_of(path) if n.split(".")[0] in ("pickle", "shelve", "dill")]
    assert not mistakes


def test_nobody_imports_a_family() -> None:
    """No family imports another: code that two families need is in models/ or data/."""
    for name, imported in modules_imported(lazy=True).items():
        folder = ".".join(name.split(".")[:3])
        foreign = {other for other in imported if other.startswith("meshwright.families.")}
        assert {other for other in foreign if not f"{other}.".startswith(f"{folder}.")} == set(), name


def is_model(path: Path) -> bool:
    """Return whether a module has a chain, or layers for chains of several families."""
    of_family = room_of(path) == "families" and "kit" in path.read_text() and "nn.Module" in path.read_text()
    return room_of(path) == "compute/models" or of_family


@pytest.mark.parametrize("path", list(filter(is_model, MODULES)), ids=lambda path: path.stem)
def test_models_know_no_axis(path: Path) -> None:
    allowed = {"config", "config/registry", "config/section", "section", "families"} | {
        f"compute/{room}" for room in ("context", "model", "parameters", "tensor", "models")
    }
    assert set(rooms_imported(path)) <= allowed, "a model knows the kit, its context, its config and initial values"
    words = re.findall(r"\b(mesh|comm|axis|all_reduce|gather)\b", path.read_text())
    assert not words, f"not a line about parallelism in a model: {words}"


def test_the_page_on_extending_imports_what_there_is() -> None:
    """A renamed class that outside packages use is seen here, before tests/test_extending.py runs."""
    pages = sorted((PACKAGE.parent / "docs").glob("extending*.md"))
    for block in re.findall(r"```python\n(.*?)```", "".join(path.read_text() for path in pages), re.DOTALL):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("meshwright."):
                names = [alias.name for alias in node.names]
                missing = [name for name in names if not hasattr(importlib.import_module(str(node.module)), name)]
                assert not missing, f"{node.module} has no {missing}"
