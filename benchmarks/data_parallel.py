"""(b) Every sync on every transport against torch's DDP, and zero3 against FSDP2; (c) server-* against one device.

    python -m benchmarks.data_parallel [--ranks 2 4] [--only SYNC ...] [--transports torch mpi]
                                       [--allocators told glibc] [--rounds N] [--json FILE]

Aims: allreduce and zero1 at most 0.95 of DDP's step at 2 ranks and at 4, zero3 at most 0.88 of FSDP2's. Two rows are
floors: ranks that never sum gradients, and the linear layers' products alone, the least time of any strategy. (c) has
no aim: the finding to repeat is that one parameter server is slower than one device.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import ours
from benchmarks.contender import Contender
from benchmarks.interleave import measure_both, peer_arguments, plan_of, write_json
from meshwright.config.registry import entries
from meshwright.ranks.machine import Machine

SYNCS = tuple(entries("syncs"))
SHARDED = "zero3"


def replicated(ranks: int) -> list[Contender]:
    """Return torch's DDP in three forms."""
    forms = {"DDP": "", "DDP, compiled inside": "inside", "DDP, compiled outside": "outside"}
    return [Contender(name, "benchmarks.baselines:ddp", {"compiled": form}, ranks) for name, form in forms.items()]


def sharded(ranks: int) -> list[Contender]:
    """Return torch's FSDP2 in two forms."""
    forms = {"FSDP2": False, "FSDP2, compiled": True}
    return [Contender(name, "benchmarks.baselines:fsdp2", {"compiled": form}, ranks) for name, form in forms.items()]


def mine(ranks: int, syncs: Sequence[str], transports: Sequence[str]) -> list[Contender]:
    """Return Meshwright's syncs, on each transport that carries the sync."""
    return [
        ours.contender(sync, transport, ranks)
        for sync in syncs
        for transport in transports
        if transport != "mpi" or entries("syncs")[sync].over_mpi
    ]


def beside(ranks: int, syncs: Sequence[str]) -> list[Contender]:
    """Return the floors, and one device if a server is among the syncs."""
    floors = [
        Contender("no sum", "benchmarks.baselines:plain", ranks=ranks),
        Contender("products alone", "benchmarks.baselines:products", ranks=ranks),
    ]
    if any(sync.startswith("server") for sync in syncs):
        floors.append(Contender("plain loop, one device", "benchmarks.baselines:plain"))
    return floors


def main() -> None:
    parser = peer_arguments("Data-parallel strategies against DDP, FSDP2 and one device.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--only", nargs="+", choices=SYNCS, default=list(SYNCS), metavar="SYNC", help=", ".join(SYNCS))
    installed = ["torch", "mpi"] if Machine.here().has_mpi else ["torch"]
    parser.add_argument("--transports", nargs="+", choices=["torch", "mpi"], default=installed)
    arguments = parser.parse_args()
    tables = {}
    for ranks in arguments.ranks:
        unsharded = [sync for sync in arguments.only if sync != SHARDED]
        cells = [(f"(b), (c) replicas, {ranks} ranks", replicated(ranks), unsharded, beside(ranks, unsharded))]
        cells.append((f"(b) sharded, {ranks} ranks", sharded(ranks), sorted({*arguments.only} - {*unsharded}), []))
        for title, theirs, syncs, floors in cells:
            if syncs:
                made = [*theirs, *floors, *mine(ranks, syncs, arguments.transports)]
                names = [contender.name for contender in theirs]
                tables |= measure_both(title, made, plan_of(arguments), names, arguments.allocators)
    write_json(arguments.json, tables)


if __name__ == "__main__":
    main()
