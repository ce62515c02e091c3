"""One file multiplies matrices: one class of products is enough to compute layers in other numbers."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from torch import Tensor

from meshwright.compute.parameters.initial import initialise
from meshwright.compute.parameters.shard import Initial
from meshwright.compute.tensor.arithmetic import Arithmetic
from meshwright.compute.tensor.head import HeadShape
from meshwright.compute.tensor.products import Products
from meshwright.compute.tensor.router import ExpertsShape
from meshwright.compute.tensor.serial import SerialKit
from meshwright.compute.tensor.tesseract import TesseractKit
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from tests.workers import run_ranks

PACKAGE = Path(__file__).resolve().parents[3] / "meshwright/compute"
ROOMS = ("tensor", "subgraph", "bits")
MULTIPLIES = {"mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_", "matmul", "linear", "einsum"}
"""Functions of torch that multiply matrices."""


def products_in(tree: ast.AST) -> list[int]:
    """Return the lines that multiply matrices."""
    found = []
    for node in ast.walk(tree):
        called = node.func if isinstance(node, ast.Call) else None
        by_torch = isinstance(called, ast.Attribute) and ast.unparse(called.value) in ("torch", "F", "torch.ops.aten")
        in_place = isinstance(called, ast.Attribute) and called.attr in ("addmm_", "baddbmm_", "mm", "bmm", "matmul")
        if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.MatMult):
            found.append(node.lineno)
        elif isinstance(called, ast.Attribute) and called.attr in MULTIPLIES and (by_torch or in_place):
            found.append(called.lineno)
    return found


def test_one_file_multiplies() -> None:
    found = {
        str(path.relative_to(PACKAGE)): products_in(ast.parse(path.read_text()))
        for room in ROOMS for path in (PACKAGE / room).glob("*.py")
    }  # fmt: skip
    assert {file for file, lines in found.items() if lines} == {
        "tensor/products.py",
        "tensor/widened.py",  # times a product
    }


@pytest.mark.parametrize("planted", ["a @ b", "x @= w", "torch.addmm(b, x, w)", "F.linear(x, w)", "total.addmm_(a, b)"])
def test_a_planted_product_is_seen(planted: str) -> None:
    assert products_in(ast.parse(planted))


class Counted(Products):
    """Products that keep the shape of each result."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def multiply(self, a: Tensor, b: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        self.shapes.append((a.shape[0], b.shape[1]))
        return super().multiply(a, b, bias, out)

    def write_product(self, a: Tensor, b: Tensor, out: Tensor, beta: int) -> None:
        self.shapes.append((a.shape[0], b.shape[1]))
        super().write_product(a, b, out, beta)


H, N, V = 8, 12, 16
ROWS, TOKENS = 2, 3
ONE = Grid((("data", 1), ("row", 1), ("col", 1), ("depth", 1)))


def counted(mesh: Mesh, layer: str) -> list[tuple[int, ...]]:
    """Return the products of a layer's forward and backward pass."""
    products = Counted()
    kit = (TesseractKit(mesh, "whole", Arithmetic(products)) if layer == "summa"
           else SerialKit(mesh, arithmetic=Arithmetic(products)))  # fmt: skip
    x = torch.randn(ROWS, TOKENS, H, requires_grad=True)
    if layer == "head":
        module = kit.head_loss(HeadShape(H, V, V, Initial(0.02)))
        arguments: tuple[object, ...] = torch.randint(V, (ROWS, TOKENS)), 1.0
    elif layer == "experts":
        assert isinstance(kit, SerialKit)
        shape = ExpertsShape(H, N, 2, 1, renormalises=True, balance=0.0, capacity=1.0, initial=Initial(0.02),
                             last=Initial(0.02))  # fmt: skip
        module, arguments = kit.experts(shape), (torch.arange(TOKENS),)
    else:
        module, arguments = kit.expand(H, N, Initial(0.02)), ()
    initialise(module, mesh, 0)
    y = module(x, *arguments)
    (y[0] if isinstance(y, tuple) else y).sum().backward()
    return products.shapes


@pytest.mark.parametrize(
    "layer, shapes",
    [
        ("pair", [(6, N), (6, H), (H, N)]),
        ("summa", [(6, N), (6, H), (H, N)]),
        ("head", [(6, V), (6, H), (V, H)]),
        # The router's; then two experts', each expert with room for 2 rows of each of 2 sequences.
        ("experts", [(6, 2), (H, 2), (6, H), *[(4, 2 * N), (4, H), (N, H), (4, N), (H, 2 * N), (4, H)] * 2]),
    ],
)  # fmt: skip
def test_each_layer_multiplies_by_the_products_that_its_kit_has(layer: str, shapes: list[tuple[int, ...]]) -> None:
    [found] = run_ranks(counted, ONE, layer)
    assert sorted(found) == sorted(shapes)
