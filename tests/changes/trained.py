"""The run that changes are tried with; copied next to `try.py`."""

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
    """Write the text, train a run with these words, and return its losses."""
    Path("text.txt").write_text("A text of some words to learn by heart.\n" * 40)
    mw.train(mw.load(RUN, words), out)
    return [line["loss"] for line in mw.history(out) if "loss" in line]
