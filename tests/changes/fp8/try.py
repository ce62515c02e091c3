"""Runs the change."""

from pathlib import Path

import meshwright as mw

RUN = {
    "model": {"layers": 2, "hidden": 16, "heads": 2, "positions": 16, "vocabulary": 257, "dropout": 0.0},
    "data": {"source": "text.txt", "sequence": 16},
    "batch": {"global": 8, "micro": 2},
    "layout": {"transport": "threads"},
    "optimizer": {"lr": 1e-2},
    "steps": 3,
    "validation": "none",
    "device": "cpu",
    "threads": 1,
    "metrics": {"sinks": []},
    "compile": "none",
}


def losses(out, *words):
    """The losses of a run with these words."""
    mw.train(mw.load(RUN, words), out)
    return [line["loss"] for line in mw.history(out) if "loss" in line]


if __name__ == "__main__":
    Path("text.txt").write_text("A text of some words to learn by heart.\n" * 40)
    wide = losses("wide")
    words = ["precision.products=fp8", "layout.tensor=megatron", "layout.tensor.size=2"]
    narrow = losses("narrow", *words)
    assert narrow != wide
    assert max(abs(a - b) for a, b in zip(wide, narrow, strict=True)) < 0.3, (wide, narrow)
    assert losses("again", *words) == narrow
    print(Path(mw.__file__).parent)
