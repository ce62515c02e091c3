"""The peers of `benchmarks.growth`: a plain loop, torch's DDP, transformers' Qwen3-MoE.

    python -m torch.distributed.run --nproc-per-node N -m benchmarks.growth_peers FOLDER

starts DDP as users do: each rank writes the time of the first step's begin to a file in FOLDER, as ranks of
`benchmarks.start` do.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.baselines import fused_adamw, gloo, plain_model, replicated
from benchmarks.contender import Place, Step
from benchmarks.reference import REFERENCE, Reference, global_batch, rank_rows
from meshwright.ranks.environment import read_environment

STARTED = Reference(layers=4, hidden=64, heads=2, sequence=64, batch=16, vocabulary=300)
"""The model of `benchmarks.start`."""


def _sizes(options: dict[str, Any]) -> Reference:
    return replace(REFERENCE, **options)


@contextmanager
def plain(place: Place, microbatches: int = 1, **sizes: Any) -> Iterator[Step]:
    """Yield steps of the plain loop on one device; gradients of microbatches add up in `.grad`."""
    model = plain_model(_sizes(sizes))
    yield loop(model, model, place, _sizes(sizes), microbatches)


@contextmanager
def ddp(place: Place, **sizes: Any) -> Iterator[Step]:
    """Yield steps of the plain model under DistributedDataParallel."""
    with gloo(place):
        model = replicated(plain_model(_sizes(sizes)), "")
        yield loop(model, model, place, _sizes(sizes), 1)


@contextmanager
def experts(place: Place, count: int, per_token: int, width: int, **sizes: Any) -> Iterator[Step]:
    """Yield steps of Qwen3MoeForCausalLM with transformers' default products of experts. The model shifts labels."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    torch.manual_seed(0)
    shape = _sizes(sizes)
    config: Any = Qwen3MoeConfig(
        vocab_size=shape.vocabulary, hidden_size=shape.hidden, intermediate_size=width, moe_intermediate_size=width,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.heads,
        head_dim=shape.hidden // shape.heads, num_experts=count, num_experts_per_tok=per_token, norm_topk_prob=True,
        max_position_embeddings=shape.sequence, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    model: Any = Qwen3MoeForCausalLM(config)
    model.train()

    def loss(tokens: Tensor, _labels: Tensor) -> Tensor:
        value: Tensor = model(input_ids=tokens, labels=tokens).loss
        return value

    yield loop(loss, model, place, shape, 1)


def loop(
    loss: Callable[[Tensor, Tensor], Tensor], model: nn.Module, place: Place, sizes: Reference, microbatches: int
) -> Step:
    """Return a training step: this rank's rows in microbatches, and the optimizer."""
    optimizer, rows, count = fused_adamw(model.parameters()), rank_rows(place.rank, place.ranks, sizes), 0

    def step() -> float:
        nonlocal count
        tokens, labels = (each[rows].chunk(microbatches) for each in global_batch(count, sizes))
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for microbatch in zip(tokens, labels, strict=True):
            value = loss(*microbatch) / microbatches
            value.backward()
            total += value.item()
        optimizer.step()
        count += 1
        return total

    return step


def main(folder: Path) -> None:
    """Run one step in a rank that torchrun has started."""
    torch.set_num_threads(1)
    environment = read_environment()
    place = Place(environment.rank, environment.world_size)
    with gloo(place):
        model = replicated(plain_model(STARTED), "")
        step = loop(model, model, place, STARTED, 1)
        begins = {"processor, a rank": time.process_time(), "begins": time.time()}
        step()
        mark = folder / f"{place.rank}.part"
        mark.write_text(json.dumps(begins | {"ends": time.time()}))
        mark.rename(folder / f"start-{place.rank}.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
