"""How much memory the ranks can still take."""

from __future__ import annotations

import torch

from meshwright.allocator import available_memory_bytes
from meshwright.mesh import Mesh


def free_memory_bytes(mesh: Mesh, *axes: str) -> int:
    """The least free device memory of the ranks of these axes; all ranks of one machine's host memory share it."""
    if mesh.device.type == "cuda":
        mine = torch.cuda.mem_get_info(mesh.device)[0]
    else:
        mine = available_memory_bytes() // mesh.grid.world_size
    if mesh.device.type == "meta":
        return mine  # a plan, made on one machine
    told = torch.tensor([float(mine)], device=mesh.device, dtype=torch.float64)
    comm = mesh.comm(*axes)
    everyone = told.new_empty(comm.size)
    comm.all_gather(everyone, told)
    return int(everyone.min())
