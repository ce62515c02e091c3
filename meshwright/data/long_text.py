"""A large text file as one document, decoded part by part, never as a whole string."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator
from pathlib import Path

from meshwright.ranks.foreign import open_named

LARGE_BYTES = 2**24
"""The least size of a text file for a LongText. A string with its copies takes up to ten times the file's bytes."""
_CHUNK_BYTES = 2**20


class LongText:
    """Bytes begin..end of a file, as text. A slice by characters is a LongText; `str` decodes the whole.

    The constructor raises UnicodeDecodeError for bytes that are no UTF-8.
    """

    def __init__(self, path: Path, begin: int, end: int) -> None:
        self._path = path
        self._begin, self._end = begin, end
        # This pass over all bytes also finds bytes that are no UTF-8.
        self._characters = sum(map(len, self.chunks()))

    @classmethod
    def of_file(cls, path: Path) -> LongText:
        """Return a file's text without a byte-order mark.

        Raises:
            UnicodeDecodeError: the file is no UTF-8.
            OSError: the file cannot be read.
        """
        with open_named(path) as file:
            begin = len(codecs.BOM_UTF8) if file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8 else 0
        return cls(path, begin, path.stat().st_size)

    def chunks(self) -> Iterator[str]:
        """Yield the text in parts of about a million characters.

        Raises:
            UnicodeDecodeError: with the position of the byte in the file.
        """
        decoder = codecs.getincrementaldecoder("utf-8")()
        with open_named(self._path) as file:
            file.seek(self._begin)
            for start in range(self._begin, self._end, _CHUNK_BYTES):
                stop = min(start + _CHUNK_BYTES, self._end)
                undecoded = len(decoder.getstate()[0])
                try:
                    yield decoder.decode(file.read(stop - start), final=stop == self._end)
                except UnicodeDecodeError as error:
                    error.start += start - undecoded
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
        """Return the position of the first byte of a character."""
        byte = self._begin
        for chunk in self.chunks() if character else ():
            if character <= len(chunk):
                return byte + len(chunk[:character].encode())
            character -= len(chunk)
            byte += len(chunk.encode())
        return byte


Text = str | LongText


def chunks_of(text: Text) -> Iterable[str]:
    """Return the parts of a large file, or the string as one part."""
    return text.chunks() if isinstance(text, LongText) else (text,)
