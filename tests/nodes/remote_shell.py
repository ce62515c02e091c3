"""A remote shell for nodes without sshd: `python remote_shell.py serve` on a node, then `... HOST COMMAND...` here.

Open MPI and others use this shell as `ssh HOST COMMAND`: stdout and the exit code are returned. The shell listens on
the node's own network alone, which only the test's nodes can reach.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time

from tests.patience import PATIENCE_SECONDS

PORT = 2222
START_SECONDS = PATIENCE_SECONDS
END = b"\nexit code "


def serve() -> None:
    """Run received commands until the node ends."""
    listener = socket.create_server(("", PORT))
    while True:
        caller, _ = listener.accept()
        threading.Thread(target=_answer, args=(caller,), daemon=True).start()


def _answer(caller: socket.socket) -> None:
    with caller:
        command = caller.makefile("r").readline().strip()
        done = subprocess.run(command, shell=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        caller.sendall(done.stdout + END + str(done.returncode).encode())


def _connect(host: str) -> socket.socket:
    end = time.monotonic() + START_SECONDS
    while True:
        try:
            return socket.create_connection((host, PORT))
        except ConnectionRefusedError:  # the shell does not listen yet
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def ask(host: str, command: str) -> int:
    """Run the command on the host, and return the exit code."""
    with _connect(host) as there:
        there.sendall(command.encode() + b"\n")
        output, _, code = there.makefile("rb").read().rpartition(END)
    sys.stdout.buffer.write(output)
    return int(code)


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        serve()
    sys.exit(ask(sys.argv[1], " ".join(sys.argv[2:])))
