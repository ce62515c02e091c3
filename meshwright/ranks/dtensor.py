"""torch's DeviceMesh over a job's ranks, and this rank's part of DTensors.

`meshwright parity` looks at models that other libraries have cut: FSDP2 and tensor-parallel plans keep parameters,
gradients and activations as DTensors, whose local part and place in the whole are read here, without a message.

torch's DTensor is imported where a tensor is neither torch's Tensor nor Parameter itself: it takes half a second, which
no other check and no run needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeGuard, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshwright.ranks.environment import use_interface
from meshwright.ranks.peers import LOOPBACK, interface_at

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@contextmanager
def process_group(wait_seconds: float) -> Iterator[None]:
    """A gloo process group of a local job inside the context, for programs that bring everything else themselves. Ranks
    meet where the environment says (MASTER_ADDR, MASTER_PORT), and leave together."""
    if interface := interface_at(LOOPBACK):
        use_interface(interface, local=True)
    dist.init_process_group("gloo", timeout=timedelta(seconds=wait_seconds))
    yield
    # A peer that is still connecting would take a rank that has left for a crashed one. After an error nobody waits.
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def device_mesh(axes: Sequence[tuple[str, int]], device_type: str = "cpu") -> DeviceMesh:
    """torch's device mesh over all ranks, outermost axis first. Collective over the world."""
    sizes, names = tuple(size for _, size in axes), tuple(name for name, _ in axes)
    assert math.prod(sizes) == dist.get_world_size(), f"{sizes} for {dist.get_world_size()} ranks"
    return init_device_mesh(device_type, sizes, mesh_dim_names=names)


def is_cut(x: Tensor | None) -> TypeGuard[DTensor]:
    """Whether a tensor is torch's DTensor."""
    if x is None or type(x) in (Tensor, nn.Parameter):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(x, DTensor)


def local_of(x: Tensor) -> Tensor:
    """This rank's part of a DTensor as a plain tensor of its own memory; any other tensor, detached."""
    if is_cut(x):
        return cast("DTensor", x.detach()).to_local().clone()  # the copy also waits for a collective that is under way
    return x.detach()


def gradient_of(parameter: Tensor) -> Tensor | None:
    """This rank's part of a parameter's gradient, placed as the parameter is.

    A DTensor's gradient may still be a partial sum, or whole where the parameter is cut. It is redistributed here, as
    optimizers do: a collective over the mesh.
    """
    gradient = parameter.grad
    if is_cut(gradient) and is_cut(parameter) and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    return None if gradient is None else local_of(gradient)


def box_of(x: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Offsets and sizes of this rank's part in the whole of a DTensor; None for any other tensor."""
    if not is_cut(x):
        return None
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, offsets = compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)
    return tuple(offsets), tuple(sizes)


def is_strided(x: Tensor) -> bool:
    """Whether a DTensor's rows on a rank are several runs of the whole's, as of a fused gate and up."""
    return is_cut(x) and any(type(placement).__name__ == "_StridedShard" for placement in x.placements)


def write_local(x: Tensor, values: Tensor) -> None:
    """Overwrite this rank's part of a tensor by values of its local shape."""
    with torch.no_grad():
        # Not the clone of `local_of`: this is the parameter's own memory.
        target = x.to_local() if is_cut(x) else x
        target.copy_(values)


def whole_of(x: Tensor) -> Tensor:
    """All of a DTensor, by a collective over its mesh; any other tensor as it is."""
    return x.full_tensor() if is_cut(x) else x


def from_all_ranks(text: bytes) -> list[bytes]:
    """Gather a text from each rank, in rank order. Collective over torch's default process group, if one was joined.

    torch's own collectives of objects pickle, and a pickle runs code of the sender.
    """
    if (position := joined_place()) is None or position[1] == 1:
        return [text]
    device = "cpu" if "gloo" in dist.get_backend() else torch.accelerator.current_accelerator()
    lengths = torch.zeros(position[1], dtype=torch.int64, device=device)
    lengths[position[0]] = len(text)
    dist.all_reduce(lengths)
    local = torch.zeros(int(lengths.max()), dtype=torch.uint8, device=device)
    local[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(local)
    rows = [torch.empty_like(local) for _ in range(position[1])]
    dist.all_gather(rows, local)
    return [bytes(row[:length].tolist()) for row, length in zip(rows, lengths.tolist(), strict=True)]


def from_rank(rank: int, local: Tensor | None, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Send one rank's tensor to all ranks, which know its shape and dtype; the result is on the CPU. Collective over
    torch's default process group."""
    device = "cpu" if "gloo" in dist.get_backend() else torch.accelerator.current_accelerator()
    if local is not None and dist.get_rank() == rank:
        x = local.to(device).contiguous()
    else:
        x = torch.empty(shape, dtype=dtype, device=device)
    dist.broadcast(x, rank)
    return x.cpu()


def joined_place() -> tuple[int, int] | None:
    """(rank, world size) in torch's default process group; None if this process has joined none."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else None


@contextmanager
def changed_parts(change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Pass each tensor that becomes a part of a DTensor through a function in a context.

    Args:
        change: Called with this rank's part; the result takes its place.
    """
    from torch.distributed.tensor import DTensor

    begin = DTensor.from_local

    def made(local: Tensor, *rest: Any, **options: Any) -> Any:
        return begin(change(local), *rest, **options)

    with patch.object(DTensor, "from_local", staticmethod(made)):
        yield
