"""The transports that may carry the messages of ranks: facts, known before any process starts.

| transport | moves            | ranks meet at                | ranks are started by                |
|-----------|------------------|------------------------------|-------------------------------------|
| torch     | host, GPU memory | a store (comm_store.py)      | fork, or torchrun, srun             |
| mpi       | host memory      | MPI's own world              | mpiexec, or srun with --mpi         |
| threads   | host, GPU memory | memory (thread_world.py)     | threads of the process that asks    |

A new transport adds its facts here and its comm and mailbox in this folder (mesh.py opens it); decisions.py says when
`layout.transport=auto` takes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

TransportName = Literal["torch", "mpi", "threads"]


@dataclass(frozen=True)
class TransportFacts:
    """`module`: the Python module that must be installed. `devices`: the types of device whose memory it moves.

    `by_mpiexec`: its ranks are started by an MPI launcher, which also brings them together. `in_process`: its ranks are
    threads of one process, on one device.
    `moves_alone`: a verb that nobody waits for yet makes progress.
    """

    module: str
    devices: tuple[str, ...]
    by_mpiexec: bool = False
    in_process: bool = False
    moves_alone: bool = True


TRANSPORTS: Mapping[str, TransportFacts] = {
    "torch": TransportFacts("torch", ("cpu", "cuda")),
    # GPU-aware MPI was never at hand.
    "mpi": TransportFacts("mpi4py", ("cpu",), by_mpiexec=True, moves_alone=False),
    "threads": TransportFacts("torch", ("cpu", "cuda"), in_process=True),
}
