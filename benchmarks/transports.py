"""One all-reduce on each transport, MPI's own forms beside what MpiComm makes of it, and a sum in shared memory.

The last is a window that ranks of one machine share, in which the summed tensors lie: each rank adds up its piece of
all of them, then copies the others' pieces. Nothing that goes through messages can be faster on one machine.

python -m benchmarks.transports [--ranks 2 4] [--rounds N] [--steps N] [--json FILE]
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from benchmarks.contender import Contender, Place, Step
from benchmarks.interleave import Plan, as_json, interleave, plan_arguments, show, write_json
from meshwright.environment import read_environment, rendezvous
from meshwright.ranks.comm import Comm
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import open_mesh
from meshwright.ranks.mpi import MpiComm

SIZES = {"4 KiB": 2**12, "1 MiB": 2**20, "16 MiB": 2**24}


@contextmanager
def all_reduce(place: Place, transport: str, size_bytes: int, form: str) -> Iterator[Step]:
    """A step is one sum of `size_bytes` of float32, in place. `form`: ours, MPI's own, or a window."""
    grid = Grid((("data", place.ranks),))
    with open_mesh(grid, read_environment(), transport, torch.device("cpu"), rendezvous()) as mesh:
        comm = mesh.comm("data")
        x = torch.zeros(size_bytes // 4)
        in_window = window_sum(comm, x.numel()) if form == "window" else None

        def step() -> float:
            if in_window:
                return in_window()
            if form == "ours":
                comm.all_reduce(x)
                return float(x[0])
            assert isinstance(comm, MpiComm), f"{form} is a form of MPI's"
            if form == "blocking":
                comm.comm.Allreduce(comm.in_place, x.numpy())
            else:
                comm.comm.Iallreduce(comm.in_place, x.numpy()).Wait()
            return float(x[0])

        yield step


def window_sum(comm: Comm, count: int) -> Step:
    """A sum of `count` float32 numbers that lie in MPI's shared memory, in place."""
    from mpi4py import MPI

    assert isinstance(comm, MpiComm), "the window is MPI's"
    window = MPI.Win.Allocate_shared(count * 4, 4, comm=comm.comm)
    tensors = [torch.from_numpy(np.frombuffer(window.Shared_query(r)[0], np.float32)) for r in range(comm.size)]
    pieces = [tensor.tensor_split(comm.size) for tensor in tensors]
    own = pieces[comm.index]

    def step() -> float:
        comm.assemble()
        own[comm.index].copy_(sum(of_rank[comm.index] for of_rank in pieces))
        comm.assemble()
        for rank, piece in enumerate(own):
            if rank != comm.index:
                piece.copy_(pieces[rank][rank])
        comm.assemble()
        return float(own[0][0])

    return step


def main() -> None:
    parser = plan_arguments("One all-reduce on each transport.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    arguments = parser.parse_args()
    tables = {}
    for ranks in arguments.ranks:
        for label, size_bytes in SIZES.items():
            forms = {
                "gloo": ("torch", "ours"),
                "MPI": ("mpi", "ours"),
                "MPI's own, blocking": ("mpi", "blocking"),
                "MPI's own, posted": ("mpi", "posted"),
                "a shared window": ("mpi", "window"),
            }
            contenders = [
                Contender(
                    name,
                    "benchmarks.transports:all_reduce",
                    {"transport": transport, "size_bytes": size_bytes, "form": form},
                    ranks,
                    "mpi" if transport == "mpi" else "torch",
                )
                for name, (transport, form) in forms.items()
            ]
            results = interleave(contenders, Plan(arguments.rounds, arguments.steps))
            show(f"all-reduce of {label} at {ranks} ranks", results, ("gloo",))
            tables[f"{label}, {ranks} ranks"] = as_json(results, ("gloo",))
    write_json(arguments.json, tables)


if __name__ == "__main__":
    main()
