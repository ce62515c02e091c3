"""Rates of checkpoints and of libraries without checks: python -m benchmarks.checkpoint_rates

A rank's shard of `--mb` MB of float32 weights is written by safetensors' `save_file` and by `write_shard`, which hashes
too; hashed alone; and read by `torch.load` and by a `Checkpoint`, which checks each block. Contenders take turns for
`--rounds`. Then the stall of a step: a copy of the weights, and `CheckpointWriter.save` of one rank, which copies and
starts the writing thread. `--published FOLDER`: the import of a Hugging Face folder. GB a second of wall clock and a
processor's second (all threads), medians. Files are in the page cache of `--folder`: a slower disk would hide the
difference.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from meshwright.compute.parameters.bucket import Place
from meshwright.compute.parameters.shard import Box
from meshwright.ranks.machine import keep_freed_memory
from meshwright.ranks.mesh import solo_mesh
from meshwright.training.checkpoint import Checkpoint
from meshwright.training.checkpoint.manifest import Manifest, Origin, Progress, StoredRun
from meshwright.training.checkpoint.restore import Piece
from meshwright.training.checkpoint.shard import Stored, write_shard
from meshwright.training.checkpoint.writer import CheckpointWriter
from meshwright.training.convert.transfer import import_folder

ROWS, COLUMNS = 2048, 2048
"""A weight: 16 MiB."""


def timed(
    contenders: dict[str, Callable[[], object]], rounds: int, size: int, between: Callable[[], object] = lambda: None
) -> None:
    """Print the rates of contenders in turns, in GB a second. `between` is called after each turn, not timed."""
    seconds: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for turn in range(rounds + 1):
        for name, run in contenders.items():
            start, used = time.perf_counter(), time.process_time()
            run()
            if turn:  # the first round warms the page cache up
                seconds[name].append((time.perf_counter() - start, time.process_time() - used))
            between()
    first = next(iter(contenders))
    base = [statistics.median(each[side] for each in seconds[first]) for side in (0, 1)]
    for name, each in seconds.items():
        wall, used = (statistics.median(pair[side] for pair in each) for side in (0, 1))
        rates = f"{size / wall / 1e9:6.2f} GB/s, {size / used / 1e9:6.2f} GB a processor second"
        print(f"  {name:44s} {rates}; {base[0] / wall:.2f}, {base[1] / used:.2f} of {first}", flush=True)


def whole(name: str, weight: Tensor) -> Stored:
    return Stored(f"weight/{name}", f"weight of {name}", (ROWS, COLUMNS), Box((0, 0), (ROWS, COLUMNS)), weight)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="default: the system's folder for temporary files")
    parser.add_argument("--published", type=Path, help="a Hugging Face folder, whose import is timed as well")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # for all contenders, as in a rank of `train`
    names = [f"w{index}" for index in range(max(1, arguments.mb * 10**6 // (4 * ROWS * COLUMNS)))]
    weights = {name: torch.randn(ROWS, COLUMNS) for name in names}
    size = sum(weight.nbytes for weight in weights.values())
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    try:
        step, plain = folder / "step-1", folder / "weights.safetensors"
        step.mkdir()

        def write() -> None:
            write_shard(step / "rank-0.safetensors", [whole(name, weight) for name, weight in weights.items()])

        print(f"{size / 1e6:.0f} MB in {len(weights)} weights of {ROWS} x {COLUMNS}, float32, one thread of torch")
        print("written:")
        contenders = {"safetensors' save_file": lambda: save_file(weights, plain), "write_shard": write}
        timed(contenders, arguments.rounds, size)
        print("hashed:")
        parts = [whole(name, weight) for name, weight in weights.items()]
        hashes = {
            "SHA-256": lambda: [hashlib.sha256(stored.tensor.numpy()).digest() for stored in parts],
            "the hashes of blocks": lambda: [stored.hashes() for stored in parts],
        }
        timed(hashes, arguments.rounds, size)
        torch.save(weights, folder / "weights.pt")
        shape, box = (ROWS, COLUMNS), Box((0, 0), (ROWS, COLUMNS))
        file, _ = write_shard(step / "rank-0.safetensors", [whole(name, weight) for name, weight in weights.items()])
        region = ("weight", shape, box.offsets, box.lengths, "float32")
        runs = tuple(StoredRun(name, *region, f"weight/{name}", 0, 0, box.num_elements) for name in weights)
        Manifest(Progress(), Origin({}), (file,), ((0,),), runs).write(step)

        def read() -> None:
            checkpoint = Checkpoint(step)
            for name in weights:
                checkpoint.read(name, "weight", box)

        readers = {"torch.load": lambda: torch.load(folder / "weights.pt"), "Checkpoint.read": read}
        print("read:")
        timed(readers, arguments.rounds, size)
        print("the stall of a step (the thread writes on):")
        writer = CheckpointWriter(folder / "run", solo_mesh(torch.device("cpu")), 1, Origin({}), {})
        places = [Place(name, shape, box, 0, box.num_elements) for name in weights]
        pieces = [Piece("weight", region, weights[region.name].flatten()) for region in places]

        def save() -> None:
            writer.save(Progress(step=1), pieces)

        copies = [weight.clone() for weight in weights.values()]

        def copy() -> None:
            for weight, there in zip(weights.values(), copies, strict=True):
                there.copy_(weight)

        timed({"a copy": copy, "CheckpointWriter.save": save}, arguments.rounds, size, writer.wait)
        if arguments.published:
            print(f"imported: {arguments.published}")
            files = list(arguments.published.glob("*.safetensors"))

            def bring() -> None:
                import_folder(arguments.published, folder / "imported")

            bytes_there = sum(file.stat().st_size for file in files)
            timed({"import_folder": bring}, arguments.rounds, bytes_there, lambda: shutil.rmtree(folder / "imported"))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
