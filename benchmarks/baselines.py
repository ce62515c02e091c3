"""The programs that ours is compared with: a plain torch loop, Hugging Face's GPT-2, torch's DDP and FSDP2.

Each function is a contender's factory (see contender.py): it builds its model in the worker and yields `step`. All
run the same sizes, the same tokens, the same AdamW; `fused` picks torch's fused AdamW, else torch's default one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.contender import Place, Step
from benchmarks.plain_model import PlainGPT
from benchmarks.reference import REFERENCE, global_batch, rank_rows

Loss = Callable[[Tensor, Tensor], Tensor]


@contextmanager
def plain(place: Place, fused: bool = False, compiled: bool = False) -> Iterator[Step]:
    """The plain loop on one device. `compiled`: its model is, whole, by torch.compile."""
    model = _plain_model()
    # Inductor's own pool of processes never answers in a contender's worker.
    whole = torch.compile(model, options={"compile_threads": 1}) if compiled else model
    yield _loop(whole, _adamw(model, fused), place)


@contextmanager
def products(place: Place) -> Iterator[Step]:
    """Only the matrix products of the plain model's linear layers: y = x w, dx = dy w^T, dw = x^T dy, and no attention.

    No program in this precision with these libraries takes less, so it bounds what a ratio to the plain loop can be.
    """
    rows, hidden = REFERENCE.batch * REFERENCE.sequence // place.ranks, REFERENCE.hidden
    block = [(hidden, 3 * hidden), (hidden, hidden), (hidden, 4 * hidden), (4 * hidden, hidden)]
    shapes = block * REFERENCE.layers + [(hidden, REFERENCE.vocabulary)]
    weights = [(torch.randn(width, out), torch.empty(width, out)) for width, out in shapes]
    inputs = {width: torch.randn(rows, width) for width in (hidden, 4 * hidden)}

    def step() -> float:
        for weight, gradient in weights:
            x = inputs[weight.shape[0]]
            y = x @ weight
            torch.mm(y, weight.t())
            torch.mm(x.t(), y, out=gradient)
        return 0.0

    yield step


@contextmanager
def hugging_face(place: Place, fused: bool = False) -> Iterator[Step]:
    """GPT2LMHeadModel of the same sizes, with its SDPA attention, no dropout and an untied head.

    It shifts the labels itself, so the last token of each sequence has no loss: 1 in 128 less than the others compute.
    """
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.utils import logging

    logging.set_verbosity_error()
    settings: dict[str, Any] = {
        "vocab_size": REFERENCE.vocabulary,
        "n_positions": REFERENCE.sequence,
        "n_embd": REFERENCE.hidden,
        "n_layer": REFERENCE.layers,
        "n_head": REFERENCE.heads,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "tie_word_embeddings": False,
        "attn_implementation": "sdpa",
        "use_cache": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "loss_type": "ForCausalLM",
    }
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**settings))

    def loss(tokens: Tensor, _labels: Tensor) -> Tensor:
        return model(input_ids=tokens, labels=tokens).loss

    yield _loop(loss, _adamw(model, fused), place)


@contextmanager
def ddp(place: Place, fused: bool = True, bucket_view: bool = True) -> Iterator[Step]:
    """The plain model under DistributedDataParallel over gloo, with its default buckets of 25 MB."""
    with gloo(place):
        model = DistributedDataParallel(_plain_model(), gradient_as_bucket_view=bucket_view)
        yield _loop(model, _adamw(model, fused), place)


@contextmanager
def fsdp2(place: Place, fused: bool = True, reshard: bool = True) -> Iterator[Step]:
    """The plain model under fully_shard over gloo: each block, then the root.

    `reshard`: free a block's weights after its forward pass (torch's default), or keep them for the backward.
    """
    with gloo(place):
        model = _plain_model()
        for block in model.blocks:
            fully_shard(block, reshard_after_forward=reshard)
        fully_shard(model)
        yield _loop(model, _adamw(model, fused), place)


def _plain_model() -> PlainGPT:
    torch.manual_seed(0)
    return PlainGPT(REFERENCE)


@contextmanager
def gloo(place: Place) -> Iterator[None]:
    """A process group over the worker's RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""
    dist.init_process_group("gloo", rank=place.rank, world_size=place.ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _adamw(model: nn.Module, fused: bool) -> torch.optim.AdamW:
    """Weight decay on matrices only, as GPT-2 is trained."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": REFERENCE.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=REFERENCE.learning_rate, betas=REFERENCE.betas, fused=fused or None)


def _loop(loss: Loss, optimizer: torch.optim.Optimizer, place: Place) -> Step:
    rows = rank_rows(place.rank, place.ranks)
    count = 0

    def step() -> float:
        nonlocal count
        tokens, labels = global_batch(count)
        value = loss(tokens[rows], labels[rows])
        optimizer.zero_grad(set_to_none=True)
        value.backward()
        optimizer.step()
        count += 1
        return value.item()

    return step
