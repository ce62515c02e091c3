"""Processes that share a search: this one, and forks of it, which answer what they are asked, each with recordings of
its own.

A fork has what this process had then, and needs no pickling of it; what it is asked, and its answers, go through a
pipe. It must be made before torch has gone backward here: on a machine with GPUs autograd's threads outlive no fork.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Concatenate, Self

Asked = Callable[Concatenate[Any, ...], Any]


class SharedCounter:
    """Numbers from 1 on, each of which one process takes; 0 is the first process' own."""

    def __init__(self) -> None:
        self._next = multiprocessing.Value("l", 1)

    def restart(self) -> None:
        """Begin at 1 again, when no process takes any."""
        self._next.value = 1

    def __iter__(self) -> Iterator[int]:
        while True:
            with self._next.get_lock():
                number = self._next.value
                self._next.value += 1
            yield number


class Workers:
    """`processes` - 1 forks, which are asked functions of `subject`, each one at a time. Ctrl-C and SIGTERM are this
    process' alone; when it leaves the `with`, they end."""

    def __init__(self, processes: int, subject: object) -> None:
        self._subject = subject
        self._connections: list[Connection] = []
        self._forks: list[BaseProcess] = []
        self._busy: set[int] = set()
        self._number = processes - 1 if sys.platform == "linux" else 0  # elsewhere libraries do not outlive a fork

    def __enter__(self) -> Self:
        context = multiprocessing.get_context("fork")
        for _ in range(self._number):
            here, there = context.Pipe()
            fork = context.Process(target=self._serve, args=(there, here), daemon=True)
            fork.start()
            there.close()
            self._connections.append(here)
            self._forks.append(fork)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> None:
        """End the forks, whatever they owe; this process goes on alone."""
        for fork in self._forks:
            fork.kill()
            fork.join()
        for connection in self._connections:
            connection.close()
        self._forks, self._connections = [], []
        self._busy.clear()

    def __len__(self) -> int:
        """The number of processes, this one too."""
        return len(self._forks) + 1

    @property
    def idle(self) -> list[int]:
        """The forks that owe no answer, by number from 1 on; 0 is this process."""
        return [number for number in range(1, len(self._forks) + 1) if number not in self._busy]

    def ask(self, number: int, question: Asked, *arguments: object) -> None:
        """Have an idle fork go on with question(subject, *arguments)."""
        self._busy.add(number)
        self._connections[number - 1].send((question, arguments))

    def answers(self, *, wait: bool = False) -> Iterator[tuple[int, Any]]:
        """The answers that have come, by whom; where `wait` says so at least one that is owed. Raises what a question
        raised there."""
        owing = {number: self._connections[number - 1] for number in sorted(self._busy)}
        ready = wait_for(list(owing.values()), None if wait else 0)
        for number, connection in owing.items():
            if connection in ready:
                answer, error = connection.recv()
                self._busy.remove(number)
                if error is not None:
                    raise error
                yield number, answer

    def _serve(self, there: Connection, here: Connection) -> None:
        """Answer until the other end is closed."""
        for number in (signal.SIGINT, signal.SIGTERM):  # a fork ends when its process says so, or is gone
            signal.signal(number, signal.SIG_IGN)
        for connection in (here, *self._connections):  # or the pipes would stay open when their process is gone
            connection.close()
        with suppress(EOFError, BrokenPipeError):
            while True:
                question, arguments = there.recv()
                try:
                    there.send((question(self._subject, *arguments), None))
                except Exception as error:  # it is raised where the answer is waited for
                    there.send((None, error))
