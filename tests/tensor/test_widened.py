"""Products of halves in float32: the same numbers, rounded once; chosen where a CPU is slow at its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.config import Config, parse_run
from meshwright.decisions import resolve_layout
from meshwright.machine import Machine
from meshwright.ranks.grid import Grid, grid_of_run
from meshwright.ranks.mesh import Mesh
from meshwright.section import with_field
from meshwright.tensor.widened import Rates, WidenedProducts, product_rates
from meshwright.training.loop import validate
from tests.fuzz.check import HeldOut
from tests.harness import build
from tests.oracle.context import config_for
from tests.oracle.run import train, train_step
from tests.workers import run_ranks


def halves(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


PRODUCTS: dict[str, Any] = {
    "mm": lambda a, b, out: a @ b,
    "mm, out": lambda a, b, out: torch.mm(a, b, out=out),
    "addmm": lambda a, b, out: torch.addmm(out, a, b, alpha=0.5),
    "addmm, out": lambda a, b, out: torch.addmm(out, a, b, beta=1, out=out),
    "addmm_": lambda a, b, out: out.addmm_(a, b),
    "bmm": lambda a, b, out: torch.bmm(a[None], b[None])[0],
    "baddbmm": lambda a, b, out: torch.baddbmm(out[None], a[None], b[None])[0],
    "linear": lambda a, b, out: torch.nn.functional.linear(a, b.t(), out[0]),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_is_that_of_the_same_numbers_in_float32(name: str) -> None:
    torch.manual_seed(1)
    a, b, out = halves(12, 20), halves(20, 8), halves(12, 8)
    wide = out.float()
    expected = PRODUCTS[name](a.float(), b.float(), wide).bfloat16()
    with WidenedProducts():
        given = PRODUCTS[name](a, b, out)
    assert given.dtype == torch.bfloat16
    assert torch.equal(given, expected)
    if name.endswith(("out", "_")):
        assert given.data_ptr() == out.data_ptr(), "what is written in place stays in its place"


def gradients_of_attention(mesh: Mesh) -> tuple[Tensor, Tensor]:
    """dQ of one attention in bf16, by a widened backward kernel and by bf16's own."""
    torch.manual_seed(2)
    q, gradient = halves(2, 3, 40, 16).requires_grad_(), halves(2, 3, 40, 16)

    def dq() -> Tensor:
        out = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        return torch.autograd.grad(out, q, gradient)[0]

    with WidenedProducts():
        widened = dq()
    return widened, dq()


def test_attention_goes_backward_in_float32() -> None:
    [(widened, own)] = run_ranks(gradients_of_attention, Grid((("data", 1),)))
    assert widened.dtype == torch.bfloat16
    assert (widened - own).norm() <= 2**-7 * own.norm()


def test_other_dtypes_are_left_alone() -> None:
    a = torch.randn(6, 6, dtype=torch.float64)
    expected = a @ a
    with WidenedProducts():
        assert torch.equal(a @ a, expected)


def dtypes_of_products(mesh: Mesh, config: Config) -> set[torch.dtype]:
    """The dtypes in which the products of matrices of a step and of a validation are computed."""
    found: set[torch.dtype] = set()

    class Watching(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            is_product = op.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm)
            if is_product and not args[-1].is_meta:  # which tell messages' shapes alone
                found.add(args[-1].dtype)
            return op(*args, **(kwargs or {}))

    with Watching():
        parts = build(config, mesh)
        train_step(parts, 0)
        validate(parts, HeldOut(config), 1)
    return found


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("layout", [{}, {"pipeline": {"size": 2, "schedule": "message-driven"}}], ids=["one", "stages"])
def test_a_run_multiplies_in_float32_in_training_and_validation(level: str, layout: dict[str, Any]) -> None:
    precision = {"level": level, "dtype": "bf16", "products": "float32"}
    config = config_for("gpt2", {}, layout=layout, precision=precision, steps=1, optimizer={"lr": 1e-2})
    results = run_ranks(dtypes_of_products, grid_of_run(config), config, token_axes=config.layout.token_axes)
    assert results == [{torch.float32}] * len(results)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_run_has_the_losses_of_one_that_multiplies_halves(level: str) -> None:
    precision = {"level": level, "dtype": "bf16"}
    config = config_for("gpt2", {}, precision=precision | {"products": "stored"})
    [(expected, _)] = run_ranks(train, Grid((("data", 1),)), config)
    [(losses, _)] = run_ranks(train, Grid((("data", 1),)), with_field(config, "precision.products", "float32"))
    torch.testing.assert_close(losses, expected, rtol=5e-3, atol=0)


@pytest.mark.parametrize(
    "words, slow, products",
    [
        (("precision=bf16", "device=cpu"), True, "float32"),
        (("precision=bf16", "device=cpu"), False, "stored"),
        (("precision=bf16", "device=cuda"), True, "stored"),
        (("precision=bf16", "precision.products=stored", "device=cpu"), True, "stored"),
        (("device=cpu",), True, "auto"),  # no halves, nothing to decide
    ],
)
def test_what_auto_becomes(words: tuple[str, ...], slow: bool, products: str) -> None:
    config = parse_run({"model": {"family": "gpt2"}, "data": {"source": "stdlib"}}, words)
    resolved = resolve_layout(config, Machine(1, 2**34, shared=False, slow_halves=slow))
    assert resolved.config.precision.products == products
    assert any(note.startswith("precision.products=auto: float32") for note in resolved.notes) == (
        products == "float32"
    )


def test_a_cpu_tells_its_rates() -> None:
    rates = product_rates("bf16")
    assert rates.half > 0
    assert rates.float32 > 0
    assert Rates(40e9, 3e9).slow
    assert not Rates(40e9, 60e9).slow
