"""Hand the launcher's stdout and stderr to the workers, which some other process starts.

mpiexec forwards its ranks' output through a pseudo-terminal of its own: a progress bar then believes in a terminal
where the user redirected to a file, does not know the window's width, and mixes with mpiexec's own messages. A fork
server keeps the streams of its own start. So each worker fetches the launcher's real descriptors over a Unix socket,
and writes as if the launcher had forked it.
"""

from __future__ import annotations

import io
import os
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from meshwright.errors import LaunchError

SOCKET = "output"
"""The socket's name in the launch folder."""

_TIMEOUT_SECONDS = 30.0


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


def flush(stream: TextIO) -> None:
    """Flush the stream; one that cannot be written to any more falls silent."""
    try:
        stream.flush()
    except OSError:
        mute(stream)


def mute(stream: TextIO) -> None:
    """Send what the stream still holds, and all that follows, nowhere; or Python fails at the process's end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def open_closed_streams() -> None:
    """Give this process the standard streams that it was started without (`>&-`), silent ones.

    Else the next file that anything opens gets a stream's number, and receives what is printed.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


class OutputServer:
    """The launcher's side. While entered, whoever connects is given our stdout and stderr."""

    def __init__(self, path: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(str(path))
        except OSError as error:  # a Unix socket's name has about 100 characters
            self._listener.close()
            raise LaunchError(f"cannot open a socket at {path} ({error}): set TMPDIR to a short local path") from error
        self._listener.listen(1024)
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def _serve(self) -> None:
        while True:
            try:
                worker, _ = self._listener.accept()
            except OSError:  # shut down
                return
            with worker, suppress(OSError):  # a worker that died meanwhile
                socket.send_fds(worker, [b"x"], [1, 2])

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()


def receive_output(path: Path) -> None:
    """A worker's side: replace this process's stdout and stderr by the launcher's."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as launcher:
        launcher.settimeout(_TIMEOUT_SECONDS)
        launcher.connect(str(path))
        _, descriptors, _, _ = socket.recv_fds(launcher, 1, 2)
    for descriptor, own in zip(descriptors, (1, 2), strict=True):
        os.dup2(descriptor, own)
        os.close(descriptor)
    for stream in (sys.stdout, sys.stderr):
        # Python chose the buffering by what we were started with.
        assert isinstance(stream, io.TextIOWrapper), stream
        stream.reconfigure(line_buffering=True)
