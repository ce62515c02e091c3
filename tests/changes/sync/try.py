"""Runs the change."""

from pathlib import Path

from trained import RUN, losses

import meshwright as mw

if __name__ == "__main__":
    alone = losses("alone")
    several = losses("several", "layout.data=4", "layout.data.sync=gathered")
    assert max(abs(a - b) for a, b in zip(alone, several, strict=True)) < 1e-5, (alone, several)
    assert mw.verify(mw.load(RUN, ["layout.data=2", "layout.data.sync=gathered"]), steps=1).holds
    print(Path(mw.__file__).parent)
