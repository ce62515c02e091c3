"""Standard streams of this process, which may be closed from the start or break at any time."""

from __future__ import annotations

import io
import os
import re
import sys
from typing import TextIO

_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Control characters except tab and line feed; Unicode characters that end a line or change a text's direction."""


def visible(text: str) -> str:
    """Replace control characters by escapes, so that a file's name or a learned text cannot move the cursor."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def say(*words: object, file: TextIO | None = None, end: str = "\n", flush: bool = False) -> None:
    """Print words from any source: control characters made `visible`, to a stream that may break."""
    text = " ".join(map(str, words))
    print(visible(text), file=PatientStream(sys.stdout if file is None else file), end=end, flush=flush)


class PatientStream(io.TextIOBase):
    """A stream that is muted, without an error, when it breaks (`| head`, a full disk, a lost terminal).

    Characters missing from the stream's encoding are written as escapes.
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
        """The stream's encoding: rich draws boxes with letters if the encoding has no lines."""
        return self._stream.encoding

    def flush(self) -> None:
        flush(self._stream)

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()


def flush(*streams: TextIO) -> None:
    """Flush the streams; mute a stream that can no longer be written to."""
    for stream in streams:
        try:
            stream.flush()
        except OSError:
            mute(stream)


def mute(stream: TextIO) -> None:
    """Discard the stream's buffered and later output. Without this Python fails at the process's end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    # Under the same descriptor, so that the buffers of Python and C are discarded too.
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def escape_unknown_characters() -> None:
    """Make stdout and stderr write escapes for characters missing from the encoding, instead of raising.

    A path, or a text learned by a model, may contain any character.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def open_closed_streams() -> None:
    """Open null streams in place of standard streams closed at the start (`>&-`).

    Else the next opened file gets a standard stream's descriptor, and receives printed output.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest free number
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
