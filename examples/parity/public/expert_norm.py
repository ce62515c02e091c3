"""NVIDIA/Megatron-LM#5916: with experts on different ranks the norm for clipping leaves out all experts but the first
rank's, as if the others were copies: clipping is weaker than asked. Rewritten here; fixed in Megatron.
"""

import torch
import torch.distributed as dist
from common import Routed, clipped, on_own_rank, real_batch, sgd_step, square_of, squares

import meshwright.parity as parity

CLIP = 0.01


def routed(job: parity.Job, all_experts: bool) -> None:
    job.reference(Routed(), loss=squares, batch=real_batch, clip=CLIP)
    model, mine, group = on_own_rank(job)

    def clip() -> None:
        experts = square_of(mine.parameters()) * (1.0 if all_experts or job.rank == 0 else 0.0)
        dist.all_reduce(experts, group=group)
        shared = square_of([*model.enter.parameters(), *model.gate.parameters()])
        clipped(model.parameters(), torch.add(shared, experts), CLIP)

    job.parallel(model, step=sgd_step(model, squares, clip))


@parity.check(ranks=2, axes={"ep": 2})
def right_all_experts(job: parity.Job) -> None:
    routed(job, True)


@parity.check(ranks=2, axes={"ep": 2})
def wrong_first_ranks(job: parity.Job) -> None:
    routed(job, False)
