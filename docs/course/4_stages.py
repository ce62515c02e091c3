"""Exercise 4: a schedule of your own. `python docs/course/4_stages.py` has it verified on two stages."""

from pathlib import Path

import meshwright as mw
from meshwright.strategies.pipeline.schedule import WHOLE, ScheduleRule
from meshwright.strategies.pipeline.task import TaskKind


def mine(view):
    """The next task of a stage, or None: wait for a message. `view` says what has come, and what is done."""
    if view.ready(TaskKind.FORWARD):
        return view.next(TaskKind.FORWARD)
    return None  # mend


MINE = ScheduleRule(mine, WHOLE, lambda stage, num_stages, num_microbatches: num_stages)
"""A microbatch is forward and backward; a stage may hold as many as there are stages."""


if __name__ == "__main__":
    # By its name, as ranks import it: this file is a script, and they are not.
    mw.register("schedules", "mine", "4_stages:MINE")
    verdict = mw.verify(mw.load(Path(__file__).with_suffix(".yaml")), steps=1)
    verdict.check()
    print(f"equal: the worst gradient is off by {verdict.worst('gradient').error:.0e}")
