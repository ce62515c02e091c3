"""pytorch/torchtitan#4245: in gpt-oss's experts under tensor parallelism every rank adds the whole bias to its partial
sum, as the ranks' number is asked of a DTensor, and the weights are none. A few lines of ours.
"""

from common import cut_expert, share_of

import meshwright.parity as parity


@parity.check(ranks=2, axes={"tp": 2})
def right_a_share(job: parity.Job) -> None:
    cut_expert(job, lambda x, bias, group: x + share_of(bias))


@parity.check(ranks=2, axes={"tp": 2})
def wrong_all_of_it(job: parity.Job) -> None:
    cut_expert(job, lambda x, bias, group: x + bias)
