"""Every sync computes what one device computes: float64 gradients to 1e-12 relative, 20 steps' losses to 1e-10."""

from __future__ import annotations

import pytest
import torch

from meshwright.config import Config, parse_config
from meshwright.data.sampler import document_entries
from meshwright.model import Batch
from meshwright.models.chain import chain_of
from meshwright.parts import Parts
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from meshwright.training.step import train_step as step_on
from tests.harness import build
from tests.workers import run_ranks

SYNCS = ["server-loss", "server-gradient", "rooted", "allreduce", "ring", "zero1", "zero2", "zero3", "fsdp"]
STEPS = 20


def config_for(sync: str, size: int, **changes: object) -> Config:
    tree = {
        "model": {
            "layers": 2, "hidden": 24, "heads": 3, "positions": 12, "vocabulary": 61, "vocabulary_multiple": 8,
            "dropout": 0.0, "tied": True,
        },
        "data": {"sequence": 10, "tokenizer": "bytes"},
        "batch": {"global": 12, "micro": 12 // size // (2 if size < 4 else 1)},
        "layout": {"data": {"size": size, "sync": sync, "bucket": 8192}},
        "precision": {"level": "O0", "dtype": "float64"},
        "optimizer": {"lr": 1e-2, "clip": 0.5, "schedule": {"warmup": 3, "decay": "cosine"}},
        "steps": STEPS,
    }  # fmt: skip
    tree["data"] = {"sequence": 10}
    return parse_config(tree | {"model": tree["model"] | {"vocabulary": 300}} | changes)


def global_batch(config: Config, step: int) -> Batch:
    """Random tokens with masked labels: replicas and microbatches count different numbers of tokens. Where documents
    are kept apart, a fifth of the tokens begins one."""
    generator = torch.Generator().manual_seed(step)
    shape = (config.batch.global_, config.data.sequence)
    tokens = torch.randint(config.model.vocabulary, shape, generator=generator)
    labels = torch.randint(config.model.vocabulary, shape, generator=generator)
    labels[torch.rand(shape, generator=generator) < torch.linspace(0, 0.9, shape[0])[:, None]] = -100
    batch = {"tokens": tokens, "labels": labels}
    if config.data.separate:
        batch |= document_entries((torch.rand(shape, generator=generator) < 0.2).numpy())
    return batch


def bert_batch(config: Config, step: int) -> Batch:
    """As `global_batch`, in two segments of various lengths, the rest padding; a third of the pairs is not labelled."""
    generator = torch.Generator().manual_seed(step + 100)
    batch = global_batch(config, step)
    rows, length = batch["tokens"].shape
    lengths = torch.randint(length // 2, length + 1, (rows, 1), generator=generator)
    place = torch.arange(length)
    mask = place < lengths
    answers = torch.randint(2, (rows, 1), generator=generator)
    answers[::3] = -100
    segments = (place >= length // 3) & mask
    labels = torch.where(mask, batch["labels"], -100)
    return {
        "tokens": batch["tokens"], "segments": segments.long(), "mask": mask.long(), "labels": labels,
        "next_sentence": answers,
    }  # fmt: skip


def vit_batch(config: Config, step: int) -> Batch:
    """Random images, some without a label."""
    generator = torch.Generator().manual_seed(step)
    model, rows = config.model, config.batch.global_
    images = torch.randint(256, (rows, model.channels, model.image, model.image), generator=generator)
    labels = torch.randint(model.classes, (rows, 1), generator=generator)
    labels[1::5] = -100
    return {"images": images.to(torch.uint8), "labels": labels}


def pair_batch(config: Config, step: int) -> Batch:
    """Random pairs: sources end in padding, targets in labels that do not count. T5's targets are shorter."""
    generator = torch.Generator().manual_seed(step)
    rows, (read, written) = config.batch.global_, config.data.lengths
    source, target, labels = (
        torch.randint(config.model.vocabulary, (rows, length), generator=generator)
        for length in (read, written, written)
    )
    seen, counted = (torch.randint(1, length + 1, (rows, 1), generator=generator) for length in (read, written))
    return {
        "source": source, "source_mask": (torch.arange(read) < seen).long(), "target": target,
        "labels": labels.masked_fill(torch.arange(written) >= counted, -100),
    }  # fmt: skip


def task_batch(config: Config, step: int) -> Batch:
    """Random rows of two texts, several a sample where these are choices, and answers, some of which do not count."""
    generator = torch.Generator().manual_seed(step)
    shapes, rows = chain_of(config).sample_shapes(config), config.batch.global_
    length = shapes["tokens"][-1]
    mask = torch.arange(length) < torch.randint(length // 2, length + 1, (rows, *shapes["tokens"]), generator=generator)
    batch = {
        "tokens": torch.randint(config.model.vocabulary, (rows, *shapes["tokens"]), generator=generator),
        "segments": ((torch.arange(length) >= length // 3) & mask).long(), "mask": mask.long(),
    }  # fmt: skip
    most = length if "start" in shapes else shapes["tokens"][0] if len(shapes["tokens"]) > 1 else 3
    for name in shapes.keys() - batch.keys():
        batch[name] = torch.randint(most, (rows, 1), generator=generator)
        batch[name][1::5] = -100
    return {name: batch[name] for name in shapes}


BATCHES = {
    "bert-pairs": task_batch, "bert-spans": task_batch, "bert-choice": task_batch,
    "gpt2": global_batch, "llama": global_batch, "deepseek": global_batch, "bert": bert_batch,
    "vit": vit_batch, "resnext": vit_batch,
    "transformer": pair_batch, "t5": pair_batch,
}  # fmt: skip


def train_step(
    parts: Parts, step: int, batch: Batch | None = None
) -> tuple[float, dict[str, dict[tuple[int, ...], torch.Tensor]]]:
    """One step on a batch, by default the family's of that number; its loss, and the gradients of this rank's slots by
    name and offsets."""
    gradients: dict[str, dict[tuple[int, ...], torch.Tensor]] = {}

    def keep() -> None:
        for slot in parts.strategy.slots:
            for place in slot.places:
                part = slot.parameter.grad[place.start : place.stop].view(place.box.lengths).clone()
                gradients.setdefault(place.name, {})[place.box.offsets] = part

    if batch is None:
        batch = BATCHES[parts.config.model.family](parts.config, step)
    return step_on(parts, batch, step, observe=keep).loss, gradients


def train(mesh: Mesh, config: Config) -> tuple[list[float], dict[str, dict[tuple[int, ...], torch.Tensor]]]:
    parts = build(config, mesh)
    assert parts.strategy.make_replicas_equal() == []
    first_gradients = None
    losses = []
    for step in range(config.steps):
        loss, gradients = train_step(parts, step)
        first_gradients = first_gradients or gradients
        losses.append(loss)
    assert first_gradients is not None
    return losses, first_gradients


def assembled(parts: list[dict[tuple[int, ...], torch.Tensor]], shape: torch.Size) -> torch.Tensor:
    whole = torch.full(shape, torch.nan, dtype=torch.float64)
    for held in parts:
        for offsets, part in held.items():
            whole[tuple(slice(o, o + n) for o, n in zip(offsets, part.shape, strict=True))] = part
    return whole


@pytest.fixture(scope="module")
def serial() -> tuple[list[float], dict[str, dict[tuple[int, ...], torch.Tensor]]]:
    return run_ranks(train, Grid((("data", 1),)), config_for("allreduce", 1))[0]


@pytest.mark.diagonal
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("sync", SYNCS)
def test_equals_serial(sync: str, size: int, serial: tuple) -> None:
    check(config_for(sync, size), serial)


@pytest.mark.few(3)
@pytest.mark.parametrize("sync, shard", [("zero1", 2), ("zero1", 1), ("zero2", 2), ("zero3", 2), ("zero3", 1)])
def test_equals_serial_in_shard_groups(sync: str, shard: int, serial: tuple) -> None:
    layout = {"data": {"size": 4, "sync": sync, "bucket": 8192, "shard": shard}}
    check(config_for(sync, 4, layout=layout, batch={"global": 12, "micro": 3 // shard}), serial)  # of one, or three


@pytest.mark.parametrize("sync", ["zero3", "server-gradient"])
def test_equals_serial_with_inputs_in_host_memory(sync: str, serial: tuple) -> None:
    check(config_for(sync, 2, memory={"recompute": "offload"}), serial)


def check(config: Config, serial: tuple) -> None:
    """The config's run against one device's."""
    results = run_ranks(train, Grid(config.layout.axes), config, token_axes=config.layout.token_axes)
    serial_losses, serial_gradients = serial
    for losses, _ in results:
        torch.testing.assert_close(losses, serial_losses, rtol=1e-10, atol=0)
    assert {"tokens.weight", "positions.weight", "norm.bias"} <= serial_gradients.keys()
    for name, held in serial_gradients.items():
        (expected,) = held.values()
        parts = [gradients[name] for _, gradients in results if name in gradients]
        actual = assembled(parts, expected.shape)
        error = (actual - expected).norm() / expected.norm()
        assert error <= 1e-12, f"{name}: {error}"
