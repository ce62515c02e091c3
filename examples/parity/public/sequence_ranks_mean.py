"""deepspeedai/DeepSpeed#5555: with Ulysses and ZeRO 0 gradients are divided by the count of all ranks, instead of the
data-parallel ranks: a sequence's ranks count too. Losses were already divided by the whole sequence. Rewritten here.
"""

from typing import Any

import torch.distributed as dist
from common import own_positions, real_batch, sgd_step, squares, summed
from torch import Tensor, nn

import meshwright.parity as parity


def parts(job: parity.Job, divisor: int) -> None:
    job.reference(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), loss=squares, batch=real_batch)
    model, group = job.copy(), job.device_mesh.get_group("sp")

    def part_of_sequence(model: Any, batch: Tensor) -> Tensor:
        return squares(model, batch) / 2

    def reduce() -> None:
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= divisor

    step = sgd_step(model, part_of_sequence, reduce)
    half = lambda x: own_positions(job.rows("data")(x), group)  # noqa: E731
    job.parallel(model, step=lambda model, x: summed(step(model, x), None) / 2, batch=half)


@parity.check(ranks=4, axes={"sp": 2})
def right_data_ranks(job: parity.Job) -> None:
    parts(job, 2)


@parity.check(ranks=4, axes={"sp": 2})
def wrong_all_ranks(job: parity.Job) -> None:
    parts(job, 4)
