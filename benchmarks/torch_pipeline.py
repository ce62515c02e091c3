"""The baseline of Meshwright's pipelines: the plain model under torch.distributed.pipelining, over gloo.

The best known form: partitions are given by hand and may cut a layer in two, because the head weighs two and a half
layers. Each microbatch's loss is divided by the labels of the global batch, so that torch need not scale gradients
afterwards. Whole logits are never gathered (`return_outputs=False`). AdamW is torch's fused form, one a rank. Every
rank draws tokens and labels by `global_batch`; neither is sent.

| symbol | local shape | meaning                                                                                  |
|--------|-------------|------------------------------------------------------------------------------------------|
| tokens | [B/m, T]    | a microbatch, read by the first chunk; labels of equal shape, by the last                |
| h      | [B/m, T, H] | between chunks: sent down; the gradient is sent up                                       |
| logits | [B/m, T, V] | of the last chunk; the loss is computed there                                            |

A chunk is a stage in torch's words: a contiguous range of the model. A rank r of p has one; in a loop r, r + p, ...; in
a V r and 2p - 1 - r, so that the embeddings and the head are on one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from benchmarks.baselines import fused_adamw, gloo
from benchmarks.contender import Contender, Place, Step
from benchmarks.plain_model import PlainBlock, PlainGPT
from benchmarks.reference import REFERENCE, global_batch

SINGLE: dict[str, Callable[..., Any]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
"""One chunk a rank."""

LOOP: dict[str, Callable[..., Any]] = {
    "looped-bfs": ScheduleLoopedBFS,
    "interleaved-1f1b": ScheduleInterleaved1F1B,
    "interleaved-zero-bubble": ScheduleInterleavedZeroBubble,
}
"""Several chunks a rank."""

V: dict[str, Callable[..., Any]] = {"zbv-zero-bubble": ScheduleZBVZeroBubble, "dual-pipe-v": ScheduleDualPipeV}
"""Two chunks a rank."""


def contender(schedule: str, partition: str, ranks: int, microbatches: int) -> Contender:
    """Return one of torch's schedules on `ranks` ranks. `partition`: the layers of each chunk, as in "3.5+0.5"."""
    options = {"schedule": schedule, "partition": partition, "microbatches": microbatches}
    return Contender(f"torch {schedule} {partition}", "benchmarks.torch_pipeline:train", options, ranks)


@contextmanager
def train(place: Place, schedule: str, partition: str, microbatches: int) -> Iterator[Step]:
    """Yield steps of the reference model; a step returns the loss on the rank of the head, and 0.0 elsewhere."""
    with gloo(place):
        torch.manual_seed(0)
        chunks = cut(PlainGPT(REFERENCE), read_partition(partition))
        pipeline = TorchPipeline(chunks, schedule, place, microbatches)
        optimizer = fused_adamw(pipeline.parameters)
        count = 0

        def step() -> float:
            nonlocal count
            tokens, labels = global_batch(count)
            optimizer.zero_grad(set_to_none=True)
            loss = pipeline.backward(tokens, labels)
            optimizer.step()
            count += 1
            return loss

        yield step


class TorchPipeline:
    """This rank's chunks of a cut model, under one of torch's schedules.

    Args:
        chunks: All of the model, with equal initial values on every rank.

    Raises:
        ValueError: The chunks do not fit the schedule and the ranks.
    """

    def __init__(self, chunks: Sequence[nn.Module], schedule: str, place: Place, microbatches: int) -> None:
        self._microbatches = microbatches
        mine = own_chunks(schedule, place, len(chunks))
        device = torch.device("cpu")
        stages = [PipelineStage(chunks[index], index, len(chunks), device) for index in mine]
        self.parameters = [parameter for index in mine for parameter in chunks[index].parameters()]
        self._has_first, self._has_last = 0 in mine, len(chunks) - 1 in mine
        make = (SINGLE | LOOP | V)[schedule]
        self._schedule = make(
            stages[0] if schedule in SINGLE else stages, microbatches, loss_fn=self._loss, scale_grads=False
        )

    def backward(self, tokens: Tensor, labels: Tensor) -> float:
        """Compute gradients of the global batch's mean loss; both [B, T]. Return the loss, 0.0 without the head."""
        losses: list[Tensor] = []
        self._schedule.step(
            *([tokens] if self._has_first else []),
            target=labels if self._has_last else None,
            losses=losses,
            return_outputs=False,
        )
        return sum(loss.item() for loss in losses)

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return a microbatch's share of the global mean; microbatches have equal sizes."""
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) / self._microbatches


def own_chunks(schedule: str, place: Place, num_chunks: int) -> list[int]:
    """Return the indices of a rank's chunks. Raises ValueError if the count of chunks does not fit."""
    if schedule in V:
        fits = num_chunks == 2 * place.ranks
        mine = [place.rank, num_chunks - 1 - place.rank]
    else:
        fits = num_chunks == place.ranks or (schedule in LOOP and num_chunks % place.ranks == 0)
        mine = list(range(place.rank, num_chunks, place.ranks))
    if not fits:
        raise ValueError(f"{schedule} cannot place {num_chunks} chunks on {place.ranks} ranks")
    return mine


def read_partition(text: str) -> list[float]:
    """Parse "3.5+0.5" to [3.5, 0.5]: the layers of each chunk."""
    return [float(layers) for layers in text.split("+")]


def cut(model: PlainGPT, layers: Sequence[float]) -> list[nn.Sequential]:
    """Cut the model into contiguous chunks of whole or half layers: a half is attention or feed-forward.

    The embeddings are in the first chunk, the final norm and the head in the last. The chunks share the model's
    parameters. Raises ValueError if the layers do not add up, or if a chunk is empty.
    """
    halves = [half for block in model.blocks for half in (Attention(block), FeedForward(block))]  # type: ignore[arg-type]
    in_halves = all(count >= 0 and count % 0.5 == 0 for count in layers)
    ends = list(accumulate(int(2 * count) for count in layers))
    parts = [halves[start:end] for start, end in pairwise([0, *ends])]
    parts[0].insert(0, Embedding(model))
    parts[-1].append(Head(model))
    if not in_halves or ends[-1] != len(halves) or not all(parts):
        raise ValueError(f"{layers} does not cut {len(model.blocks)} layers into chunks that are not empty")
    return [nn.Sequential(*chunk) for chunk in parts]


class Embedding(nn.Module):
    """Tokens [B/m, T] to h."""

    def __init__(self, model: PlainGPT) -> None:
        super().__init__()
        self.tokens, self.positions = model.tokens, model.positions

    def forward(self, tokens: Tensor) -> Tensor:
        h: Tensor = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        return h


class Attention(nn.Module):
    """The first half of a plain block."""

    def __init__(self, block: PlainBlock) -> None:
        super().__init__()
        self.heads = block.heads
        self.attention_norm, self.output = block.attention_norm, block.output
        self.query_key_value = block.query_key_value

    def forward(self, h: Tensor) -> Tensor:
        batch, sequence, hidden = h.shape
        parts = self.query_key_value(self.attention_norm(h)).split(hidden, dim=2)
        query, key, value = (
            each.view(batch, sequence, self.heads, hidden // self.heads).transpose(1, 2) for each in parts
        )  # [B/m, A, T, E]
        core = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        added: Tensor = self.output(core.transpose(1, 2).contiguous().view(batch, sequence, hidden))
        return h + added


class FeedForward(nn.Module):
    """The second half of a plain block."""

    def __init__(self, block: PlainBlock) -> None:
        super().__init__()
        self.feed_forward_norm, self.expand, self.contract = block.feed_forward_norm, block.expand, block.contract

    def forward(self, h: Tensor) -> Tensor:
        inner = F.gelu(self.expand(self.feed_forward_norm(h)), approximate="tanh")
        added: Tensor = self.contract(inner)
        return h + added


class Head(nn.Module):
    """h to logits [B/m, T, V]."""

    def __init__(self, model: PlainGPT) -> None:
        super().__init__()
        self.norm, self.head = model.norm, model.head

    def forward(self, h: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(h))
        return logits
