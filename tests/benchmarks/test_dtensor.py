"""The plain model under DTensor is a baseline only if it computes one device's result."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from benchmarks.dtensor import HeadwiseBlock, parallel_model
from benchmarks.plain_model import PlainGPT
from benchmarks.reference import Reference
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from tests.workers import run_ranks

SMALL = Reference(layers=2, hidden=24, heads=6, sequence=8, batch=3, vocabulary=36)


def differences(mesh: Mesh, sequence_parallel: bool) -> dict[str, float]:
    """Return the errors of the loss and of every whole gradient in float64, relative to the largest element."""
    model = parallel_model(SMALL, mesh.grid.world_size, sequence_parallel).double()
    torch.manual_seed(0)
    plain = PlainGPT(SMALL, HeadwiseBlock).double()
    tokens, labels = torch.randint(SMALL.vocabulary, (2, SMALL.batch, SMALL.sequence))
    expected = plain(tokens, labels)
    expected.backward()
    with loss_parallel():
        loss = model(tokens, labels)
        loss.backward()
    found = {"loss": abs(loss.item() / expected.item() - 1)}
    for (name, parameter), wanted in zip(model.named_parameters(), plain.parameters(), strict=True):
        gradient = parameter.grad.full_tensor() if isinstance(parameter, DTensor) else parameter.grad
        found[name] = float((gradient - wanted.grad).abs().max() / wanted.grad.abs().max())
    return found


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_it_computes_what_the_plain_model_does(sequence_parallel: bool) -> None:
    for found in run_ranks(differences, Grid((("tensor", 2),)), sequence_parallel, transport="torch"):
        assert max(found.values()) < 1e-12, found
