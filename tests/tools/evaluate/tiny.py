"""Tiny checkpoints to measure: random models, and a model rigged to write a word."""

from __future__ import annotations

from pathlib import Path

import torch

from meshwright.config import Config
from meshwright.config.schema import OptimizerSection, Precision
from meshwright.data.text_section import TextData
from meshwright.data.tokenizer import Tokenizer, byte_tokenizer
from meshwright.families.gpt.section import Gpt2
from meshwright.ranks.mesh import solo_mesh
from meshwright.training.checkpoint import CheckpointWriter, pieces_of
from meshwright.training.checkpoint.manifest import Origin, Progress
from meshwright.training.parts import Parts
from tests.harness import build

VOCABULARY = 257


def tiny_config(
    *,
    sequence: int = 8,
    positions: int = 8,
    tied: bool = True,
    hidden: int = 16,
    heads: int = 2,
    dtype: str = "float64",
) -> Config:
    model = Gpt2(
        layers=2, hidden=hidden, heads=heads, positions=positions, vocabulary=VOCABULARY, tied=tied, dropout=0.1
    )
    precision = Precision(level="O0", dtype=dtype)  # type: ignore[arg-type]
    return Config(
        model=model,
        data=TextData(sequence=sequence),
        precision=precision,
        optimizer=OptimizerSection(name="sgd"),
        seed=3,
    )


def lively(parts: Parts) -> Parts:
    """Draw weights far from zero, so that predictions differ from place to place."""
    generator = torch.Generator().manual_seed(5)
    for parameter in parts.model.parameters():
        noise = torch.empty(parameter.shape, dtype=torch.float64).normal_(0.0, 0.3, generator=generator)
        parameter.data.add_(noise.to(parameter))
    return parts


def save(parts: Parts, folder: Path, *, step: int = 1, tokenizer: Tokenizer | None = None) -> Path:
    """Save a checkpoint in the run's folder `folder`; return the step folder."""
    dump = parts.config.model_dump(mode="json", by_alias=True)
    text = (tokenizer or byte_tokenizer()).to_json()
    writer = CheckpointWriter(folder / "checkpoints", parts.mesh, 9, Origin(dump), {"tokenizer.json": text})
    writer.save(Progress(step=step, samples=step), pieces_of(parts))
    writer.wait()
    return folder / "checkpoints" / f"step-{step}"


def tiny_checkpoint(folder: Path, config: Config | None = None, *, step: int = 1) -> Path:
    """Save a random model's checkpoint; return the step folder."""
    return save(lively(build(config or tiny_config(), solo_mesh(torch.device("cpu")))), folder, step=step)


def rigged_checkpoint(folder: Path, follows: dict[int, int], *, positions: int = 32) -> Path:
    """Save a model that writes follows[byte] after a byte in any context, and 0 after all other bytes.

    Blocks add nothing; the embedding of byte b is the b-th unit vector; the head maps the vector to the next byte.
    """
    config = tiny_config(sequence=positions, positions=positions, tied=False, hidden=VOCABULARY, heads=1)
    parts = build(config, solo_mesh(torch.device("cpu")))
    weights = dict(parts.model.named_parameters())
    for name, weight in weights.items():
        if (
            "attention.output" in name
            or "contract" in name
            or name in ("tokens.weight", "head.weight", "positions.weight")
        ):
            weight.data.zero_()
    for byte in range(VOCABULARY):
        weights["tokens.weight"].data[byte, byte] = 1.0
        weights["head.weight"].data[follows.get(byte, 0), byte] = 1.0
    return save(parts, folder)


def sequence_config(
    family: str, source: Path, *, objective: str = "auto", dtype: str = "float64", **model: object
) -> Config:
    """Return the config of an encoder-decoder over bytes; the vocabulary fits two more tokens and the sentinels."""
    shape = {"layers": 2, "hidden": 16, "heads": 2, "feed_forward": 24, "vocabulary": VOCABULARY + 102, "dropout": 0.1}
    return Config.model_validate(
        {
            "model": {"family": family, **shape, **({"head_width": 6} if family == "t5" else {}), **model},
            "data": {"source": str(source), "sequence": 40, "validation": 0.2, "objective": objective},
            "batch": {"global": 12},
            "precision": {"level": "O0", "dtype": dtype},
            "optimizer": {"lr": 5e-3, "weight_decay": 0.0, "schedule": {"warmup": 20}},
            "seed": 3,
        }
    )
