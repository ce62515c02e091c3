"""The duration of the planner's search, and the quality of early answers: python -m benchmarks.plan_search

    python -m benchmarks.plan_search [--only 8b 70b ...] [--again] [--exhaustive]

Seconds of the clock until the first fitting layout is known, and until the search ends; the best after 5 and 30 seconds
compared with the last; processor seconds, in total and until the first; and the most memory of this process so far
(with --only a case is alone). --again: each search a second time, with the first search's kept recordings, in a new
folder (kept.py). --exhaustive: also estimates and predicts all layouts without savings of memory, without a search's
cutoffs. This takes hours for the large ones (tests/planner/plan/test_whole_spaces.py has small spaces).
"""

from __future__ import annotations

import argparse
import resource
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from meshwright.config import Config, parse_config
from meshwright.planner.plan.answer import seconds_text
from meshwright.planner.plan.cluster import Cluster, load_cluster
from meshwright.planner.plan.estimate import Estimates
from meshwright.planner.plan.kept import KeptRecordings
from meshwright.planner.plan.memory import verdict
from meshwright.planner.plan.predict import Planner, Prediction
from meshwright.planner.plan.search import layout_text, search
from meshwright.planner.plan.software import OWN_SOFTWARE
from meshwright.planner.plan.space import SearchJob, legal_layouts

MARKS_SECONDS = (5, 30)


@dataclass(frozen=True)
class Case:
    """A model in half precision on some devices."""

    model: str
    sequence: int
    samples: int
    cluster: str
    devices: int
    precision: str = "fp16"

    @property
    def run(self) -> Config:
        return parse_config(
            {
                "model": self.model,
                "data": {"sequence": self.sequence},
                "batch": {"global": self.samples},
                "precision": {"level": "O2", "dtype": self.precision},
            }
        )


CASES = {
    "small": Case("gpt2-small", 512, 64, "hal", 4),
    "medium": Case("axonn-12b", 512, 2048, "summit", 48),
    "large": Case("axonn-100b", 512, 2048, "summit", 1024),
    "axonn": Case("axonn-100b", 512, 16384, "summit", 384),
    "many": Case("axonn-100b", 512, 65536, "summit", 4096),
    "8b": Case("llama-3.1-8b", 8192, 512, "dgx-h100", 64, "bf16"),
    "70b": Case("llama-3.1-70b", 8192, 1024, "dgx-h100", 512, "bf16"),
    "405b": Case("llama-3.1-405b", 8192, 2048, "dgx-h100", 1024, "bf16"),
    "deepseek": Case("deepseek-v3", 4096, 15360, "dgx-h100", 2048, "bf16"),
}


@dataclass
class Found:
    """The fastest fitting layouts, each with the seconds until a search found the layout, and processor seconds."""

    start: float = field(default_factory=time.perf_counter)
    improvements: list[tuple[float, float, Prediction]] = field(default_factory=list)

    def __call__(self, best: Prediction) -> None:
        self.improvements.append((time.perf_counter() - self.start, time.process_time(), best))

    def best_at(self, seconds: float) -> Prediction | None:
        """Return the fastest layout known after `seconds`."""
        return next((best for clock, _, best in reversed(self.improvements) if clock <= seconds), None)


def exhaustive(case: Case, cluster: Cluster) -> float:
    """Return the least predicted seconds of all legal layouts that fit and save no memory. A layout with an estimate
    above 1.5 times the best is not predicted."""
    fixed = frozenset({"memory.offload.to", "memory.recompute"})
    models, best = Estimates(Planner(cluster)), float("inf")
    for config in legal_layouts(SearchJob(case.run, cluster, case.devices, fixed)):
        if models.weights_memory(config).total > cluster.device.memory_bytes:
            continue
        if models.estimated_seconds(config) > 1.5 * best:
            continue
        made = models.planner.predict(config)
        if verdict(made.fullest, cluster) == "fits":
            best = min(best, made.seconds)
    return best


def timed(case: Case, cluster: Cluster, name: str, recordings: KeptRecordings | None) -> None:
    """Search, and print the time, the memory and the layouts."""
    known, before = Found(), time.process_time()
    models = Estimates(Planner(cluster, OWN_SOFTWARE, recordings))
    found = search(case.run, cluster, case.devices, models=models, improved=known)
    clock, used = time.perf_counter() - known.start, time.process_time() - before
    held, best = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, found.predictions[0]
    told = f"{clock:.1f} s ({used:.1f} processor seconds), {held:.2f} GiB"
    print(f"{name}: {case.model} on {case.devices} devices of {case.cluster}: {told}")
    first, processor, _ = known.improvements[0] if known.improvements else (clock, used, best)
    print(f"  first layout that fits after {first:.1f} s ({processor - before:.1f} processor seconds)", end="")
    for mark in MARKS_SECONDS:
        then = known.best_at(mark)
        share = "none yet" if then is None else f"{then.seconds / best.seconds - 1:.1%} slower than the last"
        print(f"; best after {mark} s: {share}", end="")
    print()
    print("  " + ", ".join(f"{count:,} {label}" for label, count in asdict(found.counts).items()), end="")
    print(f"; {len(models.planner.recordings.recorded):,} parts recorded")
    print(f"  {layout_text(best.config)}: {seconds_text(best.seconds)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=CASES, default=list(CASES), help="which cases")
    parser.add_argument("--again", action="store_true", help="a second time, with kept recordings")
    parser.add_argument("--exhaustive", action="store_true", help="also predict what the search leaves out")
    arguments = parser.parse_args()
    for name in arguments.only:
        case = CASES[name]
        cluster = load_cluster(case.cluster)
        with TemporaryDirectory() as folder:
            for again in range(1 + arguments.again):
                recordings = KeptRecordings(Path(folder)) if arguments.again else None
                timed(case, cluster, f"{name}, again" if again else name, recordings)
        if arguments.exhaustive:
            least = exhaustive(case, cluster)
            print(f"  of all without savings the fastest: {seconds_text(least)}", flush=True)


if __name__ == "__main__":
    main()
