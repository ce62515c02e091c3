"""The texts to measure: streams of tokens, and pairs of texts.

| --data | a stream of text, spans | pairs |
|---|---|---|
| none | the run's held-out split | the same |
| a prepared folder | its validation split | the same |
| FILE.tsv, FILE.jsonl; FILE and --target FILE | - | all pairs |
| any other text | the whole text | - |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from meshwright.data.corpus import documents
from meshwright.data.files import ShowProgress, silent
from meshwright.data.marks_section import NONE
from meshwright.data.packed import PackedCorpus, is_prepared, open_packed
from meshwright.data.packing import corpus_for
from meshwright.data.section import TokenSection
from meshwright.data.tokenizer import pieces
from meshwright.ranks.environment import cache_folder
from meshwright.ranks.errors import ConfigError, DataError
from meshwright.tools.evaluate.load import LoadedText


@dataclass(frozen=True)
class TokenStream:
    """Documents in sequence, with begin and end marks as in training (data/marks.py)."""

    tokens: np.ndarray
    """Ids [n]. The first is a mark: the context of the text's first token."""
    words: int
    """White-space separated words of the original text."""
    name: str
    """The data's name in the result."""
    corpus: PackedCorpus | None = None
    """The prepared folder, if the stream is a validation split."""


def stream_for(loaded: LoadedText, data: str | None, progress: ShowProgress = silent) -> TokenStream:
    """Return the text to measure: `data`, else the held-out split of the run that wrote the checkpoint.

    `data`: a prepared folder (for the validation split), or any source that `documents` reads: text, jsonl, parquet, a
    folder of these, stdlib. Raises DataError if the data cannot be read, has no text, or was tokenized with another
    tokenizer.
    """
    if data is not None and not is_prepared(Path(data).expanduser()):
        return _encoded(loaded, data, progress)
    trained_on = loaded.config.data
    assert isinstance(trained_on, TokenSection), trained_on
    corpus, name = held_out(loaded, data, trained_on, progress)
    tokens = corpus.tokens("validation")
    begins, ends = corpus.header.begin is not None, corpus.header.ends
    if trained_on.separate and not ends:
        raise DataError(f"{name}: was prepared without end tokens, by which this run tells documents apart")
    # The first token is predicted from a mark: the one that begins a text, or the end mark of the previous document.
    # Without marks the first token has no context, in training as here, and is not scored.
    first = np.array([] if begins or not ends else [corpus.header.end], dtype=tokens.dtype)
    return TokenStream(np.concatenate([first, tokens]), corpus.header.validation.words, name, corpus)


def _encoded(loaded: LoadedText, source: str, progress: ShowProgress) -> TokenStream:
    words, tokenizer = 0, loaded.tokenizer
    asked = loaded.config.data
    assert isinstance(asked, TokenSection), asked
    ended = [tokenizer.end] if asked.asked.end != NONE else []

    def parts() -> Iterator[np.ndarray]:
        nonlocal words
        for index, text in enumerate(documents(source)):
            progress(f"tokenizing: {words} words", None)
            # As in a prepared folder: without marks the first token has nothing in front.
            front = [] if tokenizer.begin is None and not ended else [tokenizer.first]
            between = [*ended, *tokenizer.opening] if index else front
            yield np.array(between, dtype=np.int64)
            for segment in pieces(text):
                words += len(segment.split())  # exact: pieces are cut before a space
                yield np.array(tokenizer.encode(segment), dtype=np.int64)

    encoded = list(parts())
    if not encoded:
        raise DataError(f"{source}: holds no text")
    return TokenStream(np.concatenate(encoded), words, source)


def held_out(
    loaded: LoadedText, data: str | None, asked: TokenSection, progress: ShowProgress, corpus_kind: str = "text"
) -> tuple[PackedCorpus, str]:
    """Return a prepared folder, and the name of the folder's validation split for the result.

    Args:
        loaded: The model.
        data: A prepared folder; None: the folder prepared for the run.
        asked: The run's data section.
        progress: Called while data are prepared.
        corpus_kind: The kind of records that the folder must have.

    Raises:
        DataError: The records are of another kind, or were tokenized with another tokenizer than the model's; or no run
            held out a split.
        ConfigError: The run mixes several sources, and `data` is None.
    """
    if data is not None:
        folder = Path(data).expanduser()
        corpus, name = open_packed(folder), f"validation split of {folder}"
    elif loaded.steps == 0:
        raise DataError(f"{loaded.folder} was not trained here, so it has no held-out split of its own: give --data")
    elif asked.mixed:
        raise ConfigError.of(
            "--data", "none", "does not say which source of the run's mixture", ", ".join(asked.sources)
        )
    else:
        corpus = corpus_for(asked, cache_folder(), progress)
        name = f"the run's held-out split (data.source={asked.source})"
    if not corpus.header.validation.tokens:
        raise DataError(f"{name}: is empty, as data.validation=0 held nothing out: give --data")
    if corpus.header.kind != corpus_kind:
        wanted = "text is: give it as --data" if corpus_kind == "text" else f"{corpus_kind} are wanted"
        raise DataError(f"{corpus.folder}: was prepared of {corpus.header.kind}, and {wanted}")
    if corpus.tokenizer.to_json() != loaded.tokenizer.to_json():
        remedy = "give the text itself as --data"
        raise DataError(f"{name}: was tokenized with another tokenizer than that of {loaded.folder}; {remedy}")
    return corpus, name
