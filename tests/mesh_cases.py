"""The body of test_mesh: ranks that ask for different groups, or for the same groups in another order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.ranks.mesh import Mesh

ASKED = {
    0: (("data",), ("row",), ("data", "pipe"), ("data", "row")),
    1: (("data", "row"), ("data", "pipe"), ("data",)),
    2: (("data", "pipe"), ("row",), ("data", "row")),
}
"""Sets of axes in each stage's order of asking; only data+pipe has ranks of several stages."""


def ask_by_stage(mesh: Mesh) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return, by set of axes, the sum of the world ranks of my group."""
    results = {}
    for axes in ASKED[mesh.index("pipe")]:
        total = torch.tensor([mesh.rank])
        mesh.comm(*axes).all_reduce(total)
        results["+".join(axes)] = total
    return {}, results
