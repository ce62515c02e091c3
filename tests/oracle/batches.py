"""Random batches of each family, by the step's number: every rank of every layout draws the same."""

from __future__ import annotations

import torch

from meshwright.compute.model import Batch
from meshwright.compute.models.chain import chain_of
from meshwright.config import Config
from meshwright.data.sampler import document_entries


def global_batch(config: Config, step: int) -> Batch:
    """Return random tokens with masked labels: replicas and microbatches have different numbers of valid tokens. If
    documents are separate, a fifth of the tokens begins a document."""
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
    """Return a `global_batch` in two segments of various lengths, the rest padding; a third of the pairs has no
    label."""
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
    """Return random images, some without a label."""
    generator = torch.Generator().manual_seed(step)
    model, rows = config.model, config.batch.global_
    images = torch.randint(256, (rows, model.channels, model.image, model.image), generator=generator)
    labels = torch.randint(model.classes, (rows, 1), generator=generator)
    labels[1::5] = -100
    return {"images": images.to(torch.uint8), "labels": labels}


def pair_batch(config: Config, step: int) -> Batch:
    """Return random pairs: sources end in padding, targets in ignored labels. T5's targets are shorter."""
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
    """Return random rows of two texts, several a sample for choices, and answers, some ignored."""
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
    "gpt2": global_batch, "llama": global_batch, "gemma": global_batch, "phi": global_batch,
    "gpt-oss": global_batch,
    "deepseek": global_batch, "qwen3-next": global_batch, "qwen3.5": global_batch, "bert": bert_batch,
    "vit": vit_batch, "resnext": vit_batch,
    "transformer": pair_batch, "t5": pair_batch,
}  # fmt: skip
