"""torch's fully_shard (FSDP2), by layers; and with a tensor-parallel plan inside."""

from ddp import global_mean
from model import Transformer, adamw, batch_of, loss_of
from tensor_parallel import parallelize
from torch import nn
from torch.distributed.fsdp import fully_shard

import meshwright.parity as parity


def shard(model: nn.Module, mesh: object) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@parity.check(ranks=2)
def fsdp2(job: parity.Job) -> None:
    job.reference(Transformer(), loss=loss_of, batch=batch_of, optimizer=adamw)
    job.parallel(shard(job.copy(), job.device_mesh), loss=global_mean, batch=job.rows("data"))


@parity.check(ranks=4, axes={"data": 2, "tp": 2})
def fsdp2_tensor_parallel(job: parity.Job) -> None:
    job.reference(Transformer(), loss=loss_of, batch=batch_of, optimizer=adamw, labels=None)
    model = shard(parallelize(job.copy(), job.device_mesh["tp"]), job.device_mesh["data"])
    job.parallel(model, batch=job.rows("data"))
