"""Runs the change."""

from pathlib import Path

from trained import losses

import meshwright as mw

if __name__ == "__main__":
    wide = losses("wide")
    words = ["precision.products=fp8-stub", "layout.tensor=megatron", "layout.tensor.size=2"]
    narrow = losses("narrow", *words)
    assert narrow != wide
    assert max(abs(a - b) for a, b in zip(wide, narrow, strict=True)) < 0.3, (wide, narrow)
    assert losses("again", *words) == narrow
    print(Path(mw.__file__).parent)
