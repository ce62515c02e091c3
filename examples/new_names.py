"""The quickstart's sample with a star before each name that Unicode does not have: python examples/new_names.py FILE

A model that repeats what it has read shows none. The last line is left out: the sample's length may have cut it short.
"""

from __future__ import annotations

import sys
import unicodedata
from pathlib import Path


def is_new(name: str) -> bool:
    """Whether no character has the name."""
    try:
        unicodedata.lookup(name)
    except KeyError:
        return True
    return False


def marked(sample: str) -> str:
    """Each name but the last in a line of its own, new ones with a star, and how many those are."""
    names = [name for name in sample.splitlines() if name.strip()][:-1]
    new = [is_new(name) for name in names]
    lines = [f"{'*' if star else ' '} {name}" for name, star in zip(names, new, strict=True)]
    return "\n".join([*lines, f"\n{sum(new)} of {len(names)} names (*) are new: Unicode has no such character."])


if __name__ == "__main__":
    print(marked(Path(sys.argv[1]).read_text(encoding="utf-8")))
