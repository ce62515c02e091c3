"""Transports: what may carry a job's messages, as facts that are known before any process starts.

| transport | moves            | ranks meet at                | ranks are started by                |
|-----------|------------------|------------------------------|-------------------------------------|
| torch     | host, GPU memory | a store (comm_store.py)      | fork, or torchrun, srun             |
| mpi       | host memory      | MPI's own world              | mpiexec, or srun with --mpi         |

Who adds one writes its facts here and its comm and mailbox beside (mesh.py opens it); decisions.py says when
`layout.transport=auto` takes it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

TransportName = Literal["torch", "mpi"]


@dataclass(frozen=True)
class TransportFacts:
    """`module`: the Python module that must be installed. `devices`: the types of device whose memory it moves.

    `by_mpiexec`: its ranks are started by an MPI launcher, which also brings them together. Others meet at a store and
    have torch.distributed's process groups.
    """

    module: str
    devices: tuple[str, ...]
    by_mpiexec: bool = False

    @property
    def is_installed(self) -> bool:
        return importlib.util.find_spec(self.module) is not None


TRANSPORTS: Mapping[str, TransportFacts] = {
    "torch": TransportFacts("torch", ("cpu", "cuda")),
    # GPU-aware MPI was never at hand.
    "mpi": TransportFacts("mpi4py", ("cpu",), by_mpiexec=True),
}
