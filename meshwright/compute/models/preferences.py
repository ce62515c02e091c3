"""A decoder with a loss over pairs of answers (DPO, Rafailov et al., arXiv 2305.18290).

A sample is a pair, and fills two neighbouring rows: row 2i has the chosen answer of pair i, row 2i + 1 the rejected
one. A row's log-probability is the sum over the labelled tokens, those of the answer. Of two rows:

    log-ratio = log-probability - the first weights' log-probability (`reference` of the batch)
    reward    = beta · log-ratio
    margin    = chosen reward - rejected reward
    loss      = -(1 - e) log sigmoid(margin) - e log sigmoid(-margin)

With e = 0 this is equation 7. A batch loss is the mean over pairs. If ranks share sequences, each rank has the sums of
its own tokens. The sums are then added over these ranks before the loss, 16 bytes a pair, and the first rank counts the
pair.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.compute.model import IGNORED, SAMPLES, Batch, Costs, Hidden, Scales
from meshwright.compute.models.chain import Chain
from meshwright.compute.models.preference_section import Preference
from meshwright.config.registry import load_entry

if TYPE_CHECKING:
    from meshwright.config import Config

PAIRS, REFERENCE = "pairs", "reference"
"""Entries of a batch: the number of each pair in the split [B, 1], and the first weights' log-probabilities [B, 2]."""
ROWS = 2


class PreferenceChain(Chain):
    """The loss over pairs of a chain; the class comes before a family's class (`preferring`)."""

    labels: tuple[str, ...] = (PAIRS,)
    preference: ClassVar[Preference]
    rewards: Tensor | None = None
    """Sums over the pairs of training steps since `take_rewards`: chosen reward, rejected reward, pairs with a positive
    margin, pairs; float64 [4]. None: no pair."""

    def prepared(self, batch: Batch) -> Batch:
        """Lay pairs [B, 2, ...] out as rows [2 B, ...]."""
        rows = {name: x if name == PAIRS else x.flatten(0, 1) for name, x in batch.items() if name != REFERENCE}
        if REFERENCE in batch:
            rows[REFERENCE] = batch[REFERENCE].view(-1, 1)  # in the form of a label of rows, which no context cuts
        return super().prepared(rows)

    def log_probabilities(self, h: Tensor, batch: Batch) -> Tensor:
        """Return the log-probabilities [P, 2] of chosen and rejected answers, without gradients.

        Args:
            h: The normed hidden states [2 P, T, H] of this rank's tokens.
            batch: This rank's rows.
        """
        with torch.no_grad():
            losses: Tensor = self.head(h, batch["labels"], lambda sums: sums)
        return self.context.total(losses.double().neg().view(-1, ROWS))

    def log_ratios(self, losses: Tensor, batch: Batch) -> Tensor:
        """Return the log-ratios [P, 2] of whole rows.

        Args:
            losses: The summed losses [2 P] of this rank's tokens of each row.
            batch: This rank's rows.
        """
        reference = torch.where(batch[PAIRS] != IGNORED, batch[REFERENCE].double().view(-1, ROWS), 0)
        return self.context.total(-losses.double().view(-1, ROWS) - reference)

    def loss(self, h: Tensor, batch: Batch, scales: Scales) -> Tensor:
        """Return the sum of the losses of pairs, times their scale."""
        counted, smoothing = batch[PAIRS].flatten() != IGNORED, self.preference.label_smoothing

        def objective(losses: Tensor) -> Tensor:
            rewards = self.preference.beta * self.log_ratios(losses, batch)
            margins = rewards[:, 0] - rewards[:, 1]
            each = -(1 - smoothing) * F.logsigmoid(margins)
            if smoothing:
                each = each - smoothing * F.logsigmoid(-margins)
            if self.training and losses.requires_grad:
                numbers = torch.stack([*rewards.detach().T, (margins > 0).double(), torch.ones_like(margins)])
                sums = torch.where(counted, numbers.detach(), 0).sum(1)
                self.rewards = sums if self.rewards is None else self.rewards + sums
            # A rank that shares a pair's sequences with the first rank needs the gradient, not the value.
            return torch.where(counted, each, each - each.detach()).sum() * scales[PAIRS]

        loss: Tensor = self.head(h, batch["labels"], objective)
        return loss

    def with_layers_losses(self, loss: Tensor, hidden: Hidden, scales: Scales) -> Tensor:
        """Add losses of layers, means over rows."""
        return super().with_layers_losses(loss, hidden, {**scales, SAMPLES: scales[SAMPLES] / ROWS})

    @torch.no_grad()
    def num_correct(self, h: Tensor, batch: Batch) -> list[Tensor]:
        """Count the pairs with a larger log-ratio of the chosen answer."""
        losses: Tensor = self.head(h, batch["labels"], lambda sums: sums)
        chosen, rejected = self.log_ratios(losses, batch).unbind(1)
        return [((chosen > rejected) & (batch[PAIRS].flatten() != IGNORED)).sum()]

    def take_rewards(self, device: torch.device) -> Tensor:
        """Return the sums of `rewards` since the last call: zeros [4] without a pair."""
        sums, self.rewards = self.rewards, None
        return torch.zeros(4, dtype=torch.float64, device=device) if sums is None else sums

    @staticmethod
    def products(config: Config) -> Costs:
        """Count the multiplications of both rows."""
        costs = of_texts(config).products(config)
        layers = tuple(ROWS * layer for layer in costs.layers)
        return Costs(ROWS * costs.embedding, layers, ROWS * costs.head)

    @staticmethod
    def sample_shapes(config: Config) -> dict[str, tuple[int, ...]]:
        rows = (ROWS, config.data.lengths.source)
        return {"tokens": rows, "labels": rows, PAIRS: (1,), REFERENCE: (ROWS,)}

    @staticmethod
    def tokens_per_sample(config: Config) -> int:
        return ROWS * of_texts(config).tokens_per_sample(config)


def of_texts(config: Config) -> type[Chain]:
    """Return the class of a run's model for single texts."""
    return cast(type[Chain], load_entry(config.model.chain))


@cache
def preferring(chain: type[Chain], preference: Preference) -> type[Chain]:
    """Return a class of chains with the loss over pairs."""
    return type(f"{chain.__name__}OfPairs", (PreferenceChain, chain), {"preference": preference})


def rewards_of(model: Chain, device: torch.device) -> Tensor:
    """Return a model's sums of rewards since the last call; empty [0] for a chain of single texts."""
    if isinstance(model, PreferenceChain):
        return model.take_rewards(device)
    return torch.zeros(0, dtype=torch.float64, device=device)


def reward_metrics(sums: list[float]) -> Mapping[str, float]:
    """Return a step's mean rewards, and the share of pairs with a positive margin; nothing for a run on single texts.

    Args:
        sums: All ranks' sums of `rewards_of`. Ranks with copies add copies of each number, so the means are right.
    """
    if not sums:
        return {}
    chosen, rejected, correct, pairs = sums
    means = {"rewards_chosen": chosen / pairs, "rewards_rejected": rejected / pairs}
    return {**means, "reward_margin": (chosen - rejected) / pairs, "reward_accuracy": correct / pairs}
