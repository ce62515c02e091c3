"""User programs: a module that is called several times in a pass, and heads split unevenly over ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.parity.check import ParityCheck, ParityResult, judged
from meshwright.parity.job import ParityJob
from meshwright.parity.worker import call_check
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from tests.parity.programs import HIDDEN, Cut, FeedForward, Reduce
from tests.workers import run_ranks

HEADS, HEAD, TOKENS = 3, 4, 5
DEALT = [[0, 1], [2]]
"""The heads of each rank."""


class Recurrent(nn.Module):
    """One block, three times, as in ALBERT."""

    def __init__(self) -> None:
        super().__init__()
        self.begin, self.block, self.end = nn.Linear(HIDDEN, HIDDEN), FeedForward(), nn.Linear(HIDDEN, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.begin(x)
        for _ in range(3):
            h = h + self.block(h)
        return self.end(h)


class Heads(nn.Module):
    """Attention. The number of heads is from the width of qkv."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HEADS * HEAD), nn.Linear(HEADS * HEAD, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (-1, HEAD)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def cut(column: nn.Linear, row: nn.Linear, rows: Tensor, columns: Tensor, job: ParityJob, wrong: str) -> list[Cut]:
    """Return Megatron's two linears with some rows and some columns on this rank."""
    group = job.device_mesh.get_group("tp")
    backward, forward = int(wrong != "f-missing"), int(wrong != "g-missing")
    return [
        Cut(column.weight[rows], column.bias[rows], enter=lambda x: Reduce.apply(x, group, 0, backward)),
        Cut(row.weight[:, columns], row.bias, leave=lambda y, bias: Reduce.apply(y, group, forward, 0) + bias),
    ]


def called_three_times(mesh: Mesh, folder: Path, wrong: str) -> None:
    def check(job: ParityJob) -> None:
        job.reference(Recurrent(), loss=loss_of, batch=lambda generator: torch.randn(8, HIDDEN, generator=generator))
        model = job.copy()
        own = torch.arange(4 * HIDDEN).chunk(2)[job.index("tp")]
        model.block.up, model.block.down = cut(model.block.up, model.block.down, own, own, job, wrong)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(model: nn.Module, batch: Tensor) -> Tensor:
            """Make two microbatches, which call the block six times."""
            optimizer.zero_grad()
            losses = [loss_of(model, part) / 2 for part in batch.chunk(2)]
            for loss in losses:
                loss.backward()
            optimizer.step()
            return torch.stack(losses).sum().detach()

        job.parallel(model, loss=loss_of, step=step)

    call_check(check, mesh, "float64", folder)


def uneven_heads(mesh: Mesh, folder: Path, wrong: str) -> None:
    def check(job: ParityJob) -> None:
        job.reference(
            nn.Sequential(nn.Linear(HIDDEN, HIDDEN), Heads()),
            loss=loss_of,
            batch=lambda generator: torch.randn(4, TOKENS, HIDDEN, generator=generator),
        )
        model = job.copy()
        heads = [1] if wrong == "same-head" and job.rank == 1 else DEALT[job.index("tp")]
        columns = torch.cat([torch.arange(HEAD) + HEAD * head for head in heads])
        rows = torch.cat([columns + part * HEADS * HEAD for part in range(3)])
        model[1].qkv, model[1].out = cut(model[1].qkv, model[1].out, rows, columns, job, wrong)
        job.parallel(model, loss=loss_of)

    call_check(check, mesh, "float64", folder)


def result_of(program, wrong: str, folder: Path) -> ParityResult:
    run_ranks(program, Grid((("tp", 2),)), folder, wrong, transport="torch")
    return judged(ParityCheck("program", Path(__file__), (("tp", 2),), "float64"), "float64", folder, 0.0)


@pytest.mark.parametrize("program", [called_three_times, uneven_heads])
def test_a_right_program_holds(program, tmp_path: Path) -> None:
    result = result_of(program, "", tmp_path)
    assert result.holds, result.verdict


@pytest.mark.parametrize(
    "program, wrong, module, kind",
    [
        (called_three_times, "g-missing", "block.down", "missing reduction"),
        (called_three_times, "f-missing", "block.up", "missing reduction"),
        (uneven_heads, "g-missing", "1.out", "missing reduction"),
        (uneven_heads, "f-missing", "1", "missing reduction"),
        (uneven_heads, "same-head", "1.qkv", "wrong part"),
    ],
)
def test_a_mistake_is_found_where_it_is(program, wrong: str, module: str, kind: str, tmp_path: Path) -> None:
    result = result_of(program, wrong, tmp_path)
    assert result.finding is not None, "not seen"
    assert (result.finding.module, result.finding.kind) == (module, kind), result.verdict
