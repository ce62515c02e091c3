"""One split's token file while it is written: texts in, little-endian ids out, counts and checksum kept on the way."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

import numpy as np

from meshwright.data.checksums import FileSum
from meshwright.data.format import SplitFacts
from meshwright.data.tokenizer import Tokenizer, pieces

# Characters encoded by one call of the library: enough to keep all cores busy, little enough to hold in memory.
_BATCH_CHARACTERS = 2**22


class SplitWriter:
    """Writes documents as token ids, an end token behind each. Use as a context manager; then read the facts."""

    def __init__(self, path: Path, tokenizer: Tokenizer, dtype: np.dtype) -> None:
        self._file = path.open("wb")
        self._tokenizer = tokenizer
        self._dtype = dtype
        self._sum = FileSum()
        self._batch: list[tuple[str, bool]] = []
        self._batch_characters = 0
        self._tokens = self._documents = self._words = 0

    def __enter__(self) -> SplitWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None:
            self._flush()
        self._file.close()

    def add(self, text: str) -> None:
        """Append one document."""
        parts = list(pieces(text))
        for at, part in enumerate(parts, start=1):
            self._words += len(part.split())  # exact: pieces are cut in front of a space
            self._batch.append((part, at == len(parts)))
            self._batch_characters += len(part)
            if self._batch_characters >= _BATCH_CHARACTERS:
                self._flush()
        self._documents += 1

    @property
    def facts(self) -> SplitFacts:
        """The counts, complete after the block has ended."""
        return SplitFacts(tokens=self._tokens, documents=self._documents, words=self._words)

    @property
    def sha256(self) -> str:
        """The file's checksum, complete after the block has ended."""
        return self._sum.sha256

    @property
    def regions(self) -> tuple[str, ...]:
        """The regions' checksums, complete after the block has ended."""
        return self._sum.regions

    def _flush(self) -> None:
        encoded = self._tokenizer.encode_batch(part for part, _ in self._batch)
        for ids, (_, is_last) in zip(encoded, self._batch, strict=True):
            if is_last:
                ids.append(self._tokenizer.end)
            data = np.array(ids, dtype=self._dtype).tobytes()
            self._file.write(data)
            self._sum.update(data)
            self._tokens += len(ids)
        self._batch, self._batch_characters = [], 0
