"""The plain model under torch's pipelines is a baseline only if it computes one device's result."""

from __future__ import annotations

import pytest
import torch

from benchmarks.baselines import fused_adamw
from benchmarks.contender import Place
from benchmarks.plain_model import PlainGPT
from benchmarks.reference import Reference
from benchmarks.torch_pipeline import TorchPipeline, cut, own_chunks
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from tests.workers import run_ranks

TORCH = tuple(int(number) for number in torch.__version__.split(".")[:2])
connects_late = pytest.mark.skipif(TORCH < (2, 13), reason="torch 2.11's DualPipeV sends before gloo has connected")
SMALL = Reference(layers=4, hidden=24, heads=6, sequence=8, batch=8, vocabulary=36)
MICROBATCHES = 4
STEPS = 3


def model() -> PlainGPT:
    torch.manual_seed(0)
    return PlainGPT(SMALL).double()


def differences(mesh: Mesh, schedule: str, layers: list[float]) -> tuple[list[float], dict[str, float]]:
    """Return the losses of three steps, and each gradient's largest difference to one device's, both relative."""
    plain, whole = model(), model()
    place = Place(mesh.rank, mesh.grid.world_size)
    pipeline = TorchPipeline(cut(whole, layers), schedule, place, MICROBATCHES)
    optimizers = [fused_adamw(pipeline.parameters), fused_adamw(plain.parameters())]
    losses: list[float] = []
    found: dict[str, float] = {}
    for _ in range(STEPS):
        tokens, labels = torch.randint(SMALL.vocabulary, (2, SMALL.batch, SMALL.sequence))
        for optimizer in optimizers:
            optimizer.zero_grad()
        wanted = plain(tokens, labels)
        wanted.backward()
        losses.append(pipeline.backward(tokens, labels) / wanted.item())
        for (name, own), expected in zip(whole.named_parameters(), plain.parameters(), strict=True):
            if own.grad is not None:
                difference = float((own.grad - expected.grad).abs().max() / expected.grad.abs().max())
                found[name] = max(found.get(name, 0.0), difference)
        for optimizer in optimizers:
            optimizer.step()
    return losses, found


@pytest.mark.few(5)
@pytest.mark.parametrize(
    "ranks, schedule, layers",
    [
        (2, "gpipe", [3, 1]),
        (2, "1f1b", [3.5, 0.5]),
        (2, "looped-bfs", [2, 0.5, 1.5, 0]),
        (2, "interleaved-1f1b", [2, 0.5, 1.5, 0]),
        (2, "interleaved-zero-bubble", [1.5, 0.5, 1.5, 0.5]),
        (2, "zbv-zero-bubble", [0, 2, 1.5, 0.5]),
        pytest.param(2, "dual-pipe-v", [0, 2, 1.5, 0.5], marks=connects_late),
        (4, "1f1b", [2, 1, 1, 0]),
        (4, "interleaved-1f1b", [1, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0]),
        (4, "interleaved-zero-bubble", [0.5] * 8),
        (4, "zbv-zero-bubble", [0, 1, 0.5, 0.5, 0.5, 0.5, 1, 0]),
    ],
)
def test_it_computes_what_the_plain_model_does(ranks: int, schedule: str, layers: list[float]) -> None:
    everyone = run_ranks(differences, Grid((("pipe", ranks),)), schedule, layers, transport="torch")
    for losses in zip(*(losses for losses, _ in everyone), strict=True):
        assert sum(losses) == pytest.approx(1.0, abs=1e-12)
    names = [name for _, found in everyone for name in found]
    assert len(names) == len(set(names)) == len(list(model().parameters())), "each gradient is on one rank"
    for _, found in everyone:
        assert max(found.values()) < 1e-12, found


def test_chunks_go_round_in_a_loop_and_back_in_a_v() -> None:
    assert [own_chunks("interleaved-1f1b", Place(rank, 2), 4) for rank in range(2)] == [[0, 2], [1, 3]]
    assert [own_chunks("zbv-zero-bubble", Place(rank, 2), 4) for rank in range(2)] == [[0, 3], [1, 2]]


@pytest.mark.parametrize("schedule, num_chunks", [("1f1b", 4), ("looped-bfs", 3), ("zbv-zero-bubble", 2)])
def test_a_number_of_chunks_that_does_not_fit_is_refused(schedule: str, num_chunks: int) -> None:
    with pytest.raises(ValueError, match=f"{schedule} cannot place {num_chunks} chunks on 2 ranks"):
        own_chunks(schedule, Place(0, 2), num_chunks)


@pytest.mark.parametrize("layers", [[3, 0.5], [4, 1], [2, 0, 2], [-1, 5], [1.7, 2.3]])
def test_a_partition_that_does_not_add_up_is_refused(layers: list[float]) -> None:
    with pytest.raises(ValueError, match="does not cut 4 layers"):
        cut(model(), layers)
