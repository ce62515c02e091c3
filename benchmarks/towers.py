"""Two towers on a rank each against one rank and against shared rows (examples/towers): seconds, bytes, a timeline.

    python -m benchmarks.towers [--only bytes steps] [--rounds N] [--transport torch|mpi] [--picture docs/towers.png]

4 + 4 layers, hidden 256, 64 images of 17 tokens and captions of 16 words, all contrasted, float32, a thread a rank.
"""

from __future__ import annotations

import sys
from pathlib import Path

from meshwright.config.registry import register

EXAMPLE = Path(__file__).resolve().parent.parent / "examples/towers"


def main() -> None:
    sys.path.insert(0, str(EXAMPLE))
    register("models", "towers", "towers.section:TwoTowers")
    register("tensor", "towers", "towers.layout:Towers")
    register("data", "shapes", "towers.shapes:Shapes")
    # Imported here: the import of meshwright.config fixes the choices.
    from benchmarks.towers_steps import measure_towers

    measure_towers()


if __name__ == "__main__":
    main()
