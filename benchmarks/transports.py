"""One all-reduce on each transport, MPI's forms, and Meshwright's, which sums in memory that a node's ranks share.

`Comm` copies pieces of any tensor into that memory; gradients are allocated there (`Comm.zeros`), and summed in place.
Also measured: the same bytes in the form of a zero1 step: a reduce-scatter of gradients, an all-gather of weights.

python -m benchmarks.transports [--ranks 2 4] [--rounds N] [--steps N] [--json FILE]
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from benchmarks.contender import Contender, Place, Step
from benchmarks.interleave import measure, plan_arguments, plan_of, write_json
from meshwright.ranks.environment import read_environment, rendezvous
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import open_mesh
from meshwright.ranks.mpi import MpiComm

SIZES = {"4 KiB": 2**12, "1 MiB": 2**20, "16 MiB": 2**24, "28 MiB": 28 * 2**20}


@contextmanager
def all_reduce(place: Place, transport: str, size_bytes: int, form: str) -> Iterator[Step]:
    """Yield a step that sums `size_bytes` of float32, in place. `form`: `ours`, for any tensor; `shared`, for a tensor
    in shared memory; `scattered`, a reduce-scatter and an all-gather; `blocking` and `posted`, MPI's forms."""
    grid = Grid((("data", place.ranks),))
    with open_mesh(grid, read_environment(), transport, torch.device("cpu"), rendezvous()) as mesh:
        comm = mesh.comm("data")
        count = size_bytes // 4
        shared = form in ("shared", "scattered")
        x = comm.zeros(count, torch.float32, mesh.device) if shared else torch.zeros(count)
        weights = torch.zeros(count)
        shard = weights.view(place.ranks, -1)[comm.index]

        def step() -> float:
            if form in ("ours", "shared"):
                comm.all_reduce(x)
                return float(x[0])
            if form == "scattered":
                comm.reduce_scatter(shard, x)
                comm.all_gather(weights, shard)
                return float(weights[0])
            assert isinstance(comm, MpiComm), f"{form} is a form of MPI's"
            if form == "blocking":
                comm.comm.Allreduce(comm.in_place, x.numpy())
            else:
                comm.comm.Iallreduce(comm.in_place, x.numpy()).Wait()
            return float(x[0])

        yield step


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
                "MPI, in shared memory": ("mpi", "shared"),
                "gloo, in shared memory": ("torch", "shared"),
                "gloo, reduce-scatter and all-gather": ("torch", "scattered"),
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
            title = f"all-reduce of {label} at {ranks} ranks"
            tables[f"{label}, {ranks} ranks"] = measure(title, contenders, plan_of(arguments), ("gloo",))
    write_json(arguments.json, tables)


if __name__ == "__main__":
    main()
