"""What perplexity is measured on: a stream of tokens, and how many words of the original text they stand for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from meshwright.data.corpus import documents
from meshwright.data.packed import PackedCorpus, is_prepared, open_packed
from meshwright.data.packing import corpus_for
from meshwright.data.progress import ShowProgress, silent
from meshwright.data.section import TokenSection
from meshwright.data.tokenizer import Tokenizer, pieces
from meshwright.environment import cache_folder
from meshwright.errors import DataError
from meshwright.tools.evaluate.model import LoadedText


@dataclass(frozen=True)
class TokenStream:
    """Documents one behind the other, as in training: an end token first and between them."""

    tokens: np.ndarray
    """Ids [n]. The first is the end token: the context of the text's first token."""
    words: int
    """White-space separated words of the original text."""
    name: str
    """What was read, for the reader of the result."""


def stream_for(loaded: LoadedText, data: str | None, progress: ShowProgress = silent) -> TokenStream:
    """The text to measure: `data`, or without it the held-out split of the run that wrote the checkpoint.

    `data`: a prepared folder (its validation split), or whatever `documents` reads: text, jsonl, parquet, a folder of
    these, stdlib. Raises DataError where it cannot be read, is empty, or was tokenized with another tokenizer.
    """
    if data is not None and not is_prepared(Path(data).expanduser()):
        return _encoded(data, loaded.tokenizer, progress)
    if data is not None:
        folder = Path(data).expanduser()
        return _validation_split(open_packed(folder), loaded, f"validation split of {folder}")
    check_trained(loaded)
    asked = loaded.config.data
    assert isinstance(asked, TokenSection), asked
    corpus = corpus_for(asked, cache_folder(), progress)
    name = f"the run's held-out split (data.source={loaded.config.data.source})"
    return _validation_split(corpus, loaded, name)


def check_trained(loaded: LoadedText) -> None:
    """Raises DataError where no run here held anything out."""
    if loaded.steps == 0:
        raise DataError(f"{loaded.folder} was not trained here, so it has no held-out split of its own: give --data")


def check_tokenizer(corpus: PackedCorpus, loaded: LoadedText, name: str) -> None:
    """Raises DataError where a corpus was tokenized with another tokenizer than the model's."""
    if corpus.tokenizer.to_json() != loaded.tokenizer.to_json():
        remedy = "give the text itself as --data"
        raise DataError(f"{name}: was tokenized with another tokenizer than that of {loaded.folder}; {remedy}")


def _validation_split(corpus: PackedCorpus, loaded: LoadedText, name: str) -> TokenStream:
    check_tokenizer(corpus, loaded, name)
    tokens = np.asarray(corpus.tokens("validation"))
    first = np.array([corpus.header.end], dtype=tokens.dtype)
    return TokenStream(np.concatenate([first, tokens]), corpus.header.validation.words, name)


def _encoded(source: str, tokenizer: Tokenizer, progress: ShowProgress) -> TokenStream:
    words = 0

    def parts() -> Iterator[np.ndarray]:
        nonlocal words
        for text in documents(source):
            progress(f"tokenizing: {words} words", None)
            yield np.array([tokenizer.end], dtype=np.int64)
            for part in pieces(text):
                words += len(part.split())  # exact: pieces are cut in front of a space
                yield np.array(tokenizer.encode(part), dtype=np.int64)

    found = list(parts())
    if not found:
        raise DataError(f"{source}: holds no text")
    return TokenStream(np.concatenate(found), words, source)
