"""pytorch/torchtitan#2106: a partial sum plus a bias is a partial sum, and DTensor takes the gradient for one too:
ranks sum the gradient again, and all earlier gradients are too large by the count of ranks. Rewritten here.
"""

from common import SumBackward, cut_expert, share_of

import meshwright.parity as parity


@parity.check(ranks=2, axes={"tp": 2})
def right_once(job: parity.Job) -> None:
    cut_expert(job, lambda x, bias, group: x + share_of(bias))


@parity.check(ranks=2, axes={"tp": 2})
def wrong_once_more(job: parity.Job) -> None:
    cut_expert(job, lambda x, bias, group: SumBackward.apply(x, group) + share_of(bias))
