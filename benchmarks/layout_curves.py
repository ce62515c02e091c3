"""A whole training run on several layouts in one picture.

    python -m benchmarks.layout_curves digits [--out out/digits] [--picture docs/digits.png]
    python -m benchmarks.layout_curves docstrings [--out out/docstrings] [--picture docs/docstrings.png]

digits: a ViT on one device, [2,2,1] and [2,2,2] (Tesseract's figure 7, on scikit-learn's digits). docstrings: the
original Transformer from Python's functions to docstrings, on one device, data-parallel, D&SP and cSub (SUPER's
convergence experiment). In float64 losses are equal up to rounding, which a training run amplifies step by step.
Finished runs are not repeated. Prints the losses' relative distance from one device's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

SERIAL = "one device"
WINDOW = 10
"""Steps in the mean of a drawn loss."""

STYLES = [("#333333", "-", 3.0), ("#2b6cb0", "--", 1.6), ("#d9480f", ":", 1.6), ("#2f9e44", "-.", 1.6)]
"""Each layout's colour, line and width."""

Lines = list[dict[str, Any]]
"""A run's metrics, a line a step."""


@dataclass(frozen=True)
class Study:
    """A run under layouts, by name."""

    run: str
    steps: int
    settings: Sequence[str]
    layouts: Mapping[str, Sequence[str]]
    accuracy: bool
    """Whether the model classifies."""


STUDIES = {
    "digits": Study(
        run="meshwright/families/vision/configs/runs/digits.yaml",
        steps=400,
        settings=["validation.every=25", "precision.dtype=float64", "threads=1"],
        layouts={
            SERIAL: ["layout.tensor={kind: none}"],
            "[2,2,1]": ["layout.tensor={kind: tesseract, q: 2, d: 1}"],
            "[2,2,2]": ["layout.tensor={kind: tesseract, q: 2, d: 2}"],
        },
        accuracy=True,
    ),
    "docstrings": Study(
        run="meshwright/families/seq2seq/configs/runs/docstrings.yaml",
        steps=200,
        settings=[
            *("model.layers=2", "model.hidden=96", "model.heads=4", "model.feed_forward=384", "model.dropout=0.0"),
            *("data.sequence=64", "batch.global=16", "validation.every=0", "precision.dtype=float64", "threads=1"),
        ],
        layouts={
            SERIAL: ["layout.data.size=1"],
            "data 2": ["layout.data.size=2"],
            "D&SP 2": ["layout.data.size=1", "layout.tensor={kind: subgraph, size: 2, common: all, branch: block}"],
            "cSub 2": ["layout.data.size=1", "layout.tensor={kind: subgraph, size: 2, common: one, branch: block}"],
        },
        accuracy=False,
    ),
}


def run(study: Study, layout: str, folder: Path) -> Lines:
    """Return the lines of a run's metrics, after training if lines are missing."""
    metrics = folder / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    if len(lines) < study.steps:
        words = ["train", study.run, f"steps={study.steps}", *study.settings, *study.layouts[layout]]
        command = [str(Path(sys.executable).parent / "meshwright"), *words, "--out", str(folder)]
        subprocess.run(command, check=True)
        lines = metrics.read_text().splitlines()
    return [json.loads(line) for line in lines]


def off(lines: Lines, serial: Lines) -> list[float]:
    """Return the relative distance of each step's loss from one device's."""
    return [abs(mine["loss"] / its["loss"] - 1) for mine, its in zip(lines, serial, strict=True)]


def draw(runs: Mapping[str, Lines], picture: Path, *, accuracy: bool) -> None:
    """Draw the loss on the left; on the right the accuracy on held-out samples, or the distance from one device."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for (name, lines), (colour, style, width) in zip(runs.items(), STYLES, strict=False):
        options: dict[str, Any] = {"color": colour, "linestyle": style, "linewidth": width, "label": name}
        losses = [line["loss"] for line in lines]
        means = [sum(losses[end - WINDOW : end]) / WINDOW for end in range(WINDOW, len(losses) + 1)]
        left.plot(range(WINDOW, len(losses) + 1), means, **options)
        if accuracy:
            held = [(line["step"], line["validation_accuracy"]) for line in lines if "validation_accuracy" in line]
            right.plot(*zip(*held, strict=True), **options)
        elif name != SERIAL:
            right.semilogy(range(1, len(lines) + 1), list(accumulate(off(lines, runs[SERIAL]), max)), **options)
    left.set(title=f"loss, mean of {WINDOW} steps", xlabel="step")
    if accuracy:
        right.set(title="accuracy on held-out images", xlabel="step", ylim=(0, 1))
    else:
        right.set(title="greatest distance from one device's loss so far", xlabel="step", ylim=(1e-17, 1e-12))
    (right if accuracy else left).legend(loc="lower right" if accuracy else "upper right", frameon=False)
    for axes in (left, right):
        _tidy(axes)
    figure.savefig(picture, dpi=110)


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e4e4e4")


def main() -> None:
    parser = argparse.ArgumentParser(description="One training run under several layouts.")
    parser.add_argument("study", choices=list(STUDIES))
    parser.add_argument("--out", type=Path, help="the runs' folder; out/STUDY")
    parser.add_argument("--picture", type=Path, help="docs/STUDY.png")
    arguments = parser.parse_args()
    study = STUDIES[arguments.study]
    out = arguments.out or Path("out") / arguments.study
    runs = {name: run(study, name, out / name.replace(" ", "-")) for name in study.layouts}
    draw(runs, arguments.picture or Path("docs") / f"{arguments.study}.png", accuracy=study.accuracy)
    steps = [step for step in (1, 25, 50, 100, 200, 400) if step <= study.steps]
    for step in steps:
        distances = {name: off(lines, runs[SERIAL])[step - 1] for name, lines in runs.items() if name != SERIAL}
        told = ", ".join(f"{name} {value:.0e}" for name, value in distances.items())
        print(f"step {step}: loss {runs[SERIAL][step - 1]['loss']:.4f}; off by {told}")
    for name, lines in runs.items() if study.accuracy else ():
        print(f"{name}: accuracy {lines[-1]['validation_accuracy']:.3f}")


if __name__ == "__main__":
    main()
