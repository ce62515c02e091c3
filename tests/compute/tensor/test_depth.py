"""Depth does useful work: twice the depth halves a rank's tokens and operations. Dropping the sum over depth is
seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from meshwright.compute.model import rows_of
from meshwright.compute.parameters.initial import initialise
from meshwright.compute.parameters.shard import Initial, ShardSpec
from meshwright.config import Config
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from meshwright.training.rank_model import build_kit
from tests.harness import build, forward_and_backward
from tests.oracle.batches import global_batch
from tests.oracle.run import check, run
from tests.oracle.tensor import config_for
from tests.workers import run_ranks

FLAT = {"kind": "tesseract", "q": 2, "d": 1}
DEEP = {"kind": "tesseract", "q": 2, "d": 2}


def work(mesh: Mesh, config: Config) -> tuple[int, int]:
    """Return a rank's tokens of a batch, and the operations of the forward and backward pass."""
    parts = build(config, mesh)
    batch = {name: parts.kit.slice(x, "batch") for name, x in rows_of(global_batch(config, 0), slice(0, 12)).items()}
    with FlopCounterMode(display=False) as counter:
        forward_and_backward(parts, batch, {"labels": 1.0}, final=False)
    return batch["tokens"].numel(), counter.get_total_flops()


def test_depth_halves_tokens_and_operations() -> None:
    facts = {}
    for name, tensor in (("flat", FLAT), ("deep", DEEP)):
        config = config_for("gpt2", tensor)
        facts[name] = run_ranks(work, Grid(config.layout.axes), config, token_axes=config.layout.token_axes)
    assert {tokens for tokens, _ in facts["flat"]} == {12 * 12 // 2}
    assert {tokens for tokens, _ in facts["deep"]} == {12 * 12 // 4}
    (flat,), (deep,) = ({flops for _, flops in ranks} for ranks in facts.values())
    assert deep * 2 == flat


@pytest.mark.host  # a patch here is not in the server that forks a GPU's ranks
def test_dropping_the_depth_sum_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    (serial,) = run(one_step({"kind": "none"}))
    check(run(one_step(DEEP)), serial)
    right = ShardSpec.sum_axes

    def wrong(self: ShardSpec, mesh: Any) -> tuple[str, ...]:
        return tuple(axis for axis in right(self, mesh) if axis != "depth")

    monkeypatch.setattr(ShardSpec, "sum_axes", wrong)  # forked ranks have the patch
    with pytest.raises(AssertionError):
        check(run(one_step(DEEP)), serial)


def one_step(tensor: dict[str, Any]) -> Config:
    return config_for("gpt2", tensor, steps=1, optimizer={"lr": 1e-2})


def test_nobody_holds_what_is_whole() -> None:
    """No parameter of a rank is as large as the whole table or a whole matrix."""
    for tensor, parts in ((FLAT, 4), ({"kind": "megatron", "size": 4}, 4)):
        config = config_for("gpt2", tensor)
        held = run_ranks(shapes, Grid(config.layout.axes), config, token_axes=config.layout.token_axes)
        for rank in held:
            for name, (mine, whole) in rank.items():
                if "norm" not in name and "bias" not in name:
                    assert mine * parts == whole, name


def live(mesh: Mesh, a: int, b: int, c: int) -> int:
    """Return this rank's elements kept between a linear's forward and backward pass, and the output's elements."""
    layer = build_kit(config_for("gpt2", DEEP), mesh).expand(b, c, Initial(0.02))
    initialise(layer, mesh, 1)
    x = torch.ones(a // mesh.size("depth", "row"), b // mesh.size("col"), device=mesh.device, requires_grad=True)
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = layer(x)
    return sum(kept.values()) + y.numel()


def test_live_memory_of_a_product_is_the_papers() -> None:
    """a·b/p + b·c·d/p + a·c/p elements (Tesseract, section 3.1)."""
    a, b, c, q, d = 24, 16, 48, 2, 2
    grid, p = Grid((("depth", d), ("row", q), ("col", q))), d * q * q
    for elements in run_ranks(live, grid, a, b, c, token_axes=("depth", "row")):
        assert elements == a * b // p + b * c * d // p + a * c // p


def shapes(mesh: Mesh, config: Config) -> dict[str, tuple[int, int]]:
    """Return this rank's elements of each parameter, and the whole parameter's elements."""
    parts = build(config, mesh)
    return {
        name: (parameter.numel(), torch.Size(parts.specs[name].shape).numel())
        for name, parameter in parts.model.named_parameters()
    }
