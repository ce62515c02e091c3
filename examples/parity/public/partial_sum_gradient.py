"""pytorch/torchtitan#2106: a partial sum plus a bias is a partial sum, and so, says DTensor, is its gradient: it is
added up over the ranks once more, and what lies before has it as many times too large. A few lines of ours.
"""

from common import SumBackward, cut_expert, share_of

import meshwright.parity as parity


@parity.check(ranks=2, axes={"tp": 2})
def right_once(job: parity.Job) -> None:
    cut_expert(job, lambda x, bias, group: x + share_of(bias))


@parity.check(ranks=2, axes={"tp": 2})
def wrong_once_more(job: parity.Job) -> None:
    cut_expert(job, lambda x, bias, group: SumBackward.apply(x, group) + share_of(bias))
