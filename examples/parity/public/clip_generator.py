"""pytorch/torchtitan#1258, areal-project/AReaL#335: clipping reads the parameters twice, for the norm and for the
gradients. A generator such as `model.parameters()` is exhausted after the first time: no gradient is clipped.
Rewritten here with torch's functions.
"""

from typing import Any

from common import real_batch, sgd_step, squares
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

import meshwright.parity as parity

CLIP = 0.01


def clip(parameters: Any) -> None:
    norm = get_total_norm([p.grad for p in parameters])
    clip_grads_with_norm_(parameters, CLIP, norm)


def trained(job: parity.Job, as_list: bool) -> None:
    job.reference(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), loss=squares, batch=real_batch, clip=CLIP)
    model = nn.parallel.DistributedDataParallel(job.copy())
    step = sgd_step(model, squares, lambda: clip(list(model.parameters()) if as_list else model.parameters()))
    job.parallel(model, step=step, batch=job.rows("data"))


@parity.check(ranks=2)
def right_list(job: parity.Job) -> None:
    trained(job, True)


@parity.check(ranks=2)
def wrong_generator(job: parity.Job) -> None:
    trained(job, False)
