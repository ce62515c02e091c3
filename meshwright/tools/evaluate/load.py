"""A checkpoint loaded for inference: the serial kit on one device, with the checkpoint's tokenizer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from meshwright.compute.models.chain import make_chain
from meshwright.compute.parameters.shard import shard_specs
from meshwright.compute.precision import DTYPES
from meshwright.compute.tensor.serial import SerialHead, SerialKit
from meshwright.config import Config
from meshwright.config.registry import entries
from meshwright.data.marks_section import NO_BEGIN, AskedMarks
from meshwright.data.section import TokenSection
from meshwright.data.tokenizer import Tokenizer, load_tokenizer
from meshwright.ranks.errors import CheckpointError, ConfigError
from meshwright.ranks.mesh import solo_mesh
from meshwright.training.checkpoint import Checkpoint, find_checkpoint, load_weights
from meshwright.training.checkpoint.manifest import TOKENIZER_FILE

BATCH_TOKENS = 8192
"""Tokens of a forward pass: enough to fill a device, few enough for a large model's activations."""

Facts = dict[str, str | int | float]
"""The result of a measure: by name, in the order in which it is shown."""


@dataclass(frozen=True)
class Loaded:
    """A model in evaluation mode, and its checkpoint."""

    folder: Path
    config: Config
    steps: int
    """Steps that it was trained for; 0: imported."""
    device: torch.device
    model: Any
    """The family's chain (models/)."""

    @property
    def head(self) -> SerialHead:
        """The language-model head; of a classifier its head."""
        head: SerialHead = self.model.head
        return head


@dataclass(frozen=True)
class LoadedText(Loaded):
    """A model of text. `context`: how many tokens it sees at once."""

    tokenizer: Tokenizer
    context: int


def load_model(path: Path, device: str, reads: str) -> Loaded:
    """The model of a step folder, or of a run's newest checkpoint, without a tokenizer. Raises as `load_text`."""
    return Loaded(**_built(*_found(path, device, reads)))


def load_text(path: Path, device: str = "auto", context: int | None = None, reads: str = "tokens") -> LoadedText:
    """The model of text of a step folder, or of a run's newest checkpoint, in evaluation mode.

    `reads`: the form of batches of its family (models/section.py). Weights have the dtype of the run's optimizer:
    float64 for a float64 run, float32 for every other. `context`: by default the sequence length of the training,
    because positions beyond it were never trained; at most model.positions. Raises CheckpointError, DataError
    (tokenizer), ConfigError (device, context).
    """
    checkpoint, where = _found(path, device, reads)
    config = checkpoint.config
    positions, vocabulary = config.model.longest, config.model.num_tokens
    if context is not None and not 1 <= context <= positions:
        raise ConfigError.of("--context", context, "is no context of this model", f"1 to model.positions={positions}")
    file = checkpoint.file(TOKENIZER_FILE)
    if file is None:
        raise CheckpointError(f"{checkpoint.folder} has no {TOKENIZER_FILE}: copy its model's tokenizer there")
    trained_on = config.data
    assert isinstance(trained_on, TokenSection), trained_on
    tokenizer = load_tokenizer(
        file, AskedMarks() if trained_on.begins else NO_BEGIN
    )  # the files beside it say its marks
    if tokenizer.vocabulary_size > vocabulary:
        size = tokenizer.vocabulary_size
        raise CheckpointError(f"{file} is of another model: it has {size} tokens, and the model knows {vocabulary}")
    # Positions beyond the training's sequence were never trained.
    context = context or config.data.lengths.source
    return LoadedText(**_built(checkpoint, where), tokenizer=tokenizer, context=context)


def config_at(path: Path) -> Config:
    """The config of a step folder, or of a run's newest checkpoint."""
    return Checkpoint(find_checkpoint(path)).config


def _found(path: Path, device: str, reads: str) -> tuple[Checkpoint, torch.device]:
    """The checkpoint and the device; auto: a GPU if there is one.

    Raises ConfigError where there is no such device, CheckpointError where the family reads batches of another form.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError.of("--device", device, "is no device", "auto, cpu, cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError.of("--device", "cuda", "finds no GPU", "cpu")
    checkpoint = Checkpoint(find_checkpoint(path))
    model = checkpoint.config.model
    if model.reads != reads:
        families = " or ".join(name for name, family in entries("models").items() if family.reads == reads)
        raise CheckpointError(f"{checkpoint.folder} is a {model.family}: this needs a {families}")
    return checkpoint, torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")


def _built(checkpoint: Checkpoint, device: torch.device) -> dict[str, Any]:
    """The fields of Loaded."""
    config, mesh = checkpoint.config, solo_mesh(device)
    model = make_chain(config, SerialKit(mesh))
    # Masters of O1 and O2 are float32; the run's half-precision copies are not saved.
    model.to(DTYPES[config.precision.dtype] if config.precision.level == "O0" else torch.float32)
    load_weights(model, shard_specs(model), mesh, checkpoint)
    steps = checkpoint.manifest.progress.step
    return {"folder": checkpoint.folder, "config": config, "steps": steps, "device": device, "model": model.eval()}


def exponential(x: float) -> float:
    """e to the x; infinite where a float cannot hold it."""
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf
