"""A Hugging Face GPT-2 folder -> a checkpoint of step 0: no step taken, so no optimizer state.

To fine-tune it, import it as the first checkpoint of a run's folder, and resume that run:

    meshwright convert import HF --out RUN/checkpoints/step-0
    meshwright train run.yaml --out RUN --resume          # with the `model` section that the import prints
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from meshwright.checkpoint.manifest import Entry, Manifest, Progress, Shard
from meshwright.config import Config
from meshwright.config.schema import Data, Gpt2, Precision
from meshwright.convert.folder import new_folder
from meshwright.convert.names import HEAD, Pair, pairs_of
from meshwright.convert.settings import read_settings
from meshwright.convert.source import Source
from meshwright.data.progress import Progress as Report
from meshwright.data.progress import silent
from meshwright.data.tokenizer import load_tokenizer
from meshwright.errors import CheckpointError

FILE = "rank-0.safetensors"
TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class Imported:
    """What an import wrote. `has_tokenizer`: whether the folder had one; without it, no text goes in or out."""

    folder: Path
    model: Gpt2
    parameters: int
    has_tokenizer: bool


def import_folder(source: Path, out: Path, report: Report = silent) -> Imported:
    """Write the checkpoint `out` from a Hugging Face folder: weights in their own dtype, padding rows of zeros.

    Raises CheckpointError where the folder is incomplete, of another architecture, or holds only a pickle; where `out`
    exists; DataError where its tokenizer cannot be used.
    """
    model = read_settings(source / "config.json")
    held = Source(source)
    pairs = pairs_of(model)
    _check_names(held, pairs, model)
    has_tokenizer = (source / TOKENIZER).is_file()
    if has_tokenizer:
        load_tokenizer(source / TOKENIZER)
    with new_folder(out) as folder:
        tensors = {}
        for index, pair in enumerate(pairs):
            report("reading weights", index / len(pairs))
            tensors[pair.name] = _ours(held.read(pair.theirs), pair, source)
        report("writing", None)
        _write(folder, tensors, _config(model, tensors))
        if has_tokenizer:
            (folder / TOKENIZER).write_bytes((source / TOKENIZER).read_bytes())
    return Imported(out, model, sum(tensor.numel() for tensor in tensors.values()), has_tokenizer)


def _check_names(held: Source, pairs: list[Pair], model: Gpt2) -> None:
    wanted = {pair.theirs for pair in pairs}
    extra = held.names - wanted
    if model.tied and HEAD in extra:
        if not torch.equal(held.read(HEAD), held.read("wte.weight")):
            raise CheckpointError(f"{held.folder}: {HEAD} is not wte.weight, though tie_word_embeddings says so")
        extra = extra - {HEAD}
    for what, names in (("has no tensor", wanted - held.names), ("has a tensor that GPT-2 has not:", extra)):
        if names:
            rest = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise CheckpointError(f"{held.folder} {what} {min(names)}{rest}")


def _ours(tensor: Tensor, pair: Pair, source: Path) -> Tensor:
    """In our dims, with rows of zeros where the vocabulary is padded."""
    if tuple(tensor.shape) != pair.their_shape:
        held, wanted = list(tensor.shape), list(pair.their_shape)
        raise CheckpointError(f"{source}: {pair.theirs} is {held}, and config.json makes it {wanted}")
    if not tensor.is_floating_point():
        raise CheckpointError(f"{source}: {pair.theirs} is stored as {tensor.dtype}, which holds no weights")
    if pair.padding:
        tensor = torch.cat([tensor, tensor.new_zeros(pair.padding, *pair.shape[1:])])
    return tensor.reshape(pair.shape).contiguous()


def _config(model: Gpt2, tensors: dict[str, Tensor]) -> Config:
    """A config that says what the weights are. The rest of it, data above all, is the fine-tuning run's to say."""
    double = all(tensor.dtype == torch.float64 for tensor in tensors.values())
    precision = Precision(level="O0", dtype="float64" if double else "float32")
    return Config(model=model, data=Data(sequence=model.positions), precision=precision)


def _write(folder: Path, tensors: dict[str, Tensor], config: Config) -> None:
    path = folder / FILE
    save_file({f"weight/{name}": tensor for name, tensor in tensors.items()}, path)
    with path.open("rb") as stream:
        shard = Shard(FILE, path.stat().st_size, hashlib.file_digest(stream, "sha256").hexdigest())
    entries = tuple(
        Entry(
            name,
            "weight",
            tuple(tensor.shape),
            (0,) * tensor.dim(),
            tuple(tensor.shape),
            str(tensor.dtype).removeprefix("torch."),
            FILE,
            f"weight/{name}",
        )
        for name, tensor in tensors.items()
    )
    dump = config.model_dump(mode="json", by_alias=True)
    Manifest(Progress(), config.seed, dump, (shard,), entries).write(folder)
