"""Branches over sub-grids equal the same modules one after another: outputs, gradients, for every form and number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.compute.parameters.initial import initialise
from meshwright.compute.parameters.shard import Initial, num_parameters, shard_specs
from meshwright.compute.subgraph.branches import Branches, Common, Enter, Leave
from meshwright.compute.tensor.serial import SerialLinear
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from tests.mpi_workers import Answer
from tests.workers import run_ranks

TOLERANCE = 1e-12
ROWS, STEPS, WIDTH = 8, 3, 12
"""The dims of a replica's x [ROWS, STEPS, WIDTH]."""

PAIRS: tuple[tuple[Enter, Leave], ...] = (
    ("split", "sum"), ("split", "concat"), ("slice", "sum"), ("slice", "concat"),
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """Branches for a test. `inner` has the width of each branch's hidden layer."""

    enter: Enter
    leave: Leave
    common: Common
    inner: tuple[int, ...]
    costs: tuple[int, ...] | None = None
    widths: tuple[int, ...] | None = None
    out_widths: tuple[int, ...] | None = None
    rows: int = ROWS

    def modules(self) -> list[nn.Module]:
        """Return the branches, drawn with equal values on every rank."""
        torch.manual_seed(1)
        count = len(self.inner)
        ins = (WIDTH,) * count if self.enter == "split" else self.widths or (WIDTH // count,) * count
        outs = (WIDTH,) * count if self.leave == "sum" else self.out_widths or (4,) * count
        return [
            nn.Sequential(nn.Linear(a, inner), nn.Tanh(), nn.Linear(inner, b)).double()
            for a, inner, b in zip(ins, self.inner, outs, strict=True)
        ]

    def branches(self, mesh: Mesh) -> Branches:
        return Branches(
            self.modules(), enter=self.enter, leave=self.leave, mesh=mesh, num_rows=self.rows, common=self.common,
            costs=self.costs, widths=self.widths, out_widths=self.out_widths,
        )  # fmt: skip


def cases(size: int) -> dict[str, Case]:
    """Return cases by name, for an axis of `size` ranks."""
    listed = {}
    commons: list[Common] = ["all", "one", *range(2, size)]
    for enter, leave in PAIRS:
        for common in commons:
            listed[f"{enter}-{leave}-{common}"] = Case(enter, leave, common, (2, 3, 4, 5))
        listed[f"{enter}-{leave}-twelve"] = Case(enter, leave, "one", tuple(range(1, 13)), tuple(range(12)))
        for common in commons:
            name, costs = f"{enter}-{leave}-{common}-unequal", (1, 1, 5, 1, 2) if size == 2 else (1, 9, 1, 4, 1, 2, 1)
            inner, widths = tuple(range(2, 2 + len(costs))), (3, 1, 2, 1, 5) if size == 2 else (3, 1, 2, 1, 2, 1, 2)
            sliced, joined = widths if enter == "slice" else None, widths[::-1] if leave == "concat" else None
            rows = 7 if common != "all" or (enter, leave) == ("slice", "concat") else 8
            listed[name] = Case(enter, leave, common, inner, costs, sliced, joined, rows)
    return listed


def batch(num_rows: int, replica: int, width: int = WIDTH) -> Tensor:
    """Return the input of a replica's branches: [num_rows, STEPS, width]."""
    generator = torch.Generator().manual_seed(replica)
    return torch.randn(num_rows, STEPS, width, generator=generator, dtype=torch.float64)


def summed_gradients(model: nn.Module, mesh: Mesh) -> dict[str, Tensor]:
    """Return the gradients of this rank's parameters by name, each summed by the parameter's spec."""
    specs, results = shard_specs(model), {}
    for name, parameter in model.named_parameters():
        if parameter.numel():
            assert parameter.grad is not None, name
            mesh.comm(*specs[name].sum_axes(mesh)).all_reduce(parameter.grad)
            results[name] = parameter.grad
    return results


def pass_through(model: Branches, mesh: Mesh, x: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor], Any]:
    """Return this rank's output, the gradients of input and parameters, and the calls by verb, forward and backward."""
    mine = model.rows(x).clone().requires_grad_()
    mesh.ledger.traffic.clear()
    y = model(mine)
    there = {verb: entry.calls for (_, verb), entry in mesh.ledger.traffic.items()}
    mesh.ledger.traffic.clear()
    (y * torch.arange(1.0, y.shape[1] + 1).view(-1, *[1] * (y.dim() - 2))).square().sum().backward()
    back = {verb: entry.calls for (_, verb), entry in mesh.ledger.traffic.items()}
    assert mine.grad is not None
    return y.detach(), mine.grad, summed_gradients(model, mesh), (there, back)


def run_cases(mesh: Mesh, listed: dict[str, Case], replicas: int) -> dict[str, Any]:
    """Run every case on this rank; on one rank, all replicas' rows one after another."""
    results = {}
    for name, case in listed.items():
        inputs = [batch(case.rows, replica) for replica in range(replicas)]
        if mesh.grid.world_size == 1:
            whole = replace(case, rows=case.rows * replicas)
            results[name] = pass_through(whole.branches(mesh), mesh, torch.cat(inputs))
        else:
            results[name] = pass_through(case.branches(mesh), mesh, inputs[mesh.index("data")])
    return results


def on(data: int, size: int, listed: dict[str, Case], replicas: int) -> list[dict[str, Any]]:
    grid = Grid((("data", data), ("branch", size)))
    return run_ranks(run_cases, grid, listed, replicas, token_axes=("data", "branch"))


@cache
def answers(data: int, size: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the results of every rank of the grid, and of one device with common layers on all ranks."""
    listed = cases(size)
    alone = {name: replace(case, common="all") for name, case in listed.items()}
    return on(data, size, listed, data), on(1, 1, alone, data)[0]


def same(one: Tensor, other: Tensor, what: str) -> None:
    torch.testing.assert_close(one, other, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda text: f"{what}: {text}")


GRIDS = [(1, 2), (2, 2), (2, 4), pytest.param(1, 4, marks=pytest.mark.long), pytest.param(4, 2, marks=pytest.mark.long)]


@pytest.mark.parametrize("data, size", GRIDS)
def test_equal_to_one_after_another(data: int, size: int) -> None:
    ranks, serial = answers(data, size)
    for name, case in cases(size).items():
        outputs, input_gradients, gradients, _ = serial[name]
        for at, whole in ((0, outputs), (1, input_gradients)):
            same(torch.cat([rank[name][at] for rank in ranks]), whole, f"{name}, {('output', 'gradient')[at]} of x")
        for index in range(size):
            for replica in range(data):
                for parameter, gradient in ranks[replica * size + index][name][2].items():
                    same(gradient, gradients[parameter], f"{name}, {parameter}")
        held = [parameter for rank in ranks for parameter in rank[name][2]]
        assert sorted(held) == sorted([*gradients] * data), "each branch lives in one sub-grid"
        assert len(gradients) == 4 * len(case.inner)


MESSAGES = ("split-sum-3-unequal", "slice-concat-all-unequal")


def over_mpi(mesh: Mesh) -> tuple[None, dict[str, Tensor]]:
    """Return the results by messages on this rank of four: outputs and gradients of x by case."""
    results = run_cases(mesh, {name: cases(4)[name] for name in MESSAGES}, 1)
    return None, {f"{name}-{at}": result[at] for name, result in results.items() for at in (0, 1)}


def test_messages_over_mpi(mpi: Callable[[int], dict[str, list[Answer]]]) -> None:
    alone = {name: replace(cases(4)[name], common="all") for name in MESSAGES}
    (serial,) = on(1, 1, alone, 1)
    for name in MESSAGES:
        for at in (0, 1):
            parts = [tensors[f"{name}-{at}"] for _, tensors in mpi(4)["branches"]]
            same(torch.cat(parts), serial[name][at], f"{name}, {at}")


TABLE = {
    "all": {"split": "all_gather", "sum": "reduce_scatter", "slice": "all_to_all", "concat": "all_to_all"},
    "one": {"split": "broadcast", "sum": "reduce", "slice": "scatter", "concat": "gather"},
}
"""The paper's verb for each step forward. The mirrored step has this verb in the backward pass."""

MIRROR = {"split": "sum", "sum": "split", "slice": "concat", "concat": "slice"}


@pytest.mark.parametrize("size", [2, 4])
def test_what_is_sent_is_the_papers_table(size: int) -> None:
    ranks, _ = answers(2, size)
    for rank in ranks:
        for enter, leave in PAIRS:
            for common, verbs in TABLE.items():
                steps = (enter, leave), (MIRROR[enter], MIRROR[leave])
                wanted = [sorted(verbs[step] for step in both) for both in steps]
                for name in (f"{enter}-{leave}-{common}", f"{enter}-{leave}-twelve")[: 1 + (common == "one")]:
                    calls = rank[name][3]
                    assert [sorted(verb for verb, n in made.items() for _ in range(n)) for made in calls] == wanted
            for number in range(2, size):
                for made in rank[f"{enter}-{leave}-{number}"][3]:
                    assert set(made) <= {"send"}
    unequal = [{verb for made in rank["slice-concat-all-unequal"][3] for verb in made} for rank in ranks]
    assert unequal == [{"send"}] * len(ranks)


def convolutions(mesh: Mesh) -> tuple[Any, Any]:
    """ResNeXt's paths as branches, and as one grouped convolution; x [B, C, H, W]."""
    torch.manual_seed(2)
    whole = nn.Conv2d(12, 8, 3, padding=1, groups=4).double()
    paths = [nn.Conv2d(3, 2, 3, padding=1).double() for _ in range(4)]
    for path, weight, bias in zip(paths, whole.weight.chunk(4), whole.bias.chunk(4), strict=True):
        path.weight.data, path.bias.data = weight.detach().clone(), bias.detach().clone()
    x = batch(4 * 12, 0, 3).view(4, 12, 3, 3)
    model = Branches(paths, enter="slice", leave="concat", mesh=mesh, num_rows=4, dim=1)
    pieces = pass_through(model, mesh, x)
    x.requires_grad_()
    y = whole(x)
    (y * torch.arange(1.0, 9).view(-1, 1, 1)).square().sum().backward()
    return pieces, (y.detach(), x.grad, whole.weight.grad, whole.bias.grad)


@pytest.mark.parametrize("size", [2, 4])
def test_grouped_convolution_is_its_branches(size: int) -> None:
    # the coefficients of pass_through belong to dim 1, here the channels of all groups
    ranks = run_ranks(convolutions, Grid((("data", 1), ("branch", size))), token_axes=("data", "branch"))
    y, gradient, weight, bias = ranks[0][1]
    same(torch.cat([pieces[0] for pieces, _ in ranks]), y, "output")
    same(torch.cat([pieces[1] for pieces, _ in ranks]), gradient, "gradient of x")
    gradients = {name: value for pieces, _ in ranks for name, value in pieces[2].items()}
    same(torch.cat([gradients[f"{path}.weight"] for path in range(4)]), weight, "weight")
    same(torch.cat([gradients[f"{path}.bias"] for path in range(4)]), bias, "bias")


def held_parameters(mesh: Mesh) -> tuple[int, int, list[float]]:
    """Return the numbers of this rank's and of the model's parameters, and branch 1's weights after `initialise`."""
    torch.manual_seed(3)
    plain = nn.Linear(6, 5)
    drawn = plain.weight[0, 0].item()
    layers: list[nn.Module] = [plain, SerialLinear(mesh, 6, (5,), Initial(0.1)), nn.Linear(6, 5), nn.Linear(6, 5)]
    model = Branches(layers, enter="split", leave="sum", mesh=mesh, num_rows=4)
    initialise(model, mesh, 5)
    assert [*shard_specs(model)] == [f"{branch}.{name}" for branch in range(4) for name in ("weight", "bias")]
    if mesh.index("branch") == 0:
        assert plain.weight[0, 0].item() == drawn, "what the constructor drew"
    mine = sum(parameter.numel() for parameter in model.parameters())
    return mine, num_parameters(list(shard_specs(model).values())), model.get_parameter("1.weight").flatten().tolist()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_rank_holds_the_parameters_of_its_branches(size: int) -> None:
    ranks = run_ranks(held_parameters, Grid((("data", 1), ("branch", size))))
    for mine, whole, _ in ranks:
        assert (mine, whole) == (4 * 35 // size, 4 * 35)
    home = ranks[1 // (4 // size)][2]
    assert len(home) == 30
    assert len({*home}) == 30, "drawn from the seed"


class Turned(nn.Module):
    """Transpose [B, n, n] without a copy: output and gradient have gaps."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mT


def turn_one(mesh: Mesh) -> tuple[Tensor, Tensor | None, Tensor]:
    """Run a branch that learns and a branch that does not; only ranks with rows differentiate x. Return this rank's
    results."""
    torch.manual_seed(4)
    linear = nn.Linear(4, 4).double()
    weight = linear.weight.detach().clone()
    model = Branches([linear, Turned()], enter="split", leave="sum", mesh=mesh, num_rows=2, common="one")
    x = model.rows(torch.arange(32.0, dtype=torch.float64).view(2, 4, 4)).requires_grad_(mesh.index("branch") == 0)
    y = model(x)
    (y * torch.arange(16.0).view(4, 4)).sum().backward()
    return y.detach(), x.grad, weight


def look_up(mesh: Mesh) -> list[int]:
    """Return the sums of the gradients of this rank's tables. Ids have no gradient, and one of the tables has none."""
    tables = [nn.Embedding(5, 4), nn.Embedding(5, 4).requires_grad_(False)]
    model = Branches(tables, enter="split", leave="sum", mesh=mesh, num_rows=2)
    model(model.rows(torch.tensor([[1], [3]]))).sum().backward()
    return [int(table.weight.grad.sum()) for table in tables if table.weight.grad is not None]


def test_no_rank_waits_for_one_that_learns_nothing() -> None:
    grid = Grid((("data", 1), ("branch", 2)))
    (y, gradient, weight), (nothing, _, _) = run_ranks(turn_one, grid)
    x, scale = torch.arange(32.0, dtype=torch.float64).view(2, 4, 4), torch.arange(16.0).double().view(4, 4)
    assert nothing.shape == (0, 4, 4)
    bias = y - x @ weight.mT - x.mT
    same(bias, bias[:1, :1].expand_as(bias), "output")
    same(gradient, (scale @ weight + scale.mT).expand(2, 4, 4), "gradient of x")
    assert run_ranks(look_up, grid) == [[8], []]
