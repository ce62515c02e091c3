"""A checkpoint -> a Hugging Face GPT-2 folder: config.json, model.safetensors, and the tokenizer where there is one."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from meshwright.checkpoint import Checkpoint, find_checkpoint
from meshwright.config.schema import Gpt2
from meshwright.convert.folder import new_folder
from meshwright.convert.names import Pair, pairs_of
from meshwright.convert.settings import settings_of
from meshwright.convert.source import SINGLE
from meshwright.data.progress import Progress, silent
from meshwright.data.tokenizer import END, load_tokenizer
from meshwright.errors import CheckpointError
from meshwright.shard import Box

TOKENIZER = "tokenizer.json"


def export_folder(path: Path, out: Path, report: Progress = silent) -> Path:
    """Write `out` from a step folder or a run's newest checkpoint; returns the step folder that was read.

    Weights keep the dtype in which the checkpoint holds them; padding rows of the vocabulary and optimizer states are
    left out. Raises CheckpointError, and DataError where the tokenizer is damaged.
    """
    checkpoint = Checkpoint(find_checkpoint(path))
    model = checkpoint.config.model
    if not isinstance(model, Gpt2):
        raise CheckpointError(f"{checkpoint.folder} is a {model.family}: only a gpt2 can be exported")
    tensors: dict[str, Tensor] = {}
    pairs = pairs_of(model)
    for index, pair in enumerate(pairs):
        report("reading weights", index / len(pairs))
        tensors[pair.full_name] = _theirs(checkpoint, pair)
    tokenizer = checkpoint.folder / TOKENIZER
    end = load_tokenizer(tokenizer).end if tokenizer.is_file() else None
    dtype = str(tensors["transformer.wte.weight"].dtype).removeprefix("torch.")
    with new_folder(out) as folder:
        report("writing", None)
        save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
        _write_json(folder / "config.json", settings_of(model, end, dtype))
        if tokenizer.is_file():
            (folder / TOKENIZER).write_bytes(tokenizer.read_bytes())
            _write_json(folder / "tokenizer_config.json", _tokenizer_settings(tokenizer, model.positions))
    return checkpoint.folder


def _theirs(checkpoint: Checkpoint, pair: Pair) -> Tensor:
    """In their dims, without the padding rows."""
    shape = checkpoint.shapes.get(pair.name)
    if shape != pair.shape:
        raise CheckpointError(f"{checkpoint.folder}: {pair.name} is {shape}, and its config makes it {pair.shape}")
    box = Box((0,) * len(shape), (shape[0] - pair.padding, *shape[1:]))
    return checkpoint.read(pair.name, "weight", box).reshape(pair.their_shape).contiguous()


def _tokenizer_settings(path: Path, positions: int) -> dict[str, object]:
    """What transformers' AutoTokenizer wants to know beside tokenizer.json."""
    tokens = json.loads(path.read_text(encoding="utf-8")).get("added_tokens", [])
    ends = [token["content"] for token in tokens if token["content"] == END]
    settings: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": positions}
    return {**settings, "bos_token": END, "eos_token": END} if ends else settings


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
