"""The adapter probe: right loops and exports pass, and planted mistakes are named with module and remedy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from meshwright import parity
from meshwright.parity.adapters import AdapterProbe
from meshwright.parity.exports import key_in
from meshwright.parity.tensors import write_tensors
from meshwright.ranks.errors import ParityError
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from tests.workers import run_ranks

WIDTH, LOW = 8, 2


class Adapted(nn.Module):
    """A frozen linear and two factors."""

    def __init__(self, start_b: bool = False, is_used: bool = True) -> None:
        super().__init__()
        self.base, self.is_used = nn.Linear(WIDTH, WIDTH).requires_grad_(False), is_used
        self.lora_A = nn.ModuleDict({"default": nn.Linear(WIDTH, LOW, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(LOW, WIDTH, bias=False)})
        if not start_b:
            nn.init.zeros_(self.lora_B["default"].weight)

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        return y + self.lora_B["default"](self.lora_A["default"](x)) if self.is_used else y


def train(model: nn.Module, optimizer: Any, reduce: Callable[[int], None] | None = None, num_steps: int = 4) -> None:
    rank = dist.get_rank() if dist.is_initialized() else 0
    generator = torch.Generator().manual_seed(5 + rank)
    for step in range(num_steps):
        model(torch.randn(6, WIDTH, generator=generator)).square().mean().backward()
        if reduce is not None:
            reduce(step)
        optimizer.step()
        optimizer.zero_grad()


def build(seed: int = 0, **keywords: Any) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(Adapted(), nn.Tanh(), Adapted(**keywords))


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def kinds(probe: AdapterProbe) -> list[str]:
    return [finding.kind for finding in probe.findings]


@pytest.fixture
def done() -> tuple[nn.Sequential, AdapterProbe]:
    """Return a trained model of one process and the model's probe."""
    model = build()
    optimizer = torch.optim.AdamW(trained(model), lr=1e-2)
    probe = parity.adapter_probe(model, optimizer)
    train(model, optimizer)
    return model, probe


def saved(model: nn.Module) -> dict[str, Tensor]:
    """Return the trained tensors under peft's names."""
    named = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    return {f"base_model.model.{name.replace('.default', '')}": x for name, x in named.items()}


def test_a_right_loop_and_its_export_pass(done: tuple[nn.Sequential, AdapterProbe], tmp_path: Path) -> None:
    model, probe = done
    probe.check()
    assert "4 adapters have gradients in 3 steps on 1 rank, and copies are equal" in probe.line
    assert not probe.optimizers[0]._optimizer_step_pre_hooks
    assert probe.exported(saved(model)) == []
    assert probe.exported(dict(model.state_dict())) == []
    assert probe.exported({name: x.bfloat16() for name, x in saved(model).items()}) == []
    write_tensors(tmp_path / "adapter_model.safetensors", saved(model))
    assert probe.exported(tmp_path) == []
    probe.check()
    assert "the export has every adapter as it was trained" in probe.line


def test_a_probe_leaves_training_as_it_is(done: tuple[nn.Sequential, AdapterProbe]) -> None:
    model = build()
    train(model, torch.optim.AdamW(trained(model), lr=1e-2))
    assert all(torch.equal(x, y) for x, y in zip(model.parameters(), done[0].parameters(), strict=True))


B = "base_model.model.0.lora_B.weight"
EXPORTS: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "missing": (lambda x: x.pop(B), "save all parameters that require gradients"),
    "scaled": (lambda x: x.update({B: x[B] * 2}), "the trained value times 2;"),
    "initial values": (lambda x: x.update({B: torch.zeros_like(x[B])}), "from before training"),
    "transposed": (lambda x: x.update({B: x[B].T}), "as the module holds it"),
    "wrong shape": (lambda x: x.update({B: x[B][:3]}), "(3, 2), and (8, 2) was trained"),
    "other adapter": (lambda x: x.update({B: x[B.replace("0", "2")]}), "values of 2.lora_B.default.weight"),
    "wrong values": (lambda x: x.update({B: x[B] + torch.arange(16.0).view(8, 2)}), "of its size"),
}


@pytest.mark.parametrize("kind", EXPORTS)
def test_a_wrong_export_is_named(done: tuple[nn.Sequential, AdapterProbe], kind: str) -> None:
    model, probe = done
    export = saved(model)
    EXPORTS[kind][0](export)
    (finding,) = probe.exported(export)
    assert (finding.kind, finding.module) == (kind, "0.lora_B.default"), finding.sentence
    assert EXPORTS[kind][1] in finding.sentence
    assert (finding.factor == pytest.approx(2)) == (kind == "scaled")
    with pytest.raises(ParityError, match="the export"):
        probe.check()


@pytest.mark.parametrize("kind", ["no gradient", "zero gradient", "not stepped"])
def test_a_wrong_loop_is_named(kind: str) -> None:
    model = build(is_used=kind != "no gradient")
    if kind == "zero gradient":
        nn.init.zeros_(model[2].lora_A["default"].weight)  # type: ignore[index, union-attr, arg-type]
    given = trained(model)[:2] if kind == "not stepped" else trained(model)
    optimizer = torch.optim.AdamW(given, lr=1e-2, weight_decay=0.0)
    probe = parity.adapter_probe(model, optimizer)
    with pytest.raises(ParityError, match="has not stepped"):
        probe.check()
    train(model, optimizer)
    assert kinds(probe) == [kind], probe.line
    assert probe.findings[0].module.startswith("2.lora_A")
    assert "2.lora_B.default.weight" in probe.line


def test_a_zero_gradient_of_one_step_is_none_of_its_findings() -> None:
    model = build()
    optimizer = torch.optim.AdamW(trained(model))
    probe = parity.adapter_probe(model, optimizer, steps=1)
    train(model, optimizer, num_steps=1)
    probe.check()


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"optimizer": []}])
def test_settings_without_a_sense_are_refused(wrong: dict[str, Any]) -> None:
    model = build()
    keywords = {"optimizer": torch.optim.SGD(trained(model))} | wrong
    with pytest.raises(ParityError, match="give at least one"):
        parity.adapter_probe(model, **keywords)
    with pytest.raises(ParityError, match="unfreeze"):
        parity.adapter_probe(nn.Linear(2, 2).requires_grad_(False), torch.optim.SGD(trained(model)))


@pytest.mark.parametrize("name, key", [
    ("m.q.lora_A.default.weight", "q.lora_A.weight"), ("score.modules_to_save.default.weight", "score.weight"),
    ("q.lora_A.default.weight", "base_model.model.q.lora_A.weight"),
    ("embed.lora_embedding_A.default", "embed.lora_embedding_A"),
])  # fmt: skip
def test_names_of_peft(name: str, key: str) -> None:
    assert key_in({key: torch.ones(1), "other.weight": torch.ones(1)}, name, None) == key


def program(name: str, mesh: Mesh) -> tuple[list[str], str]:
    """Train on two ranks and export. Return the kinds of findings, and the lines."""
    rank = dist.get_rank()
    layout, _, how = name.partition(":")
    model: nn.Module = build(rank if how == "seed" or layout == "parts" else 0)
    plain = model
    if how == "frozen" and rank == 1:
        model[2].lora_A.requires_grad_(False)  # type: ignore[index, union-attr]
    if layout == "ddp":
        model = DistributedDataParallel(model)
    elif layout == "fsdp2":
        for block in (model[0], model[2]):  # type: ignore[index]
            fully_shard(block)
        fully_shard(model)
    optimizer = torch.optim.AdamW(trained(model), lr=1e-2, foreach=False)
    probe = parity.adapter_probe(model, optimizer, parts=["*"] if layout == "parts" else [])

    def reduce(step: int) -> None:
        if layout == "plain" and how != "unreduced":
            for p in trained(plain):
                dist.all_reduce(p.grad)
            if how == "apart" and rank == 1 and step == 1:
                with torch.no_grad():
                    model[0].lora_A["default"].weight += 1.0  # type: ignore[index, union-attr, operator]

    train(model, optimizer, reduce)
    own = {n: p.detach() for n, p in plain.named_parameters() if p.requires_grad}
    if layout == "fsdp2":
        own = {n: x.to_local() if how == "local" else x.full_tensor() for n, x in own.items()}  # type: ignore[operator]
    if layout == "parts" and how != "local":
        for n, x in own.items():
            both = [torch.empty_like(x) for _ in range(2)]
            dist.all_gather(both, x)
            own[n] = torch.cat(both)
    probe.exported(own if rank == 0 else None)
    return kinds(probe), probe.line


RANKS = {
    "plain": [], "ddp": [], "fsdp2": [], "parts": [],
    "plain:unreduced": ["missing reduction", "missing reduction", *["own part"] * 4],
    "plain:seed": ["different start", "missing reduction", *["own part"] * 4],
    "plain:apart": ["moved apart", "own part"],
    "fsdp2:local": ["own part"] * 4, "parts:local": ["own part"] * 4,
}  # fmt: skip


def outcomes(mesh: Mesh, names: list[str]) -> list[tuple[list[str], str]]:
    return [program(name, mesh) for name in names]


@pytest.fixture(scope="module")
def two() -> dict[str, list[tuple[list[str], str]]]:
    per_rank = run_ranks(outcomes, Grid((("data", 2),)), list(RANKS), transport="torch")
    return {name: [rank[place] for rank in per_rank] for place, name in enumerate(RANKS)}


@pytest.mark.parametrize("name", RANKS)
def test_two_ranks(two: dict[str, list[tuple[list[str], str]]], name: str) -> None:
    (first, line), (second, other) = two[name]
    assert (first, line) == (second, other)
    wanted = RANKS[name]
    assert bool(first) == bool(wanted), line
    assert first[:1] == wanted[:1], line
    assert set(first) <= set(wanted), line
    assert "own part" not in wanted or "rank 0's part alone" in line
