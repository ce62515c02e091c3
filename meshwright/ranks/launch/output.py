"""Output of workers that another process starts: the launcher's stdout and stderr, and the last lines of each rank.

mpiexec forwards output through a pseudo-terminal of its own. A progress bar would then assume a terminal although the
user redirected to a file, would not know the window's width, and would mix with mpiexec's messages. A fork server keeps
the streams of its own start. So each worker receives the launcher's stdout over a Unix socket.

A worker's stderr is a pipe, which the launcher copies to the launcher's stderr. The last bytes are kept, since they may
explain the end of a rank without a report. A worker of the fork server connects in `receive_output`. Until then, while
the user's script is imported, stderr is a file (`keep_early_errors`); the worker then writes the content to the pipe.
"""

from __future__ import annotations

import io
import os
import select
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path

from meshwright.ranks.errors import LaunchError
from meshwright.ranks.streams import escape_unknown_characters

SOCKET = "output"
"""The socket's name in the launch folder."""

_TIMEOUT_SECONDS = 30.0
_DRAIN_SECONDS = 1.0
"""Seconds to wait for a pipe's end: a child process of the worker may still hold the pipe."""
_LINE_MILLISECONDS = 20
_KEPT_BYTES = 8192
_LAST_LINES = 20


class _Tee:
    """A pipe copied to this process's stderr. `kept`: the last bytes of the content."""

    def __init__(self) -> None:
        self._reader, self.writer = os.pipe()
        self.kept = b""
        self.thread = threading.Thread(target=self._copy, daemon=True)

    def _copy(self) -> None:
        more_comes = select.poll()  # select() accepts no descriptor from 1024 on
        more_comes.register(self._reader, select.POLLIN)
        while data := os.read(self._reader, 2**16):
            # A line may be written in two parts: wait for the end of the line, so that ranks' lines do not mix.
            while not data.endswith(b"\n") and more_comes.poll(_LINE_MILLISECONDS):
                if len(data) > _KEPT_BYTES or not (more := os.read(self._reader, 2**16)):
                    break
                data += more
            self.kept = (self.kept + data)[-_KEPT_BYTES:]
            with suppress(OSError):  # stderr is closed: the worker continues
                while data:
                    data = data[os.write(2, data) :]
        os.close(self._reader)


class OutputServer:
    """The launcher's side: until `close`, each client receives this process's stdout and a pipe to its stderr."""

    def __init__(self, path: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(str(path))
        except OSError as error:  # a Unix socket's name has about 100 characters
            self._listener.close()
            raise LaunchError(f"cannot open a socket at {path} ({error}): set TMPDIR to a short local path") from error
        self._listener.listen(1024)
        self._tees: dict[int, _Tee] = {}
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                worker, _ = self._listener.accept()
            except OSError:  # shut down
                return
            with worker, suppress(OSError, ValueError):  # a worker that died meanwhile
                worker.settimeout(_TIMEOUT_SECONDS)
                rank = int(worker.recv(16))
                tee = _Tee()
                tee.thread.start()
                self._tees[rank] = tee  # after the start, since `last_words` joins the thread
                try:
                    socket.send_fds(worker, [b"x"], [1, tee.writer])
                finally:
                    os.close(tee.writer)

    def last_words(self, rank: int) -> str:
        """Return the last lines that an ended rank wrote to stderr."""
        if rank not in self._tees:
            return ""
        self._tees[rank].thread.join(_DRAIN_SECONDS)
        return last_lines(self._tees[rank].kept)

    def close(self) -> None:
        """Accept no more clients, and wait for the rest of the ranks' stderr."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        for tee in self._tees.values():
            tee.thread.join(_DRAIN_SECONDS)


def receive_output(path: Path, rank: int) -> None:
    """Replace this process's stdout by the launcher's, and stderr by a pipe to the launcher's. The worker's side."""
    escape_unknown_characters()  # first: Python then asks a stream for its position, and a new pipe has none
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as launcher:
        launcher.settimeout(_TIMEOUT_SECONDS)
        launcher.connect(str(path))
        launcher.sendall(str(rank).encode())
        _, descriptors, _, _ = socket.recv_fds(launcher, 1, 2)
    for descriptor, target in zip(descriptors, (1, 2), strict=True):
        os.dup2(descriptor, target)
        os.close(descriptor)
    for stream in (sys.stdout, sys.stderr):
        # Python chose buffering by the original stdout.
        assert isinstance(stream, io.TextIOWrapper), stream
        stream.reconfigure(line_buffering=True)


def keep_early_errors(folder: Path) -> None:
    """Give each process forked from this one a file in `folder` as stderr."""

    def after_fork() -> None:
        with suppress(OSError):  # the launcher has ended and removed the folder
            descriptor = os.open(folder / f"stderr-{os.getpid()}", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
            os.dup2(descriptor, 2)
            os.close(descriptor)

    os.register_at_fork(after_in_child=after_fork)


def take_early_errors(folder: Path, pid: int) -> bytes:
    """Read and remove a process's stderr file; return the content, empty without a file."""
    path = folder / f"stderr-{pid}"
    try:
        content = path.read_bytes()
        path.unlink()
    except OSError:
        return b""
    return content


def last_lines(content: bytes) -> str:
    """Decode the last lines of a process's output; bytes that are no text are replaced."""
    lines = content[-_KEPT_BYTES:].decode(errors="replace").rstrip().splitlines()
    return "\n".join(lines[-_LAST_LINES:])
