"""(b) Every sync on every transport against torch's DDP and FSDP2; (c) server-* against one device.

    python -m benchmarks.data_parallel [--ranks 2 4] [--only SYNC ...] [--transports torch mpi]
                                       [--waiting] [--rounds N] [--steps N] [--json FILE]

`--waiting`: also zero1 whose step ends when the stepped weights have arrived, which else travel under the next forward
pass; take five steps a turn or more, of which only the last one's is not in the turn's time.

Targets: allreduce at most 0.95 of DDP's step at 2 ranks and 0.85 at 4, zero1 at most 1.0 of DDP's, zero3 at most 1.0 of
FSDP2's. Two rows say how near that can be: ranks that never sum their gradients, and their linear layers' products
alone, which no strategy goes below. For (c) no target: the finding to repeat is that one parameter server is slower
than one device.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from benchmarks import ours
from benchmarks.contender import Contender
from benchmarks.interleave import Plan, Result, as_json, interleave, plan_arguments, plan_of, show, write_json
from meshwright.config.registry import entries

BASELINES = ("DDP", "FSDP2", "plain loop")
SYNCS = tuple(entries("syncs"))


def contenders(ranks: int, syncs: Sequence[str], transports: Sequence[str], *, waiting: bool) -> list[Contender]:
    """The baselines and the floors, then ours, over the transports that carry each."""
    theirs = [
        Contender("plain loop", "benchmarks.baselines:plain"),
        Contender("DDP", "benchmarks.baselines:ddp", ranks=ranks),
        Contender("DDP, torch's defaults", "benchmarks.baselines:ddp", {"fused": False, "bucket_view": False}, ranks),
        Contender("FSDP2", "benchmarks.baselines:fsdp2", ranks=ranks),
        Contender("no sum", "benchmarks.baselines:plain", {"fused": True}, ranks),
        Contender("products alone", "benchmarks.baselines:products", ranks=ranks),
    ]
    serial = [ours.contender("allreduce", "torch", 1)]
    mine = [
        ours.contender(sync, transport, ranks)
        for sync in syncs
        for transport in transports
        if transport != "mpi" or entries("syncs")[sync].over_mpi
    ]
    late = [ours.contender("zero1", "torch", ranks, waits=True)] if waiting else []
    return theirs + serial + mine + late


def measure(
    ranks: int, syncs: Sequence[str], transports: Sequence[str], plan: Plan, *, waiting: bool = False
) -> list[Result]:
    results = interleave(contenders(ranks, syncs, transports, waiting=waiting), plan)
    show(f"(b), (c) data parallel, {ranks} ranks of one thread", results, BASELINES)
    return results


def main() -> None:
    parser = plan_arguments("Data-parallel strategies against DDP, FSDP2 and one device.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--only", nargs="+", choices=SYNCS, default=list(SYNCS), metavar="SYNC", help=", ".join(SYNCS))
    installed = ["torch", "mpi"] if find_spec("mpi4py") else ["torch"]
    parser.add_argument("--transports", nargs="+", choices=["torch", "mpi"], default=installed)
    parser.add_argument("--waiting", action="store_true", help="also zero1 that waits for its weights in each step")
    arguments = parser.parse_args()
    plan = plan_of(arguments)
    tables = {}
    for ranks in arguments.ranks:
        results = measure(ranks, arguments.only, arguments.transports, plan, waiting=arguments.waiting)
        tables[f"ranks-{ranks}"] = as_json(results, BASELINES)
    write_json(arguments.json, tables)


if __name__ == "__main__":
    main()
