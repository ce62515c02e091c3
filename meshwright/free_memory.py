"""How much memory a rank can still take."""

from __future__ import annotations

import torch

from meshwright.machine import available_memory_bytes
from meshwright.ranks.mesh import Mesh


def host_memory_bytes(mesh: Mesh) -> int:
    """This rank's share of the host memory that is available: the node's ranks have it together."""
    return available_memory_bytes() // mesh.ranks_here


def free_memory_bytes(mesh: Mesh, coming_bytes: int = 0) -> int:
    """Device memory that this rank can take, beyond the `coming_bytes` that it will take anyway. Of a plan: the host's.

    On a GPU what torch's allocator keeps unused is free, too.
    """
    if mesh.device.type == "cuda":
        kept = torch.cuda.memory_reserved(mesh.device) - torch.cuda.memory_allocated(mesh.device)
        free = torch.cuda.mem_get_info(mesh.device)[0] + kept
    else:
        free = host_memory_bytes(mesh)
    return max(0, free - coming_bytes)
