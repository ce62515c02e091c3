"""torch's data parallelism is a baseline only if it computes the plain loop's result, compiled or not."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor

from benchmarks.baselines import fused_adamw, graphs_of, replicated, shard
from benchmarks.plain_model import PlainGPT
from benchmarks.reference import Reference, global_batch, rank_rows
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from tests.workers import run_ranks

SMALL = Reference(layers=2, hidden=24, heads=2, sequence=8, batch=4, vocabulary=36)
STEPS = 3


def model() -> PlainGPT:
    torch.manual_seed(0)
    return PlainGPT(SMALL).double()


BACKENDS = [
    "aot_eager",
    pytest.param(
        "inductor",
        marks=[pytest.mark.long, pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++ here")],
    ),
]


def trained(mesh: Mesh, form: str, backend: str) -> tuple[list[float], float, bool]:
    """Train for three steps; return this rank's losses divided by the plain loop's, and the largest error of a weight.

    The third value says whether torch has compiled a graph.
    """
    plain, own = model(), model()
    counters.clear()
    if form.startswith("DDP"):
        whole = replicated(own, form.partition(", ")[2], backend)
    else:
        shard(own, own.blocks, form.endswith("compiled"), backend)
        whole = own
    optimizers = [fused_adamw(whole.parameters()), fused_adamw(plain.parameters())]
    rows, losses = rank_rows(mesh.rank, mesh.grid.world_size, SMALL), []
    for step in range(STEPS):
        tokens, labels = global_batch(step, SMALL)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        with graphs_of(form.partition(", ")[2]):
            wanted, loss = plain(tokens, labels), whole(tokens[rows], labels[rows])
        wanted.backward()
        loss.backward()
        losses.append(loss.item() / wanted.item())
        for optimizer in optimizers:
            optimizer.step()
    weights = [(p.full_tensor() if isinstance(p, DTensor) else p).detach() for p in own.parameters()]
    pairs = zip(weights, plain.parameters(), strict=True)
    apart = max(float((one - other.detach()).abs().max()) for one, other in pairs)
    return losses, apart, bool(counters["stats"])


def check(form: str, backend: str) -> None:
    everyone = run_ranks(trained, Grid((("data", 2),)), form, backend, transport="torch")
    for losses in zip(*(losses for losses, _, _ in everyone), strict=True):
        assert sum(losses) / 2 == pytest.approx(1.0, abs=1e-12)
    for _, apart, compiled in everyone:
        assert apart < 1e-8, "weights, of which AdamW steps a gradient near 0 by its sign"
        assert compiled == ("," in form)


@pytest.mark.parametrize("form", ["DDP", "FSDP2"])
def test_it_trains_as_the_plain_loop_does(form: str) -> None:
    check(form, "none")


@pytest.mark.filterwarnings("ignore")  # warnings of the installed compiler
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", ["DDP, inside", "DDP, outside", "FSDP2, compiled"])
def test_compiled_it_does(form: str, backend: str) -> None:
    check(form, backend)
