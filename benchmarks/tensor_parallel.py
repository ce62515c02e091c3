"""(a) 1-D tensor parallelism against torch's DTensor; (b) 2-D and 2.5-D against the papers' loop of broadcasts.

    python -m benchmarks.tensor_parallel [--only a b] [--ranks 1 2 4 8] [--transports torch mpi]
                                         [--allocators told glibc] [--rounds N] [--json FILE]

(a) at 2 and 4 ranks, of the wide model; at 1 DTensor and the plain loop: the difference is DTensor's dispatch. (b) at 4
([2,2,1]) and 8 ([2,2,2]). Aims, on the better transport: (a) at most 0.70 of the step of DTensor's better form; (b) at
most 0.6 of the broadcast loop's at 4 and at 8.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import broadcast_model, dtensor, ours
from benchmarks.contender import Contender
from benchmarks.interleave import measure_both, peer_arguments, plan_of, write_json
from benchmarks.reference import REFERENCE, WIDE
from meshwright.ranks.machine import Machine

RANKS = {"a": (1, 2, 4), "b": (4, 8)}
"""Counts of ranks by question."""

Q = 2


def one_dimension(ranks: int, transports: Sequence[str]) -> tuple[list[Contender], list[str]]:
    """Return torch's two forms of 1-D and Meshwright's on each transport or, at one rank, the plain loop; and the
    baselines' names."""
    theirs = [dtensor.contender(ranks), dtensor.contender(ranks, sequence_parallel=True)]
    if ranks == 1:
        return [*theirs, Contender("plain loop", "benchmarks.baselines:plain", {"wide": True})], ["plain loop"]
    forms = {"megatron": False, "megatron, sequence parallel,": True}
    mine = [
        ours.tensor_contender(name, transport, {"kind": "megatron", "size": ranks, "sequence_parallel": sequence}, WIDE)
        for name, sequence in forms.items()
        for transport in transports
    ]
    return [*theirs, *mine], [contender.name for contender in theirs]


def two_dimensions(ranks: int, transports: Sequence[str]) -> tuple[list[Contender], list[str]]:
    """Return the broadcast loop and Meshwright's 2-D on each transport, and one device; and the baselines' names."""
    depth = ranks // Q**2
    theirs = [broadcast_model.contender(Q, depth, transport) for transport in transports]
    mine = [
        ours.tensor_contender("tesseract", transport, {"kind": "tesseract", "q": Q, "d": depth}, REFERENCE)
        for transport in transports
    ]
    return [*theirs, *mine, ours.contender("allreduce", "torch", 1)], [contender.name for contender in theirs]


def main() -> None:
    parser = peer_arguments("Tensor parallelism against DTensor and the papers' broadcast loop.")
    parser.add_argument("--only", nargs="+", choices=list(RANKS), default=list(RANKS), help="which questions")
    parser.add_argument("--ranks", type=int, nargs="+", choices=[1, 2, 4, 8], default=[1, 2, 4, 8])
    installed = ["torch", "mpi"] if Machine.here().has_mpi else ["torch"]
    parser.add_argument("--transports", nargs="+", choices=["torch", "mpi"], default=installed)
    arguments = parser.parse_args()
    tables = {}
    for question in arguments.only:
        for ranks in (count for count in RANKS[question] if count in arguments.ranks):
            make = one_dimension if question == "a" else two_dimensions
            contenders, baselines = make(ranks, arguments.transports)
            shape = f"[{ranks}]" if question == "a" else f"[{Q},{Q},{ranks // Q**2}]"
            title = f"({question}) tensor parallel {shape}, {ranks} ranks"
            tables |= measure_both(title, contenders, plan_of(arguments), baselines, arguments.allocators)
    write_json(arguments.json, tables)


if __name__ == "__main__":
    main()
