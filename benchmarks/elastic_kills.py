"""A run of 8, 5, 3 and 8 ranks, killed at random moments, each time under another layout: one hash?

python -m benchmarks.kills --elastic [--kills 100] [--seed N] [--json LINES]

A run begins on 8 ranks. A SIGKILL hits one process (a rank or the launcher) at a random moment, and the run goes on by
`--resume` on 5 ranks under another layout, then on 3, then on 8 to the end. The hash covers the losses and norms of all
steps and the Merkle root of the last state, which hold no layout. Each run is a line of JSON; runs with a line in the
file and the same undisturbed hash are not made again.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from benchmarks.kills import lives, make_corpus, ranks_below, start, steps_in, wait_for
from meshwright.config import Config, parse_config
from meshwright.training.checkpoint.merkle import Tree, state_leaves
from meshwright.training.checkpoint.reader import Checkpoint

STEPS = 8
BATCH = 60
"""Samples a step: a multiple of every count of replicas."""
WORLDS = (8, 5, 3, 8)


def _data(size: int, sync: str, **more: Any) -> dict[str, Any]:
    return {"data": {"size": size, "sync": sync}, **more}


MEGATRON = {"tensor": {"kind": "megatron", "size": 2}}
LAYOUTS: Mapping[int, Sequence[Mapping[str, Any]]] = {
    8: (
        _data(4, "zero3", pipeline={"size": 2}),
        _data(2, "ring", pipeline={"size": 4}),
        _data(2, "zero1", pipeline={"size": 4, "schedule": "1f1b"}),
        _data(4, "allreduce", **MEGATRON),
        _data(2, "zero1", pipeline={"size": 2}, **MEGATRON),
    ),
    5: (_data(5, "allreduce"), _data(5, "zero3"), {"pipeline": {"size": 5}}),
    3: (_data(3, "zero1"), _data(3, "ring"), {"pipeline": {"size": 3, "schedule": "1f1b"}}),
}


def config_of(corpus: Path, layout: Mapping[str, Any]) -> Config:
    """Return the run under a layout."""
    return parse_config({
        "seed": 3,
        "model": {"layers": 5, "hidden": 64, "heads": 4, "positions": 16, "vocabulary": 300, "dropout": 0.1},
        "data": {"source": str(corpus), "sequence": 16},
        "batch": {"global": BATCH},
        "layout": {**layout, "transport": "torch"},
        "bits": {"kind": "layout-free", "samples": 1, "tensor": 2},
        "optimizer": {"lr": 1e-2},
        "steps": STEPS,
        "checkpoint": {"every": 1, "keep": 2},
        "device": "cpu",
        "threads": 1,
    })  # fmt: skip


def hash_of(out: Path) -> str:
    """Return the hash of all losses and norms and of the last state."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    digest = hashlib.sha256(repr([(each["step"], each["loss"], each["grad_norm"]) for each in lines]).encode())
    checkpoint = Checkpoint(out / "checkpoints" / f"step-{STEPS}")
    root = Tree.of(state_leaves(checkpoint, checkpoint.manifest.origin.data, 3, {})).root
    digest.update(root.encode())
    return digest.hexdigest()


def undisturbed(corpus: Path, folder: Path) -> str:
    """Return the hash of a run on 8 ranks without kills."""
    out = folder / "undisturbed"
    launcher = start(config_of(corpus, LAYOUTS[8][0]), out, resume=False)
    launcher.join()
    if launcher.exitcode != 0:
        raise RuntimeError(out.with_suffix(".txt").read_text())
    return hash_of(out)


def elastic_run(corpus: Path, out: Path, choose: random.Random) -> dict[str, Any]:
    """Make one run of all worlds; return the hash, the kills, and the reason of a failure."""
    kills: list[dict[str, Any]] = []
    metrics = out / "metrics.jsonl"
    began = time.monotonic()
    for turn, size in enumerate(WORLDS):
        layout = choose.choice(LAYOUTS[size])
        config, last = config_of(corpus, layout), turn + 1 == len(WORLDS)
        launcher = start(config, out, resume=turn > 0)
        try:
            if last:
                launcher.join()
                if launcher.exitcode != 0:
                    said = out.with_suffix(".txt").read_text().strip().splitlines() or ["it said nothing"]
                    return {"hash": "", "kills": kills, "wrong": said[-1]}
                break
            done = steps_in(metrics)
            step, delay = done + choose.randrange(1 + (STEPS - done) // 2), choose.uniform(0, 0.3)
            victim = choose.randrange(size + 1)
            there = partial(ranks_below, launcher, size, "torch")
            alive = wait_for(lambda there=there: bool(there()), launcher)
            alive = alive and wait_for(lambda step=step: steps_in(metrics) >= step, launcher)
            time.sleep(delay)
            ranks = there()
            if not (alive and ranks):
                said = out.with_suffix(".txt").read_text().strip().splitlines() or ["it said nothing"]
                return {"hash": "", "kills": kills, "wrong": f"ended before the kill: {said[-1]}"}
            doomed = [*ranks, psutil.Process(launcher.pid)]
            doomed[victim].kill()
            wait_for(lambda doomed=doomed: not any(map(lives, doomed)))
            name = "launcher" if victim == size else f"rank {victim}"
            kills.append({"ranks": size, "layout": config.layout.summary, "victim": name, "step": steps_in(metrics)})
        finally:
            launcher.kill()
            launcher.join()
    kills.append({"ranks": WORLDS[-1], "layout": config.layout.summary, "victim": None, "step": STEPS})
    return {"hash": hash_of(out), "kills": kills, "wrong": "", "seconds": round(time.monotonic() - began, 1)}


def elastic(runs: int, seed: int, lines: Path | None, folder: Path, console: Console) -> list[dict[str, Any]]:
    """Make the runs that the file of lines lacks; return all lines. Ctrl-C ends early with the runs so far."""
    corpus = make_corpus(folder)
    held = lines.read_text().splitlines() if lines is not None and lines.exists() else []
    expected = undisturbed(corpus, folder)
    # Lines of another state of the code have other bits.
    found = [line for line in map(json.loads, held) if (line["seed"], line["expected"]) == (seed, expected)]
    made = {line["run"] for line in found}
    try:
        for index in range(runs):
            if index in made:
                continue
            out = folder / f"run {index}"
            line = {"run": index, "seed": seed, "expected": expected}
            line |= elastic_run(corpus, out, random.Random(f"{seed}/{index}"))
            found.append(line)
            if lines is not None:
                with lines.open("a") as file:
                    file.write(json.dumps(line) + "\n")
            same = "the undisturbed run's hash" if line["hash"] == expected else f"ANOTHER HASH {line['wrong']}"
            told = ", ".join(f"{kill['layout']} (step {kill['step']})" for kill in line["kills"])
            console.print(f"{index + 1}/{runs}: {told}: {same}")
            shutil.rmtree(out, ignore_errors=True)
    except KeyboardInterrupt:
        console.print("ended by Ctrl-C")
    return found


def summary(found: Sequence[Mapping[str, Any]]) -> str:
    """Return the count of runs that ended with the undisturbed hash, of all runs."""
    right = [line for line in found if line["hash"] == line["expected"]]
    kills = sum(sum(kill["victim"] is not None for kill in line["kills"]) for line in found)
    hashes = sorted({line["hash"][:16] or "no hash" for line in found})
    expected = sorted({line["expected"][:16] for line in found})
    return f"{len(right)} of {len(found)} runs, {kills} kills: {', '.join(hashes)}; undisturbed: {', '.join(expected)}"
