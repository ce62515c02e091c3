"""Runs the change."""

from pathlib import Path

from trained import RUN, losses

import meshwright as mw

if __name__ == "__main__":
    words = ["optimizer.name=rows", "optimizer.lr=1e-3"]
    alone = losses("alone", *words)
    assert alone[-1] < alone[0], alone
    dealt = [*words, "layout.data=2", "layout.data.sync=zero1"]
    several = losses("several", *dealt)
    assert max(abs(a - b) for a, b in zip(alone, several, strict=True)) < 1e-3, (alone, several)
    # Its checkpoint goes on in another layout, states and all.
    mw.train(mw.load(RUN, [*words, "steps=5", "layout.pipeline=2"]), "several", resume=True)
    mw.train(mw.load(RUN, [*words, "steps=5"]), "alone", resume=True)
    ends = [mw.history(out)[-1]["loss"] for out in ("alone", "several")]
    assert abs(ends[0] - ends[1]) < 1e-3, ends
    mw.verify(mw.load(RUN, [*dealt, "layout.transport=torch"]), steps=3).check()
    print(Path(mw.__file__).parent)
