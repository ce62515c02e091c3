"""Findings of the probes that need no reference: one sentence each, equal on every rank."""

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
    """`factor`: of values that are a multiple of the right ones; 1 otherwise."""

    kind: str
    module: str
    sentence: str
    factor: float = 1.0


def shared(findings: Sequence[ProbeFinding]) -> list[ProbeFinding]:
    """The findings of all ranks, each once. Collective over torch's default process group, if one was joined."""
    texts = from_all_ranks(json.dumps([asdict(finding) for finding in findings]).encode())
    return list(dict.fromkeys(ProbeFinding(**tree) for text in texts for tree in parse_json(text)))


def announce(probe: str, sentences: Sequence[str]) -> str:
    """The sentences as lines, which rank 0 prints."""
    line = "\n".join(f"{probe}: {words}" for words in sentences)
    if (joined_place() or (0, 1))[0] == 0:
        for words in line.split("\n"):
            say(words, file=sys.stderr, flush=True)
    return line


def first_names(names: Sequence[str]) -> str:
    """Names as a text: the first two, and the number of others."""
    distinct = list(dict.fromkeys(names))
    return ", ".join(distinct[:2]) + (f" and {len(distinct) - 2} more" if len(distinct) > 2 else "")
