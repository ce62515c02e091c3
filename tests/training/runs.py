"""A tiny corpus, tiny runs of `meshwright train`, and readers of the runs' files."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.config import Config, parse_config, parse_run
from meshwright.data.packing import prepare
from meshwright.ranks import launch
from meshwright.ranks.errors import LaunchError
from meshwright.training.decisions import resolve, this_machine
from meshwright.training.job import train
from tests.data.dialogues import make_tokenizer
from tests.data.preferences import make_pairs

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "sleeps", "well", "under", "trees"]


def make_text(folder: Path, seed: int = 1) -> Path:
    choose = random.Random(seed)
    path = folder / "text.txt"
    path.write_text("\n".join(" ".join(choose.choice(WORDS) for _ in range(12)) for _ in range(300)))
    return path


def make_corpus(folder: Path, seed: int = 1) -> Path:
    """Prepare a folder of bytes."""
    prepare(str(make_text(folder, seed)), "bytes", folder / "corpus")
    return folder / "corpus"


def tree_for(corpus: Path, **changes: Any) -> dict[str, Any]:
    return {
        "seed": 3,
        "model": {
            "layers": 1, "hidden": 16, "heads": 2, "positions": 16, "vocabulary": 300, "vocabulary_multiple": 8,
            "dropout": 0.1,
        },
        "data": {"source": str(corpus), "sequence": 12},
        "batch": {"global": 12, "micro": 2},
        "layout": {"data": {"size": 2}, "transport": "torch"},
        "precision": {"dtype": "float64"},
        "optimizer": {"lr": 1e-2},
        "steps": 8,
        "checkpoint": {"every": 3, "keep": 2},
        "metrics": {"tensorboard": False},
        "device": "cpu",
        "threads": 1,
    } | changes  # fmt: skip


def config_for(corpus: Path, **changes: Any) -> Config:
    return parse_config(tree_for(corpus, **changes))


def lines_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def losses_of(out: Path) -> list[tuple[int, str]]:
    """Return steps and losses as exact text."""
    return [(line["step"], repr(line["loss"])) for line in lines_of(out)]


def run(config: Config, out: Path, *, resume: bool = False, trace: Sequence[int] = ()) -> Path:
    train(config, out, resume=resume, trace=trace)
    return out


def run_as(entry: str, config: Config, out: Path, *, resume: bool = False, **arguments: Any) -> str:
    """Run with an entry function of tests/training/entries.py. Return the reason of a failure, or an empty text."""
    out.mkdir(parents=True, exist_ok=True)
    resolved = resolve(config, this_machine()).config
    ranks = resolved.ranks(str(out))
    given = {"config": resolved, "asked": config, "out": out, "data": Path(config.data.source), "resume": resume}
    try:
        launch.run(f"tests.training.entries:{entry}", ranks, **(given | arguments))
    except LaunchError as error:
        return str(error)
    return ""


def preferring_run(folder: Path, *words: str) -> Config:
    """Return six steps of a small Llama on 40 pairs of answers; the pairs are written to the folder."""
    tokenizer = folder / "tokenizer" / "tokenizer.json"
    if not tokenizer.is_file():
        make_tokenizer(folder / "tokenizer")
        make_pairs(folder, "messages", 40)
    tree = {
        "model": {"family": "llama", "layers": 2, "hidden": 16, "heads": 2, "feed_forward": 16, "vocabulary": 320},
        "data": {"source": str(folder / "pairs.jsonl"), "tokenizer": str(tokenizer), "sequence": 64, "validation": 0.3},
        "loss": {"kind": "dpo", "beta": 0.5},
        "batch": {"global": 4, "micro": 1},
        "layout": {"transport": "torch"},
        "optimizer": {"lr": 1e-2},
        "precision": "float64",
        "steps": 6,
        "checkpoint": {"every": 3},
        "validation": {"every": 3, "batches": 1},
        "metrics": {"sinks": []},
        "device": "cpu",
        "threads": 1,
    }
    return parse_run(tree, list(words))
