"""Findings of probes without a reference: one sentence each, equal on every rank."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from meshwright.ranks.dtensor import from_all_ranks, joined_place
from meshwright.ranks.foreign import parse_json
from meshwright.ranks.streams import say


@dataclass(frozen=True)
class ProbeFinding:
    """A mistake that a probe found. `factor`: of values that are a multiple of the right values; else 1."""

    kind: str
    module: str
    sentence: str
    factor: float = 1.0


def shared(findings: Sequence[ProbeFinding]) -> list[ProbeFinding]:
    """Return the findings of all ranks, each once. Collective over torch's default process group, if one was joined."""
    texts = from_all_ranks(json.dumps([asdict(finding) for finding in findings]).encode())
    return list(dict.fromkeys(ProbeFinding(**tree) for text in texts for tree in parse_json(text)))


def announce(probe: str, sentences: Sequence[str]) -> str:
    """Print the sentences as lines on rank 0. Returns the lines."""
    line = "\n".join(f"{probe}: {words}" for words in sentences)
    if (joined_place() or (0, 1))[0] == 0:
        for words in line.split("\n"):
            say(words, file=sys.stderr, flush=True)
    return line


def first_names(names: Sequence[str]) -> str:
    """Return names as a text: the first two, and the number of others."""
    distinct = list(dict.fromkeys(names))
    return ", ".join(distinct[:2]) + (f" and {len(distinct) - 2} more" if len(distinct) > 2 else "")
