"""DeepSpeed's ZeRO 1, 2 and 3 on CPU processes (DS_ACCELERATOR=cpu).

DeepSpeed's step clears gradients, so the whole gradients are read before the step. Under stage 3 a parameter is empty
between two uses: a rank holds a slice of the flattened weight, padded on the last rank.
"""

import deepspeed
import torch
from deepspeed.utils import safe_get_full_grad
from model import Transformer, batch_of, loss_of
from torch import Tensor, nn

import meshwright.parity as parity


def check(job: parity.Job, stage: int) -> None:
    job.reference(Transformer(), loss=loss_of, batch=batch_of, labels=None)
    config = {"train_micro_batch_size_per_gpu": 4, "zero_allow_untested_optimizer": True,
              "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}  # fmt: skip
    model = job.copy()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=sgd, config=config, dist_init_required=False)

    def slices() -> dict[str, Tensor]:
        places = {name: job.rank * p.ds_tensor.numel() for name, p in engine.module.named_parameters()}
        return {name: p.ds_tensor[: p.ds_numel - places[name]] for name, p in engine.module.named_parameters()}

    def gradient_of(p: Tensor) -> Tensor:
        whole = safe_get_full_grad(p)
        return whole if stage < 3 else whole.flatten().split(p.ds_tensor.numel())[job.rank]

    def step(engine: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        loss = loss_of(engine, batch)
        engine.backward(loss)
        job.keep_gradients({name: gradient_of(p) for name, p in engine.module.named_parameters()})
        engine.step()
        return loss.detach()

    job.parallel(engine, step=step, batch=job.rows("data"), gradients=False, weights=slices if stage == 3 else None)


@parity.check(ranks=2, precision="float32")
def zero1(job: parity.Job) -> None:
    check(job, 1)


@parity.check(ranks=2, precision="float32")
def zero2(job: parity.Job) -> None:
    check(job, 2)


@parity.check(ranks=2, precision="float32")
def zero3(job: parity.Job) -> None:
    check(job, 3)
