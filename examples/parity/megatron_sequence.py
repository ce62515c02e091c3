"""Megatron-Core's tensor parallelism with sequence parallelism: norms and residuals on half of dim 0.

Megatron marks some parameters and leaves the sum of these gradients over ranks to the training loop; here step() adds
the gradients. Without the sum: "missing reduction".
"""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, scatter_to_sequence_parallel_region
from megatron_core import parallelize
from model import Transformer, batch_of, loss_of
from torch import Tensor, nn

import meshwright.parity as parity


def train_step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss = loss_of(model, batch)
    loss.backward()
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith(("out.bias", "down.bias")):
            dist.all_reduce(parameter.grad)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.zero_grad()
    return loss.detach()


def no_sum(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss = loss_of(model, batch)
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.zero_grad()
    return loss.detach()


def sequence_parallel(job: parity.Job) -> nn.Module:
    job.reference(Transformer(), loss=loss_of, batch=batch_of)
    torch.cuda.current_device = lambda: "cpu"  # Megatron-Core makes buffers on this device
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    model = parallelize(job.copy(), sequence=True)
    model.tokens.register_forward_hook(lambda module, x, y: scatter_to_sequence_parallel_region(y))
    model.norm.register_forward_hook(lambda module, x, y: gather_from_sequence_parallel_region(y, False))
    return model


@parity.check(ranks=2, axes={"tp": 2})
def megatron_sequence(job: parity.Job) -> None:
    job.parallel(sequence_parallel(job), step=train_step, load=True)


@parity.check(ranks=2, axes={"tp": 2})
def megatron_sequence_without_the_sum(job: parity.Job) -> None:
    job.parallel(sequence_parallel(job), step=no_sum, load=True)
