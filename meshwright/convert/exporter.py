"""A checkpoint -> a Hugging Face folder: config.json, model.safetensors, and what the family wants beside them."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from meshwright.checkpoint import Checkpoint, find_checkpoint
from meshwright.convert.family import Pair
from meshwright.convert.folder import new_folder
from meshwright.convert.registry import FAMILIES
from meshwright.convert.source import SINGLE
from meshwright.data.progress import Progress, silent
from meshwright.errors import CheckpointError
from meshwright.shard import Box

TOKENIZER = "tokenizer.json"


def export_folder(path: Path, out: Path, report: Progress = silent) -> Path:
    """Write `out` from a step folder or a run's newest checkpoint; returns the step folder that was read.

    Weights keep the dtype in which the checkpoint holds them; padding rows of tables and optimizer states are left out.
    Raises CheckpointError, and DataError where the tokenizer is damaged.
    """
    checkpoint = Checkpoint(find_checkpoint(path))
    model = checkpoint.config.model
    family = FAMILIES[model.family]
    tensors: dict[str, Tensor] = {}
    pairs = family.pairs(model)
    for index, pair in enumerate(pairs):
        report("reading weights", index / len(pairs))
        tensors |= _theirs(checkpoint, pair)
    held = checkpoint.file(TOKENIZER)
    tokenizer = None if held is None else held.read_text(encoding="utf-8")
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    texts = family.files(model, tokenizer, dtype)
    with new_folder(out) as folder:
        report("writing", None)
        save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    return checkpoint.folder


def _theirs(checkpoint: Checkpoint, pair: Pair) -> dict[str, Tensor]:
    """In their dims, without the padding rows."""
    shape = checkpoint.shapes.get(pair.name)
    if shape != pair.shape:
        raise CheckpointError(f"{checkpoint.folder}: {pair.name} is {shape}, and its config makes it {pair.shape}")
    box = Box((0,) * len(shape), (shape[0] - pair.padding, *shape[1:]))
    parts = pair.to_theirs(checkpoint.read(pair.name, "weight", box))
    named = zip(pair.theirs.items(), parts, strict=True)
    return {name: part.reshape(shape).contiguous() for (name, shape), part in named}
