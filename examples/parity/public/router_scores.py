"""huggingface/transformers#48205: each rank has other experts, and the gradient of the router's scores for these
experts. Without a sum over the ranks the router learns from some experts. Rewritten here; fixed in transformers.
"""

from typing import Any

from common import Routed, SumBackward, SumForward, on_own_rank, real_batch, sgd_step, squares
from torch import Tensor

import meshwright.parity as parity


def routed(job: parity.Job, summed: bool) -> None:
    job.reference(Routed(), loss=squares, batch=real_batch)
    model, mine, group = on_own_rank(job)

    def here(x: Tensor, scores: Tensor) -> Any:
        scores = SumBackward.apply(scores, group) if summed else scores
        return SumForward.apply(scores[..., [job.rank]] * mine(SumBackward.apply(x, group)), group)

    model.here = here
    job.parallel(model, step=sgd_step(model, squares))


@parity.check(ranks=2, axes={"ep": 2})
def right_summed(job: parity.Job) -> None:
    routed(job, True)


@parity.check(ranks=2, axes={"ep": 2})
def wrong_own_scores(job: parity.Job) -> None:
    routed(job, False)
