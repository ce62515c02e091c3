"""The norm probe: right loops pass and train to the same bits. Wrong norms are named with module and remedy."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad, clip_grad_norm_, clip_grads_with_norm_, get_total_norm

from meshwright import parity
from meshwright.parity.norm import NormProbe
from meshwright.parity.norm_rules import judged
from meshwright.parity.norm_sums import Clip, Part, RankStep
from meshwright.ranks.errors import ParityError
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from tests.parity.training import HIDDEN, VOCABULARY, Model
from tests.patience import PATIENCE_SECONDS
from tests.workers import run_ranks

ROOT = Path(__file__).resolve().parents[2]
MAX_NORM = 0.05
STEPS = 3


class Experts(nn.Module):
    """A dense layer on all ranks, and experts on this rank alone."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.dense, self.head = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        self.adapter = nn.Linear(HIDDEN, HIDDEN)
        torch.manual_seed(seed)
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(2))
        for expert in self.experts:
            nn.init.zeros_(expert.bias)  # type: ignore[arg-type]
        # Equal on all ranks at first, though each rank has a separate part: no other tensor tells.
        self.experts_norm = nn.LayerNorm(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.dense(x) + self.adapter(x))
        return self.head(x + self.experts[0](self.experts_norm(x)) + self.experts[1](x).relu())


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(HIDDEN, 2 * HIDDEN), nn.GELU(), nn.Linear(2 * HIDDEN, VOCABULARY))


def average(parameters: Any, group: Any = None) -> None:
    for parameter in parameters:
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= dist.get_world_size(group)


def total(copies: list[Tensor], parts: list[Tensor], group: Any = None) -> Tensor:
    """Return the right norm: parts of all ranks, copies once."""
    squares = torch.zeros((), dtype=parts[0].dtype if parts else torch.float64)
    for p in parts:
        squares += p.grad.square().sum() if p.grad is not None else 0
    dist.all_reduce(squares, group=group)
    return (squares + sum(p.grad.square().sum() for p in copies if p.grad is not None)).sqrt()


def by_hand(parameters: list[Tensor], norm: Tensor | float) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad *= min(1.0, MAX_NORM / (float(norm) + 1e-6))


def clip_all(model: nn.Module) -> None:
    clip_grad_norm_(model.parameters(), MAX_NORM)


def split_experts(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    named = list(model.named_parameters())
    return [p for n, p in named if "experts" not in n], [p for n, p in named if "experts" in n]


def split_cut(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Return copies and parts of the model that tests.parity.training cuts by hand."""
    named = list(model.named_parameters())
    return [p for n, p in named if ".up." not in n and ".down." not in n], \
        [p for n, p in named if ".up." in n or ".down." in n]  # fmt: skip


def program(name: str, mesh: Mesh, probed: bool) -> tuple[list[Tensor], NormProbe | None]:
    """Train a few steps. Return the weights and the probe."""
    layout, _, how = name.partition(":")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model: nn.Module = plain()
    group: Any = None
    data: Any = None
    max_norm = MAX_NORM if how.startswith("hand") or name == "fsdp1" else None
    if layout == "ddp":
        model = DistributedDataParallel(model)
    elif layout == "fsdp1":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    elif layout == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("copies", "parts")))
    elif layout == "fsdp2":
        fully_shard(model[0])  # type: ignore[index]
        fully_shard(model)
    elif layout == "dtensor":
        device_mesh = init_device_mesh("cpu", (size,))
        parallelize_module(model, device_mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    elif layout == "tp":
        group = dist.group.WORLD
        if size == 4:
            pairs = [dist.new_group(each) for each in ([0, 1], [2, 3], [0, 2], [1, 3])]
            group, data = pairs[rank // 2], pairs[2 + rank % 2]
        model = Model(group).double()
        for block in model.blocks:  # type: ignore[union-attr]
            block.cut(rank % 2, 2)  # type: ignore[operator]
    elif layout == "experts":
        model = Experts(10 if how == "seed" else 10 + rank).double()
    elif layout == "pipe":
        model = nn.ModuleDict({"first" if rank == 0 else "last": nn.Linear(HIDDEN, HIDDEN)})
    if layout == "owners":
        # Each rank steps the rank's own parameters, sums gradients of these alone, and sends the weights to the others.
        trained = list(model.parameters())[rank::size]
    elif how == "frozen":
        trained = [p for n, p in model.named_parameters() if "adapter" not in n and not n.startswith("0.")]
    else:
        trained = list(model.parameters())
    optimizer = torch.optim.AdamW(trained, lr=1e-2, foreach=False)
    probe = parity.norm_probe(model, optimizer, max_norm=max_norm, steps=STEPS) if probed else None
    generator = torch.Generator().manual_seed(2 + (rank // 2 if layout == "tp" else 0 if layout == "dtensor" else rank))
    for _ in range(STEPS + 1):
        x = torch.randn(6, HIDDEN, generator=generator)
        labels = torch.randint(0, VOCABULARY, (6,), generator=generator)
        if layout == "pipe":
            y = model["first" if rank == 0 else "last"](x)  # type: ignore[index]
            y.square().mean().backward()
        elif layout == "tp":
            F.cross_entropy(model(labels[None]).flatten(0, 1), labels.roll(1)).backward()
        else:
            F.cross_entropy(model(x.to(next(model.parameters()).dtype)), labels).backward()
        own = list(model.parameters())
        if layout == "experts":
            if how == "none" and rank == 1:
                model.experts[1].weight.grad = None  # type: ignore[union-attr]
            dense, parts = split_experts(model)
            if how != "late":
                average(dense)
            if how in ("", "none", "frozen", "seed"):
                parts = [p for p in parts if p.grad is not None]
                used = [p for p in dense if how != "frozen" or any(p is t for t in trained)]
                clip_grads_with_norm_(own, MAX_NORM, total(used if how != "frozen" else dense, parts))
            elif how == "twice-called":
                norm = total(dense, parts)
                clip_grads_with_norm_(dense, MAX_NORM, norm)
                clip_grads_with_norm_(parts, MAX_NORM, norm)
            elif how == "dense":
                clip_grad_norm_(dense, MAX_NORM)
            elif how == "hand-dense":
                by_hand(own, get_total_norm([p.grad for p in dense if p.grad is not None]))
            elif how == "first":
                one = [p for p in parts if rank == 0]
                clip_grads_with_norm_(own, MAX_NORM, total(dense, one))
            elif how == "hand":
                by_hand(own, total(dense, parts))
            elif how == "hand-each":
                by_hand(own, total([], own))
            elif how == "late":
                clip_grads_with_norm_(own, MAX_NORM, total(dense, parts))
                average(dense)
            elif how == "scaled":
                clip_grads_with_norm_(own, MAX_NORM, total(dense, parts))
                for p in own:
                    p.grad *= 0.5  # type: ignore[operator]
        elif layout == "tp":
            copies, parts = split_cut(model)
            if size == 4:
                average(own, data)
            if how == "local":
                clip_grad_norm_(own, MAX_NORM)
            elif how == "hand-local":
                by_hand(own, get_total_norm([p.grad for p in own if p.grad is not None]))
            elif how == "each":
                clip_grads_with_norm_(own, MAX_NORM, total([], own, group))
            elif how == "norms":
                norm = get_total_norm([p.grad for p in own if p.grad is not None])
                dist.all_reduce(norm, group=group)
                clip_grads_with_norm_(own, MAX_NORM, norm)
            else:
                clip_grads_with_norm_(own, MAX_NORM, total(copies, parts, group))
        elif layout == "owners":
            for owner, p in enumerate(own):
                dist.reduce(p.grad, owner % size)
            clip_grads_with_norm_(trained, MAX_NORM, total([], trained))
        elif layout == "pipe":
            if how == "local":
                clip_grad_norm_(own, MAX_NORM)
            else:
                clip_grads_with_norm_(own, MAX_NORM, total([], own))
        elif name == "fsdp1":
            model.clip_grad_norm_(MAX_NORM)  # type: ignore[operator]
        elif how == "each":
            clip_grads_with_norm_(own, MAX_NORM, total([], own))
        elif how == "order":
            clip_grad_norm_(own, MAX_NORM, norm_type=float("inf"))
        elif how != "unclipped":
            clip_all(model)
        optimizer.step()
        for owner, p in enumerate(own if layout == "owners" else []):
            dist.broadcast(p.detach(), owner % size)
            p.grad = None
        optimizer.zero_grad(set_to_none=how != "none")
    full = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return [p.detach().clone() for p in full], probe


def outcomes(mesh: Mesh, names: list[str]) -> list[dict[str, Any]]:
    """Return the findings and the verdict for each program, and whether the probe left no trace."""
    found = []
    cells = [f.__closure__[0].cell_contents for f in (clip_grad._get_total_norm, clip_grad._clip_grads_with_norm_)]  # type: ignore[attr-defined]
    for name in names:
        weights, probe = program(name, mesh, probed=True)
        alone, _ = program(name, mesh, probed=False)
        assert probe is not None
        now = [f.__closure__[0].cell_contents for f in (clip_grad._get_total_norm, clip_grad._clip_grads_with_norm_)]  # type: ignore[attr-defined]
        raised = ""
        try:
            probe.check()
        except ParityError as error:
            raised = str(error)
        found.append({
            "name": name, "findings": probe.findings, "line": probe.line, "raised": raised,
            "same": all(torch.equal(x, y) for x, y in zip(weights, alone, strict=True)),
            "restored": now == cells and not probe.optimizers[0]._optimizer_step_pre_hooks,
        })  # fmt: skip
    return found


RIGHT = ("ddp", "fsdp2", "fsdp1", "dtensor", "tp", "experts", "experts:none", "experts:twice-called", "experts:hand",
         "experts:seed", "pipe", "owners")  # fmt: skip
WRONG = {
    "tp:local": ("own part", "blocks.", "each rank counts its own part alone"),
    "tp:hand-local": ("own part", "blocks.", "each rank counts its own part alone"),
    "tp:each": ("copies", "", "count a tensor that several ranks hold on one of them"),
    "tp:norms": ("wrong sum", "(all", "it is the sum of norms of 2 ranks"),
    "experts:dense": ("left out", "experts", "it leaves out experts."),
    "experts:first": ("left out", "experts", " more of rank 1; "),
    "experts:hand-dense": ("left out", "experts", "it leaves out experts."),
    "experts:hand-each": ("copies", "", "it counts 2 copies"),
    "experts:frozen": ("frozen", "adapter", "it counts adapter."),
    "experts:late": ("not reduced before", "", "the norm is taken before gradients are reduced"),
    "experts:scaled": ("scaled late", "(all", "multiplied by 0.5"),
    "pipe:local": ("own part", "", "each rank counts its own part alone"),
    "fsdp1:local": ("own part", "", "each rank counts its own part alone"),
    "plain:unreduced": ("missing reduction", "", "with different gradients"),
    "ddp:each": ("copies", "", "it counts 2 copies"),
}
BOTH = {"tp": "", "hsdp": "", "ddp": "", "tp:local": "own part", "tp:each": "copies"}


@pytest.fixture(scope="module")
def two() -> dict[str, list[dict[str, Any]]]:
    """Return the outcomes of both ranks by program."""
    names = [*RIGHT, *WRONG, "ddp:order", "ddp:unclipped"]
    per_rank = run_ranks(outcomes, Grid((("data", 2),)), names, transport="torch")
    return {name: [rank[place] for rank in per_rank] for place, name in enumerate(names)}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_loop_passes(two: dict[str, list[dict[str, Any]]], name: str) -> None:
    for rank in two[name]:
        assert rank["findings"] == [], rank["line"]
        assert f"norm probe: {STEPS} steps of 2 ranks clip by the norm of the full gradients" in rank["line"]
        assert rank["raised"] == ""
        assert ("start equal on several ranks" in rank["line"]) == (name == "experts:seed")


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_norm_is_named(two: dict[str, list[dict[str, Any]]], name: str) -> None:
    kind, module, words = WRONG[name]
    assert two[name][0]["line"] == two[name][1]["line"]
    (finding,) = two[name][0]["findings"]
    assert finding.kind == kind, finding.sentence
    assert finding.module.startswith(module), finding.sentence
    assert words in finding.sentence
    assert two[name][0]["raised"] == f"norm probe: {finding.sentence}"
    assert abs(finding.factor - 1) > 1e-3, finding


@pytest.mark.parametrize("name", [*RIGHT, *WRONG])
def test_a_probe_leaves_no_trace(two: dict[str, list[dict[str, Any]]], name: str) -> None:
    for rank in two[name]:
        assert rank["same"]
        assert rank["restored"]


@pytest.mark.parametrize("name, words", [("ddp:order", "of another order than 2"), ("ddp:unclipped", "give max_norm=")])
def test_a_loop_that_cannot_be_judged_is_no_proof(two: dict[str, list[dict[str, Any]]], name: str, words: str) -> None:
    for rank in two[name]:
        assert rank["findings"] == []
        assert words in rank["raised"]


def test_a_grid_of_data_and_tensor_axes() -> None:
    per_rank = run_ranks(outcomes, Grid((("data", 2), ("tp", 2))), list(BOTH), transport="torch")
    for place, (name, kind) in enumerate(BOTH.items()):
        for rank in per_rank:
            assert [finding.kind for finding in rank[place]["findings"]] == [kind] * bool(kind), rank[place]["line"]
            assert rank[place]["same"]
        line = per_rank[0][place]["line"]
        assert name != "tp:local" or "each rank counts its own part alone" in line
        assert name != "tp:each" or "it counts 2 copies" in line


def test_one_process(capfd: pytest.CaptureFixture[str]) -> None:
    """Two optimizers step after one backward pass, in bf16; then there is a stale gradient of no optimizer."""
    torch.manual_seed(1)
    model = plain().bfloat16()
    stale = nn.Linear(HIDDEN, HIDDEN).bfloat16()
    first, second = torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.AdamW(model[2].parameters())
    for parameters, kinds in ((model, []), (nn.ModuleList([model, stale]), ["frozen"])):
        probe = parity.norm_probe(nn.ModuleList([model, stale]), [first, second], steps=2)
        for _ in range(2):
            F.cross_entropy(model(torch.randn(6, HIDDEN).bfloat16()), torch.arange(6)).backward()
            stale(torch.randn(6, HIDDEN).bfloat16()).square().sum().backward()
            clip_grad_norm_(parameters.parameters(), MAX_NORM)
            first.step()
            second.step()
            model.zero_grad()
        assert [finding.kind for finding in probe.findings] == kinds, probe.line
        assert probe.line in capfd.readouterr().err
    assert "1.weight, 1.bias, which the optimizer does not train" in probe.line


def test_small_gradients_prove_nothing_by_hand() -> None:
    model = plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = parity.norm_probe(model, optimizer, max_norm=1e6, steps=2)
    with pytest.raises(ParityError, match="has not stepped"):
        parity.norm_probe(model, optimizer).check()
    for _ in range(2):
        F.cross_entropy(model(torch.randn(6, HIDDEN)), torch.arange(6)).backward()
        optimizer.step()
    with pytest.raises(ParityError, match="reach max_norm in none of 2 steps of 1 rank: give loop and probe a smaller"):
        probe.check()


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"max_norm": 0.0}, {"max_norm": float("nan")}])
def test_settings_without_a_sense_are_refused(wrong: dict[str, Any]) -> None:
    model = plain()
    with pytest.raises(ParityError, match="give at least one of each"):
        parity.norm_probe(model, torch.optim.SGD(model.parameters(), lr=0.1), **wrong)


def test_probes_end_in_any_order() -> None:
    """Two probes watch one function of torch: the first to end leaves the other probe in place."""
    inner = clip_grad._clip_grads_with_norm_.__closure__[0].cell_contents  # type: ignore[attr-defined]
    models = [plain(), plain()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    probes = [parity.norm_probe(m, o, steps=n) for m, o, n in zip(models, optimizers, (1, 2), strict=True)]
    for _ in range(2):
        for model, optimizer in zip(models, optimizers, strict=True):
            F.cross_entropy(model(torch.randn(6, HIDDEN)), torch.arange(6)).backward()
            clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
    for probe in probes:
        probe.check()
    assert "2 steps of 1 rank clip" in probes[1].line
    assert clip_grad._clip_grads_with_norm_.__closure__[0].cell_contents is inner  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "words, said", [([], "expert: the loop clips by"), (["--right"], "3 steps of 2 ranks clip by")]
)
def test_a_script_under_torchrun(words: list[str], said: str) -> None:
    """Rank 0 alone prints, and the documentation shows the printed line."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = ["examples/parity/norm_probe.py", *words]
    result = subprocess.run(
        [*launcher, *script], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=True
    )
    (line,) = [line for line in result.stderr.splitlines() if "norm probe" in line]
    # Numbers may round differently on other machines.
    shown = re.sub(r"\d+\.\d+", "N", line)
    assert shown in re.sub(r"\d+\.\d+", "N", (ROOT / "docs/parity_probes.md").read_text())
    assert ("3 steps of 2 ranks clip by the norm" if words else "expert: the loop clips by") in line


def step_of(place: str, square: float, name: str, total: float) -> RankStep:
    """Return a rank with one copy of a tied tensor, and a part of this rank alone."""
    marks = (0.0, 3.0), (0.0, square**0.5)
    parts = {name: Part(place, False, True, marks[0], marks[0]), "own": Part(name, False, True, marks[1], marks[1])}
    return RankStep(parts, (Clip(frozenset(parts), 100.0, total),), 1e-6)


@pytest.mark.parametrize("tied, total, kinds", [("tied", 5.0, []), ("tied", 34**0.5, ["copies"]), ("", 34**0.5, [])])
def test_a_tied_tensor_of_two_stages_counts_once(tied: str, total: float, kinds: list[str]) -> None:
    """The tensor has a name on each stage, and equal weights and gradients tell. 9 + 7 + 9, or twice the first 9."""
    steps = [[step_of(tied or "first", 7.0, "tokens", total), step_of(tied or "last", 9.0, "head", total)]]
    verdict = judged(steps, None)
    assert [finding.kind for finding in verdict.findings] == kinds, verdict.sentences


@pytest.mark.parametrize(
    "total, is_right", [(29**0.5, True), (20**0.5, True), (25**0.5, True), (4.0, False), (30**0.5, False)]
)
def test_a_norm_may_count_what_is_open_either_way(total: float, is_right: bool) -> None:
    """A tensor of ones has squares 4 and 9 on two ranks: one of two copies, or two parts. Both ranks have another
    16."""
    step = []
    for square in (4.0, 9.0):
        marks = {"norm.weight": (0.0, square**0.5), "up.weight": (0.0, 4.0)}
        parts = {name: Part(name, "norm" in name, True, mark, mark) for name, mark in marks.items()}
        step.append(RankStep(parts, (Clip(frozenset(parts), 100.0, total),), 1e-6))
    assert (judged([step], None).findings == []) == is_right
