"""All 27 choices of matrices that stay, gathered and streamed, give the product; a rank sends the table's elements."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.compute.parameters.initial import initialise
from meshwright.compute.parameters.shard import Initial
from meshwright.compute.tensor.gathered import Weights
from meshwright.compute.tensor.summa import ROUTES, Form, Sizes, Stationary, best_stationary
from meshwright.compute.tensor.tesseract import TesseractLinear
from meshwright.ranks.collectives import all_gather, reduce_scatter
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from meshwright.ranks.planned import planned_mesh
from meshwright.training.decisions import affordable_products
from tests.workers import run_ranks

ROWS, H, N = 12, 18, 24
GRIDS = {"2": Grid((("row", 2), ("col", 2))), "3": Grid((("row", 3), ("col", 3)))}
KEPT, ANEW, STREAMED = (
    Form(streams=False, keeps=True),
    Form(streams=False, keeps=False),
    Form(streams=True, keeps=False),
)
FORMS = [KEPT, ANEW, STREAMED]
CHOICES = [Stationary(*each) for each in product("XWY", repeat=3)]


def block(mesh: Mesh, x: Tensor) -> Tensor:
    """Return this rank's block of a matrix."""
    rows = x.chunk(mesh.size("row"))[mesh.index("row")]
    return rows.chunk(mesh.size("col"), 1)[mesh.index("col")].contiguous()


def layer_of(mesh: Mesh, form: Form) -> TesseractLinear:
    weights = Weights(mesh, "gather" if form.keeps else "stream" if form.streams else "whole", {})
    layer = TesseractLinear(mesh, H, (N,), Initial(0.5), weights)
    initialise(layer, mesh, 1)
    return layer.double()


def products(mesh: Mesh) -> list[tuple[str, float]]:
    """Return the worst relative error of y, dx, dW and db, of each choice in each form."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(ROWS, H, generator=generator, dtype=torch.float64).to(mesh.device)
    above = torch.randn(ROWS, N, generator=generator, dtype=torch.float64).to(mesh.device)
    worst = []
    for form, choice in product(FORMS, CHOICES):
        layer = layer_of(mesh, form)
        layer.choice = lambda rows, choice=choice: choice  # type: ignore[method-assign]
        leaf = block(mesh, x).requires_grad_()
        y = layer(leaf)
        y.backward(block(mesh, above))
        whole = all_gather(all_gather(layer.weight.detach(), mesh, "row", 0), mesh, "col", 1)
        assert layer.weight.grad is not None
        assert layer.bias.grad is not None
        assert leaf.grad is not None
        columns = above.chunk(mesh.size("col"), 1)[mesh.index("col")]
        rows = columns.chunk(mesh.size("row"))[mesh.index("row")]
        pairs = [
            (y.detach(), block(mesh, x @ whole)),
            (leaf.grad, block(mesh, above @ whole.t())),
            (layer.weight.grad, block(mesh, x.t() @ above)),
            (layer.bias.grad, rows.sum(0)),
        ]
        errors = [float((mine - wanted).norm() / wanted.norm()) for mine, wanted in pairs]
        worst.append((f"{form} {choice}", max(errors)))
    return worst


@pytest.mark.parametrize("q", GRIDS)
def test_every_choice_multiplies(q: str) -> None:
    for answers in run_ranks(products, GRIDS[q], token_axes=("row",)):
        assert len(answers) == 81
        for name, error in answers:
            assert error < 1e-13, name


def traffic(mesh: Mesh) -> list[tuple[Form, Stationary, dict[tuple[str, str], tuple[int, int]]]]:
    found = []
    for form, choice in product(FORMS, CHOICES):
        layer = layer_of(mesh, form)
        layer.choice = lambda rows, choice=choice: choice  # type: ignore[method-assign]
        x = torch.ones(ROWS // mesh.size("row"), H // mesh.size("col"), dtype=torch.float64, device=mesh.device)
        x.requires_grad_()
        mesh.ledger.traffic.clear()
        layer(x).sum().backward()
        entries = {key: (entry.calls, entry.sent_bytes // 8) for key, entry in mesh.ledger.traffic.items()}
        found.append((form, choice, entries))
    return found


@pytest.mark.parametrize("q", GRIDS)
def test_bytes_and_calls(q: str) -> None:
    size = int(q)
    blocks = Sizes(ROWS // size, H // size, N // size, size)
    for rank, answers in enumerate(run_ranks(traffic, GRIDS[q], token_axes=("row",))):
        on_diagonal = rank // size == rank % size
        for form, choice, entries in answers:
            sent, exchanged = expected(blocks, choice, form)
            told = dict.fromkeys(("row", "col", "row+col"), 0)
            for (axis, _), (_, elements) in entries.items():
                told[axis] += elements
            name = f"{form} {choice} rank {rank}"
            assert {axis: told[axis] for axis in ("row", "col")} == sent, name
            assert told["row+col"] == (0 if on_diagonal else exchanged), name
            if not form.streams:
                calls = sum(calls for (_, verb), (calls, _) in entries.items() if verb != "send")
                assert calls <= 6, name
            if not on_diagonal:
                assert blocks.sent(choice, form) == sum(told.values()), name


def expected(sizes: Sizes, choice: Stationary, form: Form) -> tuple[dict[str, int], int]:
    """Return the elements sent over each axis, and exchanged with the mirror rank."""
    sent = {"row": 0, "col": 0}
    exchanged = 0
    gathered: set[tuple[str, str]] = set()
    for target, stays in (("Y", choice.forward), ("X", choice.dx), ("W", choice.dw)):
        for who, route in ROUTES[stays].items():
            served = who != target and (who, stays) in gathered
            if not served:
                rows, inputs, outputs = sizes.rows, sizes.inputs, sizes.outputs
                block = {"X": rows * inputs, "W": inputs * outputs, "Y": rows * outputs}[who]
                sent[route.axis] += (sizes.q - 1) * block
                exchanged += block * route.transposed
            if who == "Y" and target == "X" and not form.streams:
                gathered.add((who, stays))
            if who == "W" and target == "Y" and form.keeps:
                gathered.add((who, stays))
    return sent, exchanged


def test_the_choice_follows_the_sizes() -> None:
    many_tokens = Sizes(4096, 256, 1024, 2)
    assert best_stationary(many_tokens, KEPT) == Stationary("Y", "Y", "Y")  # W is small, and X smaller than Y
    contract = Sizes(4096, 1024, 256, 2)
    assert best_stationary(contract, KEPT).forward == "X"  # W and the small Y are sent
    few_tokens = Sizes(4, 4096, 16384, 2)
    assert best_stationary(few_tokens, STREAMED) == Stationary("W", "W", "W")  # the weight is the largest
    for sizes in (many_tokens, contract, few_tokens):
        for form in FORMS:
            least = min(sizes.sent(choice, form) for choice in CHOICES)
            assert sizes.sent(best_stationary(sizes, form), form) == least


@pytest.mark.parametrize(
    "free, form",
    [(4 * 2 * 800, KEPT), (4 * 2 * 800 - 1, ANEW), (8 * 2 * 100, ANEW), (8 * 2 * 100 - 1, STREAMED)],
)
def test_the_form_follows_the_memory(free: int, form: Form) -> None:
    policy = affordable_products([100] * 8, 2, free)
    assert Weights(planned_mesh(GRIDS["2"], 0, ("row",)), policy, {}).form == form


def gathers(mesh: Mesh) -> tuple[int, int, int]:
    """Return the weights gathered by two microbatches, by the next step, and by a step that keeps nothing."""
    counts = []
    for form in FORMS[:2]:
        layer = layer_of(mesh, form)
        layer.choice = lambda rows: Stationary("Y", "Y", "Y")  # type: ignore[method-assign]
        for _step in range(2):
            mesh.ledger.traffic.clear()
            for _ in range(2):
                x = torch.ones(ROWS // 2, H // 2, dtype=torch.float64, device=mesh.device, requires_grad=True)
                layer(x).sum().backward()
            layer.weights.gathered.clear()
            counts.append(mesh.ledger.traffic["row", "all_gather"].calls)
    return counts[0], counts[1], counts[2]


def test_a_gathered_weight_is_kept_over_the_microbatches_of_a_step() -> None:
    for told in run_ranks(gathers, GRIDS["2"], token_axes=("row",)):
        assert told == (1, 1, 4)


def scattered(mesh: Mesh) -> list[Any]:
    x = torch.arange(12.0, device=mesh.device).view(2, 6).mul_(mesh.index("col") + 1).requires_grad_()
    part = reduce_scatter(x, mesh, "col", 1)
    part.backward(torch.full_like(part, float(mesh.index("col") + 1)))
    return [part.detach().tolist(), x.grad.tolist() if x.grad is not None else None]


def test_reduce_scatter_mirrors_all_gather() -> None:
    answers = run_ranks(scattered, Grid((("col", 2),)), token_axes=("col",))
    assert [part for part, _ in answers] == [[[0, 3, 6], [18, 21, 24]], [[9, 12, 15], [27, 30, 33]]]
    assert all(gradient == [[1, 1, 1, 2, 2, 2]] * 2 for _, gradient in answers)
