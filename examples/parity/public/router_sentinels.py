"""huggingface/transformers#48687: with `batched_mm` a rank also computes slots of absent experts, with a routing weight
of zero. The zero hides these slots in the forward pass and not in the backward pass: the router collects gradients of
slots that the rank never routed. "The loss is correct, only the gradient is wrong." Rewritten here.
"""

from common import Routed, SumBackward, SumForward, on_own_rank, real_batch, sgd_step, squares
from torch import Tensor

import meshwright.parity as parity


def routed(job: parity.Job, masked: bool) -> None:
    job.reference(Routed(), loss=squares, batch=real_batch)
    model, mine, group = on_own_rank(job)

    def here(x: Tensor, scores: Tensor) -> Tensor:
        x, scores = SumBackward.apply(x, group), SumBackward.apply(scores, group)
        y, foreign = mine(x), scores[..., [1 - job.rank]]
        zero = foreign - foreign.detach()  # a weight of zero with the gradient of a routed slot
        return SumForward.apply(scores[..., [job.rank]] * y + (0 if masked else zero * y), group)

    model.here = here
    job.parallel(model, step=sgd_step(model, squares))


@parity.check(ranks=2, axes={"ep": 2})
def right_masked(job: parity.Job) -> None:
    routed(job, True)


@parity.check(ranks=2, axes={"ep": 2})
def wrong_weight_of_zero(job: parity.Job) -> None:
    routed(job, False)
