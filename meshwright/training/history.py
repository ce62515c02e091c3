"""The steps of a run, read from its metrics.jsonl while it goes on or when it is over."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from meshwright.errors import DataError

METRICS = "metrics.jsonl"

_NOT_FINITE = {str(value): value for value in (math.inf, -math.inf, math.nan)}
"""JSON has no word for them, so that a text stands in the file."""


def read_history(metrics_file: Path) -> list[dict[str, Any]]:
    """The numbers of each step, in order. A step that is there twice (the run was resumed) counts as written last; a
    last line that is being written is left out.

    Raises DataError where the file cannot be read, or a line of it is no step with a loss.
    """
    try:
        lines = metrics_file.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else error
        raise DataError(f"{metrics_file} cannot be read: {cause}") from error
    steps: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(lines, 1):
        try:
            record = {key: _NOT_FINITE.get(str(value), value) for key, value in json.loads(line).items()}
            steps[int(record["step"])] = record | {"loss": float(record["loss"])}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if number == len(lines) and not line.endswith("\n"):
                break  # it is being written, or its writer was killed in the middle of it
            raise DataError(f"{metrics_file}, line {number} is not a step with a loss: {line.strip()[:80]}") from error
    return [steps[step] for step in sorted(steps)]
