"""Attention of packed documents and of windows.

Each document is a separate causal attention, without a mask. With a window of W tokens a query attends to the last W
keys, and earlier keys are not computed.

`starts` [B, T], int64: the position in the row of the first token of each token's document. The host chooses kernels by
`starts`, so a run keeps it in host memory (model.py). In a plan `starts` has no values: a row is one document, which
takes the most memory and time.

| device                       | attention of a row of documents of t1, t2, ... tokens                              |
|------------------------------|------------------------------------------------------------------------------------|
| a GPU with FlashAttention    | one kernel for all rows, given the documents' starts (Dao, arXiv 2307.08691)       |
| others                       | a kernel a document; for short documents a kernel a block of about BLOCK tokens    |
| a ring, `ring.py`            | a kernel a `Piece`: a run of queries and a run of keys of one document             |

A window cuts queries into runs of max(W, BLOCK) tokens. A run attends to its own keys and the W - 1 keys before, with a
mask of [run, run + W - 1]: about 2 W products a query. FlashAttention's kernel has windows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from meshwright.compute.context.spec import AttentionSpec, outside

BLOCK = 128
"""Tokens of short documents that share one kernel with a mask: a kernel call costs the same as the scores of about 128
tokens."""


def flash_takes(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> bool:
    """Return True if a GPU's FlashAttention takes these tensors without padding their heads."""
    if has_torch_function((query,)):  # a plan's device may have FlashAttention (on_device.py)
        takes: bool = handle_torch_function(flash_takes, (query,), query, key, value, dropout)
        return takes
    if not query.is_cuda or query.shape[-1] % 8:
        return False
    asked = torch.backends.cuda.SDPAParams(query, key, value, None, dropout, True, key.shape[1] != query.shape[1])
    return torch.backends.cuda.can_use_flash_attention(asked)


_Runs = tuple[tuple[int, int], tuple[int, int], bool, int | None]
"""A run of queries and a run of keys, as (first, end); `causal` and `ahead` of a Piece."""
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None, bool], Tensor]
"""attend(query, key, value, mask, causal): softmax(scale · Q Kᵀ + mask) V."""


class Piece(NamedTuple):
    """A run of queries and a run of keys of one document, in some rows. `causal`: a query attends to keys up to its own
    position; else to all. Positions count the tokens that a rank holds."""

    rows: slice
    queries: slice
    keys: slice
    causal: bool
    ahead: int | None = None
    """Tokens from the first key to the first query, if a window hides keys of the piece; None: no mask."""


def lengths_of(starts: Tensor) -> list[list[int]]:
    """Return the lengths of each row's documents, in order."""
    places = starts.cpu().numpy()
    ends = places[:, 1:] != places[:, :-1]
    return [np.diff([0, *(np.flatnonzero(row) + 1), places.shape[1]]).tolist() for row in ends]


def blocks_of(lengths: Sequence[int]) -> list[list[int]]:
    """Group a row's documents by kernel: several with at most BLOCK tokens together, or one."""
    blocks: list[list[int]] = []
    room = 0
    for length in lengths:
        if length > room:
            blocks.append([])
            room = BLOCK
        blocks[-1].append(length)
        room -= length
    return blocks


def attend_by_document(
    attend: Attend, starts: Tensor, query: Tensor, key: Tensor, value: Tensor, window: int | None = None
) -> Tensor:
    """Attend document by document; queries, keys, values and result [B, A, T, E]."""
    rows = []
    # The gradient of a split is one concatenation; each slice would have a gradient as large as the row.
    for lengths, *operands in zip(lengths_of(starts), *(x.split(1) for x in (query, key, value)), strict=True):
        blocks = blocks_of(lengths)
        parts = zip(*(x.split([sum(block) for block in blocks], 2) for x in operands), strict=True)
        outs = []
        for block, (q, k, v) in zip(blocks, parts, strict=True):
            if len(block) == 1:
                outs.append(attend_by_window(attend, window, q, k, v))
                continue
            numbers = torch.repeat_interleave(torch.tensor(block))
            hidden = outside(window or len(numbers), 0, len(numbers), len(numbers), numbers.device)
            hidden |= numbers[:, None] != numbers
            # Added to the scores [t, t]: hides other documents.
            mask = torch.zeros(hidden.shape, dtype=q.dtype).masked_fill_(hidden, -torch.inf).to(q.device)
            outs.append(attend(q, k, v, mask, False))
        rows.append(torch.cat(outs, 2))
    return torch.cat(rows)


def attend_by_window(attend: Attend, window: int | None, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend within a window, or without if `window` is None; [B, A, T, E], one document a row."""
    length = query.shape[2]
    if window is None or window >= length:
        return attend(query, key, value, None, True)
    run = max(window, BLOCK)
    outs, masks = [], dict[tuple[int, int], Tensor]()
    before: list[Tensor] | None = None
    # Splits, as in `attend_by_document`.
    for q, *current in zip(*(x.split(run, 2) for x in (query, key, value)), strict=True):
        last = [] if before is None or window == 1 else [x[:, :, 1 - window :] for x in before]
        k, v = current if not last else (torch.cat(both, 2) for both in zip(last, current, strict=True))
        sizes = q.shape[2], k.shape[2]
        if sizes not in masks:
            hidden = outside(window, sizes[1] - sizes[0], *sizes, q.device)
            masks[sizes] = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden, -torch.inf)
        outs.append(attend(q, k, v, masks[sizes], False) if k.shape[2] > window else attend(q, k, v, None, not last))
        before = current
    return torch.cat(outs, 2)


def attend_at_once(
    flash: Callable[..., Sequence[Tensor]], starts: Tensor | None, query: Tensor, key: Tensor, value: Tensor,
    spec: AttentionSpec,
) -> Tensor:  # fmt: skip
    """Attend by one kernel, which takes all rows as one row with the documents' ends; result [B, A, T, E].

    Args:
        flash: aten's _flash_attention_forward, or a function with the same result.
        starts: None: one document a row.
    """
    batch, _, length, _ = query.shape
    by_row = [[length]] * batch if starts is None else lengths_of(starts)
    lengths = [length for row in by_row for length in row]
    # Copied from pinned memory, so that the host goes on.
    ends = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    ends = ends.pin_memory().to(query.device, non_blocking=True) if query.is_cuda else ends
    tokens = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]  # [B T, A, E]
    how = {"scale": spec.scale}
    if spec.window is not None:
        how |= {"window_size_left": spec.window - 1, "window_size_right": 0}
    out = flash(*tokens, ends, ends, max(lengths), max(lengths), spec.dropout, True, False, **how)[0]
    return out.unflatten(0, (batch, -1)).transpose(1, 2)


def pieces_of(
    starts: np.ndarray, chunk: int, queries: Sequence[int], keys: Sequence[int], window: int | None = None
) -> Iterator[Piece]:
    """Yield pieces of the queries of one rank and the keys of another.

    Args:
        starts: As in the module's text.
        chunk: Tokens of a chunk.
        queries, keys: Numbers of the two ranks' chunks, in order. Two chunks have at most one document in common.
        window: The window's tokens; None: no window.
    """
    by_row = [tuple(_pieces_of_row(row, chunk, queries, keys, window)) for row in starts]
    first = 0
    # Consecutive rows with equal pieces share a kernel.
    for pieces, rows in groupby(by_row):
        last = first + len(list(rows))
        for own_queries, own_keys, causal, ahead in pieces:
            yield Piece(slice(first, last), slice(*own_queries), slice(*own_keys), causal, ahead)
        first = last


def _pieces_of_row(
    starts: np.ndarray, chunk: int, queries: Sequence[int], keys: Sequence[int], window: int | None
) -> Iterator[_Runs]:
    for at, query_chunk in enumerate(queries):
        chunk_starts = starts[query_chunk * chunk : (query_chunk + 1) * chunk]
        for key_at, key_chunk in enumerate(keys):
            if key_chunk == query_chunk:
                edges = [0, *(np.flatnonzero(chunk_starts[1:] != chunk_starts[:-1]) + 1).tolist(), chunk]
                for begin, end in pairwise(edges):
                    run = at * chunk + begin, at * chunk + end
                    yield from _within(window, run, (key_at * chunk + begin, key_at * chunk + end), 0)
            elif key_chunk < query_chunk and chunk_starts[0] < (key_chunk + 1) * chunk:
                begin = max(int(chunk_starts[0]) - key_chunk * chunk, 0)
                count = int(np.count_nonzero(chunk_starts == chunk_starts[0]))
                run, keys_seen = (at * chunk, at * chunk + count), (key_at * chunk + begin, (key_at + 1) * chunk)
                yield from _within(window, run, keys_seen, (query_chunk - key_chunk) * chunk - begin)


def _within(window: int | None, queries: tuple[int, int], keys: tuple[int, int], ahead: int) -> Iterator[_Runs]:
    """Yield the parts of two runs of one document inside of a window. `ahead`: tokens from the first key to the first
    query; 0: both runs are the same tokens, and causal."""
    (first, end), (first_key, end_key) = queries, keys
    if window is None or ahead + end - first <= window:  # the last query attends to the first key
        yield queries, keys, ahead == 0, None
        return
    if ahead:  # queries past the last key's window attend to none of these keys
        end = min(end, first + window + (end_key - first_key) - 1 - ahead)
    run = max(window, BLOCK)
    for start in range(first, end, run):
        stop = min(start + run, end)
        position = ahead + start - first  # of the run's first query, counted from the first key
        nearest = min(end_key, first_key + position + stop - start)
        furthest = max(first_key, first_key + position - window + 1)
        inner = position - (furthest - first_key)
        if inner + stop - start <= window:  # no query's window ends inside
            yield (start, stop), (furthest, nearest), inner == 0, None
        else:
            yield (start, stop), (furthest, nearest), False, inner
