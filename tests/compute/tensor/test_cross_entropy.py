"""The chunked loss against torch's cross entropy on whole logits, in float64: value, dh, dW."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.compute.parameters.initial import initialise
from meshwright.compute.parameters.shard import Initial
from meshwright.compute.tensor import cross_entropy
from meshwright.compute.tensor.cross_entropy import Classes, chunked_loss, chunked_token_losses, num_correct
from meshwright.compute.tensor.head import HeadShape, TableHead
from meshwright.compute.tensor.serial import SerialKit
from meshwright.config import Config, parse_config
from meshwright.ranks.comm import RankGroup, SoloComm
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh, solo_mesh
from meshwright.training.rank_model import build_kit, build_model
from meshwright.training.step import train_step
from tests.harness import build
from tests.oracle.batches import BATCHES
from tests.oracle.tensor import ONE_D, config_for
from tests.workers import run_ranks

ONE = Grid((("data", 1),))
ROWS, HIDDEN, VOCABULARY, PADDED = 50, 8, 37, 48
WHOLE = Classes(VOCABULARY, SoloComm(RankGroup("", (0,), 0)))
ONE_CHUNK, MANY_CHUNKS = ROWS, 16  # four chunks, the last of two rows


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    h = torch.randn(ROWS, HIDDEN, generator=generator, dtype=torch.float64)
    weight = 3 * torch.randn(PADDED, HIDDEN, generator=generator, dtype=torch.float64)
    labels = torch.randint(VOCABULARY, (ROWS,), generator=generator)
    labels[::7] = -100
    labels[16:32] = -100  # a whole chunk that counts nothing
    return h.to(dtype), weight.to(dtype), labels


def set_sizes(patch: pytest.MonkeyPatch, chunk_rows: int) -> None:
    """Set chunks of `chunk_rows` rows of logits, worked on five rows at a time."""
    patch.setattr(cross_entropy, "CHUNK_BYTES", {"cpu": 4 * PADDED * chunk_rows})
    patch.setattr(cross_entropy, "CHUNK_ROWS", 1)
    patch.setattr(cross_entropy, "SLICE_BYTES", {"cpu": 4 * PADDED * 5})


def reference(h: Tensor, weight: Tensor, labels: Tensor, scale: float, smoothing: float = 0.0) -> Tensor:
    logits = (h @ weight.t())[:, :VOCABULARY]
    return scale * F.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)


def with_gradients(
    mesh: Mesh, which: str, chunk_rows: int, scale: float, factor: float, dtype: str, smoothing: float = 0.0
) -> list[Tensor]:
    """Return [loss, dh, dW] of factor · loss."""
    h, weight, labels = inputs(getattr(torch, dtype))
    h.requires_grad_()
    weight.requires_grad_()
    if which == "ours":
        with pytest.MonkeyPatch.context() as patch:
            set_sizes(patch, chunk_rows)
            loss = chunked_loss(h, weight, None, labels, replace(WHOLE, smoothing=smoothing), scale)
    else:
        loss = reference(h, weight, labels, scale, smoothing)
    (factor * loss).backward()
    assert h.grad is not None
    assert weight.grad is not None
    return [loss.detach(), h.grad, weight.grad]


@pytest.mark.parametrize("scale, factor", [(1.0, 1.0), (1 / 3, 1.0), (1 / 7, -3.0)])
@pytest.mark.parametrize("chunk_rows", [ONE_CHUNK, MANY_CHUNKS])
def test_equals_cross_entropy(chunk_rows: int, scale: float, factor: float) -> None:
    (ours,) = run_ranks(with_gradients, ONE, "ours", chunk_rows, scale, factor, "float64")
    (theirs,) = run_ranks(with_gradients, ONE, "reference", 0, scale, factor, "float64")
    for mine, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-13)
    assert ours[2][VOCABULARY:].count_nonzero() == 0  # padding rows are never seen
    assert ours[1][16:32].count_nonzero() == 0  # nor do uncounted tokens matter


@pytest.mark.parametrize("chunk_rows", [ONE_CHUNK, MANY_CHUNKS])
@pytest.mark.parametrize("smoothing", [0.1, 1.0])
def test_smoothed_labels(smoothing: float, chunk_rows: int) -> None:
    """Smoothing equals torch's label_smoothing; in every kit: test_words."""
    (ours,) = run_ranks(with_gradients, ONE, "ours", chunk_rows, 1 / 7, -3.0, "float64", smoothing)
    (theirs,) = run_ranks(with_gradients, ONE, "reference", 0, 1 / 7, -3.0, "float64", smoothing)
    for mine, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-13)
    assert ours[2][VOCABULARY:].count_nonzero() == 0
    assert ours[1][16:32].count_nonzero() == 0


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_lower_precision(dtype: str, tolerance: float, smoothing: float) -> None:
    (ours,) = run_ranks(with_gradients, ONE, "ours", MANY_CHUNKS, 1.0, 1.0, dtype, smoothing)
    (theirs,) = run_ranks(with_gradients, ONE, "reference", 0, 1.0, 1.0, "float64", smoothing)
    assert ours[0].dtype == torch.float32
    assert ours[2].dtype == getattr(torch, dtype)
    for mine, wanted in zip(ours, theirs, strict=True):
        assert float((mine.double() - wanted).norm() / wanted.norm()) < tolerance


def test_many_chunks_in_half_precision_are_added_without_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16 would add up 256 of 600 equal terms: a sum stops growing if a term is less than the sum's last bit."""
    set_sizes(monkeypatch, 1)
    _, weight, _ = inputs()
    h, labels = torch.ones(600, weight.shape[1]), torch.zeros(600, dtype=torch.int64)
    gradients = {}
    for dtype in (torch.float64, torch.bfloat16):
        table = weight.detach().to(dtype).requires_grad_()
        bias = torch.zeros(len(table), dtype=dtype, requires_grad=True)
        chunked_loss(h.to(dtype), table, bias, labels, WHOLE, 1.0).backward()
        gradients[dtype] = [x.grad.double() for x in (table, bias) if x.grad is not None]
    for mine, wanted in zip(gradients[torch.bfloat16], gradients[torch.float64], strict=True):
        assert float((mine - wanted).norm() / wanted.norm()) < 0.02


@pytest.mark.parametrize("chunk_rows", [ONE_CHUNK, MANY_CHUNKS])
def test_without_gradients(chunk_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    set_sizes(monkeypatch, chunk_rows)
    h, weight, labels = inputs()
    with torch.no_grad():
        loss = chunked_loss(h, weight, None, labels, WHOLE, 0.5)
    torch.testing.assert_close(loss, reference(h, weight, labels, 0.5), rtol=1e-12, atol=0)
    losses = chunked_token_losses(h, weight, None, labels, WHOLE)
    wanted = F.cross_entropy((h @ weight.t())[:, :VOCABULARY], labels, reduction="none")
    torch.testing.assert_close(losses, wanted, rtol=1e-12, atol=1e-13)
    assert losses[labels == -100].count_nonzero() == 0


@pytest.mark.parametrize("dtype, tolerance", [("float64", 1e-12), ("float32", 1e-5)])
@pytest.mark.parametrize("spread", [1.0, 2000.0])
def test_labels_without_a_share(spread: float, dtype: str, tolerance: float) -> None:
    """A softmax is 0 at logits far below the greatest; losses and gradients of such labels stay right."""
    found = []
    for kind in (getattr(torch, dtype), torch.float64):
        h, weight, labels = inputs(kind)
        bias = torch.linspace(-1, 1, PADDED, dtype=kind).requires_grad_()
        leaves = h.requires_grad_(), (spread * weight).detach().requires_grad_(), bias
        if not found:
            loss = chunked_loss(*leaves, labels, WHOLE, 1 / 3)
        else:
            logits = (h @ leaves[1].t() + bias)[:, :VOCABULARY]
            assert (spread > 1) == bool((logits.softmax(1) == 0).any())
            loss = F.cross_entropy(logits, labels, reduction="sum") / 3
        loss.backward()
        found.append([loss.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)])
    for mine, wanted in zip(*found, strict=True):
        assert float((mine.double() - wanted).norm() / wanted.norm()) < tolerance


def test_nothing_counted() -> None:
    h, weight, labels = inputs()
    assert chunked_loss(h, weight, None, torch.full_like(labels, -100), WHOLE, 1.0) == 0


def test_huge_logits_stay_finite() -> None:
    h, weight, labels = inputs()
    loss = chunked_loss(1e4 * h, weight, None, labels, WHOLE, 1.0)
    torch.testing.assert_close(loss, reference(1e4 * h, weight, labels, 1.0), rtol=1e-12, atol=0)


class Tied(nn.Module):
    """A head over the table that also embeds. The evaluated loss is not smoothed."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        kit = SerialKit(mesh)
        self.table = kit.embedding(PADDED, HIDDEN, Initial(1.0))
        self.head = kit.head_loss(HeadShape(HIDDEN, VOCABULARY, PADDED, Initial(1.0), smoothing=0.1), self.table)


def tied_gradient(mesh: Mesh) -> tuple[list[str], Tensor, Tensor, list[int], bool]:
    model = Tied(mesh)
    initialise(model, mesh, 1)
    model.double()
    weight = model.table.weight
    ids = torch.arange(12, device=mesh.device).view(2, 6) % VOCABULARY
    labels = (ids + 1) % VOCABULARY
    model.head(model.table(ids), labels, 0.5).backward()
    ours = weight.grad.clone()
    weight.grad = None
    reference(F.embedding(ids, weight).flatten(0, 1), weight, labels.flatten(), 0.5, 0.1).backward()
    h = model.table(ids).detach()
    logits = model.head.logits(h)
    match = torch.allclose(logits, (h @ weight.t())[..., :VOCABULARY], rtol=1e-12)
    token_losses = model.head.token_losses(h, labels)
    match = match and torch.allclose(
        token_losses.flatten(), F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none"), rtol=1e-12
    )
    return [name for name, _ in model.named_parameters()], ours, weight.grad, list(logits.shape), match


def test_tied_head() -> None:
    ((names, ours, theirs, shape, match),) = run_ranks(tied_gradient, ONE)
    assert names == ["table.weight"]
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)
    assert shape == [2, 6, VOCABULARY]
    assert match


def autocast_loss(mesh: Mesh) -> tuple[Any, ...]:
    h, weight, labels = inputs(torch.float32)
    h.requires_grad_()
    weight.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = chunked_loss(h, weight, None, labels, WHOLE, 1.0)
    loss.backward()
    assert h.grad is not None
    assert weight.grad is not None
    return loss.detach(), h.grad, weight.grad


def test_autocast_computes_in_half_and_hands_back_full() -> None:
    (ours,) = run_ranks(autocast_loss, ONE)
    (theirs,) = run_ranks(with_gradients, ONE, "reference", 0, 1.0, 1.0, "float64")
    for mine, wanted in zip(ours, theirs, strict=True):
        assert mine.dtype == torch.float32
        assert 1e-6 < float((mine.double() - wanted).norm() / wanted.norm()) < 2e-2


SPLITS = {
    "padding on the last rank": (37, 40, 4),  # 10 rows a rank, the last with 7 classes
    "padding over half of it": (37, 48, 2),  # 24 rows, 13 classes
    "a rank without a class": (37, 60, 3),  # 20, 17, none
    "seven ranks without a class": (5, 64, 8),
    "none": (36, 36, 3),
}
"""Real classes, rows of the table, ranks."""


def split_inputs(vocabulary: int, padded: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    h = torch.randn(ROWS, HIDDEN, generator=generator, dtype=torch.float64)
    weight = 3 * torch.randn(padded, HIDDEN, generator=generator, dtype=torch.float64)
    bias = torch.randn(padded, generator=generator, dtype=torch.float64)
    labels = torch.randint(vocabulary, (ROWS,), generator=generator)
    labels[::7] = -100
    return h, weight, bias, labels


def split_loss(mesh: Mesh, vocabulary: int, padded: int, chunk_elements: int) -> list[Tensor]:
    """Return [loss, whole dh, dW, db, number right] with each rank's part of the table, by chunks of `chunk_elements`
    logits."""
    comm = mesh.comm("col")
    h, weight, bias, labels = split_inputs(vocabulary, padded)
    mine = slice(comm.index * padded // comm.size, (comm.index + 1) * padded // comm.size)
    part, offsets = weight[mine].clone().requires_grad_(), bias[mine].clone().requires_grad_()
    h.requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cross_entropy, "SLICE_BYTES", {"cpu": 4 * chunk_elements // 3})
        classes = Classes(vocabulary, comm, 0.1, chunk_bytes=4 * chunk_elements)
        loss = chunked_loss(h, part, offsets, labels, classes, 1 / 3)
        loss.backward()
        right = num_correct(h, part, offsets, labels, classes)
    assert h.grad is not None
    assert part.grad is not None
    assert offsets.grad is not None
    comm.all_reduce(h.grad)
    return [loss.detach(), h.grad, part.grad, offsets.grad, right]


def unsplit_loss(mesh: Mesh, vocabulary: int, padded: int) -> list[Tensor]:
    """Return the result of `split_loss`, by torch on whole logits."""
    h, weight, bias, labels = split_inputs(vocabulary, padded)
    leaves = [x.requires_grad_() for x in (h, weight, bias)]
    logits = (h @ weight.t() + bias)[:, :vocabulary]
    loss = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=0.1) / 3
    return [loss.detach(), *torch.autograd.grad(loss, leaves), (logits.argmax(1) == labels).sum()]


@pytest.mark.diagonal
@pytest.mark.parametrize("chunk_elements", [30, 107, 10**6])
@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_split_over_ranks(split: tuple[int, int, int], chunk_elements: int) -> None:
    """Ranks hold different numbers of real classes; all ranks send equal numbers of chunks of equal lengths."""
    vocabulary, padded, size = split
    grid = Grid((("data", 1), ("col", size)))
    results = run_ranks(split_loss, grid, vocabulary, padded, chunk_elements, forked=True)
    ((loss, dh, dweight, dbias, right),) = run_ranks(unsplit_loss, ONE, vocabulary, padded)
    for mine in results:
        torch.testing.assert_close(mine[0], loss, rtol=1e-12, atol=0)
        torch.testing.assert_close(mine[1], dh, rtol=1e-12, atol=1e-13)
        assert mine[4] == right
    torch.testing.assert_close(torch.cat([mine[2] for mine in results]), dweight, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(torch.cat([mine[3] for mine in results]), dbias, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype, times", [(torch.bfloat16, 1), (torch.float32, 2)])
@pytest.mark.parametrize("classes, chunks", [(152_064, 5), (128_256, 4), (50_304, 2), (16_384, 1)])
def test_a_gpu_has_1_gib_of_logits_at_a_time(classes: int, chunks: int, dtype: torch.dtype, times: int) -> None:
    """16,384 tokens in whole tiles of 128 rows. A float32 logit is two of bf16."""
    h, table = torch.empty(16_384, 64, device="meta"), torch.empty(classes, 64, device="meta")
    rows = list(replace(WHOLE, vocabulary=classes, device_type="cuda").chunks(h, table, dtype))
    assert times * chunks - 1 <= len(rows) <= times * chunks
    assert all((each.stop - each.start) * classes * dtype.itemsize <= 2**30 for each in rows)
    assert all((each.stop - each.start) % 128 == 0 for each in rows)


def sizes_in(config: Config) -> list[int]:
    """Return the bytes of the float32 logits of each chunk in a run's head, 512 tokens over 512 classes."""
    mesh = solo_mesh(torch.device("cpu"), config.grid.names)
    model = build_model(config, build_kit(config, mesh), mesh)
    (head,) = (module for module in model.modules() if isinstance(module, TableHead))
    h = torch.empty(512, config.model.hidden, device="meta")
    return [4 * 512 * (rows.stop - rows.start) for rows in head.classes.chunks(h, head.block, torch.float32)]


def test_a_run_says_how_large_its_chunks_are() -> None:
    """`memory.logits`: also fewer rows than a CPU's chunks have by default."""
    model = {"family": "gpt2", "layers": 1, "hidden": 32, "heads": 2, "vocabulary": 512}
    assert sizes_in(parse_config({"model": model})) == [2**20]
    assert sizes_in(parse_config({"model": model, "memory": {"logits": "256K"}})) == [2**18] * 4
    assert sizes_in(parse_config({"model": model, "memory": {"logits": 2**14}})) == [2**14] * 64


def two_steps(mesh: Mesh, config: Config) -> list[float]:
    parts = build(config, mesh)
    return [train_step(parts, BATCHES["gpt2"](config, step), step).loss for step in range(2)]


@pytest.mark.parametrize("tensor", [{"kind": "none"}, ONE_D[0]], ids=["serial", "1-D"])
def test_a_run_with_other_chunks_is_the_same_run(tensor: dict[str, object]) -> None:
    losses = []
    for logits in ("auto", "4K", "16K"):
        config = config_for("gpt2", tensor, memory={"logits": logits})
        losses.append(run_ranks(two_steps, Grid(config.layout.axes), config)[0])
    assert losses[0] == pytest.approx(losses[1], rel=1e-12, abs=0)
    assert losses[0] == pytest.approx(losses[2], rel=1e-12, abs=0)
