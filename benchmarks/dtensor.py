"""The baseline of 1-D tensor parallelism: the plain model under torch's parallelize_module (DTensor), over gloo.

The best known form: query, key and value are one linear layer with columns ordered by head, so that a cut by columns is
a cut by heads and a block sends one all-reduce each way for the layer. Activations are plain tensors between the linear
layers (`use_local_output`); only the logits stay a DTensor, for `loss_parallel`, which never gathers. AdamW is torch's
fused form.

| module                  | style                     | a rank's weight           |
|-------------------------|---------------------------|---------------------------|
| tokens                  | rowwise                   | [V/p, H]                  |
| query_key_value, expand | colwise                   | [3H/p, H], [4H/p, H]      |
| output, contract        | rowwise                   | [H, H/p], [H, 4H/p]       |
| head                    | colwise                   | [V/p, H]                  |
| norms, positions        | whole; or, with `sequence_parallel`, SequenceParallel and rowwise |
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from benchmarks.baselines import fused_adamw, gloo
from benchmarks.contender import Contender, Place, Step
from benchmarks.plain_model import PlainBlock, PlainGPT
from benchmarks.reference import WIDE, Reference, global_batch


def contender(ranks: int, sequence_parallel: bool = False) -> Contender:
    """Return DTensor on `ranks` ranks."""
    name = "DTensor, sequence parallel" if sequence_parallel else "DTensor"
    return Contender(name, "benchmarks.dtensor:train", {"sequence_parallel": sequence_parallel}, ranks)


@contextmanager
def train(place: Place, sequence_parallel: bool = False) -> Iterator[Step]:
    """Yield steps of the wide model; every rank sees the whole global batch."""
    with gloo(place):
        model = parallel_model(WIDE, place.ranks, sequence_parallel)
        optimizer = fused_adamw(model.parameters())
        count = 0

        def step() -> float:
            nonlocal count
            tokens, labels = global_batch(count, WIDE)
            optimizer.zero_grad(set_to_none=True)
            with loss_parallel():
                loss = model(tokens, labels)
                loss.backward()
            optimizer.step()
            count += 1
            return loss.item()

        yield step


class HeadwiseBlock(PlainBlock):
    """The plain block with the columns of query_key_value in the order [A, 3, E], for any count of heads."""

    def forward(self, h: Tensor) -> Tensor:
        width = self.query_key_value.in_features // self.heads
        split = self.query_key_value(self.attention_norm(h)).unflatten(-1, (-1, 3, width))  # [B, T, A/p, 3, E]
        query, key, value = (each.transpose(1, 2) for each in split.unbind(3))  # [B, A/p, T, E]
        core = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        h = h + self.output(core.transpose(1, 2).flatten(2))
        inner = F.gelu(self.expand(self.feed_forward_norm(h)), approximate="tanh")
        return h + self.contract(inner)


def parallel_model(sizes: Reference, ranks: int, sequence_parallel: bool) -> nn.Module:
    """Return the plain model, drawn from the same seed on every rank, cut over the default process group."""
    torch.manual_seed(0)
    model = PlainGPT(sizes, HeadwiseBlock)
    mesh = init_device_mesh("cpu", (ranks,))
    return parallelize_module(model, mesh, _sequence_plan() if sequence_parallel else _plan())


def _plan() -> dict[str, ParallelStyle]:
    return {
        "tokens": RowwiseParallel(input_layouts=Replicate()),
        "blocks.*.query_key_value": ColwiseParallel(),
        "blocks.*.output": RowwiseParallel(),
        "blocks.*.expand": ColwiseParallel(),
        "blocks.*.contract": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }


def _sequence_plan() -> dict[str, ParallelStyle]:
    """Keep T/p of the tokens on a rank between the pairs of linears: all-gather and reduce-scatter, no all-reduce."""
    return {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "positions": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
        "blocks.*.attention_norm": SequenceParallel(use_local_output=True),
        "blocks.*.query_key_value": ColwiseParallel(input_layouts=Shard(1)),
        "blocks.*.output": RowwiseParallel(output_layouts=Shard(1)),
        "blocks.*.feed_forward_norm": SequenceParallel(use_local_output=True),
        "blocks.*.expand": ColwiseParallel(input_layouts=Shard(1)),
        "blocks.*.contract": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(use_local_output=True),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
