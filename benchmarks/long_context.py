"""A sequence that one rank's memory cannot hold, and four ranks' can: `layout.context` under a limit on each rank.

    python -m benchmarks.long_context [--sequence 32768] [--limit 600M] [--json FILE]

A GPT-2 of 8 layers, hidden 64, 4 heads, a row of 32,768 tokens, float32, one thread a rank, no recomputation. Each rank
may allocate `--limit` of address space after the start (RLIMIT_AS, as set by `ulimit -v`): one rank, then 4 ranks of
each kind. Printed: whether a step ended, the allocated address space, the loss, and the bytes over the context axis by
the ledger and by the formula of docs/context.md.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from meshwright.config import Config, parse_config
from meshwright.config.section import parse_size
from meshwright.ranks.launch import Rank, run
from meshwright.training.decisions import resolve, this_machine
from meshwright.training.parts import build
from meshwright.training.step import train_step

LAYERS, HIDDEN, HEADS, VOCABULARY = 8, 64, 4, 257
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "ulysses, 4 ranks": {"size": 4},
    "ring, 4 ranks": {"size": 4, "kind": "ring"},
}


def config_of(context: dict[str, Any], sequence: int) -> Config:
    model = {
        "layers": LAYERS, "hidden": HIDDEN, "heads": HEADS, "positions": sequence, "vocabulary": VOCABULARY,
        "dropout": 0.0,
    }  # fmt: skip
    tree = {
        "model": model, "data": {"sequence": sequence}, "batch": {"global": 1}, "threads": 1,
        "layout": {"context": context, "transport": "torch"}, "device": "cpu",
    }  # fmt: skip
    return resolve(parse_config(tree), this_machine()).config


def address_bytes() -> tuple[int, int]:
    """Return this process's address space, now and at most."""
    text = Path("/proc/self/status").read_text()
    now, most = (int(re.search(rf"^{name}:\s+(\d+) kB", text, re.M)[1]) * 1024 for name in ("VmSize", "VmPeak"))  # type: ignore[index]
    return now, most


def step_under_limit(rank: Rank, config: Config, limit: int) -> dict[str, Any]:
    """Run a step on one row of random tokens; return the used bytes and seconds, or the error's text."""
    parts = build(config, rank.mesh)
    sequence = config.model.longest
    generator = torch.Generator().manual_seed(1)
    row = torch.randint(VOCABULARY, (1, sequence + 1), generator=generator)
    batch = {"tokens": row[:, :-1].contiguous(), "labels": row[:, 1:].contiguous()}
    before, _ = address_bytes()
    resource.setrlimit(resource.RLIMIT_AS, (before + limit, resource.RLIM_INFINITY))
    began = time.monotonic()
    try:
        loss = train_step(parts, batch).loss
    except RuntimeError as error:  # torch's allocator
        return {"ended": str(error).splitlines()[0], "limit": before + limit}
    traffic = rank.mesh.ledger.traffic.items()
    sent = sum(entry.sent_bytes for (axis, _), entry in traffic if axis == "context")
    return {
        "loss": loss, "seconds": time.monotonic() - began, "took": address_bytes()[1] - before,
        "limit": before + limit, "sent": sent,
    }  # fmt: skip


def formula_bytes(config: Config) -> int:
    """Return the bytes that a rank sends over the context axis in a step of one microbatch (docs/context.md)."""
    c = config.layout.context.size
    n = config.model.longest // c * HIDDEN * 4
    each = {"ulysses": 8 * n * (c - 1) // c, "ring": 2 * n * (3 * c - 2)}[config.layout.context.kind]
    return LAYERS * each if c > 1 else 0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.long_context", description=__doc__)
    parser.add_argument("--sequence", type=int, default=32768)
    parser.add_argument("--limit", type=parse_size, default=600 * 2**20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    limit = int(options.limit)
    table = Table("layout", "a step", "seconds", "took, MB", "may take, MB", "sent a rank, MB", "by formula, MB")
    told = {}
    for name, context in LAYOUTS.items():
        config = config_of(context, options.sequence)
        ranks = run(step_under_limit, config.ranks(), config=config, limit=limit)
        told[name] = ranks
        ended = next((rank["ended"] for rank in ranks if "ended" in rank), None)
        most = {key: max(rank.get(key, 0) for rank in ranks) for key in ("seconds", "took", "sent")}
        table.add_row(
            name,
            f"loss {ranks[0]['loss']:.5f}" if ended is None else "out of memory",
            f"{most['seconds']:.0f}" if ended is None else "-",
            f"{most['took'] / 2**20:,.0f}" if ended is None else "-",
            f"{limit / 2**20:,.0f}",
            f"{most['sent'] / 1e6:,.2f}" if ended is None else "-",
            f"{formula_bytes(config) / 1e6:,.2f}",
        )
    Console(width=120).print(table)
    if options.json:
        options.json.write_text(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
