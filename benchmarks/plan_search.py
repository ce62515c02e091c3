"""How long the planner's search takes, and what becomes of the layouts: python -m benchmarks.plan_search

    python -m benchmarks.plan_search [--only small medium large axonn many] [--processes N]

Seconds of the clock, on as many processes as --processes says, by default two; and the most memory that this process
and a worker have held so far, added up, which counts twice what they share: with --only a case is alone.
"""

from __future__ import annotations

import argparse
import resource
import time
from dataclasses import asdict, dataclass

from meshwright.config import parse_config
from meshwright.tools.plan.answer import seconds_text
from meshwright.tools.plan.cluster import load_cluster
from meshwright.tools.plan.search import layout_text, search


@dataclass(frozen=True)
class Case:
    """A model in O2 fp16 on some devices."""

    model: str
    sequence: int
    samples: int
    cluster: str
    devices: int


CASES = {
    "small": Case("gpt2-small", 512, 64, "hal", 4),
    "medium": Case("axonn-12b", 512, 2048, "summit", 48),
    "large": Case("axonn-100b", 512, 2048, "summit", 1024),
    "axonn": Case("axonn-100b", 512, 16384, "summit", 384),
    "many": Case("axonn-100b", 512, 65536, "summit", 4096),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=CASES, default=list(CASES), help="which cases")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    for name in arguments.only:
        case = CASES[name]
        run = parse_config(
            {
                "model": case.model,
                "data": {"sequence": case.sequence},
                "batch": {"global": case.samples},
                "precision": {"level": "O2", "dtype": "fp16"},
            }
        )
        clock = time.perf_counter()
        found = search(run, load_cluster(case.cluster), case.devices, processes=arguments.processes)
        clock = time.perf_counter() - clock
        every = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        held = sum(resource.getrusage(who).ru_maxrss for who in every[: arguments.processes]) / 2**20
        told = f"{clock:.1f} s on {arguments.processes} processes, {held:.2f} GiB"
        print(f"{name}: {case.model} on {case.devices} devices of {case.cluster}: {told}")
        print("  " + ", ".join(f"{count:,} {kind}" for kind, count in asdict(found.counts).items()))
        best = found.predictions[0]
        print(f"  {layout_text(best.config)}: {seconds_text(best.seconds)}", flush=True)


if __name__ == "__main__":
    main()
