"""Mark the new names in the quickstart's sample with a star: python examples/new_names.py FILE

Unicode has no character of a new name. The last line is left out, because the sample's length may have cut this name.
"""

from __future__ import annotations

import sys
import unicodedata
from pathlib import Path


def is_new(name: str) -> bool:
    """Return whether no character has the name."""
    try:
        unicodedata.lookup(name)
    except KeyError:
        return True
    return False


def marked(sample: str) -> str:
    """Return each name but the last on a line, new names with a star, and the count of new names."""
    names = [name for name in sample.splitlines() if name.strip()][:-1]
    new = [is_new(name) for name in names]
    lines = [f"{'*' if star else ' '} {name}" for name, star in zip(names, new, strict=True)]
    return "\n".join([*lines, f"\n{sum(new)} of {len(names)} names (*) are new: Unicode has no such character."])


if __name__ == "__main__":
    print(marked(Path(sys.argv[1]).read_text(encoding="utf-8")))
