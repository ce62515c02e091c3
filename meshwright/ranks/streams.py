"""This process's standard streams, which may be closed from the start or break at any time."""

from __future__ import annotations

import io
import os
import re
import sys
from typing import TextIO

_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Control characters but tab and line feed; of Unicode's those that end a line or turn the direction of a text."""


def visible(text: str) -> str:
    """Write control characters as escapes: a file's name or a learned text moves no cursor and hides no letter."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def say(*words: object, file: TextIO | None = None, end: str = "\n", flush: bool = False) -> None:
    """Print words that may be somebody else's: with `visible` control characters, to a stream that may break."""
    text = " ".join(map(str, words))
    print(visible(text), file=PatientStream(sys.stdout if file is None else file), end=end, flush=flush)


class PatientStream(io.TextIOBase):
    """A stream that outlives its reader: when it breaks (`| head`, a full disk, a lost terminal) it falls silent.

    A character that the stream's encoding lacks is written as its escape.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except UnicodeEncodeError as error:
            return self.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding)) and len(text)
        except OSError:
            mute(self._stream)
        return len(text)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The stream's encoding: rich draws its boxes of letters where the encoding has no lines."""
        return self._stream.encoding

    def flush(self) -> None:
        flush(self._stream)

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()


def flush(*streams: TextIO) -> None:
    """Flush the streams; one that cannot be written to any more falls silent."""
    for stream in streams:
        try:
            stream.flush()
        except OSError:
            mute(stream)


def mute(stream: TextIO) -> None:
    """Send what the stream still holds, and all that follows, nowhere; or Python fails at the process's end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    # Under the same descriptor, so that what Python and C still hold for it goes nowhere, too.
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def escape_unknown_characters() -> None:
    """Have stdout and stderr write a character that their encoding lacks as its escape, instead of ending the process:
    a path, or a text that a model has learned, may hold any character."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def open_closed_streams() -> None:
    """Give this process silent streams for those that it was started without (`>&-`): else the next file that anything
    opens gets a stream's number, and receives what is printed."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
