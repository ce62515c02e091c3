"""A run's steps, told to a function of the process that started it, as they are made: `mw.train(config, out, each=f)`.

Rank 0 writes each step's metrics as a line to a named pipe, and a thread here reads them: it sleeps until one is there.
What the function answers goes back as a file beside the pipe, at which rank 0 looks once a step.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from meshwright.launch.session import temporary_folder

Each = Callable[[dict[str, Any]], object]
"""Called with a step's numbers, as metrics.jsonl has them; a true answer ends the run after its step, with a
checkpoint."""

_PIPE, _STOP = "steps", "stop"
_END = "end\n"
"""The line behind the last step."""


@contextmanager
def followed(each: Each | None) -> Iterator[Path | None]:
    """The folder in which rank 0 tells its steps while the context is entered; None where nobody asks.

    `each` is called in a thread, one step after another; one that is slower than the steps holds the run up. What it
    raises ends the run like a true answer, and is raised at the end.
    """
    if each is None:
        yield None
        return
    raised: list[BaseException] = []
    with ExitStack() as stack:
        folder = stack.enter_context(temporary_folder())
        os.mkfifo(folder / _PIPE)
        # Open for both, so that there is a writer before rank 0 comes, and when it is started again.
        descriptor = os.open(folder / _PIPE, os.O_RDWR)
        reader = threading.Thread(target=_read, args=(folder, each, raised), name="each", daemon=True)
        reader.start()
        try:
            yield folder
        finally:
            os.write(descriptor, f"\n{_END}".encode())
            reader.join()
            os.close(descriptor)
    if raised:
        raise raised[0]


def _read(folder: Path, each: Each, raised: list[BaseException]) -> None:
    with (folder / _PIPE).open(encoding="utf-8") as lines:
        for line in iter(lines.readline, _END):
            if raised:
                continue  # until the run is over: rank 0 must not wait for a reader
            try:
                numbers = json.loads(line)
            except ValueError:  # what stands between two lines, or half of one: rank 0 was killed, and tells it again
                continue
            try:
                if each(numbers):
                    (folder / _STOP).touch()
            except BaseException as error:  # the caller's own: it is the caller who hears of it
                raised.append(error)
                (folder / _STOP).touch()


class StepTeller:
    """Rank 0's end. Without a folder nobody is told, and nobody asks to stop."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def tell(self, line: Mapping[str, Any]) -> None:
        """Write a step's metrics, as a run that is read later would be. Waits while the reader is behind."""
        if self._folder is not None:
            with (self._folder / _PIPE).open("w", encoding="utf-8") as pipe:
                pipe.write(f"\n{json.dumps(line)}\n")

    @property
    def asks_to_stop(self) -> bool:
        return self._folder is not None and (self._folder / _STOP).exists()
