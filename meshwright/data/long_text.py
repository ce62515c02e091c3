"""A large text file as one document: decoded in parts as they are read, never a string as a whole."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator
from pathlib import Path

from meshwright.ranks.foreign import open_named

LARGE_BYTES = 2**24
"""A text file of LARGE_BYTES and more is a LongText: a string and its copies take up to ten times the file's bytes."""
_CHUNK_BYTES = 2**20


class LongText:
    """Bytes begin..end of a file, as text. A slice by characters is a LongText; `str` decodes the whole.

    Raises UnicodeDecodeError for bytes that are no UTF-8, when it is made.
    """

    def __init__(self, path: Path, begin: int, end: int) -> None:
        self._path = path
        self._begin, self._end = begin, end
        # A pass over all bytes, which finds bytes that are no UTF-8.
        self._characters = sum(map(len, self.chunks()))

    @classmethod
    def of_file(cls, path: Path) -> LongText:
        """A file's text without a byte-order mark. Raises UnicodeDecodeError, OSError."""
        with open_named(path) as file:
            begin = len(codecs.BOM_UTF8) if file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8 else 0
        return cls(path, begin, path.stat().st_size)

    def chunks(self) -> Iterator[str]:
        """The text in parts of about a million characters. Raises UnicodeDecodeError with the file's byte."""
        decoder = codecs.getincrementaldecoder("utf-8")()
        with open_named(self._path) as file:
            file.seek(self._begin)
            for start in range(self._begin, self._end, _CHUNK_BYTES):
                stop = min(start + _CHUNK_BYTES, self._end)
                kept = len(decoder.getstate()[0])
                try:
                    yield decoder.decode(file.read(stop - start), final=stop == self._end)
                except UnicodeDecodeError as error:
                    error.start += start - kept
                    raise

    def __len__(self) -> int:
        return self._characters

    def __str__(self) -> str:
        return "".join(self.chunks())

    def __getitem__(self, wanted: slice) -> LongText:
        start, stop, _ = wanted.indices(len(self))
        first, last = sorted((start, max(start, stop)))
        return LongText(self._path, self._byte_of(first), self._byte_of(last))

    def _byte_of(self, character: int) -> int:
        """The byte at which a character begins."""
        byte = self._begin
        for chunk in self.chunks() if character else ():
            if character <= len(chunk):
                return byte + len(chunk[:character].encode())
            character -= len(chunk)
            byte += len(chunk.encode())
        return byte


Text = str | LongText


def chunks_of(text: Text) -> Iterable[str]:
    """The parts of a large file, or the string."""
    return text.chunks() if isinstance(text, LongText) else (text,)
