"""How often a BERT names the tokens that were masked, and whether one text follows the other.

The samples are those of the training's validation (data/masked.py), drawn from the run's seed: the same each time.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from meshwright.data.masked import MaskedSamples
from meshwright.data.progress import ShowProgress, silent
from meshwright.data.specials import specials_of
from meshwright.errors import CheckpointError
from meshwright.model import counts_of, to_device
from meshwright.models.bert import BERT
from meshwright.models.section import Bert
from meshwright.tools.evaluate.model import LoadedText, load_text
from meshwright.tools.evaluate.perplexity import BATCH_TOKENS
from meshwright.tools.evaluate.text import TokenStream


@dataclass(frozen=True)
class LoadedBert(LoadedText):
    """A BERT in evaluation mode."""

    model: BERT


@dataclass(frozen=True)
class Answers:
    """To one of BERT's questions. `total_loss` in nats, over all that was asked."""

    asked: int
    right: int
    total_loss: float

    @property
    def facts(self) -> dict[str, int | float]:
        return {
            "asked": self.asked,
            "right": self.right,
            "accuracy": self.right / self.asked,
            "loss": self.total_loss / self.asked,
        }


@dataclass(frozen=True)
class MaskedAccuracy:
    """What a BERT named right."""

    data: str
    samples: int
    context: int
    tokens: Answers
    next_sentence: Answers | None
    """None: the model was not trained on it."""

    @property
    def facts(self) -> dict[str, str | int | float]:
        facts: dict[str, str | int | float] = {"data": self.data, "samples": self.samples, "context": self.context}
        facts |= self.tokens.facts
        if self.next_sentence is not None:
            facts |= {f"next_sentence_{name}": fact for name, fact in self.next_sentence.facts.items()}
        return facts


def load_bert(path: Path, device: str = "auto", context: int | None = None) -> LoadedBert:
    """The BERT of a step folder, or of a run's newest checkpoint. Raises as `load_text`."""
    loaded, model = load_text(path, device, context, "bert")
    assert isinstance(model, BERT)
    return LoadedBert(**vars(loaded), model=model)


@torch.inference_mode()
def masked_accuracy(
    loaded: LoadedBert, stream: TokenStream, progress: ShowProgress = silent, *, batch_tokens: int = BATCH_TOKENS
) -> MaskedAccuracy:
    """Ask for 15 % of a stream's tokens, once. `batch_tokens`: about so many go through the model at once.

    Raises CheckpointError where the tokenizer is not the model's, DataError and ConfigError where no sample fits.
    """
    model = loaded.config.model
    assert isinstance(model, Bert), model
    specials = specials_of(loaded.tokenizer)
    if specials.vocabulary_size > model.vocabulary:
        size = specials.vocabulary_size
        knows = f"and the model knows {model.vocabulary}"
        raise CheckpointError(f"{loaded.folder}: its tokenizer has {size} tokens with BERT's special ones, {knows}")
    samples = MaskedSamples(
        stream.tokens,
        specials,
        loaded.context,
        loaded.config.seed,
        next_sentence=model.next_sentence,
        name=stream.name,
    )
    rows = max(1, batch_tokens // loaded.context)
    labels = loaded.model.labels
    sums = torch.zeros(3, len(labels), dtype=torch.float64)  # asked, right, losses
    for first in range(0, len(samples), rows):
        batch = to_device(samples.held_out(first, min(rows, len(samples) - first)), loaded.device)
        h = loaded.model.trunk(batch)
        for column, name in enumerate(labels):
            sums[2, column] += loaded.model.loss(h, batch, {other: float(other == name) for other in labels}).cpu()
        sums[0] += torch.tensor(counts_of(batch, labels))
        sums[1] += torch.tensor(loaded.model.num_correct(h, batch))
        progress("masked-lm", min(1.0, (first + rows) / len(samples)))
    answers = [Answers(int(asked), int(right), loss) for asked, right, loss in sums.t().tolist()]
    next_sentence = answers[1] if model.next_sentence else None
    return MaskedAccuracy(stream.name, len(samples), loaded.context, answers[0], next_sentence)
