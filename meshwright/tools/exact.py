"""Text and log-probabilities with the bits of training's forward pass, for a run with `bits: layout-free`.

Every row has its place in a grain of `bits.samples` rows of whole sequences, as a sample has in training; other rows
and later tokens are zeros. A later token and another row change no bit: each row of a product is computed by itself,
and hidden keys have weights of exactly zero.

| way       | computes for a token                                       | products                       |
|-----------|------------------------------------------------------------|--------------------------------|
| no cache  | the whole grain                                            | of training's forward pass     |
| cache     | the token's run, 1 / `bits.sequence` of the grain          | the same, of this run alone    |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshwright.compute.context.open import open_context
from meshwright.compute.model import IGNORED, Batch
from meshwright.compute.models.chain import Chain, chain_of, make_chain
from meshwright.compute.models.decoder import Decoder
from meshwright.compute.parameters.shard import shard_specs
from meshwright.config import Config
from meshwright.config.layout import Layout
from meshwright.config.registry import load_entry
from meshwright.ranks.errors import ConfigError, Problem
from meshwright.ranks.mesh import Mesh, solo_mesh
from meshwright.training.checkpoint import Checkpoint, load_weights
from meshwright.training.rank_model import build_kit

LAYOUT_FREE = "meshwright.compute.bits.assembly:layout_free"
BY_RUN = "meshwright.compute.bits.cached:RunChain"
"""Entries of the room of equal bits."""

Choose = Callable[[int, int, Tensor], int | None]
"""choose(row_index, position, logits [V]): the token at `position`; None ends the row."""

FEW_FLOPS = 5 * 10**8
"""Operations of a grain's forward pass up to which one thread computes: about 10 ms."""


def require_exact(config: Config, field_name: str) -> None:
    """Raise ConfigError with all reasons for which generation cannot have the bits of the run's training.

    Args:
        config: The run.
        field_name: The option that asks for equal bits.
    """
    model, bits, precision = config.model, config.bits, config.precision
    later = getattr(model, "later_tokens", 0)
    reasons = (
        (not bits.layout_free, "bits.kind", bits.kind, "has kernels by the number of rows", "layout-free"),
        (not issubclass(chain_of(config), Decoder) or not model.cuts_context, "model.family", model.family,
         "does not go on token by token in runs", "gpt2, llama"),
        (model.routing.num_experts > 0, "model.experts.count", model.routing.num_experts,
         "gives experts as many rows as all tokens choose, and later tokens change that number", "no experts"),
        (later > 0, "model.later_tokens", later, "reads tokens that generation does not have yet", "0"),
        (model.adapter is not None, "model.adapter", "an adapter", "has products that are not kept apart", "none"),
        (config.loss is not None, "loss", "a loss over pairs", "has no log-probabilities of single tokens", "none"),
        ((precision.level, precision.dtype) != ("O0", "float32"), "precision", f"{precision.level} {precision.dtype}",
         "has weights of two precisions, or rounded ones", "float32"),
        (bits.layout_free and not bits.cuts and not model.routing.num_experts, "bits.samples", bits.samples,
         "keeps grains alone, without runs of tokens", "leave it out, or bits.sequence=2"),
    )  # fmt: skip
    found = [
        Problem(name, value, f"{why} ({field_name})", valid) for holds, name, value, why, valid in reasons if holds
    ]
    if found:
        raise ConfigError(found)


@dataclass
class Continued:
    """The new tokens of one row, and the log-probability of each in nats, a float32 number."""

    tokens: list[int] = field(default_factory=list)
    logs: list[float] = field(default_factory=list)


class ExactDecoder:
    """Generates with the bits of training's forward pass, with or without a cache of keys and values."""

    def __init__(self, config: Config, device: torch.device, *, cached: bool) -> None:
        """Build the model of one device, without values (`load`).

        Raises ConfigError as `require_exact`.
        """
        require_exact(config, "exact generation")
        self.config = config = config.model_copy(update={"layout": Layout(transport="torch")})
        self.samples, self.runs = config.bits.samples, config.bits.sequence
        self.length = chain_of(config).tokens_per_sample(config)
        self.mesh: Mesh = solo_mesh(device, config.grid.names)
        self.by_run = load_entry(BY_RUN)(config, self.mesh) if cached else None
        self.chain: Chain = whole_chain(config, self.mesh) if self.by_run is None else self.by_run.chain

    def load(self, checkpoint: Checkpoint) -> ExactDecoder:
        """Read the checkpoint's weights; return the decoder."""
        load_weights(self.chain, shard_specs(self.chain), self.mesh, checkpoint)
        return self

    def continued(self, prompts: Mapping[int, Sequence[int]], choose: Choose) -> dict[int, Continued]:
        """Continue prompts, all at once, until `choose` ends a row or the row fills the sequence.

        Args:
            prompts: Tokens by row of the grain, 0 to bits.samples - 1; the row decides the bits.
            choose: Chooses each token.

        Raises:
            ConfigError: A prompt is empty, or leaves no room in the sequence.
        """
        for prompt in prompts.values():
            if not 1 <= len(prompt) < self.length:
                rule = f"leaves no place for a token in data.sequence={self.length}"
                raise ConfigError.of("--prompt", f"{len(prompt)} tokens", rule, f"1 to {self.length - 1} tokens")
        rows = torch.zeros(self.samples, self.length, dtype=torch.long)
        ends, found = dict[int, int](), {row_index: Continued() for row_index in prompts}
        for row_index, prompt in prompts.items():
            rows[row_index, : len(prompt)] = torch.tensor(prompt)
            ends[row_index] = len(prompt)
        width, known = self.length // self.runs, 0
        if self.by_run is not None:
            self.by_run.forget()
        while ends:
            wanted = {(end - 1) // width for end in ends.values()}
            needed, known = sorted(wanted.union(range(known, max(wanted)))), max(known, *wanted)
            with few_threads(self.config):
                for run, h in zip(needed, self.states(rows, needed), strict=True):
                    due = {row_index: end for row_index, end in ends.items() if (end - 1) // width == run}
                    self.add(h, run * width, due, found, choose)
            for row_index in [*ends]:
                row, end = found[row_index], ends.pop(row_index)
                if len(row.tokens) == end + 1 - len(prompts[row_index]) and end + 1 < self.length:
                    rows[row_index, end] = row.tokens[-1]
                    ends[row_index] = end + 1
        return found

    @torch.no_grad()
    def states(self, rows: Tensor, runs: Sequence[int]) -> list[Tensor]:
        """Return the normed hidden states [B, T/runs, H] of some runs of the tokens `rows` [B, T]."""
        batch: Batch = {"tokens": rows.to(self.mesh.device)}
        if "documents" in self.chain.sample_shapes(self.config):
            # Each row is one document.
            batch["documents"] = torch.zeros_like(batch["tokens"])
            batch["positions"] = torch.arange(self.length, device=self.mesh.device).expand_as(rows).contiguous()
        if self.by_run is not None:
            return [self.by_run.states(batch, run) for run in runs]
        (h,) = self.chain.hidden_states(batch)
        parts = h.chunk(self.runs, 1)
        return [parts[run] for run in runs]

    def add(
        self, h: Tensor, first: int, due: Mapping[int, int], found: Mapping[int, Continued], choose: Choose
    ) -> None:  # fmt: skip
        """Choose the next token of each row that ends in a run, and add it with its log-probability.

        Args:
            h: [B, t, H], the run's states.
            first: The run's first position.
            due: The number of tokens so far, by row.
            found: The rows' new tokens.
            choose: Chooses each token.
        """
        width, tokens = h.shape[1], dict[int, int]()

        def labels_of(chunk: slice, logits: Tensor) -> Tensor:
            labels = torch.full((logits.shape[0],), IGNORED, device=h.device)
            for row_index, end in due.items():
                at = row_index * width + end - 1 - first - chunk.start
                if 0 <= at < logits.shape[0] and (token := choose(row_index, end, logits[at])) is not None:
                    labels[at] = tokens[row_index] = token
            return labels

        head: Any = self.chain.head
        losses = head.chosen(h, labels_of)
        for row_index, token in tokens.items():
            found[row_index].tokens.append(token)
            found[row_index].logs.append(-float(losses[row_index, due[row_index] - 1 - first]))


@contextmanager
def few_threads(config: Config) -> Iterator[None]:
    """Compute on one thread if a grain takes few operations on a CPU: a second thread would mostly wait."""
    before = torch.get_num_threads()
    # A step is a forward and a backward pass of twice the operations.
    if config.bits.samples * chain_of(config).flops_per_sample(config) < 3 * FEW_FLOPS:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def whole_chain(config: Config, mesh: Mesh) -> Chain:
    """Build the layout-free chain of one device, in evaluation mode and without values."""
    chain = make_chain(config, build_kit(config, mesh))
    chain.attend_in(open_context(config, mesh))
    load_entry(LAYOUT_FREE)(config, mesh, chain.inside).apply(config, mesh, chain, shard_specs(chain))
    return chain.eval()


def greedy(row_index: int, position: int, logits: Tensor) -> int:
    """Choose the most likely token; of several equal logits the first."""
    return int(logits.argmax())
