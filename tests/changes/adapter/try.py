"""Runs the change."""

from pathlib import Path

from trained import RUN, losses

import meshwright as mw

OTHERS = "tokens.*, positions.*, '*norm*', '*.output.*', '*.feed_forward.*', 'blocks.?.attention.query_key_value.[wb]*'"

if __name__ == "__main__":
    words = ["model.side_rank=2", f"model.frozen=[{OTHERS}]"]
    alone = losses("alone", *words)
    assert alone[-1] < alone[0], alone
    several = losses("several", *words, "layout.data=2", "layout.data.sync=zero3", "layout.pipeline=2")
    assert max(abs(a - b) for a, b in zip(alone, several, strict=True)) < 1e-3, (alone, several)
    cut = mw.load(RUN, [*words, "layout.tensor={kind: megatron, size: 2}", "layout.transport=torch"])
    failed = mw.verify(cut, steps=3).failed  # the first gradient of A is zero, as B is
    assert not failed, failed
    print(Path(mw.__file__).parent)
