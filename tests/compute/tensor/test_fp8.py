"""Linears in FP8: the formula, the gradients, every layout within verify's bound, and refusals."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.compute.models.chain import make_chain
from meshwright.compute.parameters.gradients import Gradients
from meshwright.compute.parameters.initial import initialise
from meshwright.compute.parameters.shard import use_gradients
from meshwright.compute.tensor.copies import ColumnProducts, Columns
from meshwright.compute.tensor.fp8 import CAPABILITY, E4M3, LARGEST, Fp8Products, inner_layers, narrow, rounded
from meshwright.compute.tensor.products import PLAIN, LinearLayer, Products
from meshwright.compute.tensor.serial import SerialKit
from meshwright.config import Config, parse_config
from meshwright.ranks.errors import ConfigError
from meshwright.ranks.mesh import solo_mesh
from meshwright.tools.verify.reference import Reference
from meshwright.tools.verify.tolerance import tolerance_of
from meshwright.training.fp8_note import check_gpus, fp8_note
from tests.harness import build
from tests.oracle.batches import BATCHES
from tests.oracle.run import assembled, run

FLOAT64 = {"level": "O0", "dtype": "float64"}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"family": "gpt2", "positions": 16, "vocabulary": 300, "tied": True},
    "llama": {
        "family": "llama", "positions": 16, "vocabulary": 300, "key_value_heads": 2, "head_width": 16,
        "feed_forward": 128,
    },
    "deepseek": {
        "family": "deepseek", "positions": 16, "vocabulary": 300, "query_rank": 32, "key_value_rank": 32,
        "head_width": 16, "rotary_width": 16, "value_width": 16, "feed_forward": 128,
    },
    "experts": {
        "family": "llama", "positions": 16, "vocabulary": 300, "feed_forward": 32,
        "experts": {"count": 4, "per_token": 4, "balance": 0.1},
    },
    "t5": {
        "family": "t5", "positions": 16, "vocabulary": 360, "feed_forward": 128, "head_width": 16,
        "distance_buckets": 8, "distance_max": 10,
    },
    "vit": {"family": "vit", "image": 8, "patch": 2, "channels": 1, "classes": 10},
}  # fmt: skip


def fp8(level: str = "O2") -> dict[str, Any]:
    return {"level": level, "dtype": "bf16", "products": "fp8"}


def config_for(name: str, precision: dict[str, Any], layout: dict[str, Any] | None = None, **changes: Any) -> Config:
    own = changes.pop("model", {})
    layers = 2 if name == "t5" else 4
    tree = {
        "model": {"layers": layers, "hidden": 64, "heads": 4, "vocabulary_multiple": 4, "dropout": 0.0}
        | MODELS[name] | own,
        "data": {"source": "digits"} if name == "vit" else {"sequence": 16},
        "batch": {"global": 8, "micro": 4},
        "layout": {"data": {"bucket": 8192}} | (layout or {}),
        "precision": precision,
        "optimizer": {"lr": 1e-2, "clip": 0.5},
        "steps": 2,
    }  # fmt: skip
    return parse_config(tree | changes)


def e4m3(x: Tensor, dim: int) -> Tensor:
    """Return x in e4m3 by the formula, written anew: scaled, cast and scaled back."""
    scale = x.abs().amax(dim, keepdim=True).float().clamp(min=1e-30) / 448
    return (x * (1 / scale)).to(torch.float8_e4m3fn).to(x.dtype) * scale


def test_a_row_is_rounded_by_its_own_scale() -> None:
    torch.manual_seed(1)
    x = torch.randn(6, 32) * torch.logspace(-6, 6, 6)[:, None]
    numbers, scales = rounded(x.bfloat16(), 1)
    wide = x.bfloat16().float()
    assert numbers.dtype == E4M3
    assert torch.equal(scales, wide.abs().amax(1, keepdim=True) / LARGEST)
    assert torch.equal(numbers.float(), (wide * (1 / scales)).to(E4M3).float())
    assert numbers.float().abs().amax(1).tolist() == [LARGEST] * 6
    # Half of the last of four bits, and half of the least number below the normal numbers.
    assert bool(((numbers.float() * scales - wide).abs() <= wide.abs() * 2**-4 + scales * 2**-10).all())


def test_a_column_is_rounded_by_its_own_scale_and_written_for_the_kernel() -> None:
    torch.manual_seed(1)
    weight = torch.randn(32, 16).bfloat16()
    numbers, scales = rounded(weight, 0)
    assert (numbers.shape, numbers.stride(), scales.shape) == ((32, 16), (1, 32), (1, 16))
    other, rows = rounded(weight.t().contiguous(), 1)
    assert torch.equal(numbers.float(), other.float().t())
    assert torch.equal(scales, rows.t())


def test_zeros_stay_zeros_and_an_overflow_is_seen() -> None:
    x = torch.zeros(3, 16)
    x[1, 3], x[2, 5] = torch.inf, torch.nan
    numbers, scales = rounded(x, 1)
    values = numbers.float() * scales
    assert values[0].tolist() == [0.0] * 16
    assert bool(values[1:].isnan().any(1).all())
    tiny, scales = rounded(torch.full((1, 16), 2.0**-120), 1)
    assert bool((tiny.float() * scales).isfinite().all())


BY_ROWS = pytest.mark.skipif(torch.__version__.startswith("2.11"), reason="its _scaled_mm has no such scales on CPUs")


@pytest.mark.parametrize("emulates", [True, pytest.param(False, marks=BY_ROWS)], ids=["casts", "scaled_mm"])
def test_a_product_is_that_of_the_rounded_factors(emulates: bool) -> None:
    torch.manual_seed(1)
    a, b, bias = torch.randn(24, 64).bfloat16(), torch.randn(64, 32).bfloat16(), torch.randn(32).bfloat16()
    factors = Fp8Products(PLAIN, emulates)
    exact = e4m3(a.float(), 1).double() @ e4m3(b.float(), 0).double()
    close = partial(torch.testing.assert_close, rtol=2**-7, atol=1e-2)
    given = factors.multiply(a, b)
    assert given.dtype == a.dtype
    close(given.double(), exact)
    close(factors.multiply(a, b, bias).double(), exact + bias.double())
    out = torch.empty_like(given)
    assert factors.multiply(a, b, out=out) is out
    assert torch.equal(out, given)
    total = torch.ones(24, 32)
    factors.write_product(a, b, total, beta=1)
    assert torch.equal(total, 1 + given.float())
    # The input gradient's factor is a stored weight, transposed.
    dy = torch.randn(24, 32).bfloat16()
    close(factors.multiply(dy, b.t()).double(), e4m3(dy.float(), 1).double() @ e4m3(b.t().float(), 0).double())


def test_under_autocast_a_sum_is_not_rounded_to_halves() -> None:
    torch.manual_seed(1)
    a, b = torch.randn(8, 512).bfloat16(), torch.randn(512, 16).bfloat16()
    factors = Fp8Products(PLAIN, emulates=True)
    with torch.autocast("cpu", torch.bfloat16):
        given = factors.multiply(a, b)
    assert torch.equal(given, factors.multiply(a, b))


def test_weight_gradients_are_the_other_products() -> None:
    torch.manual_seed(1)
    products = Fp8Products(PLAIN, emulates=True)
    x, dy, out = torch.randn(8, 16).bfloat16(), torch.randn(8, 32).bfloat16(), torch.empty(16, 32).bfloat16()
    (write,) = products.weight_gradients(lambda: x, products.read(dy))
    write(out, 0)
    assert torch.equal(out, x.t() @ dy)
    db = torch.empty(32).bfloat16()
    (write,) = products.bias_gradients(products.read(dy))
    write(db, 0)
    assert torch.equal(db, dy.sum(0))


def test_shared_columns_are_rounded_after_they_are_chosen() -> None:
    columns, factors = Columns(((0, 16), (32, 48)), 48), Fp8Products(PLAIN, emulates=True)
    changed = ColumnProducts(columns).changed(partial(Fp8Products, emulates=True))
    torch.manual_seed(1)
    x, weight = torch.randn(4, 32), torch.randn(32, 48)
    weight[:, 16:32] *= 1e3
    assert torch.equal(changed.forward(x, weight), factors.forward(x, columns.of(weight)))
    assert changed.outputs_of(48) == 32


class _Fp8Linear(torch.autograd.Function):
    """x W + b in plain torch, with the formula's three products."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        y = e4m3(x, -1) @ e4m3(weight, 0)
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        (dy,), (x, weight) = gradients, ctx.saved_tensors
        rows = dy.flatten(0, -2)
        db = rows.sum(0) if ctx.needs_input_grad[2] else None
        return e4m3(dy, -1) @ e4m3(weight.t(), 0), x.flatten(0, -2).t() @ rows, db


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_a_model_is_plain_torch_with_the_formula(model: str) -> None:
    """In float64 nothing else is rounded: the loss and every gradient are equal."""
    config = config_for(model, FLOAT64, {"data": {}})
    reference = Reference(config, torch.device("cpu"))
    for name, layer in reference.model.named_modules():
        if name.startswith(("blocks.1.", "blocks.2.")) and name.endswith(
            ("query_key_value", "output", "expand", "contract")
        ):
            layer.function = _plain_linear  # type: ignore[assignment]
    batch = BATCHES[config.model.family](config, 0)
    expected = reference.backward(batch)

    mesh = solo_mesh(torch.device("cpu"))
    own = make_chain(config, SerialKit(mesh))
    initialise(own, mesh, config.seed)
    own.double()
    exact = _loss_of(own, batch)
    assert abs(exact - expected) > 1e-6 * expected, "rounding changes the loss"
    own.zero_grad()
    narrowed = narrow(own.blocks, config.model.num_blocks, "cpu")
    assert (narrowed.count, narrowed.spared) == (8, {})
    use_gradients(own, Gradients())
    assert _loss_of(own, batch) == pytest.approx(expected, rel=1e-12)
    for name, parameter in own.named_parameters():
        wanted = reference.gradients[name]
        assert parameter.grad is not None
        assert float((parameter.grad - wanted).norm()) <= 1e-12 * float(wanted.norm()), name


def _plain_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    flat = None if bias is None else bias.flatten()
    y: Tensor = _Fp8Linear.apply(x, weight.flatten(1), flat)
    return y.view(*x.shape[:-1], *weight.shape[1:])


def _loss_of(model: nn.Module, batch: dict[str, Tensor]) -> float:
    counted = int((batch["labels"] != -100).sum())
    (loss,) = model(batch, {"labels": 1 / counted, "samples": 1 / batch["labels"].shape[0]})
    loss.backward()
    return float(loss.detach())


@cache
def float64(model: str) -> Any:
    return run(config_for(model, FLOAT64))[0]


LAYOUTS: dict[str, dict[str, Any]] = {
    "serial": {},
    "zero1": {"data": {"size": 2, "sync": "zero1"}},
    "zero2": {"data": {"size": 2, "sync": "zero2"}},
    "zero3": {"data": {"size": 2, "sync": "zero3"}},
    "1-D": {"tensor": {"kind": "megatron", "size": 2}},
    "sequence": {"tensor": {"kind": "megatron", "size": 2, "sequence_parallel": True}},
    "2-D": {"tensor": {"kind": "tesseract", "q": 2, "d": 1}},
    "2.5-D": {"tensor": {"kind": "tesseract", "q": 2, "d": 2}},
    "sub-graph": {"tensor": {"kind": "subgraph", "size": 2, "common": "all", "branch": "block"}},
    "ring": {"context": {"kind": "ring", "size": 2}},
    "ulysses": {"context": {"kind": "ulysses", "size": 2}},
    "stages": {"pipeline": {"size": 2, "schedule": "message-driven"}},
    "deferred": {"pipeline": {"size": 2, "schedule": "message-driven", "chunks": 2}},
}


def check(config: Config) -> list[float]:
    """Compare a run with float64 on one device within verify's bound; return the losses."""
    losses, gradients = float64(config.model.family if not config.model.routing.num_experts else "experts")
    results, allowed = run(config), tolerance_of(config)
    for mine, _ in results:
        torch.testing.assert_close(mine, losses[: len(mine)], rtol=allowed.loss, atol=0)
    for name, held in gradients.items():
        (expected,) = held.values()
        actual = assembled([gradients[name] for _, gradients in results if name in gradients], expected.shape)
        error = float((actual - expected).norm() / expected.norm())
        assert error <= allowed.gradient, f"{name}: {error}"
    return list(results[0][0])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_within_the_bound(layout: str) -> None:
    narrowed, stored = (
        check(config_for("gpt2", precision, LAYOUTS[layout])) for precision in (fp8(), fp8() | {"products": "float32"})
    )
    assert narrowed != stored, "nothing was rounded to FP8"


@pytest.mark.parametrize("summa", ["gather", "whole", "stream"])
def test_panels_are_within_the_bound(summa: str) -> None:
    config = config_for("llama", fp8("O1"), LAYOUTS["2-D"], memory={"summa": summa})
    check(config)


@pytest.mark.parametrize("layout", ["serial", "1-D"])
@pytest.mark.parametrize("model", ["llama", "deepseek", "experts", "t5", "vit"])
def test_every_model_is_within_the_bound(model: str, layout: str) -> None:
    check(config_for(model, fp8("O1"), LAYOUTS[layout]))


@pytest.mark.parametrize("recompute", [1, "selective", "ops"])
def test_recomputation_changes_no_bit(recompute: str | int) -> None:
    kept, again = (run(config_for("gpt2", fp8(), memory={"recompute": each}))[0] for each in ("none", recompute))
    assert again[0] == kept[0]
    for name, held in kept[1].items():
        for offsets, part in held.items():
            assert torch.equal(again[1][name][offsets], part), name


def test_replicas_and_stages_have_the_numbers_of_one_device() -> None:
    """Scales are of rows and weights, which these layouts do not cut."""
    (expected, _), *_ = run(config_for("gpt2", fp8(), {"pipeline": {"size": 1}}))
    (staged, _), *_ = run(config_for("gpt2", fp8(), LAYOUTS["stages"]))
    assert staged == expected


def test_frozen_weights_stay_without_gradients() -> None:
    (_, gradients), *_ = run(config_for("gpt2", fp8(), model={"frozen": ["blocks.1.*"]}))
    assert not [name for name in gradients if name.startswith("blocks.1.")]
    assert [name for name in gradients if name.startswith("blocks.2.")]


def products_of(model: nn.Module) -> dict[str, Products]:
    return {name: layer.products for name, layer in model.named_modules() if isinstance(layer, LinearLayer)}


def test_what_is_spared() -> None:
    config = config_for("deepseek", fp8(), model={"query_rank": 24})
    products = products_of(build(config, solo_mesh(torch.device("cpu"), tuple(dict(config.layout.axes)))).model)
    narrowed = {name for name, own in products.items() if isinstance(own, Fp8Products)}
    inner = {name for name in products if name.startswith(("blocks.1.", "blocks.2."))}
    assert narrowed
    assert narrowed == {name for name in inner if not name.rpartition(".")[2].startswith("query")}
    note = fp8_note(config)
    assert "e4m3 in 12 linears of layers 1 to 2" in note
    assert "attention.query_latent [64, 24]" in note
    assert list(inner_layers(2)) == []
    assert "the first and the last layer, experts" in fp8_note(config_for("experts", fp8()))


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"precision": {"level": "O0", "dtype": "float32", "products": "fp8"}}, "rounds operands in bf16"),
        ({"precision": {"level": "O2", "dtype": "fp16", "products": "fp8"}}, "rounds operands in bf16"),
        ({"bits": {"kind": "layout-free"}}, "scales of each rank's own rows and columns"),
        ({"model": {"layers": 2}}, "spares the first and the last layer, and the model has 2"),
    ],
    ids=["float32", "fp16", "bits", "layers"],
)
def test_what_is_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told) as raised:
        config_for("gpt2", changes.pop("precision", fp8()), **changes)
    assert "precision.products" in str(raised.value)


def test_widths_that_leave_nothing_are_refused() -> None:
    config = config_for("gpt2", fp8(), model={"hidden": 40})
    with pytest.raises(ConfigError, match="multiples of 16 on each rank"):
        fp8_note(config)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("rows, inner, outputs", [(64, 256, 128), (7, 64, 48), (1024, 2048, 512)])
def test_a_gpu_multiplies_as_the_casts_do(rows: int, inner: int, outputs: int) -> None:
    """Both add up in float32, in another order, and round once: a number may fall on the other side of a half."""
    if torch.cuda.get_device_capability() < CAPABILITY:
        pytest.skip("no FP8 on this GPU")
    torch.manual_seed(1)
    x, weight, bias = torch.randn(rows, inner), torch.randn(inner, outputs), torch.randn(outputs)
    x, weight, bias = (each.bfloat16().cuda() for each in (x, weight, bias))
    for a, b, added in ((x, weight, bias), (x @ weight, weight.t(), None)):
        for dim, each in ((1, a), (0, b)):
            (here, scales), (there, others) = rounded(each, dim), rounded(each.cpu(), dim)
            assert torch.equal(scales.cpu(), others)
            assert torch.equal(here.cpu().float(), there.float())
        own, cast = (Fp8Products(PLAIN, emulates).multiply(a, b, added) for emulates in (False, True))
        assert own.dtype == cast.dtype == torch.bfloat16
        error = float((own.float() - cast.float()).norm() / cast.float().norm())
        assert error <= 2**-9, error
        out = torch.empty_like(own)
        assert torch.equal(Fp8Products(PLAIN, False).multiply(a, b, added, out), own)


def test_a_gpu_without_fp8_is_refused() -> None:
    check_gpus([(8, 9), (9, 0), (10, 0)])
    with pytest.raises(ConfigError, match=r"needs GPUs of compute capability 8\.9 .*one here has 8\.0"):
        check_gpus([(9, 0), (8, 0)])
