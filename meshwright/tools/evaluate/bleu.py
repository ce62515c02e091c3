"""BLEU (Papineni et al., 2002) of an encoder-decoder's answers, by sacrebleu (Post, 2018, arXiv 1804.08771), whose
signature says how it was computed: scores compare only where signatures agree.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.data.progress import ShowProgress, silent
from meshwright.errors import ConfigError, DataError
from meshwright.tools.evaluate.beam import Beam
from meshwright.tools.evaluate.pairs import TextPairs
from meshwright.tools.evaluate.sequence import LoadedSequence, answers, source_ids, text_of


@dataclass(frozen=True)
class Bleu:
    """Of all answers together, 0 to 100. `cut`: sources longer than the context, of which the beginning was read."""

    data: str
    pairs: int
    cut: int
    beam: Beam
    context: int
    score: float
    brevity_penalty: float
    signature: str

    @property
    def facts(self) -> dict[str, str | int | float]:
        return {
            "data": self.data,
            "pairs": self.pairs,
            "cut": self.cut,
            "context": self.context,
            "beams": self.beam.beams,
            "length_penalty": self.beam.length_penalty,
            "bleu": self.score,
            "brevity_penalty": self.brevity_penalty,
            "signature": self.signature,
        }


def bleu(
    loaded: LoadedSequence, held_out: TextPairs, beam: Beam, samples: int | None = None, progress: ShowProgress = silent
) -> Bleu:
    """Answer the sources of the first `samples` pairs (None: all), and compare with their targets.

    Raises ConfigError on a number of samples that is none, DataError without sacrebleu.
    """
    if samples is not None and samples < 1:
        raise ConfigError.of("--samples", samples, "asks for nothing", "1 or more")
    try:
        from sacrebleu.metrics import BLEU
    except ImportError as error:
        remedy = "pip install 'meshwright[translation]'"
        raise DataError(f"BLEU needs sacrebleu, which is not installed: {remedy}") from error
    pairs = held_out.pairs[:samples]
    whole = [source_ids(loaded, source) for source, _ in pairs]
    read = [ids if len(ids) <= loaded.context else [*ids[: loaded.context - 1], ids[-1]] for ids in whole]
    texts = [text_of(loaded, answer.tokens) for answer in answers(loaded, read, beam, progress=progress)]
    metric = BLEU()
    found = metric.corpus_score(texts, [[target for _, target in pairs]])
    cut = sum(len(ids) > loaded.context for ids in whole)
    signature = str(metric.get_signature())
    return Bleu(held_out.name, len(pairs), cut, beam, loaded.context, found.score, found.bp, signature)
