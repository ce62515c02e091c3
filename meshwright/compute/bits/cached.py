"""A model that computes one run of tokens at a time, and reads keys and values of other runs from a cache.

A rank of `layout.context` holds some runs of each sequence (blocks.py) and gets other runs' keys and values from other
ranks, with the bits of one device. Here one device takes the place of each rank in turn, and a cache the place of the
messages. So a run has the bits of training's forward pass, and a run that is complete is never computed again.

A shorter step has other kernels: a product of one row has other bits than that row in a product of many.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import Tensor

from meshwright.compute.bits.arithmetic import ExactArithmetic
from meshwright.compute.bits.assembly import blocks_of, heads_of, layout_free
from meshwright.compute.bits.heads import HeadParts
from meshwright.compute.context.context import TOKENS, Context
from meshwright.compute.context.spec import AttentionSpec
from meshwright.compute.models.chain import Chain, make_chain
from meshwright.compute.parameters.shard import shard_specs
from meshwright.config import Config
from meshwright.config.registry import load_entry
from meshwright.config.schema import PRODUCTS
from meshwright.ranks.mesh import Mesh


class CachedRun(Context):
    """The run `index` of `size` runs of every sequence, with the keys and values of an attention's other runs."""

    def __init__(self, heads: HeadParts, runs: int) -> None:
        self.heads: HeadParts = heads
        self.size, self.index = runs, 0
        self.cache: tuple[Tensor, Tensor] | None = None
        """Keys and values [B, K, T, E] of all computed runs; zeros elsewhere."""

    def move(self, run: int) -> None:
        """Go to a run; the cache stays."""
        self.index = run

    def forget(self) -> None:
        """Empty the cache: other sequences follow."""
        self.cache = None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """Keep the run's keys and values, and attend to those of all kept runs."""
        key, value = self.heads.shared(key, value, 1)
        length = key.shape[TOKENS]
        if self.cache is None:
            zeros = (x.new_zeros(*x.shape[:TOKENS], length * self.size, x.shape[-1]) for x in (key, value))
            self.cache = next(zeros), next(zeros)
        run = slice(self.index * length, (self.index + 1) * length)
        for whole, local in zip(self.cache, (key, value), strict=True):
            whole[:, :, run] = local
        return self.heads.attend_run(query, *self.cache, run, spec)


class RunChain:
    """A chain of one device whose forward pass computes one run of tokens; has the parameters of the whole chain."""

    def __init__(self, config: Config, mesh: Mesh) -> None:
        """Build the chain, without values. `config`: of one device, with cuts (bits/section.py)."""
        products = load_entry(PRODUCTS[config.precision.products])
        blocks = replace(blocks_of(config, mesh), runs=1, outer_runs=1)
        kit = config.layout.tensor.kit(config, mesh, ExactArithmetic(blocks, products))
        self.chain: Chain = make_chain(config, kit)
        heads = heads_of(config, mesh)
        self.contexts = [CachedRun(heads, config.bits.sequence)]
        self.chain.attend_in(self.contexts[0])
        for core in self.chain.attention_cores():
            # Each attention has keys of its own.
            self.contexts.append(CachedRun(heads, config.bits.sequence))
            core.attend_in(self.contexts[-1])
        layout_free(config, mesh, self.chain.inside).apply(config, mesh, self.chain, shard_specs(self.chain))
        self.chain.eval()

    def forget(self) -> None:
        """Empty the caches: other sequences follow."""
        for context in self.contexts:
            context.forget()

    @torch.no_grad()
    def states(self, batch: dict[str, Tensor], run: int) -> Tensor:
        """Return the normed hidden states [B, T/runs, H] of a run of the whole sequences of `batch`.

        Earlier runs must have been computed with the same tokens.
        """
        for context in self.contexts:
            context.move(run)
        inside: Collection[str] = self.chain.inside
        (h,) = self.chain.hidden_states(self.chain.context.cut(batch, inside))
        return h
