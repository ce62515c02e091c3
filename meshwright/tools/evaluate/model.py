"""A checkpoint as a model that can be asked: the serial kit on one device, with the checkpoint's tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import nn

from meshwright.checkpoint import Checkpoint, find_checkpoint, load_weights
from meshwright.checkpoint.manifest import TOKENIZER_FILE
from meshwright.config import Config
from meshwright.data.tokenizer import Tokenizer, load_tokenizer
from meshwright.errors import CheckpointError, ConfigError
from meshwright.models.chain import make_chain
from meshwright.models.gpt import GPT
from meshwright.models.section import TextTransformer
from meshwright.parameters.shard import shard_specs
from meshwright.parts import DTYPES
from meshwright.ranks.mesh import solo_mesh
from meshwright.tensor.kit import WholeHead
from meshwright.tensor.serial import SerialKit


@dataclass(frozen=True)
class LoadedText:
    """Where a model of text comes from, and how it reads. `context`: how many tokens it sees at once."""

    folder: Path
    config: Config
    steps: int
    """Steps it was trained for here; 0: imported."""
    tokenizer: Tokenizer
    device: torch.device
    context: int


@dataclass(frozen=True)
class LoadedModel(LoadedText):
    """A GPT-2 in evaluation mode."""

    model: GPT

    @property
    def head(self) -> WholeHead:
        """The language-model head."""
        return cast(WholeHead, self.model.head)


def load_model(path: Path, device: str = "auto", context: int | None = None) -> LoadedModel:
    """The GPT-2 of a step folder, or of a run's newest checkpoint. Raises as `load_text`."""
    loaded, model = load_text(path, device, context, "gpt2")
    assert isinstance(model, GPT)
    return LoadedModel(**vars(loaded), model=model)


def family_at(path: Path) -> str:
    """The family of the model in a step folder, or in a run's newest checkpoint."""
    return Checkpoint(find_checkpoint(path)).config.model.family


def load_text(path: Path, device: str, context: int | None, *families: str) -> tuple[LoadedText, nn.Module]:
    """A model of text of one of these families, and what it reads with: of a step folder or of a run's newest
    checkpoint, in evaluation mode.

    Weights are held as the run's optimizer held them: float64 for a float64 run, float32 for every other.
    `context`: by default the sequence length of the training, because positions beyond it were never trained; at most
    model.positions. Raises CheckpointError, DataError (tokenizer), ConfigError (device, context).
    """
    where = device_of(device)
    checkpoint = Checkpoint(find_checkpoint(path))
    config = checkpoint.config
    if config.model.family not in families:
        raise CheckpointError(f"{checkpoint.folder} is a {config.model.family}: this needs a {' or '.join(families)}")
    assert isinstance(config.model, TextTransformer), config.model
    positions = config.model.positions
    if context is not None and not 1 <= context <= positions:
        raise ConfigError.of("--context", context, "is no context of this model", f"1 to model.positions={positions}")
    tokenizer = _tokenizer(checkpoint, config.model.vocabulary)
    mesh = solo_mesh(where)
    model = make_chain(config, SerialKit(mesh))
    model.to(DTYPES[config.precision.dtype] if config.precision.level == "O0" else torch.float32)
    load_weights(model, shard_specs(model), mesh, checkpoint)
    model.eval()
    steps = checkpoint.manifest.progress.step
    return LoadedText(checkpoint.folder, config, steps, tokenizer, where, context or config.data.lengths.source), model


def device_of(name: str) -> torch.device:
    """auto: a GPU where there is one. Raises ConfigError where there is none of what is asked for."""
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError.of("--device", name, "is no device", "auto, cpu, cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError.of("--device", "cuda", "finds no GPU", "cpu")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def _tokenizer(checkpoint: Checkpoint, vocabulary: int) -> Tokenizer:
    path = checkpoint.file(TOKENIZER_FILE)
    if path is None:
        raise CheckpointError(f"{checkpoint.folder} has no {TOKENIZER_FILE}: copy its model's tokenizer there")
    tokenizer = load_tokenizer(path)
    if tokenizer.vocabulary_size > vocabulary:
        size = tokenizer.vocabulary_size
        raise CheckpointError(f"{path} is of another model: it has {size} tokens, and the model knows {vocabulary}")
    return tokenizer
