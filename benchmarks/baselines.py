"""The programs for comparison: a plain torch loop, Hugging Face's GPT-2, torch's DDP and FSDP2.

A context manager here is a contender's factory (contender.py): builds a model in the worker and yields `step`. All run
the same sizes, the same tokens and torch's fused AdamW. README.md names the page that recommends each form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch._dynamo.config
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.contender import Place, Step
from benchmarks.plain_model import PlainGPT
from benchmarks.reference import REFERENCE, WIDE, Reference, global_batch, rank_rows

Loss = Callable[[Tensor, Tensor], Tensor]


@contextmanager
def plain(place: Place, compiled: bool = False, wide: bool = False) -> Iterator[Step]:
    """Yield steps of the plain loop on one device. `compiled`: compile the whole model. `wide`: use the wide model."""
    sizes = WIDE if wide else REFERENCE
    model = plain_model(sizes)
    if compiled:
        model.compile()
    yield _loop(model, fused_adamw(model.parameters()), place, sizes)


@contextmanager
def products(place: Place) -> Iterator[Step]:
    """Compute only the matrix products of the plain model's linear layers: y = x w, dx = dy w^T, dw = x^T dy.

    No program in this precision with these libraries takes less time: a lower bound of every ratio to the plain loop.
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
def hugging_face(place: Place) -> Iterator[Step]:
    """Yield steps of GPT2LMHeadModel of the same sizes, with SDPA attention, no dropout and an untied head.

    The model shifts labels, so the last token of each sequence has no loss: 1 in 128 less than in other contenders.
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

    yield _loop(loss, fused_adamw(model.parameters()), place)


@contextmanager
def ddp(place: Place, compiled: str = "") -> Iterator[Step]:
    """Yield steps of the plain model under DistributedDataParallel over gloo."""
    with gloo(place), graphs_of(compiled):
        model = replicated(plain_model(), compiled)
        yield _loop(model, fused_adamw(model.parameters()), place)


def replicated(model: nn.Module, compiled: str, backend: str = "inductor") -> nn.Module:
    """Return the model under DistributedDataParallel, with the default buckets of 25 MB.

    Args:
        compiled: `inside` compiles the model given to DDP, `outside` the DDP module, an empty text nothing.
    """
    if compiled == "inside":
        model.compile(backend=backend)
    whole = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if compiled == "outside":
        whole.compile(backend=backend)
    return whole


def graphs_of(compiled: str) -> AbstractContextManager[Any]:
    """Patch torch's optimize_ddp. Graphs end with DDP's buckets by default, so that sums overlap the backward pass.
    `inside` turns this off: torch would cut the model inside of DDP as well."""
    return torch._dynamo.config.patch(optimize_ddp=compiled != "inside")


@contextmanager
def fsdp2(place: Place, compiled: bool = False) -> Iterator[Step]:
    """Yield steps of the plain model under fully_shard over gloo."""
    with gloo(place):
        model = plain_model()
        shard(model, model.blocks, compiled)
        yield _loop(model, fused_adamw(model.parameters()), place)


def shard(model: nn.Module, blocks: Iterable[nn.Module], compiled: bool, backend: str = "inductor") -> None:
    """Compile each block if `compiled`, and put each block under fully_shard, then the root with the rest."""
    for block in blocks:
        if compiled:
            block.compile(backend=backend)
        fully_shard(block)
    fully_shard(model)


def plain_model(sizes: Reference = REFERENCE) -> PlainGPT:
    """Return the plain model, drawn from the same seed in every worker."""
    torch.manual_seed(0)
    return PlainGPT(sizes)


@contextmanager
def gloo(place: Place) -> Iterator[None]:
    """Open a process group over the worker's RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""
    dist.init_process_group("gloo", rank=place.rank, world_size=place.ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def fused_adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    """Return AdamW with weight decay on matrices only, as for GPT-2. A fused step takes DTensors or plain tensors, so
    each type has groups."""
    every = list(parameters)
    groups = [
        {"params": [p for p in every if isinstance(p, DTensor) == cut and (p.dim() > 1) == matrix]}
        | {"weight_decay": REFERENCE.weight_decay if matrix else 0.0}
        for cut in (True, False)
        for matrix in (True, False)
    ]
    filled = [group for group in groups if group["params"]]
    return torch.optim.AdamW(filled, lr=REFERENCE.learning_rate, betas=REFERENCE.betas, fused=True)


def _loop(loss: Loss, optimizer: torch.optim.Optimizer, place: Place, sizes: Reference = REFERENCE) -> Step:
    rows = rank_rows(place.rank, place.ranks, sizes)
    count = 0

    def step() -> float:
        nonlocal count
        tokens, labels = global_batch(count, sizes)
        value = loss(tokens[rows], labels[rows])
        optimizer.zero_grad(set_to_none=True)
        value.backward()
        optimizer.step()
        count += 1
        return value.item()

    return step
