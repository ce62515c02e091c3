"""Real vocabularies over several ranks: every kit computes one device's numbers, with tokens enough for chunks.

GPT-2's 50257 words, BERT's 30522 and T5's 32128 are not the multiples that layouts need: the last ranks hold the
padding, so ranks hold different numbers of real classes. Layers are few and narrow; tables and logits have real sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from meshwright.compute.model import Batch, to_device
from meshwright.config import Config, parse_config
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from meshwright.training.parts import Parts
from tests.harness import build
from tests.mpi_cases import REAL_VOCABULARIES
from tests.mpi_workers import Answer as MpiAnswer
from tests.oracle.batches import BATCHES
from tests.oracle.run import train_step
from tests.workers import run_ranks

MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"family": "gpt2", "vocabulary": 50257},
    "bert": {"family": "bert", "vocabulary": 30522},
    "t5": {"family": "t5", "vocabulary": 32128, "feed_forward": 48, "head_width": 3, "distance_buckets": 8,
           "distance_max": 10},
}  # fmt: skip

MULTIPLE = 192
"""The table's rows are a multiple of MULTIPLE: 2, 3, 4 and 8 ranks share the rows evenly."""

MICRO, SEQUENCE = 8, 72
"""A microbatch has 576 tokens: several chunks in every case."""

STEPS = 2

MEGATRON = {size: {"kind": "megatron", "size": size} for size in (2, 3, 4, 8)}
CUT = {size: layout | {"sequence_parallel": True} for size, layout in MEGATRON.items()}
FLAT, DEEP = ({"kind": "tesseract", "q": 2, "d": d} for d in (1, 2))
ALL, ONE = (
    {"kind": "subgraph", "size": 2, "common": common, "branch": branch}
    for common, branch in (("all", "attention-core"), ("one", "block"))
)
KITS = [*MEGATRON.values(), *CUT.values(), FLAT, DEEP, ALL, ONE, ALL | {"size": 4}, ONE | {"size": 4}]

Case = tuple[str, dict[str, Any]]

CASES: list[Case] = [("gpt2", MEGATRON[4]), ("bert", CUT[3]), ("t5", MEGATRON[2]), ("bert", FLAT), ("t5", ALL)]
"""Every kit and every vocabulary once."""

ONLY_LONG = [(model, tensor) for model in MODELS for tensor in KITS if (model, tensor) not in CASES]


THREADED: list[Case] = [("t5", CUT[2]), ("gpt2", ALL)]
THREADED_LONG = [(model, tensor) for model, tensor in [*CASES, *ONLY_LONG] if (model, tensor) not in THREADED]


def config_for(model: str, tensor: dict[str, Any], dtype: str) -> Config:
    shape = {
        "layers": 1, "hidden": 24, "heads": 24, "positions": SEQUENCE, "vocabulary_multiple": MULTIPLE, "dropout": 0.0,
    }  # fmt: skip
    tree = {
        "model": shape | MODELS[model],
        "data": {"sequence": SEQUENCE} | ({"kind": "pairs"} if model == "t5" else {}),
        "batch": {"global": 2 * MICRO, "micro": MICRO},
        "layout": {"tensor": tensor},
        "precision": {"level": "O0", "dtype": dtype},
        "optimizer": {"lr": 1e-2, "clip": 1.0},
        "steps": STEPS,
    }
    return parse_config(tree)


@dataclass(frozen=True)
class Answer:
    """A rank's results: losses, then validation losses and numbers of right words, and the first step's gradients."""

    losses: list[float]
    held_out: list[float]
    num_correct: list[float]
    gradients: dict[str, dict[tuple[int, ...], Any]]
    """Arrays by name and offsets: the parent of forked ranks leaves torch's threads alone."""


def learnable(config: Config, step: int) -> Batch:
    """Return the family's batch with the vocabulary's last word as every third label, which a model guesses soon."""
    made = BATCHES[config.model.family](config, step)
    third = torch.arange(made["labels"].shape[1]) % 3 == 0
    last = config.model.vocabulary - 1
    return made | {"labels": torch.where(third & (made["labels"] >= 0), last, made["labels"])}


def train(mesh: Mesh, config: Config) -> Answer:
    parts = build(config, mesh)
    first: dict[str, dict[tuple[int, ...], Any]] = {}
    losses = torch.zeros(config.steps, dtype=torch.float64)
    for step in range(config.steps):
        losses[step], gradients = train_step(parts, step, learnable(config, step))
        if step == 0:
            first = {name: {at: part.cpu().numpy() for at, part in held.items()} for name, held in gradients.items()}
    sums = validated(parts, to_device(learnable(config, config.steps), mesh.device))
    mesh.comm(*config.layout.batch_axes).all_reduce(sums)
    held_out, right = sums.split([len(parts.model.labels), len(parts.model.labels)])
    return Answer(losses.tolist(), held_out.tolist(), right.tolist(), first)


@torch.no_grad()
def validated(parts: Parts, batch: Batch) -> torch.Tensor:
    """Return by label the summed loss of this rank's rows of a batch, then the numbers of right predictions."""
    names = parts.model.labels
    sums = torch.zeros(2, len(names), dtype=torch.float64)

    def add(h: torch.Tensor, rows: Batch) -> None:
        losses = [float(parts.model.loss(h, rows, {other: float(other == name) for other in names})) for name in names]
        sums.add_(torch.tensor([losses, parts.model.num_correct(h, rows)], dtype=torch.float64))

    parts.pipeline.evaluate(parts.microbatches(batch), add)
    return sums.flatten()


@cache
def serial(model: str, dtype: str) -> Answer:
    """Return one device's answer."""
    return run(model, {"kind": "none"}, dtype, 1)[0]


def run(model: str, tensor: dict[str, Any], dtype: str, threads: int) -> list[Answer]:
    config = config_for(model, tensor, dtype)
    grid = Grid(config.layout.axes)
    return run_ranks(train, grid, config, token_axes=config.layout.token_axes, threads=threads)


def check(results: list[Answer], expected: Answer, of_losses: float, of_gradients: float) -> None:
    assert expected.num_correct[0] > 40
    for mine in results:
        assert mine.losses == pytest.approx(expected.losses, rel=of_losses, abs=0)
        assert mine.held_out == pytest.approx(expected.held_out, rel=of_losses, abs=0)
        assert mine.num_correct == expected.num_correct
    for name, held in expected.gradients.items():
        (whole,) = held.values()
        actual = np.full_like(whole, np.nan)
        for offsets, part in (piece for mine in results for piece in mine.gradients.get(name, {}).items()):
            actual[tuple(slice(o, o + n) for o, n in zip(offsets, part.shape, strict=True))] = part
        error = np.linalg.norm((actual - whole).ravel()) / np.linalg.norm(whole.ravel())
        assert error <= of_gradients, f"{name}: {error}"


def label(case: Case) -> str:
    return "-".join(map(str, (case[0], *case[1].values())))


def marked(cases: list[Case], only_long: list[Case]) -> list[Any]:
    return [*cases, *[pytest.param(case, marks=pytest.mark.long) for case in only_long]]


@pytest.mark.few(3)
@pytest.mark.parametrize("case", marked(CASES, ONLY_LONG), ids=label)
def test_equals_serial(case: Case) -> None:
    check(run(*case, "float64", 1), serial(case[0], "float64"), of_losses=1e-10, of_gradients=1e-12)


@pytest.mark.few(1)
@pytest.mark.host  # threads are a CPU's, and a GPU multiplies float32 in TF32
@pytest.mark.parametrize("case", marked(THREADED, THREADED_LONG), ids=label)
def test_equals_serial_with_threads(case: Case) -> None:
    """In float32 with two threads a rank, as under `meshwright verify --as-configured`."""
    check(run(*case, "float32", 2), serial(case[0], "float32"), of_losses=1e-5, of_gradients=1e-5)


def train_for_files(
    mesh: Mesh, model: str, tensor: dict[str, Any]
) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    """Run `train`; return the gradients flat, by `name@offset,offset`."""
    mine = train(mesh, config_for(model, tensor, "float64"))
    flat = {
        f"{name}@{','.join(map(str, offsets))}": torch.from_numpy(part)
        for name, held in mine.gradients.items()
        for offsets, part in held.items()
    }
    return [mine.losses, mine.held_out, mine.num_correct], flat


def from_files(answer: MpiAnswer) -> Answer:
    (losses, held_out, num_correct), flat = answer
    gradients: dict[str, dict[tuple[int, ...], Any]] = {}
    for named, part in flat.items():
        name, _, offsets = named.partition("@")
        gradients.setdefault(name, {})[tuple(map(int, offsets.split(",")))] = part.numpy()
    return Answer(losses, held_out, num_correct, gradients)


@pytest.mark.parametrize("model", REAL_VOCABULARIES)
def test_equals_serial_over_mpi(model: str, mpi: Callable[[int], dict[str, list[MpiAnswer]]]) -> None:
    results = [from_files(answer) for answer in mpi(2)[f"{model}-words"]]
    check(results, serial(model, "float64"), of_losses=1e-10, of_gradients=1e-12)
