"""pytorch/torchtitan#4332: every tensor-parallel rank adds its share of a bias to its partial sum, and the division
gives the bias a share of its gradient as well, which nobody adds up. A few lines of ours.
"""

from common import cut_expert, share_of

import meshwright.parity as parity


@parity.check(ranks=2, axes={"tp": 2})
def right_whole_gradient(job: parity.Job) -> None:
    cut_expert(job, lambda x, bias, group: x + share_of(bias))


@parity.check(ranks=2, axes={"tp": 2})
def wrong_divided_gradient(job: parity.Job) -> None:
    cut_expert(job, lambda x, bias, group: x + bias / 2)
