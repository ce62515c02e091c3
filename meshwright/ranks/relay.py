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
_NONCE_BYTES, _PROOF_BYTES = 32, 32
ACCEPTED = b"+"
_LISTENER = 3
_PATIENCE_SECONDS = 10.0
_PART_BYTES = 2**16


class NoGateError(Exception):
    """A server without a gate's greeting."""


def proof(secret: bytes, nonce: bytes) -> bytes:
    """The answer to a gate's number."""
    return hmac.new(secret, nonce, hashlib.sha256).digest()


def knows_us(connection: socket.socket, secret: bytes) -> bool:
    """Answer a gate; whether it takes the answer. Raises NoGateError, and OSError where the connection breaks."""
    wanted = len(GREETING) + _NONCE_BYTES
    heard = b""
    while len(heard) < wanted and (part := connection.recv(wanted - len(heard))):
        heard += part
    if not heard.startswith(GREETING) or len(heard) < wanted:
        raise NoGateError
    connection.sendall(proof(secret, heard[len(GREETING) :]))
    with suppress(ConnectionError):  # a gate that hangs up has refused
        return connection.recv(1) == ACCEPTED
    return False


def start(role: str, listener: socket.socket, address: str, port: int, secret: bytes) -> None:
    """Start a relay for the life of this process; the listener is the relay's from now on."""
    reading, _alive = os.pipe()  # the second end stays open for the rest of this process's life
    os.write(_alive, secret + b"\n")
    os.posix_spawn(
        sys.executable,
        [sys.executable, "-I", "-S", __file__, role, address, str(port)],
        {"PATH": os.defpath},
        file_actions=[(os.POSIX_SPAWN_DUP2, reading, 0), (os.POSIX_SPAWN_DUP2, listener.fileno(), _LISTENER)],
    )
    os.close(reading)
    listener.close()


class Relay:
    """One end's process: `role`, and the address and port to forward connections to."""

    def __init__(self, role: str, address: str, port: int, secret: bytes) -> None:
        self.role, self.place, self.secret = role, (address, port), secret

    async def run(self, listener: socket.socket) -> None:
        """Pass connections on until stdin ends."""
        loop = asyncio.get_running_loop()
        ended = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(ended), sys.stdin)
        server = await asyncio.start_server(self._take, sock=listener, backlog=2048)
        async with server:
            await ended.read()

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        other: asyncio.StreamWriter | None = None
        with suppress(OSError, asyncio.IncompleteReadError, TimeoutError, ValueError):
            async with asyncio.timeout(_PATIENCE_SECONDS):
                if self.role == "gate":
                    nonce = secrets.token_bytes(_NONCE_BYTES)
                    writer.write(GREETING + nonce)
                    answer = await reader.readexactly(_PROOF_BYTES)
                    if not hmac.compare_digest(answer, proof(self.secret, nonce)):
                        raise ConnectionRefusedError
                    writer.write(ACCEPTED)
                far, other = await asyncio.open_connection(*self.place)
                if self.role == "client":
                    greeted = await far.readexactly(len(GREETING) + _NONCE_BYTES)
                    other.write(proof(self.secret, greeted[len(GREETING) :]))
                    await far.readexactly(1)
            await asyncio.gather(_copy(reader, other), _copy(far, writer))
        for one in (writer, other):
            if one is not None:
                one.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while part := await reader.read(_PART_BYTES):
            writer.write(part)
            await writer.drain()
    finally:
        writer.close()  # an end that has left is gone for the other as well


def main(role: str, address: str, port: str) -> None:
    """Run one end's process."""
    # Launchers ask every process of a job to stop; the relay is needed until its rank has ended.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    secret = b""
    while not secret.endswith(b"\n") and (part := os.read(0, 1)):
        secret += part
    listener = socket.socket(fileno=_LISTENER)
    asyncio.run(Relay(role, address, int(port), secret[:-1]).run(listener))


if __name__ == "__main__":
    main(*sys.argv[1:])
