"""pytorch/torchtitan#4332: every tensor-parallel rank adds a share of a bias to a partial sum. By this division the
bias has a share of the gradient as well, and no rank sums the shares. Rewritten here.
"""

from common import cut_expert, share_of

import meshwright.parity as parity


@parity.check(ranks=2, axes={"tp": 2})
def right_whole_gradient(job: parity.Job) -> None:
    cut_expert(job, lambda x, bias, group: x + share_of(bias))


@parity.check(ranks=2, axes={"tp": 2})
def wrong_divided_gradient(job: parity.Job) -> None:
    cut_expert(job, lambda x, bias, group: x + bias / 2)
