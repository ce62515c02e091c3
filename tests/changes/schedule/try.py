"""Runs the change."""

from pathlib import Path

from trained import losses

import meshwright as mw

if __name__ == "__main__":
    alone = losses("alone")
    words = ["layout.pipeline=2", "layout.pipeline.schedule=depth-first"]
    assert max(abs(a - b) for a, b in zip(alone, losses("stages", *words), strict=True)) < 1e-5
    print(Path(mw.__file__).parent)
