"""A whole training run on several layouts in one picture (Tesseract's figure 7, on scikit-learn's digits).

    python -m benchmarks.layout_curves [--out out/digits] [--picture docs/digits.png]

A ViT on one device, [2,2,1] and [2,2,2], in float64: the same losses but for rounding, which a training run amplifies
step by step. Runs that are there already are not repeated. Prints the losses' relative distance from one device's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

LAYOUTS = {
    "serial": "{kind: none}",
    "2x2x1": "{kind: tesseract, q: 2, d: 1}",
    "2x2x2": "{kind: tesseract, q: 2, d: 2}",
}
STEPS = 400
SETTINGS = [f"steps={STEPS}", "validation.every=25", "precision.dtype=float64", "threads=1"]
STYLES = {"serial": ("#333333", "-", 3.0), "2x2x1": ("#2b6cb0", "--", 1.6), "2x2x2": ("#d9480f", ":", 1.6)}
WINDOW = 10
"""Steps whose mean loss is drawn."""


def run(name: str, folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics; it is trained first where they are not all there."""
    metrics = folder / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    if len(lines) < STEPS:
        words = ["train", "meshwright/configs/runs/digits.yaml", f"layout.tensor={LAYOUTS[name]}", *SETTINGS]
        command = [str(Path(sys.executable).parent / "meshwright"), *words, "--out", str(folder)]
        subprocess.run(command, check=True)
        lines = metrics.read_text().splitlines()
    return [json.loads(line) for line in lines]


def draw(runs: dict[str, list[dict[str, Any]]], picture: Path) -> None:
    """Loss on the left, accuracy on the held-out digits on the right."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    loss, accuracy = figure.subplots(1, 2)
    for name, lines in runs.items():
        colour, style, width = STYLES[name]
        losses = [line["loss"] for line in lines]
        means = [sum(losses[end - WINDOW : end]) / WINDOW for end in range(WINDOW, len(losses) + 1)]
        held = [(line["step"], line["validation_accuracy"]) for line in lines if "validation_accuracy" in line]
        label = "one device" if name == "serial" else f"[{name.replace('x', ',')}]"
        options: dict[str, Any] = {"color": colour, "linestyle": style, "linewidth": width, "label": label}
        loss.plot(range(WINDOW, len(losses) + 1), means, **options)
        accuracy.plot(*zip(*held, strict=True), **options)
    loss.set(title=f"loss, mean of {WINDOW} steps", xlabel="step")
    accuracy.set(title="accuracy on held-out digits", xlabel="step", ylim=(0, 1))
    accuracy.legend(loc="lower right", frameon=False)
    for axes in (loss, accuracy):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#e4e4e4")
    figure.savefig(picture, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description="A ViT on the digits under three layouts.")
    parser.add_argument("--out", type=Path, default=Path("out/digits"))
    parser.add_argument("--picture", type=Path, default=Path("docs/digits.png"))
    arguments = parser.parse_args()
    runs = {name: run(name, arguments.out / name) for name in LAYOUTS}
    draw(runs, arguments.picture)
    for step in (1, 25, 50, 100, 200, STEPS):
        expected = runs["serial"][step - 1]["loss"]
        off = {name: abs(lines[step - 1]["loss"] / expected - 1) for name, lines in runs.items()}
        print(
            f"step {step}: loss {expected:.4f}; off by "
            + ", ".join(f"{name} {value:.0e}" for name, value in off.items())
        )
    for name, lines in runs.items():
        print(f"{name}: accuracy {lines[-1]['validation_accuracy']:.3f}")


if __name__ == "__main__":
    main()
