"""Marks the numbers that lessons ask for: python docs/course/count.py 3 block=1024 tokens=32

The right numbers are from Meshwright's own plan of the mended run file. A wrong answer is named; the right one is not
printed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

from meshwright import load
from meshwright.compute.models.chain import chain_of
from meshwright.planner.explain.tables import Explained, compose
from meshwright.ranks.errors import MeshwrightError
from meshwright.strategies.pipeline.clock import simulate
from meshwright.strategies.pipeline.schedule import ONE_F_ONE_B
from meshwright.strategies.pipeline.task import TaskKind

HERE = Path(__file__).parent


def planned(name: str) -> Explained:
    return compose(load(HERE / name))


def held(explained: Explained, ending: str) -> int:
    """Elements that rank 0 holds of block 0's parameters, of all names with this ending."""
    parameters = explained.run.stages[0].parameters
    return sum(each.num_elements for each in parameters if each.name.startswith("blocks.0.") and ending in each.name)


def tokens(explained: Explained) -> int:
    """Tokens of a microbatch on a rank between two pairs."""
    run = explained.run
    whole = run.config.micro * chain_of(run.config).tokens_per_sample(run.config)
    return whole // run.grid.size(*run.config.layout.context.token_axes, *run.config.layout.tensor.batch_axes)


def blocks() -> dict[str, int]:
    explained = planned("3_blocks.yaml")
    return {"block": held(explained, "feed_forward.expand.weight"), "tokens": tokens(explained)}


def stages() -> dict[str, int]:
    """The bubble of 1F1B on the clock, if a backward pass takes twice as long as a forward one."""
    config = load(HERE / "4_stages.yaml", ["layout.pipeline.schedule=1f1b"])
    size, count = config.layout.pipeline.size, config.num_microbatches
    step = simulate(
        size, count, ONE_F_ONE_B, lambda stage, task: 1.0 + (task.kind is TaskKind.BACKWARD), lambda *message: 0.0
    )
    return {"idle": round(100 * step.idle_share)}


def subgraphs() -> dict[str, int]:
    explained = planned("5_subgraphs.yaml")
    config = explained.run.config
    held_heads = Fraction(config.model.heads, config.layout.tensor.size)
    return {"heads": int(held_heads), "block": held(explained, "attention.query_key_value.weight")}


def rings() -> dict[str, int]:
    config = load(HERE / "6_rings.yaml")
    size = config.layout.context.size
    return {"tokens": config.data.sequence // size, "sends": size - 1}


def experts() -> dict[str, int]:
    explained = planned("7_experts.yaml")
    config = explained.run.config
    return {
        "experts": config.model.experts.count // config.layout.data.expert,
        "block": held(explained, "feed_forward.expand.weight"),
    }


def bits() -> dict[str, int]:
    config = load(HERE / "8_bits.yaml")
    parts = config.bits.tensor // config.layout.tensor.size
    return {"parts": parts, "columns": 4 * config.model.hidden // config.bits.tensor}


LESSONS: dict[str, Callable[[], dict[str, int]]] = {
    "3": blocks, "4": stages, "5": subgraphs, "6": rings, "7": experts, "8": bits,
}  # fmt: skip


def main(words: list[str]) -> int:
    lesson, *answers = words or [""]
    given = dict(word.partition("=")[::2] for word in answers)
    if lesson not in LESSONS:
        print(f"lesson {lesson or '(none)'} asks for no numbers; valid: {', '.join(LESSONS)}")
        return 2
    try:
        right = LESSONS[lesson]()
    except MeshwrightError as error:
        print(f"mend the run file first: {error}")
        return 1
    wrong = [name for name, number in right.items() if given.get(name) != str(number)]
    for name in wrong:
        told = f"{name}={given[name]} is not the number" if given.get(name) else f"{name} is asked for"
        print(f"{told}: look at the lesson's picture and count again")
    if not wrong:
        print("right: " + ", ".join(f"{name}={number}" for name, number in right.items()))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
