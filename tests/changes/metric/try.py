"""Runs the change."""

from pathlib import Path

from trained import losses

import meshwright as mw

if __name__ == "__main__":
    losses("out", "layout.data=2")
    measured = [line["largest_weight"] for line in mw.history("out") if "loss" in line]
    assert len(measured) == 3, measured
    assert all(0 < number < 10 for number in measured), measured
    print(Path(mw.__file__).parent)
