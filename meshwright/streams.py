"""This process's standard streams, which may be closed from the start or break at any time."""

from __future__ import annotations

import io
import os
import sys
from typing import TextIO


class PatientStream(io.TextIOBase):
    """A stream that outlives its reader: when it breaks (`| head`, a full disk, a lost terminal) it falls silent."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except OSError:
            mute(self._stream)
        return len(text)

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
