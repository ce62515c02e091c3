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
from typing import Self

from meshwright.errors import LaunchError

SOCKET = "output"
"""The socket's name in the launch folder."""

_TIMEOUT_SECONDS = 30.0


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
