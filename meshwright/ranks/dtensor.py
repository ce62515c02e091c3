"""torch's device mesh over a job's ranks, and what of torch's distributed tensors this rank holds.

`meshwright parity` looks at models that other libraries have cut: FSDP2 and tensor-parallel plans keep parameters,
gradients and activations as DTensors, whose local part and place in the whole are read here, without a message.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from meshwright.environment import use_interface
from meshwright.ranks.peers import interface_at


@contextmanager
def process_group(wait_seconds: float) -> Iterator[None]:
    """torch's process group of a local job over gloo, while the context is entered, for programs that bring all else
    themselves. Ranks meet as the environment says, and leave together."""
    if interface := interface_at("127.0.0.1"):
        use_interface(interface)
    dist.init_process_group("gloo", timeout=timedelta(seconds=wait_seconds))
    yield
    # A peer that still connects takes a rank that has left for one that has died. After an error nobody waits.
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def device_mesh(axes: Sequence[tuple[str, int]], device_type: str = "cpu") -> DeviceMesh:
    """torch's device mesh over all ranks, outermost axis first. Collective over the world."""
    sizes, names = tuple(size for _, size in axes), tuple(name for name, _ in axes)
    assert math.prod(sizes) == dist.get_world_size(), f"{sizes} for {dist.get_world_size()} ranks"
    return init_device_mesh(device_type, sizes, mesh_dim_names=names)


def local_of(x: Tensor) -> Tensor:
    """This rank's part of a DTensor as a plain tensor of its own memory; any other tensor, detached."""
    if isinstance(x, DTensor):
        return cast(DTensor, x.detach()).to_local().clone()  # the copy also waits for a collective that is under way
    return x.detach()


def gradient_of(parameter: Tensor) -> Tensor | None:
    """This rank's part of a parameter's gradient, placed as the parameter is.

    A DTensor's gradient may still be a partial sum, or whole where the parameter is cut: optimizers then redistribute
    it, and so does this, which is collective over the mesh.
    """
    gradient = parameter.grad
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    return None if gradient is None else local_of(gradient)


def box_of(x: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Offsets and sizes of this rank's part in the whole of a DTensor; None for any other tensor."""
    if not isinstance(x, DTensor):
        return None
    sizes, offsets = compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)
    return tuple(offsets), tuple(sizes)


def write_local(x: Tensor, values: Tensor) -> None:
    """Overwrite this rank's part of a tensor by values of its local shape."""
    with torch.no_grad():
        # Not the clone of `local_of`: this is the parameter's own memory.
        target = x.to_local() if isinstance(x, DTensor) else x
        target.copy_(values)


def joined_place() -> tuple[int, int] | None:
    """This process's rank and the number of ranks in torch's process group; None where it has joined none."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else None
