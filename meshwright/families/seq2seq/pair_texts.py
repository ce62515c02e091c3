"""The pairs of texts for an evaluation: --data, or the run's held-out pairs (tools/evaluate/texts.py)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from meshwright.data.files import ShowProgress, silent
from meshwright.data.packed import document_ends, is_prepared
from meshwright.families.seq2seq.data_section import PairData
from meshwright.families.seq2seq.load import LoadedSequence
from meshwright.families.seq2seq.pairs import pair_corpus
from meshwright.ranks.errors import ConfigError, DataError
from meshwright.tools.evaluate.texts import held_out


@dataclass(frozen=True)
class TextPairs:
    """Pairs of a source and a target. `name`: the name of the data in the result."""

    pairs: list[tuple[str, ...]]
    name: str


def asked_pairs(loaded: LoadedSequence, data: str | None, target: str | None) -> PairData | None:
    """Return the section of the pairs to measure: `data`, or the run's own pairs.

    None if the run learned spans and `data` has no pairs. Raises ConfigError for a `target` without `data`.
    """
    learned = loaded.config.data if isinstance(loaded.config.data, PairData) else None
    if data is not None:
        given = (learned or PairData(kind="pairs")).model_copy(update={"source": data, "target": target})
        # A model that learned spans is measured on pairs only if the file has no other reading.
        return given if learned or PairData.claims(given.model_dump()) else None
    if target is not None:
        raise ConfigError.of("--target", target, "has no partner", "with --data, the file of its sources")
    return learned


def pairs_for(
    loaded: LoadedSequence, data: str | None, target: str | None = None, progress: ShowProgress = silent
) -> TextPairs:
    """Read the pairs to measure. Raises DataError for unreadable data, ConfigError for a run that has no pairs."""
    asked = asked_pairs(loaded, data, target)
    if data is None and asked is None and loaded.steps:
        raise ConfigError.of("--data", "none", f"leaves {loaded.folder} without pairs: it learned spans", "a tsv file")
    if data is not None and not is_prepared(Path(data).expanduser()):
        unpacked = pair_corpus(asked or PairData(kind="pairs", source=data, target=target))
        pairs, name = [tuple(map(str, pair)) for pair in unpacked.read()], unpacked.where
    else:
        corpus, name = held_out(loaded, data, asked or PairData(kind="pairs"), progress, "pairs")
        tokens = corpus.tokens("validation")
        # The last piece, after the last end token, is empty.
        documents = np.split(tokens, document_ends(tokens, corpus.header.end) + 1)[:-1]
        texts = [corpus.tokenizer.decode(document[:-1].tolist()) for document in documents]
        pairs = list(zip(texts[::2], texts[1::2], strict=True))  # a source and its target in turn
    if not pairs:
        raise DataError(f"{name}: holds no pair")
    return TextPairs(pairs, name)
