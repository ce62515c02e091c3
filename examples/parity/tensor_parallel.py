"""torch's tensor-parallel plans (DTensor), without and with sequence parallelism."""

from model import Transformer, adamw, batch_of, loss_of
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import meshwright.parity as parity


def parallelize(model: nn.Module, mesh: object) -> nn.Module:
    """Cut as Megatron does: columns, then rows. All other weights are whole on every rank."""
    plan = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}
    for block in model.blocks:
        parallelize_module(block, mesh, plan | {name: RowwiseParallel() for name in ("out", "down")})
    return model


def parallelize_sequence(model: nn.Module, mesh: object) -> nn.Module:
    """Cut layers, and keep norms and residuals on this rank's slice of the sequence."""
    whole = {name: ColwiseParallel(input_layouts=Shard(1)) for name in ("q", "k", "v", "up")}
    rows = {name: RowwiseParallel(output_layouts=Shard(1)) for name in ("out", "down")}
    for block in model.blocks:
        parallelize_module(block, mesh, whole | rows | {"norm1": SequenceParallel(use_local_output=True),
                                                         "norm2": SequenceParallel(use_local_output=True)})  # fmt: skip
    return parallelize_module(model, mesh, {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True),
    })  # fmt: skip


@parity.check(ranks=2, axes={"tp": 2})
def tensor_parallel(job: parity.Job) -> None:
    job.reference(Transformer(), loss=loss_of, batch=batch_of, optimizer=adamw)
    job.parallel(parallelize(job.copy(), job.device_mesh))


@parity.check(ranks=2, axes={"tp": 2})
def sequence_parallel(job: parity.Job) -> None:
    job.reference(Transformer(), loss=loss_of, batch=batch_of)
    job.parallel(parallelize_sequence(job.copy(), job.device_mesh))
