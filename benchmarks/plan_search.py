"""How long the planner's search takes, and what becomes of the layouts: python -m benchmarks.plan_search

Seconds of this process's processor time, beside those of the clock: a search runs on one core; and the most memory that
the process has held so far, so that --only takes one case at a time.
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
    for name in parser.parse_args().only:
        case = CASES[name]
        run = parse_config(
            {
                "model": case.model,
                "data": {"sequence": case.sequence},
                "batch": {"global": case.samples},
                "precision": {"level": "O2", "dtype": "fp16"},
            }
        )
        clock, processor = time.perf_counter(), time.process_time()
        found = search(run, load_cluster(case.cluster), case.devices)
        clock, processor = time.perf_counter() - clock, time.process_time() - processor
        held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        told = f"{clock:.1f} s, {processor:.1f} s of a core, {held:.2f} GiB"
        print(f"{name}: {case.model} on {case.devices} devices of {case.cluster}: {told}")
        print("  " + ", ".join(f"{count:,} {kind}" for kind, count in asdict(found.counts).items()))
        best = found.predictions[0]
        print(f"  {layout_text(best.config)}: {seconds_text(best.seconds)}", flush=True)


if __name__ == "__main__":
    main()
