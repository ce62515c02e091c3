"""Runs the change."""

from pathlib import Path

from trained import losses

import meshwright as mw

if __name__ == "__main__":
    words = ["optimizer.name=lion", "optimizer.lr=1e-3"]
    alone = losses("alone", *words)
    assert alone[-1] < alone[0], alone
    several = losses("several", *words, "layout.data=2", "layout.data.sync=zero1")
    assert max(abs(a - b) for a, b in zip(alone, several, strict=True)) < 1e-3, (alone, several)
    print(Path(mw.__file__).parent)
