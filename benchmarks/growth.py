"""Growth of seconds and memory with a size, and a peer's growth with the same size; the slope in words.

    python -m benchmarks.growth [--only ranks sequence ...] [--rounds N] [--no-start] [--json FILE]

| question     | sizes                     | ours                          | peer                               |
|--------------|---------------------------|-------------------------------|------------------------------------|
| ranks        | 1 to 16, 2 rows for each  | allreduce and zero1 over gloo | torch's DDP; a start by torchrun   |
| sequence     | 2,048 to 32,768 tokens    | ring and Ulysses over 2 ranks | a plain loop with SDPA, one device |
| vocabulary   | 8,192 to 151,936          | one device                    | a plain loop with whole logits     |
| experts      | 8 to 128, 2 for a token   | one device                    | transformers' Qwen3-MoE            |
| microbatches | 1 to 32 of one row        | one device                    | a plain loop that adds up `.grad`  |
| layers       | 2 to 32                   | one device                    | a plain loop                       |

All contenders of a question alternate step by step in one start. Slopes are fitted to medians: a power of the size, and
the size at which the slope bends. With more ranks than cores, ranks share cores in a step's wall time: read the
processor time a rank. torch's `context_parallel` is no peer of ring attention, because on a CPU it raises "Operator
aten._scaled_dot_product_flash_attention_for_cpu.default does not have a sharding strategy registered".
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.table import Table

from benchmarks import ours, start
from benchmarks.contender import Contender, Option
from benchmarks.growth_peers import STARTED
from benchmarks.interleave import Plan, Result, Spread, interleave, machine
from benchmarks.reference import Reference
from benchmarks.slope import fit
from benchmarks.team import START_SECONDS
from meshwright.ranks.errors import LaunchError

SMALL = Reference(layers=2, hidden=128, heads=4, batch=4, vocabulary=2048)
"""The model that grows in one size at a time."""

CONTEXT_RANKS = 2
CHOSEN = 2
"""Experts per token."""
WIDTH = 64
"""The inner width of an expert."""


@dataclass(frozen=True)
class Question:
    """A size and the contenders of each value by label, the peer last."""

    name: str
    unit: str
    sizes: Sequence[int]
    contenders: Callable[[int], dict[str, Contender]]
    rounds: int = 8
    """Turns without `--rounds`."""


@dataclass(frozen=True)
class Point:
    """A contender's figures at one size."""

    label: str
    size: int
    ranks: int
    ms: Spread
    processor_ms: Spread
    """Of one rank, the mean over ranks."""
    held_bytes: int
    work: Spread
    """Processor time of all ranks, divided by the peer's."""
    start_s: float | None = None
    """Seconds until the first step begins, if measured."""


def fields_of(sizes: Reference) -> dict[str, Option]:
    """Return the config fields of Meshwright for these sizes."""
    return {
        "model.layers": sizes.layers, "model.hidden": sizes.hidden, "model.heads": sizes.heads,
        "model.positions": sizes.sequence, "model.vocabulary": sizes.vocabulary, "data.sequence": sizes.sequence,
        "batch.global": sizes.batch,
    }  # fmt: skip


def options_of(sizes: Reference) -> dict[str, Option]:
    """Return the peers' options for these sizes."""
    names = ("layers", "hidden", "heads", "sequence", "batch", "vocabulary")
    return {name: value for name, value in asdict(sizes).items() if name in names}


def mine(label: str, sizes: Reference, **fields: Option) -> Contender:
    dotted = {name.replace("__", "."): value for name, value in fields.items()}
    return ours.configured(label, "torch", fields_of(sizes) | dotted)


def peer(label: str, factory: str, sizes: Reference, ranks: int = 1, **options: Option) -> Contender:
    return Contender(label, f"benchmarks.growth_peers:{factory}", options_of(sizes) | options, ranks)


def of_ranks(ranks: int) -> dict[str, Contender]:
    sizes = replace(SMALL, batch=2 * ranks)
    syncs = {
        sync: mine(sync, sizes, layout__data__size=ranks, layout__data__sync=sync) for sync in ("allreduce", "zero1")
    }
    return {**syncs, "DDP": peer("DDP", "ddp", sizes, ranks)}


def of_sequence(tokens: int) -> dict[str, Contender]:
    sizes = Reference(layers=1, hidden=64, heads=2, sequence=tokens, batch=1, vocabulary=256)
    kinds = {
        way: mine(way, sizes, layout__context__size=CONTEXT_RANKS, layout__context__kind=way)
        for way in ("ring", "ulysses")
    }
    return {**kinds, "plain loop": peer("plain loop", "plain", sizes)}


def of_vocabulary(classes: int) -> dict[str, Contender]:
    return on_one(replace(SMALL, vocabulary=classes, layers=1, batch=2))


def of_layers(layers: int) -> dict[str, Contender]:
    return on_one(replace(SMALL, layers=layers))


def of_microbatches(count: int) -> dict[str, Contender]:
    sizes = replace(SMALL, batch=count)
    beside = peer("plain loop", "plain", sizes, microbatches=count)
    return {"meshwright": mine("meshwright", sizes, batch__micro=1), "plain loop": beside}


def on_one(sizes: Reference) -> dict[str, Contender]:
    return {"meshwright": mine("meshwright", sizes), "plain loop": peer("plain loop", "plain", sizes)}


def of_experts(count: int) -> dict[str, Contender]:
    model = {
        "family": "llama", "layers": SMALL.layers, "hidden": SMALL.hidden, "heads": SMALL.heads, "feed_forward": WIDTH,
        "experts": {"count": count, "per_token": CHOSEN}, "positions": SMALL.sequence, "vocabulary": SMALL.vocabulary,
        "head_norms": True, "tied": False,
    }  # fmt: skip
    options: dict[str, Option] = {"data.sequence": SMALL.sequence, "batch.global": SMALL.batch, "model": repr(model)}
    return {
        "meshwright": ours.configured("meshwright", "torch", options),
        "Qwen3-MoE": peer("Qwen3-MoE", "experts", SMALL, count=count, per_token=CHOSEN, width=WIDTH),
    }


QUESTIONS = {
    question.name: question
    for question in (
        Question("ranks", "ranks", (1, 2, 4, 8, 16), of_ranks),
        Question("sequence", "tokens", (2048, 4096, 8192, 16384, 32768), of_sequence, rounds=3),
        Question("vocabulary", "classes", (8192, 16384, 32768, 65536, 151936), of_vocabulary, rounds=5),
        Question("experts", "experts", (8, 16, 32, 64, 128), of_experts),
        Question("microbatches", "microbatches", (1, 2, 4, 8, 16, 32), of_microbatches),
        Question("layers", "layers", (2, 4, 8, 16, 32), of_layers),
    )
}


def measure(question: Question, rounds: int | None = None) -> list[Point]:
    """Measure all sizes of a question in turns, by size and then by contender."""
    made = [(size, label, each) for size in question.sizes for label, each in question.contenders(size).items()]
    named = [replace(each, name=f"{label}, {size:,} {question.unit}") for size, label, each in made]
    results = interleave(named, Plan(rounds or question.rounds))
    peers: dict[int, Result] = {size: result for (size, _, _), result in zip(made, results, strict=True)}
    return [
        Point(
            label, size, each.ranks, result.milliseconds,
            Spread.of([spent / each.ranks for spent in result.processor]), result.held_bytes, result.work(peers[size]),
        )
        for (size, label, each), result in zip(made, results, strict=True)
    ]  # fmt: skip


def starts(ranks: int) -> dict[str, float]:
    """Return seconds from the command until the last rank's first step begins: `meshwright train`, then torchrun."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "run.yaml").write_text(start.RUN)
        (folder / "text.txt").write_text("a rank is a process, and a process is a rank.\n" * 2000)
        words = [f"layout.data.size={ranks}", "layout.transport=torch", f"batch.global={STARTED.batch}"]
        found = {"allreduce": start.first_step(folder, words, folder / "ours")["until the first step begins"]}
        theirs = folder / "theirs"
        theirs.mkdir()
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
        variables = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(Path.cwd()), *sys.path])}
        began = time.time()
        words = [*command, "benchmarks.growth_peers", str(theirs)]
        with (folder / "log").open("w+") as log:
            torchrun = subprocess.Popen(words, cwd=folder, env=variables, stdout=log, stderr=log)
            try:
                while len(marks := list(theirs.glob("start-*.json"))) < ranks:
                    if torchrun.poll() or time.time() > began + START_SECONDS:
                        log.seek(0)
                        raise LaunchError(f"torchrun: {len(marks)} of {ranks} ranks began a step\n{log.read()[-2000:]}")
                    time.sleep(0.1)
            finally:  # not waited for: a rank of gloo's may hang after the last step
                torchrun.terminate()
                torchrun.wait()
        return found | {"DDP": max(json.loads(mark.read_text())["begins"] for mark in marks) - began}


def slopes(points: Sequence[Point]) -> list[str]:
    """Return a line for each contender and figure."""
    lines = []
    for label in dict.fromkeys(point.label for point in points):
        series = [point for point in points if point.label == label]
        figures = {
            "seconds a step": [point.ms.median for point in series],
            "processor time a rank": [point.processor_ms.median for point in series],
            "memory a rank": [float(point.held_bytes) for point in series],
            "seconds until the first step": [point.start_s for point in series if point.start_s is not None],
        }
        for figure, values in figures.items():
            if len(values) > 1:
                lines.append(f"{label}: {figure}: {fit([point.size for point in series], values).words}")
    return lines


def show(question: Question, points: Sequence[Point], seconds: float) -> None:
    """Print a question's table, a row per size and contender, and the slopes below."""
    has_start = any(point.start_s is not None for point in points)
    table = Table(title=f"{question.name}; {seconds:.0f} s with the start", caption=machine())
    heads = ["ms a step", "processor ms a rank", "MB a rank", "processor time / peer's", *["s to a step"] * has_start]
    for head in (question.unit, "contender", "ranks", *heads):
        table.add_column(head, justify="left" if head == "contender" else "right")
    for point in points:
        started = [] if point.start_s is None else [f"{point.start_s:.1f}"]
        table.add_row(
            f"{point.size:,}", point.label, str(point.ranks), f"{_three(point.ms, 0)}",
            f"{point.processor_ms.median:.0f}", f"{point.held_bytes / 1e6:.0f}", _three(point.work, 2), *started,
        )  # fmt: skip
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(table)
    for line in slopes(points):
        console.print(line, highlight=False)


def _three(spread: Spread, digits: int) -> str:
    return f"{spread.median:.{digits}f} ({spread.low:.{digits}f} to {spread.high:.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(QUESTIONS), default=list(QUESTIONS), help="which questions")
    parser.add_argument("--rounds", type=int, help="turns of each contender; by question: 3 to 8")
    parser.add_argument("--no-start", action="store_true", help="leave out the starts of 1 to 16 ranks by the commands")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE as well")
    arguments = parser.parse_args()
    told: dict[str, object] = {"machine": machine()}
    for name in arguments.only:
        question, began = QUESTIONS[name], time.monotonic()
        points = measure(question, arguments.rounds)
        if name == "ranks" and not arguments.no_start:
            found = {size: starts(size) for size in question.sizes}
            points = [replace(point, start_s=found[point.size].get(point.label)) for point in points]
        show(question, points, time.monotonic() - began)
        told[name] = {"points": [asdict(point) for point in points], "slopes": slopes(points)}
        if arguments.json:
            arguments.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
