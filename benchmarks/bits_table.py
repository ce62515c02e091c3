"""The page of layouts with equal bits, made from the rules of a config: every shipped model on every axis.

    python -m benchmarks.bits_table > docs/bits_table.md

A cell is the most ranks of 2, 4 and 8 that `bits: layout-free` alone allows on the axis, with no other axis. A letter
is the refusal of a run, printed below the table. A dash: no size is legal in the usual mode either.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from string import ascii_lowercase
from typing import Any

from meshwright.config import Config, model_names, parse_config
from meshwright.ranks.errors import ConfigError

AXES: dict[str, str] = {
    "data": "layout.data={n} layout.data.sync=zero3",
    "stages": "layout.pipeline={n}",
    "experts": "layout.data={n} layout.data.expert={n}",
    "1-D": "layout.tensor=megatron layout.tensor.size={n}",
    "1-D, sequence": "layout.tensor=megatron layout.tensor.size={n} layout.tensor.sequence_parallel=true",
    "sub-graphs": "layout.tensor=subgraph layout.tensor.size={n}",
    "2-D": "layout.tensor={{kind: tesseract, q: {n}}}",
    "Ulysses": "layout.context={n}",
    "ring": "layout.context={n} layout.context.kind=ring",
    "Muon": "layout.data={n} optimizer=muon",
}
SIZES = (8, 4, 2)
PARTS = ("bits.tensor=2", "bits.hidden=2", "bits.sequence=4", "bits.attention=runs")

HEAD = """# Equal bits: every shipped model on every axis

`python -m benchmarks.bits_table > docs/bits_table.md` makes this page from the rules that check a run; a test compares.

- A number is the most ranks (of 2, 4, 8; in 2-D of one side) that `bits: layout-free` alone allows on the axis.
- `4 of 8`: the usual mode allows 8, and so do larger numbers in the section `bits`.
- A letter is a refusal, listed below the table. A dash: no size is legal in the usual mode either.
- Dropout is 0, since rings drop nothing in any mode. The batch has 64 samples. [Equal bits](bits.md) mixes the axes.
"""


def run_of(model: str, bits: str, *words: str) -> Config:
    """Return a run of a shipped model, with the kind of data that the model reads."""
    tree: dict[str, Any] = {"model": {"base": model, "dropout": 0.0}, "batch": {"global": 64}, "bits": bits}
    images = any(model.startswith(family) for family in ("vit", "resnext"))
    return parse_config(tree | ({"data": {"source": "digits"}} if images else {}), words)


def largest(model: str, bits: str, axis: str) -> int:
    """Return the most ranks that the axis allows, or 0."""
    return next((size for size in SIZES if not refusals(model, bits, *words_of(axis, size))), 0)


def words_of(axis: str, size: int) -> list[str]:
    return re.split(r" (?=layout|optimizer)", AXES[axis].format(n=size))


def refusals(model: str, bits: str, *words: str) -> list[str]:
    """Return the refusals, a text each, without the model's sizes: one letter serves all models."""
    try:
        config = run_of(model, bits, *words)
    except ConfigError as error:
        return [f"`{problem.field}` {re.sub(r'=[0-9]+', '', problem.rule)}" for problem in error.problems]
    idle = config.layout.data.expert > 1 and not config.model.routing.num_experts
    return ["`layout.data.expert` has no effect without experts"] if idle else []


def cells(model: str, letters: dict[str, str]) -> Iterator[str]:
    """Yield a model's cells. `letters`: the letters of refusals so far, by text, extended in place."""
    for axis in AXES:
        usual = largest(model, "usual", axis)
        size = largest(model, "layout-free", axis) if usual else 0
        if not usual:
            yield "-"
        elif size:
            yield str(size) if size == usual else f"{size} of {usual}"
        else:  # the reason for parts that `auto` did not choose, if there is one
            words = words_of(axis, SIZES[-1])
            found = refusals(model, "layout-free", *words, *PARTS) + refusals(model, "layout-free", *words)
            found.sort(key=lambda text: not text.startswith("`bits.kind`"))  # first: a family that refuses all parts
            yield letters.setdefault(found[0], ascii_lowercase[len(letters)])


def page() -> str:
    """The page's text."""
    letters: dict[str, str] = {}
    rows = [f"| {' | '.join(('model', *AXES))} |", f"|---|{':-:|' * len(AXES)}"]
    rows += [f"| {model} | {' | '.join(cells(model, letters))} |" for model in model_names()]
    return "\n".join([HEAD, *rows, "", *(f"- **{letter}**: {text}" for text, letter in letters.items())]) + "\n"


if __name__ == "__main__":
    print(page(), end="")
