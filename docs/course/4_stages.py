"""Exercise 4: a schedule of your own. `python docs/course/4_stages.py` verifies the schedule on two stages."""

from pathlib import Path

import meshwright as mw
from meshwright.strategies.pipeline.schedule import WHOLE, ScheduleRule
from meshwright.strategies.pipeline.task import TaskKind


def mine(view):
    """The next task of a stage, or None: wait for a message. `view` has received messages and finished tasks."""
    if view.ready(TaskKind.FORWARD):
        return view.next(TaskKind.FORWARD)
    return None  # mend


MINE = ScheduleRule(mine, WHOLE, lambda stage, num_stages, num_microbatches: num_stages)
"""A microbatch has a forward and a backward pass; a stage holds at most `num_stages` microbatches."""


if __name__ == "__main__":
    # By the module's name, because ranks import the file as a module, not as a script.
    mw.register("schedules", "mine", "4_stages:MINE")
    verdict = mw.verify(mw.load(Path(__file__).with_suffix(".yaml")), steps=1)
    verdict.check()
    print(f"equal: the worst gradient is off by {verdict.worst('gradient').error:.0e}")
