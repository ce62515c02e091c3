"""Context parallelism: a rank's tokens of each sequence, and attention to other ranks' tokens.

Outside of attention a Transformer's layers work token by token, so a rank needs only its own tokens. Each kind of
context parallelism implements attention over cut sequences; the base class holds whole sequences.

Ulysses (DeepSpeed, arXiv 2309.14509) exchanges some tokens of all heads for all tokens of some heads, and back:

| tensor  | outside of attention | inside           | forward sends    | backward sends   |
|---------|----------------------|------------------|------------------|------------------|
| Q, K, V | [B, A, T/c, E]       | [B, A/c, T, E]   | three all-to-all | three all-to-all |
| output  | [B, A, T/c, E]       | [B, A/c, T, E]   | one all-to-all   | one all-to-all   |

With K < c key-value heads, each head is copied c/K times before it is sent: a rank gets one head and a part of the
head's queries.

A layer and microbatch sends 8 all-to-alls of [B, A, T/c, E], (c - 1)/c of each to other ranks. One rank has the whole
sequence of a head, so masks, documents, causality, dropout and the kernel are those of one device.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.compute.context.documents import attend_at_once, attend_by_document, attend_by_window, flash_takes
from meshwright.compute.context.shaped import attend_shaped
from meshwright.compute.context.spec import AttentionSpec
from meshwright.compute.context.widened import attend_widened
from meshwright.compute.model import IGNORED, Batch
from meshwright.ranks.collectives import all_gather, all_reduce, all_to_all
from meshwright.ranks.mesh import Mesh

AXIS = "context"
HEADS, TOKENS = 1, 2
"""The dims of A and T in [B, A, T, E]."""


class Heads:
    """Attention of whole sequences over all heads of a rank, in one call."""

    widens: bool = False
    """Whether a CPU's backward kernel gets half-precision inputs as float32 (widened.py)."""

    def shared(self, key: Tensor, value: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
        """Repeat heads of keys and values [B, K, t, E] if there are fewer heads than ranks."""
        if (heads := key.shape[HEADS]) < ranks:
            key, value = (x.repeat_interleave(ranks // heads, HEADS) for x in (key, value))
        return key, value

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """Attend by F.scaled_dot_product_attention, or with a soft cap or sinks by `attend_shaped`.

        Documents attend one by one; a window attends by blocks of tokens.

        Args:
            query: [B, A, T, E].
            key, value: [B, A/G, T, E].
            spec: With tensors of whole sequences.

        Returns:
            [B, A, T, E].
        """
        grouped = query.shape[HEADS] != key.shape[HEADS]

        def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
            if not spec.plain:
                return attend_shaped(query, key, value, mask, causal, spec, self.widens)
            attention = attend_widened if self.widens else F.scaled_dot_product_attention
            attended: Tensor = attention(
                query, key, value, mask, spec.dropout, causal, scale=spec.scale, enable_gqa=grouped
            )  # fmt: skip
            return attended

        starts, window = spec.documents, spec.within(key.shape[TOKENS]).window
        # Each row is one document: a GPU's kernel for documents takes 1.8 times as long (docs/performance_gpu.md).
        if starts is None or starts.is_meta or not starts[:, -1].any():
            if window is None:
                return attend(query, key, value, spec.mask, spec.causal)
            starts = None
        if spec.plain and flash_takes(query, key, value, spec.dropout):
            flash = torch.ops.aten._flash_attention_forward
            return attend_at_once(flash, starts, query, key, value, spec)
        if starts is None:
            return attend_by_window(attend, spec.window, query, key, value)
        return attend_by_document(attend, starts, query, key, value, window)


class WidenedHeads(Heads):
    """Attention with a backward kernel that gets half-precision inputs as float32."""

    widens = True


class Context:
    """A rank's tokens of each sequence: all, or the i-th part on the i-th of `size` ranks."""

    heads: Heads = Heads()
    """Attention of whole sequences."""
    size, index = 1, 0

    def attend_by(self, heads: Heads) -> None:
        """Set the attention of whole sequences, `heads`."""
        self.heads = heads

    def runs(self, length: int, index: int | None = None) -> tuple[range, ...]:
        """Return the tokens of a sequence that this rank, or the rank `index`, holds, in order."""
        count = length // self.size
        at = self.index if index is None else index
        return (range(at * count, (at + 1) * count),)

    def positions(self, start: int, count: int, device: torch.device, index: int | None = None) -> Tensor:
        """Return the positions [count] of the tokens of this rank, or of the rank `index`; whole sequences begin at
        `start`."""
        if self.size == 1:
            return torch.arange(start, start + count, device=device)
        assert start == 0, "tokens follow a cache where sequences are whole"
        of_rank = () if index is None else (index,)  # another package's runs may know its own rank alone
        runs = self.runs(count * self.size, *of_rank)
        return torch.cat([torch.arange(run.start, run.stop, device=device) for run in runs])

    def in_order(self, parts: Tensor, length: int) -> tuple[Tensor, list[int]]:
        """Gather a tensor of each run of a sequence, in the order of the sequence; differentiable.

        Args:
            parts: [runs of this rank, ...].
            length: tokens of the whole sequence.

        Returns:
            [runs of all ranks, ...], and the numbers of this rank's runs.
        """
        return parts, list(range(len(parts)))

    def cut(self, batch: Batch, inside: Collection[str]) -> Batch:
        """Cut a batch to this rank's tokens; entries in `inside`, which attention reads, stay whole."""
        if self.size == 1:
            return batch
        local_batch: Batch = {}
        for name, x in batch.items():
            if name in inside:
                local_batch[name] = x
            elif x.shape[1] == 1:
                # A label [B, 1] belongs to the first token, so only that token's rank counts the label.
                local_batch[name] = x if self.index == 0 else torch.full_like(x, IGNORED)
            else:
                local_batch[name] = torch.cat([x[:, run.start : run.stop] for run in self.runs(x.shape[1])], 1)
        return local_batch

    def total(self, x: Tensor) -> Tensor:
        """Sum numbers of each rank's tokens over the ranks that share sequences. Backward: identity."""
        return x

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """Attend from this rank's queries to the keys of whole sequences.

        Args:
            query: [B, A, t, E].
            key, value: [B, A/G, t, E], one head for G queries.
            spec: With tensors of whole sequences.

        Returns:
            [B, A, t, E].
        """
        key, value = self.heads.shared(key, value, 1)
        return self.heads.attend(query, key, value, spec)


class CutContext(Context):
    """A context of several ranks, each with a part of every sequence's tokens."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self.comm = mesh, mesh.comm(AXIS)
        self.size, self.index = mesh.size(AXIS), mesh.index(AXIS)

    def total(self, x: Tensor) -> Tensor:
        return all_reduce(x, self.mesh, AXIS)

    def in_order(self, parts: Tensor, length: int) -> tuple[Tensor, list[int]]:
        begins = [run.start for rank in range(self.size) for run in self.runs(length, rank)]
        order = sorted(range(len(begins)), key=lambda index: begins[index])
        gathered, first = all_gather(parts, self.mesh, AXIS, 0), self.index * len(parts)
        return torch.stack([gathered[index] for index in order]), [
            order.index(first + index) for index in range(len(parts))
        ]


class Ulysses(CutContext):
    """Rank i has the i-th part of the heads inside of attention."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        key, value = self.heads.shared(key, value, self.size)
        q, k, v = (
            all_to_all(x, self.mesh, AXIS, gather_dim=TOKENS, scatter_dim=HEADS) for x in (query, key, value)
        )  # [B, A/c, T, E]
        attended = self.heads.attend(q, k, v, spec.by_heads(self.size)[self.index])
        return all_to_all(attended, self.mesh, AXIS, gather_dim=HEADS, scatter_dim=TOKENS)


WHOLE_SEQUENCES = Context()
