"""Rewards of a run on pairs of answers: the share of pairs with the larger reward of the chosen answer.

The pairs are the run's held-out ones. The first weights' log-probabilities are read from the run's reference.json
(training/references.py), which a run writes before its first step.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from meshwright.compute.model import to_device
from meshwright.compute.models.preferences import ROWS, PreferenceChain
from meshwright.data.files import ShowProgress
from meshwright.data.preferences_section import PreferenceData
from meshwright.ranks.errors import CheckpointError, ConfigError
from meshwright.tools.evaluate.load import BATCH_TOKENS, Facts, LoadedText
from meshwright.tools.evaluate.texts import held_out
from meshwright.training.references import FILE, SPLITS, ReferredPairs, read_tables


@torch.inference_mode()
def preferences_of(loaded: LoadedText, progress: ShowProgress) -> Facts:
    """Measure the held-out pairs of a run on pairs of answers.

    Args:
        loaded: The model, in evaluation mode.
        progress: Called after every batch.

    Returns:
        The number of pairs, the loss, the share of pairs with a positive margin, and the means of chosen rewards,
        rejected rewards and margins, in float64.

    Raises:
        ConfigError: `--context` is not the length of the run's rows.
        CheckpointError: The run has no numbers of the first weights for these pairs.
        DamagedError: The file of these numbers is damaged.
        DataError: The run held out no pairs.
    """
    section, model, preference = loaded.config.data, loaded.model, loaded.config.loss
    assert isinstance(section, PreferenceData), section
    assert isinstance(model, PreferenceChain), type(model)
    assert preference is not None
    if loaded.context != section.sequence:
        rule_text = "is another length than that of the rows, for which the run has the first weights' numbers"
        raise ConfigError.of("--context", loaded.context, rule_text, f"{section.sequence}, or without it")
    corpus, name = held_out(loaded, None, section, progress, "preferences")
    pairs, _ = section.samples(loaded.config, corpus, "validation")
    path = loaded.folder.resolve().parents[1] / FILE
    if not path.is_file():
        raise CheckpointError(f"{path}: is missing; it has the first weights' numbers: measure the run's own folder")
    table = read_tables(path, section.fingerprint(corpus.folder), "").get(SPLITS[1])
    if table is None or table.shape != (len(pairs), ROWS):
        rule = f"has not the numbers of the {len(pairs)} held-out pairs"
        raise CheckpointError(f"{path}: {rule}; a run with validation.every above 0 writes these before its first step")
    referred, margins, rewards = ReferredPairs(pairs, table), list[torch.Tensor](), list[torch.Tensor]()
    count = max(1, BATCH_TOKENS // (ROWS * section.sequence))
    for first in range(0, len(pairs), count):
        batch = referred.held_out(first, min(count, len(pairs) - first))
        rows = model.prepared(to_device(batch, loaded.device))
        losses = model.head(model.hidden_states(rows)[0], rows["labels"], lambda sums: sums)
        rewards.append(preference.beta * model.log_ratios(losses, rows))
        margins.append(rewards[-1][:, 0] - rewards[-1][:, 1])
        progress("preferences", min(1.0, (first + count) / len(pairs)))
    margin, (chosen, rejected) = torch.cat(margins), torch.cat(rewards).mean(0).tolist()
    smoothing = preference.label_smoothing
    loss = -(1 - smoothing) * F.logsigmoid(margin) - smoothing * F.logsigmoid(-margin)
    return {
        "data": name, "pairs": len(pairs), "loss": float(loss.mean()),
        "reward_accuracy": float((margin > 0).double().mean()), "reward_margin": float(margin.mean()),
        "rewards_chosen": chosen, "rewards_rejected": rejected,
    }  # fmt: skip
