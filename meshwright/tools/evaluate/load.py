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
"""The result of a measure: numbers and texts by name, in the shown order."""


@dataclass(frozen=True)
class Loaded:
    """A model in evaluation mode, and the checkpoint's facts."""

    folder: Path
    config: Config
    steps: int
    """Number of training steps; 0: imported."""
    device: torch.device
    model: Any
    """The family's chain (models/)."""

    @property
    def head(self) -> SerialHead:
        """The head: the language model's, or the classifier's."""
        head: SerialHead = self.model.head
        return head


@dataclass(frozen=True)
class LoadedText(Loaded):
    """A model of text with a tokenizer. `context`: tokens per forward pass of a sequence."""

    tokenizer: Tokenizer
    context: int


def load_model(path: Path, device: str, reads: str) -> Loaded:
    """Load the model of a step folder, or of a run's newest checkpoint, without a tokenizer. Raises as `load_text`."""
    return Loaded(**_built(*_found(path, device, reads)))


def load_text(path: Path, device: str = "auto", context: int | None = None, reads: str = "tokens") -> LoadedText:
    """Load a model of text in evaluation mode.

    Weights have the dtype of the run's optimizer: float64 for a float64 run, float32 for all others.

    Args:
        path: A step folder, or a run's folder for the newest checkpoint.
        device: auto, cpu or cuda.
        context: Tokens per forward pass, at most model.positions. Default: the sequence length of training, because
            later positions were never trained.
        reads: The form of batches that the family must read (models/section.py).

    Raises:
        CheckpointError: There is no such checkpoint, no tokenizer in it, or the family reads another form.
        DataError: The tokenizer cannot be used.
        ConfigError: There is no such device, or the context is out of range.
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
    )  # marks are read from the files in the same folder
    if tokenizer.vocabulary_size > vocabulary:
        size = tokenizer.vocabulary_size
        raise CheckpointError(f"{file} is of another model: it has {size} tokens, and the model knows {vocabulary}")
    context = context or config.data.lengths.source
    return LoadedText(**_built(checkpoint, where), tokenizer=tokenizer, context=context)


def config_at(path: Path) -> Config:
    """Return the config of a step folder, or of a run's newest checkpoint."""
    return Checkpoint(find_checkpoint(path)).config


def _found(path: Path, device: str, reads: str) -> tuple[Checkpoint, torch.device]:
    """Return the checkpoint and the device; auto: a GPU if there is one.

    Raises ConfigError if there is no such device, CheckpointError if the family reads batches of another form.
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
    """Build the model with the checkpoint's weights; return the fields of Loaded."""
    config, mesh = checkpoint.config, solo_mesh(device)
    model = make_chain(config, SerialKit(mesh))
    # Masters of O1 and O2 are float32; the run's half-precision copies are not saved.
    model.to(DTYPES[config.precision.dtype] if config.precision.level == "O0" else torch.float32)
    load_weights(model, shard_specs(model), mesh, checkpoint)
    steps = checkpoint.manifest.progress.step
    return {"folder": checkpoint.folder, "config": config, "steps": steps, "device": device, "model": model.eval()}


def exponential(x: float) -> float:
    """Return e to the x; infinity on overflow."""
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf
