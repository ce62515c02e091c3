"""Runs the change."""

from pathlib import Path

from trained import RUN, losses

import meshwright as mw
from meshwright.planner.plan.cluster import load_cluster
from meshwright.planner.plan.predict import Planner

LAYERS, STAGES = "model.layers=4", "layout.pipeline.size=2"


def planned(policy):
    """Return the bytes of activations and the seconds of a step."""
    words = (LAYERS, "model.hidden=64", "batch.micro=8", "layout.transport=torch", f"memory.recompute={policy}")
    found = Planner(load_cluster("two-cores")).predict(mw.load(RUN, words))
    return found.fullest.activations, found.seconds


if __name__ == "__main__":
    words = [LAYERS, "model.dropout=0.1"]
    assert losses("kept", *words) == losses("alternate", *words, "memory.recompute=alternate")
    staged = losses("stages", *words, STAGES, "memory.recompute=alternate")
    assert staged == losses("kept stages", *words, STAGES)
    sliced = mw.load(RUN, [LAYERS, "layout.data={size: 2, sync: zero3}", "memory.recompute=alternate"])
    mw.verify(sliced, steps=2).check()
    (most, quick), (some, slower), (least, slow) = map(planned, ("none", "alternate", "{every: 1}"))
    assert least < some < most, (least, some, most)
    assert quick < slower < slow, (quick, slower, slow)
    print(Path(mw.__file__).parent)
