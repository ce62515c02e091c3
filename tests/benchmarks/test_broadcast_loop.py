"""The papers' broadcast loop is a baseline only if it computes the plain model's result."""

from __future__ import annotations

import pytest
import torch

from benchmarks.broadcast_loop import Shape
from benchmarks.broadcast_model import BroadcastGPT
from benchmarks.plain_model import PlainGPT
from benchmarks.reference import Reference
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from tests.workers import run_ranks

SMALL = Reference(layers=2, hidden=24, heads=6, sequence=8, batch=12, vocabulary=36)


def differences(mesh: Mesh) -> dict[str, float]:
    """Return errors of the loss and of this rank's gradients, in float64, relative to the largest element."""
    torch.manual_seed(0)
    plain = PlainGPT(SMALL).double()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.normal_(std=0.3)
    tokens, labels = torch.randint(SMALL.vocabulary, (2, SMALL.batch, SMALL.sequence))
    shape = Shape.of(mesh)
    model = BroadcastGPT(plain, shape)
    own = model(tokens, labels)
    own.backward()
    expected = plain(tokens, labels)
    expected.backward()
    total = own.detach() / shape.q  # the ranks of a row hold the same part
    mesh.world.all_reduce(total)
    found = {"loss": abs(float(total / expected.detach()) - 1)}
    for parameter in plain.parameters():
        parameter.data = parameter.grad  # so that gradients are cut like weights
    wanted = BroadcastGPT(plain, shape).parameters()
    for (name, parameter), block in zip(model.named_parameters(), wanted, strict=True):
        if parameter.grad is not None:
            found[name] = float((parameter.grad - block.detach()).abs().max() / block.detach().abs().max())
    return found


@pytest.mark.parametrize("q, depth", [(1, 2), (2, 1), (2, 2), (3, 1)])
def test_it_computes_what_the_plain_model_does(q: int, depth: int) -> None:
    everyone = run_ranks(differences, Grid((("depth", depth), ("row", q), ("col", q))))
    num_parameters = 1 + len(list(PlainGPT(SMALL).parameters()))
    assert len(everyone[0]) == num_parameters, "row 0 holds a gradient of everything"
    for found in everyone:
        assert max(found.values()) < 1e-12, found
