"""Readers of a run's steps: from metrics.jsonl, during or after the run, or by a callback as steps are made.

The callback belongs to the process that started the run: `mw.train(config, out, each=f)`. Rank 0 writes each step's
metrics as a line to a named pipe. A thread of the starting process reads the lines, and sleeps until the next line.
If the callback returns a true value, the thread creates a file next to the pipe; rank 0 checks for the file once a
step.
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
"""Callback that gets a step's numbers, by their names in metrics.jsonl. A true result ends the run a step or two
later, with a checkpoint."""

METRICS = "metrics.jsonl"

_NOT_FINITE = {str(value): value for value in (math.inf, -math.inf, math.nan)}
"""Numbers without a JSON literal, by the text that files contain instead."""

_PIPE, _STOP = "steps", "stop"
_END = "end\n"
"""The line after the last step."""


@contextmanager
def followed(each: Each | None) -> Iterator[Path | None]:
    """Yield the folder of the named pipe that gets rank 0's steps; None without a callback.

    A thread calls `each` for one step after another; a callback slower than the steps delays the run. An exception from
    `each` ends the run like a true result, and is raised at the end.
    """
    if each is None:
        yield None
        return
    raised: list[BaseException] = []
    with ExitStack() as stack:
        folder = stack.enter_context(temporary_folder())
        os.mkfifo(folder / _PIPE)
        # Open for reading and writing: the pipe has a writer before rank 0 opens it, and while rank 0 restarts.
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
                continue  # read until the run is over: rank 0 must not wait for a reader
            try:
                numbers = json.loads(line)
            except ValueError:  # an empty line, or half of one: a killed rank 0 writes the step again
                continue
            try:
                if each(numbers):
                    (folder / _STOP).touch()
            except BaseException as error:  # from the caller's function: raised to the caller by `followed`
                raised.append(error)
                (folder / _STOP).touch()


@dataclass(frozen=True)
class StepTeller:
    """Rank 0's end of the pipe. Without a folder nothing is written, and no stop is asked for."""

    folder: Path | None

    def tell(self, line: Mapping[str, Any]) -> bool:
        """Write a step's metrics as a line of JSON; return whether the callback asks to stop. Waits while the pipe is
        full."""
        if self.folder is None:
            return False
        with (self.folder / _PIPE).open("w", encoding="utf-8") as pipe:
            pipe.write(f"\n{json.dumps(line)}\n")
        return (self.folder / _STOP).exists()


def named_as_now(line: dict[str, Any]) -> dict[str, Any]:
    """Convert a step's numbers to current names: earlier files have `pipeline` for `passes`, "unknown" for None."""
    known = {key: None if value == "unknown" else value for key, value in line.items()}
    if isinstance(shares := known.get("utilisation"), list):
        known["utilisation"] = [None if share == "unknown" else share for share in shares]
    if isinstance(phases := known.get("phase_seconds"), dict):
        known["phase_seconds"] = {"passes" if name == "pipeline" else name: value for name, value in phases.items()}
    return known


def read_history(metrics_file: Path) -> list[dict[str, Any]]:
    """Read the numbers of each step, in order of steps.

    If a resumed run wrote a step twice, the later line counts. An incomplete last line is skipped.

    Raises:
        DataError: the file cannot be read, or a line is not a step with a loss.
    """
    try:
        lines = read_text(metrics_file).splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else error
        raise DataError(f"{metrics_file} cannot be read: {cause}") from error
    steps: dict[int, dict[str, Any]] = {}
    for line_number, line in enumerate(lines, 1):
        try:
            record = {key: _NOT_FINITE.get(str(value), value) for key, value in named_as_now(parse_json(line)).items()}
            steps[int(record["step"])] = record | {"loss": float(record["loss"])}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if line_number == len(lines) and not line.endswith("\n"):
                break  # still being written, or cut off when the writer was killed
            raise DataError(
                f"{metrics_file}, line {line_number} is not a step with a loss: {line.strip()[:80]}"
            ) from error
    return [steps[step] for step in sorted(steps)]
