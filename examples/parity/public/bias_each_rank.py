"""pytorch/torchtitan#4245: in gpt-oss's experts under tensor parallelism every rank adds the whole bias to a partial
sum: the count of ranks is read from a DTensor, and the weights are no DTensors. Rewritten here.
"""

from common import cut_expert, share_of

import meshwright.parity as parity


@parity.check(ranks=2, axes={"tp": 2})
def right_a_share(job: parity.Job) -> None:
    cut_expert(job, lambda x, bias, group: x + share_of(bias))


@parity.check(ranks=2, axes={"tp": 2})
def wrong_all_of_it(job: parity.Job) -> None:
    cut_expert(job, lambda x, bias, group: x + bias)
