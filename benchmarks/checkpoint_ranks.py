"""The cost of checkpoints of a thousand ranks, measured without the ranks: python -m benchmarks.checkpoint_ranks

Manifests of `--model` under zero1 over `--ranks` ranks, as runs and, as in format 2, with an entry for each box:
entries, bytes, seconds of a core to write and to read. Ranks are planned: weights are meta tensors.

Reading: checkpoints of GPT-2 small's weights are written by 64 ranks of zero1 and by one rank. A rank of several
layouts then reads a share. Printed: the MB that the rank reads and hashes, the MB of all touched shards (format 2
hashed these), and the seconds of both. Files are in the page cache.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from meshwright.config import Config, parse_config
from meshwright.ranks.grid import Grid
from meshwright.ranks.planned import planned_mesh
from meshwright.training.checkpoint import Checkpoint, pieces_of
from meshwright.training.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    Origin,
    Progress,
    StoredFile,
    read_manifest,
    stored_file,
)
from meshwright.training.checkpoint.restore import Piece
from meshwright.training.checkpoint.shard import write_shard
from meshwright.training.checkpoint.writer import key_of, runs_of, stored_of
from meshwright.training.parts import Parts, build

ZERO1_64 = {"data": {"sync": "zero1", "size": 64}}
READERS: dict[int, dict[str, tuple[dict[str, Any], int]]] = {
    64: {
        "zero1 over 64": (ZERO1_64, 5),
        "zero1 over 48": ({"data": {"sync": "zero1", "size": 48}}, 5),
        "1-D over 4": ({"tensor": {"kind": "megatron", "size": 4}}, 3),
        "one device": ({}, 0),
    },
    1: {"zero1 over 64": (ZERO1_64, 5), "1-D over 4": ({"tensor": {"kind": "megatron", "size": 4}}, 3)},
}
"""By the count of ranks that wrote: layouts, each with the rank that reads."""
Row = dict[str, Any]


def planned(model: str, layout: dict[str, Any], rank: int) -> Parts:
    """Return a rank's parts on the meta device, with the optimizer's states."""
    samples = 1
    for section in layout.values():
        samples *= section.get("size", 1)
    config: Config = parse_config({"model": model, "batch": {"global": samples}, "layout": layout})
    parts = build(config, planned_mesh(Grid(config.layout.axes), rank, config.layout.token_axes))
    parts.optimizer.prepare_states(1)
    return parts


def seconds_of(call: Callable[[], object]) -> float:
    """Return the least of three calls, in seconds of this process's processor time."""
    seconds = []
    for _ in range(3):
        start = time.process_time()
        call()
        seconds.append(time.process_time() - start)
    return min(seconds)


def manifests(model: str, ranks: int, folder: Path) -> None:
    """Print the cost of both forms of a manifest."""
    parts = planned(model, {"data": {"sync": "zero1", "size": ranks}}, 0)
    pieces = list(pieces_of(parts))
    groups, runs = runs_of(pieces, parts.mesh)
    files = tuple(StoredFile(f"rank-{rank}.safetensors", 2**60, "0" * 64, 8) for rank in range(ranks))
    new = Manifest(Progress(), Origin({}), files, groups, runs)
    wrote, path = seconds_of(lambda: new.write(folder)), folder / MANIFEST
    print(f"{model}, zero1 over {ranks}:")
    print(f"  runs: {len(runs):,}, {path.stat().st_size / 1e6:.1f} MB, written in {wrote:.2f} s", end="")
    print(f", read in {seconds_of(lambda: read_manifest(folder)):.2f}", flush=True)
    start = time.process_time()
    entries = list(boxes(parts, pieces, ranks))
    made = time.process_time() - start
    start = time.process_time()
    text = json.dumps({"format": 2, "entries": entries}, indent=1)
    wrote = time.process_time() - start
    print(f"  boxes: {len(entries):,}, {len(text) / 1e6:.1f} MB, made in {made:.2f} s, written in {wrote:.2f}")


def boxes(parts: Parts, pieces: list[Piece], ranks: int) -> Iterator[Row]:
    """Yield the entries of format 2: the boxes of each rank's slice of each place."""
    for piece in pieces:
        region, length = piece.region, piece.slices.length
        for rank in range(region.start // length, min(ranks, -(-region.stop // length))):
            for index, clipped in enumerate(region.clip(rank * length, (rank + 1) * length)):
                box = {"shape": clipped.shape, "offsets": clipped.box.offsets, "lengths": clipped.box.lengths}
                name = {"parameter": clipped.name, "kind": piece.kind, "key": f"{key_of(piece)}/{index}"}
                yield name | box | {"dtype": "float32", "file": f"rank-{rank}.safetensors"}


def write(folder: Path, ranks: int) -> None:
    """Write the weights of all ranks of zero1, of random numbers."""
    layout: dict[str, Any] = {"data": {"sync": "zero1", "size": ranks}}
    files, listed = [], None
    for rank in range(ranks):
        parts = planned("gpt2-small", layout, rank)
        pieces = [piece for piece in pieces_of(parts) if piece.kind == "weight"]
        listed = listed or runs_of(pieces, parts.mesh)
        held = [stored_of(piece, torch.randn(piece.tensor.numel())) for piece in pieces if piece.tensor.numel()]
        files.append(write_shard(folder / f"rank-{rank}.safetensors", held)[0])
    assert listed is not None
    Manifest(Progress(), Origin({}), tuple(files), *listed).write(folder)


def readings(folder: Path, ranks: int) -> None:
    """Print the bytes that ranks of several layouts read."""
    write(folder, ranks)
    for name, (layout, rank) in READERS[ranks].items():
        slots = planned("gpt2-small", layout, rank).strategy.slots
        checkpoint, before, start = Checkpoint(folder), bytes_read(), time.process_time()
        for slot in slots:
            for region in slot.places:
                checkpoint.read(region.name, "weight", region.box)
        seconds, read = time.process_time() - start, bytes_read() - before
        start = time.process_time()
        shards = [stored_file(folder / name) for name in checkpoint.shards]
        hashed = time.process_time() - start
        whole = sum(file.size_bytes for file in shards)
        print(
            f"  a rank of {name}: reads {read / 1e6:.1f} MB in {seconds:.2f} s; its {len(shards)} shards are "
            f"{whole / 1e6:.1f} MB, and hashed in {hashed:.2f} s",
            flush=True,
        )


def bytes_read() -> int:
    """Return the bytes that this process has requested from the system."""
    return int(Path("/proc/self/io").read_text().split()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt2-xl")
    parser.add_argument("--ranks", type=int, default=1024)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        manifests(arguments.model, arguments.ranks, Path(folder))
    for ranks in READERS:
        with tempfile.TemporaryDirectory() as folder:
            print(f"gpt2-small's weights, written by {ranks} ranks of zero1:")
            readings(Path(folder), ranks)


if __name__ == "__main__":
    main()
