"""AxoNN's linear layers on CPU processes: cut over columns and rows, and over depth, with other samples on each rank.

AxoNN asks for NCCL and CUDA by name; the lines below replace both. `weights=` gives AxoNN's flat weights a shape.
"""

from functools import partial

import torch
from axonn import axonn as ax
from axonn.intra_layer import Linear, fully_connected, sync_gradients
from model import Transformer, batch_of, loss_of
from torch import Tensor, distributed, nn

import meshwright.parity as parity

gloo_group = distributed.new_group
distributed.new_group = lambda ranks, backend: gloo_group([int(rank) for rank in ranks])
torch.cuda.device_count, torch.cuda.set_device, torch.cuda.current_device = lambda: 2, lambda rank: None, lambda: "cpu"
fully_connected.initialize_params = partial(fully_connected.initialize_params, init_device="cpu")


def check(job: parity.Job, batch: object = None, **grid: int) -> None:
    job.reference(Transformer(), loss=loss_of, batch=batch_of, labels=None)
    ax.init(**grid)
    model = job.copy()
    for block in model.blocks:
        for name in ("q", "k", "v", "up", "out", "down"):
            whole = getattr(block, name)
            rows = name in ("out", "down")
            cut = Linear(whole.in_features, whole.out_features, transpose=rows, expert_mode=True)  # without: CUDA only
            cut.load_state_dict(whole.state_dict())
            setattr(block, name, cut)
    tensor_parallel = grid.get("G_intra_r", 1) > 1
    shapes = {f"{name}.weight": (m.local_out_features, m.local_in_features)
              for name, m in model.named_modules() if isinstance(m, Linear) and tensor_parallel}  # fmt: skip

    def shaped(gradients: bool = False) -> dict[str, Tensor]:
        named = model.named_parameters()
        return {name: (p.grad if gradients else p).view(shapes.get(name, p.shape)) for name, p in named}

    def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        (loss := loss_of(model, batch)).backward()
        sync_gradients(model, mean=True, expert_mode=True)
        job.keep_gradients(shaped(gradients=True))
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        model.zero_grad()
        return loss.detach()

    job.parallel(model, step=step, batch=batch, weights=shaped, gradients=False)


@parity.check(ranks=2, axes={"tp": 2})
def tensor(job: parity.Job) -> None:
    check(job, G_intra_r=2)


@parity.check(ranks=2, axes={"depth": 2})
def depth(job: parity.Job) -> None:
    """AxoNN's function for gradients reads an attribute that no layer sets: biases are not summed over depth."""
    check(job, batch=job.rows("depth"), G_intra_d=2)
