"""A store's connections between hosts, each begun by a proof of the job's secret.

    rank 0's host                                   another host
    store at loopback <- relay `gate` <---------- relay `client` at loopback <- the rank's store client

TCPStore has no password. A process of our own runs at either end: the gate listens at the address for other hosts,
sends a new random number on each connection, and forwards the connection to the store after a correct answer: the
number's HMAC under the secret. The secret is never sent. Later bytes are not encrypted.

Runs as a script, `python -I -S relay.py gate|client ADDRESS PORT`: a thread in the rank would need Python's lock, which
a rank may hold while waiting for the store. The script listens at descriptor 3, reads the secret from stdin, and ends
at the end of stdin: when the rank's process ends.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import secrets
import signal
import socket
import sys
from contextlib import suppress

GREETING = b"meshwright store 1\n"
"""The gate's first bytes: a store or another program sends none of them."""
NO_FILE = "0" * 16
"""The file's name in a greeting if the secret is MESHWRIGHT_SECRET's."""
_NONCE_BYTES, _PROOF_BYTES = 32, 32
_GREETING_BYTES = len(GREETING) + len(NO_FILE) + _NONCE_BYTES
_BLIND, _MOST_BLIND = b"blind ", 1000
ACCEPTED = b"+"
_LISTENER = 3
_PATIENCE_SECONDS = 10.0
_PART_BYTES = 2**16


class NoGateError(Exception):
    """A server without a gate's greeting."""


def proof(secret: bytes, nonce: bytes) -> bytes:
    """The answer to a gate's number."""
    return hmac.new(secret, nonce, hashlib.sha256).digest()


def greeted(connection: socket.socket) -> tuple[str, bytes]:
    """Read a gate's greeting: the name of the secret's file, and the number to answer.

    Raises:
        NoGateError: The server's first bytes are no greeting.
        OSError: The connection breaks.
    """
    heard = b""
    while len(heard) < _GREETING_BYTES and (chunk := connection.recv(_GREETING_BYTES - len(heard))):
        heard += chunk
    name, nonce = heard[len(GREETING) : -_NONCE_BYTES], heard[-_NONCE_BYTES:]
    if len(heard) < _GREETING_BYTES or not heard.startswith(GREETING) or not name.isalnum():
        raise NoGateError
    return name.decode(), nonce


def admitted(connection: socket.socket, secret: bytes, nonce: bytes) -> bool:
    """Answer a gate's number; whether the answer is right. Raises OSError if the connection breaks."""
    connection.sendall(proof(secret, nonce))
    with suppress(ConnectionError):  # a gate closes after a wrong answer
        return connection.recv(1) == ACCEPTED
    return False


def tell_blind(connection: socket.socket, who: str) -> None:
    """Tell a gate that a rank does not see the secret's file. Not proved: rank 0 takes it for a reason, if a rank is
    missing, and for nothing else."""
    connection.sendall((_BLIND + who.encode("ascii", "replace"))[:_PROOF_BYTES].ljust(_PROOF_BYTES, b"\0"))


def start(role: str, listener: socket.socket, address: str, port: int, secret: bytes, name: str = "") -> int:
    """Start a relay for the life of this process; the listener is the relay's from now on.

    Args:
        role: `gate` or `client`.
        listener: Where the relay takes connections.
        address: The host to forward connections to, at `port`.
        port: See `address`.
        secret: The job's secret.
        name: Of a gate: the name of the secret's file.

    Returns:
        A descriptor with a line for each rank that says it is blind.
    """
    reading, _alive = os.pipe()  # the second end stays open for the rest of this process's life
    blind, told = os.pipe()
    os.set_blocking(blind, False)
    os.write(_alive, secret + b"\n")
    os.posix_spawn(
        sys.executable,
        [sys.executable, "-I", "-S", __file__, role, address, str(port), name or NO_FILE],
        {"PATH": os.defpath},
        file_actions=[
            (os.POSIX_SPAWN_DUP2, reading, 0),
            (os.POSIX_SPAWN_DUP2, told, 1),
            (os.POSIX_SPAWN_DUP2, listener.fileno(), _LISTENER),
        ],
    )
    os.close(reading)
    os.close(told)
    listener.close()
    return blind


class Relay:
    """One end's process: `role`, and the address and port to forward connections to."""

    def __init__(self, role: str, address: str, port: int, secret: bytes, name: str) -> None:
        self.role, self.place, self.secret, self.name = role, (address, port), secret, name.encode()
        self.blind: set[bytes] = set()

    async def run(self, listener: socket.socket) -> None:
        """Pass connections on until stdin ends."""
        loop = asyncio.get_running_loop()
        ended = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(ended), sys.stdin)
        server = await asyncio.start_server(self._take, sock=listener, backlog=2048)
        async with server:
            await ended.read()

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_writer: asyncio.StreamWriter | None = None
        with suppress(OSError, asyncio.IncompleteReadError, TimeoutError, ValueError):
            async with asyncio.timeout(_PATIENCE_SECONDS):
                if self.role == "gate":
                    nonce = secrets.token_bytes(_NONCE_BYTES)
                    writer.write(GREETING + self.name + nonce)
                    answer = await reader.readexactly(_PROOF_BYTES)
                    if answer.startswith(_BLIND) and answer not in self.blind and len(self.blind) < _MOST_BLIND:
                        self.blind.add(answer)
                        os.write(1, answer.removeprefix(_BLIND).rstrip(b"\0") + b"\n")
                    if not hmac.compare_digest(answer, proof(self.secret, nonce)):
                        raise ConnectionRefusedError
                    writer.write(ACCEPTED)
                far, far_writer = await asyncio.open_connection(*self.place)
                if self.role == "client":
                    far_writer.write(proof(self.secret, (await far.readexactly(_GREETING_BYTES))[-_NONCE_BYTES:]))
                    await far.readexactly(1)
            await asyncio.gather(_copy(reader, far_writer), _copy(far, writer))
        for stream in (writer, far_writer):
            if stream is not None:
                stream.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while chunk := await reader.read(_PART_BYTES):
            writer.write(chunk)
            await writer.drain()
    finally:
        writer.close()  # an end that has left is gone for the other as well


def main(role: str, address: str, port: str, name: str) -> None:
    """Run one end's process."""
    # Launchers ask every process of a job to stop; the relay is needed until its rank has ended.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(signum, signal.SIG_IGN)
    secret = b""
    while not secret.endswith(b"\n") and (byte := os.read(0, 1)):
        secret += byte
    listener = socket.socket(fileno=_LISTENER)
    asyncio.run(Relay(role, address, int(port), secret[:-1], name).run(listener))


if __name__ == "__main__":
    main(*sys.argv[1:])
