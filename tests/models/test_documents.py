"""Documents packed into one sequence and kept apart are computed as one by one: float64, loss and gradients to 1e-12;
under layouts as on one device. The samples' boundaries are the packed corpus' end tokens."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from meshwright.config import Config, parse_run
from meshwright.data.packing import prepare
from meshwright.data.sampler import TokenBatches, document_entries
from meshwright.errors import ConfigError
from meshwright.model import IGNORED, Batch
from meshwright.models.chain import Chain, make_chain
from meshwright.parts import build_model
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from meshwright.tensor.serial import SerialKit
from meshwright.tools.verify.reference_kit import ReferenceKit
from tests.context.test_equality import BLOCKS, CUT, ONE_D, config_for
from tests.tensor.test_equality import check, run
from tests.workers import run_ranks

APART = {"sequence": 24, "documents": "separate"}
LENGTHS = [(5, 1, 18), (24,), (2, 7, 7, 8)]
"""Tokens of the documents of each row."""


def separate(name: str, layout: dict[str, Any], **changes: Any) -> Config:
    layout = dict(layout)
    micro = 2 if "pipeline" in layout or "data" in layout else 4
    changes = {"data": APART, "batch": {"global": 8, "micro": micro}} | changes
    return config_for(name, layout.pop("context", {}), layout=layout, **changes)


def packed_rows() -> Batch:
    """Three rows of documents; each one's last token predicts nothing."""
    tokens = torch.randint(300, (3, 24), generator=torch.Generator().manual_seed(7))
    begins, labels = np.zeros((3, 24), dtype=bool), tokens.roll(-1, 1)
    for row, lengths in enumerate(LENGTHS):
        ends = np.cumsum(lengths)
        begins[row, ends[:-1]] = True
        labels[row, torch.from_numpy(ends - 1)] = IGNORED
    return {"tokens": tokens, "labels": labels} | document_entries(begins)


def loss_and_gradients(model: Chain, batches: list[Batch], total: int) -> tuple[float, dict[str, Tensor]]:
    """The mean over `total` valid tokens in all batches."""
    model.zero_grad()
    loss = torch.stack([model(batch, {"labels": 1 / total})[0] for batch in batches]).sum()
    loss.backward()
    return float(loss.detach()), {name: x.grad.clone() for name, x in model.named_parameters()}


def packed_and_one_by_one(mesh: Mesh, config: Config) -> tuple[Any, Any]:
    model = build_model(config, SerialKit(mesh), mesh)
    whole = packed_rows()
    ends = [np.cumsum(lengths) for lengths in LENGTHS]
    alone = [
        {name: whole[name][row : row + 1, end - length : end] for name in ("tokens", "labels")}
        for row, lengths in enumerate(LENGTHS)
        for end, length in zip(ends[row].tolist(), lengths, strict=True)
    ]
    total = int((whole["labels"] != IGNORED).sum())
    return loss_and_gradients(model, [whole], total), loss_and_gradients(model, alone, total)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_packed_documents_are_computed_as_one_by_one(name: str) -> None:
    [((loss, gradients), (expected, by_one))] = run_ranks(
        packed_and_one_by_one, Grid((("data", 1),)), separate(name, {})
    )
    assert loss == pytest.approx(expected, rel=1e-12)
    for parameter, gradient in by_one.items():
        assert (gradients[parameter] - gradient).norm() <= 1e-12 * gradient.norm(), parameter


LAYOUTS: dict[str, dict[str, Any]] = {
    "1-D, cut": {"tensor": CUT},
    "2-D": {"tensor": BLOCKS},
    "branches": {"tensor": {"kind": "subgraph", "size": 2, "branch": "attention-core"}},
    "stages": {"pipeline": {"size": 2, "schedule": "message-driven"}},
    "ulysses": {"context": {"size": 2, "kind": "ulysses"}},
    "ring": {"context": {"size": 2, "kind": "ring"}},
    "ring of 4": {"context": {"size": 4, "kind": "ring"}},
    "ring x 1-D x replicas": {
        "context": {"size": 2, "kind": "ring"}, "tensor": ONE_D, "data": {"size": 2, "sync": "zero1", "bucket": 8192},
    },
    "fsdp": {"data": {"size": 2, "sync": "fsdp"}},
    "zero3": {"data": {"size": 2, "sync": "zero3"}},
}  # fmt: skip
ONLY_LONG = {("gpt2", "ring of 4"), ("llama", "zero3"), ("llama", "fsdp"), ("gpt2", "branches"), ("gpt2", "zero3")}


@cache
def serial(name: str) -> Any:
    return run(separate(name, {}))[0]


@pytest.mark.parametrize(
    "name, layout",
    [
        pytest.param(name, layout, marks=pytest.mark.long) if (name, layout) in ONLY_LONG else (name, layout)
        for name in ("gpt2", "llama")
        for layout in LAYOUTS
    ],
)
def test_equals_serial(name: str, layout: str) -> None:
    check(run(separate(name, LAYOUTS[layout])), serial(name))


def test_equals_serial_with_recomputation() -> None:
    layout = {"context": {"size": 2, "kind": "ring"}, "pipeline": {"size": 2}}
    check(run(separate("llama", layout, memory={"recompute": "selective"})), serial("llama"))


def test_half_precision_trains_as_on_one_device() -> None:
    precision = {"level": "O1", "dtype": "bf16"}
    expected, _ = run(separate("llama", {}, precision=precision))[0]
    for losses, _ in run(separate("llama", LAYOUTS["ulysses"], precision=precision)):
        torch.testing.assert_close(losses, expected, rtol=5e-3, atol=0)


def test_a_window_knows_its_documents(tmp_path: Path) -> None:
    texts = ["abc", "de", "fghijklmnop", "q", "rstuvw", "xyz"] * 9
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    corpus = prepare(str(tmp_path / "a.jsonl"), "bytes", tmp_path / "out", 0.1)
    end = corpus.header.end
    apart = TokenBatches(corpus, "train", 16, 1, end).samples(0, 20)
    joined = TokenBatches(corpus, "train", 16, 1).samples(0, 20)
    assert torch.equal(apart["tokens"], joined["tokens"])
    for row in range(20):
        tokens, begin = apart["tokens"][row].tolist(), 0
        for place, token in enumerate(tokens):
            assert apart["documents"][row, place] == begin
            assert apart["positions"][row, place] == place - begin
            asked = IGNORED if token == end else int(joined["labels"][row, place])
            assert apart["labels"][row, place] == asked
            begin = place + 1 if token == end else begin


def test_the_reference_keeps_documents_apart_too() -> None:
    """It runs the same model file on torch's functions: what `verify` holds a layout against."""
    config = separate("gpt2", {})
    torch.manual_seed(1)
    model = make_chain(config, ReferenceKit()).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    batch = packed_rows()
    first = model.hidden_states(batch)[0][:, :5]
    batch["tokens"][0, 5:] = 1
    assert torch.equal(model.hidden_states(batch)[0][0, :5], first[0])
    batch["tokens"][0, :5] = 2
    later = model.hidden_states(batch)[0][0, 5:]
    batch["tokens"][0, :5] = 3
    assert torch.equal(model.hidden_states(batch)[0][0, 5:], later)


@pytest.mark.parametrize(
    "tree, message",
    [
        (
            {"model": {"family": "gpt2"}, "data": {"documents": "apart"}},
            "data.documents=apart is none of the choices (did you mean separate?); valid: joined, separate",
        ),
        (
            {"model": {"family": "bert"}, "data": {"documents": "separate"}},
            "data.documents=separate has no effect on data.kind=masked",
        ),
    ],
)
def test_what_does_not_go_is_refused(tree: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse_run(tree)
    assert message in str(refusal.value)
