"""Products of halves in float32: the same numbers, rounded once; chosen if a CPU is slow at products of halves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.compute.tensor.widened import WIDENED, Rates, product_rates
from meshwright.config import Config, parse_run
from meshwright.config.section import with_field
from meshwright.ranks.grid import Grid
from meshwright.ranks.machine import Machine
from meshwright.ranks.mesh import Mesh
from meshwright.training.decisions import resolve_layout
from meshwright.training.loop import validate
from tests.fuzz.check import HeldOut
from tests.harness import build
from tests.oracle.context import config_for
from tests.oracle.run import train, train_step
from tests.workers import run_ranks


def halves(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


def test_a_product_is_that_of_the_same_numbers_in_float32() -> None:
    torch.manual_seed(1)
    a, b, bias, out = halves(12, 20), halves(20, 8), halves(8), halves(12, 8)
    wide_a, wide_b = a.float(), b.float()
    assert torch.equal(WIDENED.multiply(a, b), (wide_a @ wide_b).bfloat16())
    assert torch.equal(WIDENED.multiply(a, b, bias), torch.addmm(bias.float(), wide_a, wide_b).bfloat16())
    summed = torch.addmm(out.float(), wide_a, wide_b).bfloat16()
    address = out.data_ptr()
    WIDENED.write_product(a, b, out, beta=1)
    assert torch.equal(out, summed)
    WIDENED.write_product(a, b, out, beta=0)
    assert torch.equal(out, (wide_a @ wide_b).bfloat16())
    assert WIDENED.multiply(a, b, out=out) is out
    assert out.data_ptr() == address, "a product is written where it should be"


def test_a_wide_sum_gets_rounded_products() -> None:
    torch.manual_seed(1)
    a, b, total = halves(12, 20), halves(20, 8), torch.randn(12, 8)
    expected = total + (a.float() @ b.float()).bfloat16()
    WIDENED.write_product(a, b, total, beta=1)
    assert torch.equal(total, expected)


def test_under_autocast_float32_operands_are_rounded_first() -> None:
    torch.manual_seed(1)
    a, b = torch.randn(12, 20), torch.randn(20, 8)
    with torch.autocast("cpu", torch.bfloat16):
        given = WIDENED.multiply(a, b)
    assert torch.equal(given, (a.bfloat16().float() @ b.bfloat16().float()).bfloat16())


def test_a_convolution_is_that_of_the_same_numbers_in_float32() -> None:
    torch.manual_seed(1)
    image, kernels, gradient = (
        halves(2, 4, 6, 6).requires_grad_(),
        halves(8, 2, 3, 3).requires_grad_(),
        halves(2, 8, 3, 3),
    )
    wide = [x.detach().float().requires_grad_() for x in (image, kernels)]
    own = WIDENED.convolve(image, kernels, 2, 1, 2)
    expected = torch.nn.functional.conv2d(*wide, None, 2, 1, 1, 2)
    assert torch.equal(own, expected.bfloat16())
    own.backward(gradient)
    expected.backward(gradient.float())
    for x, other in zip((image, kernels), wide, strict=True):
        assert x.grad is not None
        assert other.grad is not None
        assert torch.equal(x.grad, other.grad.bfloat16())


def test_other_dtypes_are_left_alone() -> None:
    a = torch.randn(6, 6, dtype=torch.float64)
    assert torch.equal(WIDENED.multiply(a, a), a @ a)


def dtypes_of_products(mesh: Mesh, config: Config) -> set[torch.dtype]:
    """Return the dtypes of the products of matrices in a step and in a validation."""
    found: set[torch.dtype] = set()

    class Watching(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            is_product = op.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm)
            if is_product and not args[-1].is_meta:  # which have messages' shapes alone
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
    results = run_ranks(dtypes_of_products, config.grid, config, token_axes=config.layout.token_axes)
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
