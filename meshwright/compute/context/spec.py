"""The question that a layer asks of attention, as one value: `attend(query, key, value, spec)`.

A layer fixes `causal`, `window`, `scale` and `dropout` at construction; each call adds tensors. Numbers and tensors are
one value, since recomputation (torch's checkpoint) keeps arguments as objects. An autograd function gets the tensors
separately. A kernel or a context without support for a field refuses a spec with this field set (`only`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor


def outside(window: int, ahead: int, queries: int, keys: int, device: torch.device) -> Tensor:
    """bool [queries, keys]: True for a key that a window hides from a query, or that is later than the query. `ahead`:
    places from the first key to the first query."""
    distances = ahead + torch.arange(queries, device=device)[:, None] - torch.arange(keys, device=device)
    return (distances < 0) | (distances >= window)


@dataclass(frozen=True, eq=False)
class AttentionSpec:
    """softmax(cap(scale · Q Kᵀ) + bias) V over the keys that each query sees, with dropout on the weights; the sinks
    are in the softmax's denominator alone."""

    causal: bool = False
    """Each token sees itself and the earlier tokens alone."""
    window: int | None = None
    """The number of keys that a causal token sees: itself and the tokens before it; None: no limit."""
    scale: float | None = None
    """The factor of scores; None: 1/√E."""
    dropout: float = 0.0
    """The share of weights set to zero in this call."""
    documents: Tensor | None = None
    """int64 [B, T] of whole sequences: the position of the first token of each token's document. A causal token sees
    only tokens of the same document (documents.py)."""
    seen: Tensor | None = None
    """bool [B, 1, 1, S] of whole sequences: False for a key that no query sees, such as padding."""
    bias: Tensor | None = None
    """[1 or B, A, T, S]: an addend to the scores."""
    soft_cap: float | None = None
    """cap(x) = soft_cap · tanh(x / soft_cap), of scaled scores, before the bias and masks (Gemma 2, arXiv 2408.00118);
    None: cap(x) = x."""
    sinks: Tensor | None = None
    """[A], a logit a head: a further column of the softmax, without a value (gpt-oss, arXiv 2508.10925). Or [n, A]: one
    row for each use, with separate gradients (bits: layout-free)."""

    def __post_init__(self) -> None:
        if not self.causal and (self.documents is not None or self.window is not None):
            raise ValueError("attention: `documents` and `window` need causal=True")
        if self.window is not None and self.window < 1:
            raise ValueError(f"attention: window={self.window} hides a token from itself; valid: 1 or more")
        if self.soft_cap is not None and not self.soft_cap > 0:
            raise ValueError(f"attention: soft_cap={self.soft_cap} is no bound of scores; valid: more than 0")
        if self.causal and (self.seen is not None or self.bias is not None):
            raise ValueError("attention: causal=True with `seen` or `bias`: put causality into the bias")

    @property
    def plain(self) -> bool:
        """Whether F.scaled_dot_product_attention computes this: it has neither a soft cap nor sinks."""
        return self.soft_cap is None and self.sinks is None

    @property
    def mask(self) -> Tensor | None:
        """The mask of F.scaled_dot_product_attention: `seen` or `bias`."""
        if self.seen is not None and self.bias is not None:
            raise ValueError("attention: `seen` with `bias`: merge both (in_dtype)")
        return self.seen if self.bias is None else self.bias

    def only(self, *known: str, by: str) -> None:
        """Raise ValueError if a field is set that is not among `known`. `by`: the kernel or context."""
        for field in fields(self):
            value = getattr(self, field.name)
            # Not `!=`, which compares a tensor element by element.
            is_set = value is not None if field.default is None else value != field.default
            if is_set and field.name not in known:
                raise ValueError(f"attention: {by} does not know `{field.name}`; it knows {', '.join(known)}")

    def within(self, length: int) -> AttentionSpec:
        """Drop a window that hides nothing in a sequence of `length` tokens."""
        return self if self.window is None or self.window < length else replace(self, window=None)

    def in_dtype(self, dtype: torch.dtype) -> AttentionSpec:
        """Cast a bias to the queries' dtype and merge `seen` into the bias."""
        if self.bias is None:
            return self
        bias = self.bias.to(dtype)  # autocast's queries are narrower than a bias that layers pass on
        if self.seen is not None:
            # The least finite number, not -inf: a row without visible keys would be 0 / 0.
            bias = bias.masked_fill(~self.seen, torch.finfo(dtype).min)
        return replace(self, bias=bias, seen=None)

    def by_heads(self, count: int) -> list[AttentionSpec]:
        """Split the tensors into `count` equal runs of heads; a bias of one head is for all heads."""
        bias, sinks = self.bias, self.sinks
        by_head = bias is not None and bias.shape[1] > 1
        if sinks is None and not by_head:
            return [self] * count
        biases: Sequence[Tensor | None] = bias.chunk(count, 1) if bias is not None and by_head else [bias] * count
        logits: Sequence[Tensor | None] = [None] * count if sinks is None else sinks.chunk(count, -1)
        return [replace(self, bias=head_bias, sinks=some) for head_bias, some in zip(biases, logits, strict=True)]

    def by_rows(self, count: int) -> list[AttentionSpec]:
        """Split the tensors into `count` equal runs of rows; a tensor of one row is for all rows."""
        if count == 1:
            return [self]
        # Sinks with rows have a run of rows for each run of samples.
        sinks = None if self.sinks is None or self.sinks.dim() == 1 else self.sinks
        tensors = self.documents, self.seen, self.bias, sinks
        split: list[Sequence[Tensor | None]] = [
            [x] * count if x is None or x.shape[0] == 1 else x.chunk(count) for x in tensors
        ]
        return [
            replace(self, documents=documents, seen=seen, bias=bias, sinks=self.sinks if rows is None else rows)
            for documents, seen, bias, rows in zip(*split, strict=True)
        ]

    def of_use(self, use: int) -> AttentionSpec:
        """Choose a row of sinks that have one for each use."""
        return self if self.sinks is None or self.sinks.dim() == 1 else replace(self, sinks=self.sinks[use])
