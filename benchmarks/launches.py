"""The tokens below which a planned step on one H100 waits for the host's launches: a CUDA graph saves no more.

    python -m benchmarks.launches

A step of two microbatches. `kernels`: of a microbatch, both ways, as planned. Milliseconds of a step: if launches take
no time, as in a CUDA graph; if the host takes 6 us for each, an assumption for compiled code; and 25 us, as measured
for eager code (`graphs` in benchmarks/one_gpu.json: 23.1 ms for 940 launches). `waits`: the device's waiting time as a
share of a step, with 6 and with 25 us.
"""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from meshwright.config import load_config
from meshwright.planner.plan.cluster import load_cluster
from meshwright.planner.plan.predict import Planner
from meshwright.planner.plan.recorder import Kernel

MODELS = ("gpt2-small", "llama-3.2-1b")
SHAPES = ((1, 128), (1, 256), (1, 512), (1, 1024), (2, 1024), (4, 1024), (8, 1024), (16, 1024))
"""Sequences of a microbatch, and tokens of each."""
ISSUES = (0.0, 6e-6, 25e-6)
WORDS = "data.tokenizer=bytes device=cuda precision=bf16"


def main() -> None:
    cluster = load_cluster("dgx-h100")
    planners = [
        Planner(cluster.model_copy(update={"device": cluster.device.model_copy(update={"issue_seconds": issue})}))
        for issue in ISSUES
    ]
    for base in MODELS:
        table = Table("compile", "microbatch", title=f"{base}, one H100, as planned")
        for head in ("kernels", "ms, 0 us", "ms, 6 us", "ms, 25 us", "waits"):
            table.add_column(head, justify="right")
        for compiles in ("none", "blocks"):
            for rows, tokens in SHAPES:
                words = f"{WORDS} compile={compiles} data.sequence={tokens} batch.micro={rows} batch.global={2 * rows}"
                config = load_config("gpt2", [f"model.base={base}", *words.split()])
                run = planners[0].run(config)
                kernels = sum(
                    event.times
                    for unit in run.stages[0].chunks[0].units
                    for task in run.kinds
                    for program, times in unit.passes(task, 0)
                    for event in program.events * times
                    if isinstance(event, Kernel)
                )
                free, short, long = (planner.predict(config).seconds for planner in planners)
                table.add_row(
                    compiles, f"{rows} x {tokens}", f"{kernels:g}", f"{free * 1e3:.1f}", f"{short * 1e3:.1f}",
                    f"{long * 1e3:.1f}", f"{1 - free / short:.0%}, {1 - free / long:.0%}",
                )  # fmt: skip
        Console(width=120).print(table)


if __name__ == "__main__":
    main()
