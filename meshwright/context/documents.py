"""Attention of packed documents: each document is a separate causal attention, without a mask.

`starts` [B, T], int64, where the host can read it: the place in its row where each token's document begins. It says
which kernels run, so a run keeps it off the GPU (model.py). A plan's has no values: there a row is one document, the
longest, which takes the most memory and time.

| device                       | attention of a row of documents of t1, t2, ... tokens                              |
|------------------------------|------------------------------------------------------------------------------------|
| a GPU with FlashAttention    | one kernel for all rows, told where documents begin (Dao, arXiv 2307.08691)        |
| others                       | a kernel a document; of shorter ones a kernel a block of about BLOCK tokens        |
| a ring, `ring.py`            | a kernel a `Piece`: a run of queries and a run of keys of one document             |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

BLOCK = 128
"""Short documents of up to so many tokens together go into one kernel with a mask: a kernel call costs as much as so
many tokens' scores."""


def keeps_documents(mask: Tensor) -> bool:
    """Whether a mask is of documents: the place in its row where each token's begins."""
    return mask.dtype == torch.int64


def flash_takes(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> bool:
    """Whether a GPU's FlashAttention is there for these, in rows of heads as wide as it reads them."""
    if not query.is_cuda or query.shape[-1] % 8:
        return False
    asked = torch.backends.cuda.SDPAParams(query, key, value, None, dropout, True, key.shape[1] != query.shape[1])
    return torch.backends.cuda.can_use_flash_attention(asked)


Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None, bool], Tensor]
"""attend(query, key, value, mask, causal): softmax(scale · Q Kᵀ + mask) V."""


class Piece(NamedTuple):
    """Queries and keys of one document in some rows, which see each other: all, or (`causal`) each query the keys up
    to its own place. Places are counted in what the ranks hold."""

    rows: slice
    queries: slice
    keys: slice
    causal: bool


def lengths_of(starts: Tensor) -> list[list[int]]:
    """The lengths of each row's documents, in their order."""
    places = starts.cpu().numpy()
    ends = places[:, 1:] != places[:, :-1]
    return [np.diff([0, *(np.flatnonzero(row) + 1), places.shape[1]]).tolist() for row in ends]


def blocks_of(lengths: Sequence[int]) -> list[list[int]]:
    """The documents of a row in runs that a kernel attends: those that fit into BLOCK tokens together, or one alone."""
    blocks: list[list[int]] = []
    room = 0
    for length in lengths:
        if length > room:
            blocks.append([])
            room = BLOCK
        blocks[-1].append(length)
        room -= length
    return blocks


def attend_by_document(attend: Attend, starts: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[B, A, T, E] of queries, keys and values of whole rows."""
    rows = []
    # Splits, whose gradients are one concatenation: a slice's would be as large as the row, a document each.
    for own, *operands in zip(lengths_of(starts), *(x.split(1) for x in (query, key, value)), strict=True):
        blocks = blocks_of(own)
        parts = zip(*(x.split([sum(block) for block in blocks], 2) for x in operands), strict=True)
        outs = []
        for block, (q, k, v) in zip(blocks, parts, strict=True):
            mask = None
            if len(block) > 1:  # the addend [t, t] of the scores of documents beside each other
                numbers = torch.repeat_interleave(torch.tensor(block))
                seen = (numbers[:, None] == numbers).tril()
                mask = torch.zeros(seen.shape, dtype=q.dtype).masked_fill_(~seen, -torch.inf).to(q.device)
            outs.append(attend(q, k, v, mask, mask is None))
        rows.append(torch.cat(outs, 2))
    return torch.cat(rows)


def attend_at_once(
    flash: Callable[..., Sequence[Tensor]], starts: Tensor, query: Tensor, key: Tensor, value: Tensor, dropout: float,
    scale: float | None,
) -> Tensor:  # fmt: skip
    """[B, A, T, E] by one kernel, which takes all rows as one row, and the documents' ends in it.

    `flash`: aten's _flash_attention_forward, or what does the same.
    """
    lengths = [length for row in lengths_of(starts) for length in row]
    # Copied from pinned memory, so that the host goes on.
    ends = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    ends = ends.pin_memory().to(query.device, non_blocking=True) if query.is_cuda else ends
    tokens = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]  # [B T, A, E]
    out = flash(*tokens, ends, ends, max(lengths), max(lengths), dropout, True, False, scale=scale)[0]
    return out.unflatten(0, (query.shape[0], -1)).transpose(1, 2)


def pieces_of(starts: Tensor, chunk: int, queries: Sequence[int], keys: Sequence[int]) -> Iterator[Piece]:
    """The pieces of queries in some of a row's chunks of `chunk` tokens and keys in some others.

    `queries`, `keys`: the numbers of the chunks that two ranks hold, in their order. Two chunks share one document at
    most, which goes from the one into the other.
    """
    every = starts.numpy()
    by_row = [tuple(_pieces_of_row(row, chunk, queries, keys)) for row in every]
    first = 0
    # Rows alike, as those of one document are, go into one kernel.
    for pieces, rows in groupby(by_row):
        last = first + len(list(rows))
        for own_queries, own_keys, causal in pieces:
            yield Piece(slice(first, last), slice(*own_queries), slice(*own_keys), causal)
        first = last


def _pieces_of_row(
    starts: np.ndarray, chunk: int, queries: Sequence[int], keys: Sequence[int]
) -> Iterator[tuple[tuple[int, int], tuple[int, int], bool]]:
    for at, number in enumerate(queries):
        own = starts[number * chunk : (number + 1) * chunk]
        for key_at, key_number in enumerate(keys):
            if key_number == number:
                edges = [0, *(np.flatnonzero(own[1:] != own[:-1]) + 1).tolist(), chunk]
                for begin, end in pairwise(edges):
                    run = at * chunk + begin, at * chunk + end
                    yield run, (key_at * chunk + begin, key_at * chunk + end), True
            elif key_number < number and own[0] < (key_number + 1) * chunk:
                begin = max(int(own[0]) - key_number * chunk, 0)
                count = int(np.count_nonzero(own == own[0]))
                run = at * chunk, at * chunk + count
                yield run, (key_at * chunk + begin, (key_at + 1) * chunk), False
