"""A run's steps for who follows it: read from its metrics.jsonl, while it goes on or when it is over; or told, as they
are made, to a function of the process that started it: `mw.train(config, out, each=f)`.

Rank 0 writes each step's metrics as a line to a named pipe, and a thread here reads them: it sleeps until one is there.
What the function answers goes back as a file beside the pipe, at which rank 0 looks once a step.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.ranks.errors import DataError
from meshwright.ranks.foreign import parse_json, read_text
from meshwright.ranks.launch.session import temporary_folder

Each = Callable[[dict[str, Any]], object]
"""Called with a step's numbers, as metrics.jsonl has them; a true answer ends the run a step or two later, with
a checkpoint."""

METRICS = "metrics.jsonl"

_NOT_FINITE = {str(value): value for value in (math.inf, -math.inf, math.nan)}
"""JSON has no word for them, so that a text stands in the file."""

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


@dataclass(frozen=True)
class StepTeller:
    """Rank 0's end. Without a folder nobody is told, and nobody asks to stop."""

    folder: Path | None

    def tell(self, line: Mapping[str, Any]) -> bool:
        """Write a step's metrics, as a run that is read later would be; returns whether the reader asks to stop. Waits
        while the reader is behind."""
        if self.folder is None:
            return False
        with (self.folder / _PIPE).open("w", encoding="utf-8") as pipe:
            pipe.write(f"\n{json.dumps(line)}\n")
        return (self.folder / _STOP).exists()


def named_as_now(line: dict[str, Any]) -> dict[str, Any]:
    """A step's numbers with today's names: earlier files call the passes `pipeline`, and what is not known a text."""
    known = {key: None if value == "unknown" else value for key, value in line.items()}
    if isinstance(shares := known.get("utilisation"), list):
        known["utilisation"] = [None if share == "unknown" else share for share in shares]
    if isinstance(phases := known.get("phase_seconds"), dict):
        known["phase_seconds"] = {"passes" if name == "pipeline" else name: value for name, value in phases.items()}
    return known


def read_history(metrics_file: Path) -> list[dict[str, Any]]:
    """The numbers of each step, in order. A step that is there twice (the run was resumed) counts as written last; a
    last line that is being written is left out.

    Raises DataError where the file cannot be read, or a line of it is no step with a loss.
    """
    try:
        lines = read_text(metrics_file).splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else error
        raise DataError(f"{metrics_file} cannot be read: {cause}") from error
    steps: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(lines, 1):
        try:
            record = {key: _NOT_FINITE.get(str(value), value) for key, value in named_as_now(parse_json(line)).items()}
            steps[int(record["step"])] = record | {"loss": float(record["loss"])}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if number == len(lines) and not line.endswith("\n"):
                break  # it is being written, or its writer was killed in the middle of it
            raise DataError(f"{metrics_file}, line {number} is not a step with a loss: {line.strip()[:80]}") from error
    return [steps[step] for step in sorted(steps)]
