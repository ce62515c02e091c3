"""Pipelines with real computation: torch.distributed.pipelining in all schedules and partitions, at 2 and 4 ranks.

    python -m benchmarks.pipeline_torch [--ranks 2 4] [--microbatches 4] [--only 1f1b ...] [--heats N]
                                        [--allocators told glibc] [--rounds N] [--json FILE]

First the heats: the partitions of each schedule in turns, `--heats` rounds; the partition with the least median is
chosen. Then the final: the best partition of each schedule and one device, in turns. The baseline is the fastest of
torch's pipelines in the final. Aim, on the better transport: at most 0.85 of the baseline's step at 2 ranks and at 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks import torch_pipeline
from benchmarks.contender import Allocator, Contender
from benchmarks.interleave import (
    ALLOCATORS,
    Plan,
    Result,
    Rows,
    as_json,
    interleave,
    peer_arguments,
    plan_of,
    show,
    write_json,
)
from benchmarks.ours import pipeline_contender

SINGLE = {2: ("4+0", "3.5+0.5", "3+1", "2.5+1.5"), 4: ("2+1+1+0", "1.5+1.5+1+0", "1+1.5+1.5+0", "1+1+1+1")}
"""Partitions by ranks: one chunk a rank. The head weighs about two and a half layers."""

LOOP = {
    2: ("1.5+0.5+1.5+0.5", "2+0.5+1.5+0", "2+1+1+0", "1+1+1+1"),
    4: ("1+0.5+0.5+0.5+0.5+0.5+0.5+0", "0.5+0.5+0.5+0.5+0.5+0.5+1+0", "0.5+0.5+0.5+0.5+0.5+0.5+0.5+0.5"),
}
"""Two chunks a rank; the last chunk, with the head, is on the last rank."""

V = {
    2: ("0+2+2+0", "0.5+2+1.5+0", "0.5+1.5+2+0", "0.5+1.5+1.5+0.5"),
    4: ("0+1+0.5+0.5+0.5+0.5+1+0", "0+0.5+0.5+1+1+0.5+0.5+0", "0.5+0.5+0.5+0.5+0.5+0.5+1+0"),
}
"""Two chunks a rank, the embeddings and the head on the first."""

PARTITIONS = (
    dict.fromkeys(torch_pipeline.SINGLE, SINGLE)
    | dict.fromkeys(torch_pipeline.LOOP, LOOP)
    | dict.fromkeys(torch_pipeline.V, V)
)
"""By schedule."""


def fits(schedule: str, ranks: int, microbatches: int) -> bool:
    """Return whether torch's schedule allows the microbatches: DualPipeV needs at least one per chunk."""
    return schedule != "dual-pipe-v" or microbatches >= 2 * ranks


def heat(schedule: str, ranks: int, microbatches: int, plan: Plan) -> list[Result]:
    """Measure all partitions of one schedule; return results, fastest first."""
    forms = PARTITIONS[schedule][ranks]
    contenders = [torch_pipeline.contender(schedule, form, ranks, microbatches) for form in forms]
    return sorted(interleave(contenders, plan), key=lambda result: result.milliseconds.median)


OURS: dict[int, tuple[tuple[str, str | None], ...]] = {
    2: (("3+1", None), ("4+0", None), ("1+1+2+0", "v"), ("0+2+2+0", "v"), ("2+1+1+0", "loop")),
    4: (("0+1+3+0", None), ("2+1+1+0", None), ("1+1+2+0", None)),
}
"""Meshwright's partitions in whole layers, by ranks, and the placement of two chunks a rank. The reference's four
layers fill two chunks on two ranks; on four, positions between the ends would have no layer. By the clock, with four
stages on two cores, 0+1+3+0 is the fastest cut of all."""


def ours(ranks: int, microbatches: int) -> list[Contender]:
    """Return message-driven in every partition, on both transports."""
    return [
        pipeline_contender("message-driven", transport, partition, microbatches, placement)
        for transport in ("mpi", "torch")
        for partition, placement in OURS[ranks]
    ]


def final(
    title: str, theirs: Sequence[Contender], mine: Sequence[Contender], plan: Plan, allocators: Sequence[Allocator]
) -> dict[str, Rows]:
    """Measure torch's pipelines, Meshwright's and one device in turns under each allocator, against torch's fastest."""
    tables = {}
    for allocator in allocators:
        made = [*theirs, *mine, Contender("one device", "benchmarks.baselines:plain")]
        results = interleave([replace(contender, allocator=allocator) for contender in made], plan)
        best = min(results[: len(theirs)], key=lambda result: result.milliseconds.median).contender.name
        show(f"{title}; {ALLOCATORS[allocator]}", results, [best])
        tables[f"{title}, {allocator}"] = as_json(results, [best])
    return tables


def main() -> None:
    parser = peer_arguments("Pipelines against torch.distributed.pipelining, with real computation.")
    parser.add_argument("--ranks", type=int, nargs="+", choices=[2, 4], default=[2, 4])
    parser.add_argument("--microbatches", type=int, choices=[4, 8], default=4, help="of the global batch of 8")
    parser.add_argument("--only", nargs="+", choices=list(PARTITIONS), default=list(PARTITIONS), help="which schedules")
    parser.add_argument("--heats", type=int, default=3, help="turns of each partition before the final")
    arguments = parser.parse_args()
    plan = plan_of(arguments)
    tables: dict[str, Rows] = {}
    for ranks in arguments.ranks:
        what = f"{ranks} ranks, {arguments.microbatches} microbatches"
        finalists = []
        for schedule in arguments.only:
            if not fits(schedule, ranks, arguments.microbatches):
                print(f"{schedule} needs {2 * ranks} microbatches on {ranks} ranks: left out")
                continue
            results = heat(schedule, ranks, arguments.microbatches, replace(plan, rounds=arguments.heats))
            best = results[0].contender
            show(f"partitions, {what}", results, [best.name])
            tables[f"heat-{ranks}-{schedule}"] = as_json(results, [best.name])
            finalists.append(best)
        if finalists:
            mine = ours(ranks, arguments.microbatches)
            tables |= final(f"pipelines, {what}", finalists, mine, plan, arguments.allocators)
    write_json(arguments.json, tables)


if __name__ == "__main__":
    main()
