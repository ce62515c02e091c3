"""DeepSpeed ZeRO 1 and 2 on CPU processes. Its step clears gradients, so losses, outputs and weights are compared."""

import deepspeed
import torch
from model import Transformer, batch_of, loss_of
from torch import Tensor, nn

import meshwright.parity as parity


def engine_of(job: parity.Job, stage: int) -> nn.Module:
    model = job.copy()
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage},
              "zero_allow_untested_optimizer": True}  # fmt: skip
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config, dist_init_required=False
    )
    return engine


def step(engine: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss = loss_of(engine, batch)
    engine.backward(loss)
    engine.step()
    return loss.detach()


@parity.check(ranks=2, precision="float32")
def zero1(job: parity.Job) -> None:
    job.reference(Transformer(), loss=loss_of, batch=batch_of, labels=None)
    job.parallel(engine_of(job, 1), step=step, batch=job.rows("data"), gradients=False)


@parity.check(ranks=2, precision="float32")
def zero2(job: parity.Job) -> None:
    job.reference(Transformer(), loss=loss_of, batch=batch_of, labels=None)
    job.parallel(engine_of(job, 2), step=step, batch=job.rows("data"), gradients=False)
