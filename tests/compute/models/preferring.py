"""Small runs on pairs of answers: configs, random batches, and the loss in plain torch, written from the paper."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.compute.model import Batch
from meshwright.config import Config, parse_config
from meshwright.ranks.mesh import Mesh
from tests.data.dialogues import make_tokenizer
from tests.harness import build
from tests.oracle.run import train_step
from tests.oracle.tensor import MODELS
from tests.workers import run_ranks

STEPS = 3


@cache
def tokenizer() -> Path:
    """Return a tokenizer with a chat template: a run on pairs is refused without a template."""
    return make_tokenizer(Path(tempfile.mkdtemp()))


def preferring(layout: dict[str, Any], family: str = "llama", **changes: Any) -> Config:
    layout = {"data": {"bucket": 8192}, **layout}
    shape = {"layers": 2, "hidden": 24, "heads": 12, "vocabulary_multiple": 12, "dropout": 0.0}
    tree = {
        "model": shape | MODELS[family] | {"positions": 48} | changes.pop("model", {}),
        "data": {"kind": "preferences", "source": ".", "tokenizer": str(tokenizer()), "sequence": 24},
        "loss": {"kind": "dpo", "beta": 0.3} | changes.pop("loss", {}),
        "batch": {"global": 8, "micro": 2 if "pipeline" in layout or layout["data"].get("size", 1) > 1 else 4},
        "layout": layout,
        "precision": {"level": "O0", "dtype": "float64"},
        "optimizer": {"lr": 1e-2, "clip": 0.5, "schedule": {"warmup": 3}},
        "steps": STEPS,
    }
    return parse_config(tree | changes)


def random_pairs(config: Config, step: int) -> Batch:
    """Random pairs: prompts and answers of various lengths."""
    generator = torch.Generator().manual_seed(step)
    rows, length = config.batch.global_, config.data.lengths.source
    tokens = torch.randint(config.model.num_tokens, (rows, 2, length + 1), generator=generator)
    places, begins = torch.arange(length), torch.randint(1, length // 2, (rows, 1, 1), generator=generator)
    ends = torch.randint(length // 2, length + 1, (rows, 2, 1), generator=generator)
    labels = tokens[..., 1:].masked_fill((places < begins) | (places >= ends), -100)
    numbers = torch.arange(rows)[:, None] + step * rows
    return {"tokens": tokens[..., :-1].contiguous(), "labels": labels, "pairs": numbers}


def pairs_of(config: Config, step: int) -> Batch:
    """Return random pairs with reference numbers of the pairs' size."""
    batch, generator = random_pairs(config, step), torch.Generator().manual_seed(step + 50)
    lengths = (batch["labels"] != -100).sum(-1)
    noise = torch.randn(lengths.shape, generator=generator, dtype=torch.float64)
    return batch | {"reference": -4.0 * lengths + noise}


def paper_loss(logits: Tensor, labels: Tensor, reference: Tensor, beta: float, smoothing: float = 0.0) -> Tensor:
    """Equation 7 of arXiv 2305.18290 as a mean over pairs; with smoothing, pairs are swapped with that probability.

    logits [P, 2, T, V]; labels [P, 2, T], -100 for tokens outside of answers; reference [P, 2].
    """
    chances = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    ratios = (chances * (labels != -100)).sum(-1) - reference
    margin = beta * (ratios[:, 0] - ratios[:, 1])
    return -((1 - smoothing) * F.logsigmoid(margin) + smoothing * F.logsigmoid(-margin)).mean()


def train(mesh: Mesh, config: Config) -> tuple[list[float], dict[str, dict[tuple[int, ...], Tensor]]]:
    parts = build(config, mesh)
    assert parts.strategy.make_replicas_equal() == []
    steps = [train_step(parts, step, pairs_of(config, step)) for step in range(config.steps)]
    return [loss for loss, _ in steps], steps[0][1]


def run(config: Config) -> list[Any]:
    return run_ranks(train, config.grid, config, token_axes=config.layout.token_axes)
