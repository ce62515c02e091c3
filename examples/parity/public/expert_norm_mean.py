"""deepspeedai/DeepSpeed#8475 (DeepSpeed at cf443004): clip_grad_norm_ averages the ranks' norms over the data-parallel
group. The average is the full norm only if every rank holds the same parameters; experts are not the same. Rewritten
here.
"""

import torch
import torch.distributed as dist
from common import Routed, clipped, on_own_rank, real_batch, sgd_step, square_of, squares

import meshwright.parity as parity

CLIP = 0.01


def routed(job: parity.Job, squares_added: bool) -> None:
    job.reference(Routed(), loss=squares, batch=real_batch, clip=CLIP)
    model, mine, group = on_own_rank(job)

    def clip() -> None:
        shared, experts = square_of([*model.enter.parameters(), *model.gate.parameters()]), square_of(mine.parameters())
        if squares_added:
            dist.all_reduce(experts, group=group)
            total = shared + experts
        else:
            norm = torch.sqrt(shared + experts) / 2
            dist.all_reduce(norm, group=group)
            total = norm.square()
        clipped(model.parameters(), total, CLIP)

    job.parallel(model, step=sgd_step(model, squares, clip))


@parity.check(ranks=2, axes={"ep": 2})
def right_squares_added(job: parity.Job) -> None:
    routed(job, True)


@parity.check(ranks=2, axes={"ep": 2})
def wrong_mean_of_norms(job: parity.Job) -> None:
    routed(job, False)
