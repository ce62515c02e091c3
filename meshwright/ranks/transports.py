"""Facts about the transports between ranks, known before any process starts.

| transport | moves            | ranks meet at                | ranks are started by                |
|-----------|------------------|------------------------------|-------------------------------------|
| torch     | host, GPU memory | a store (comm_store.py)      | fork, or torchrun, srun             |
| mpi       | host memory      | MPI's own world              | mpiexec, or srun with --mpi         |
| threads   | host, GPU memory | memory (thread_world.py)     | threads of the process that asks    |

A new transport adds facts here, and a comm and a mailbox in this folder (opened by mesh.py). decisions.py decides when
`layout.transport=auto` chooses a transport.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

TransportName = Literal["torch", "mpi", "threads"]


@dataclass(frozen=True)
class TransportFacts:
    """Facts about a transport. `module`: the Python module that must be installed. `devices`: supported device types.

    `by_mpiexec`: an MPI launcher starts and connects the ranks. `in_process`: ranks are threads of one process, on one
    device. `moves_alone`: a begun verb makes progress before the rank waits.
    """

    module: str
    devices: tuple[str, ...]
    by_mpiexec: bool = False
    in_process: bool = False
    moves_alone: bool = True


TRANSPORTS: Mapping[str, TransportFacts] = {
    "torch": TransportFacts("torch", ("cpu", "cuda")),
    # GPU-aware MPI was never available for tests.
    "mpi": TransportFacts("mpi4py", ("cpu",), by_mpiexec=True, moves_alone=False),
    "threads": TransportFacts("torch", ("cpu", "cuda"), in_process=True),
}
