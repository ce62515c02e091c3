"""Separate documents in one packed sequence are computed as one by one: float64, loss and gradients to 1e-12; under
layouts as on one device. The samples' boundaries are the packed corpus' end tokens."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from meshwright.compute.model import IGNORED, Batch, to_device
from meshwright.compute.models.chain import Chain, make_chain
from meshwright.compute.tensor.serial import SerialKit
from meshwright.config import Config, parse_run
from meshwright.data.packing import prepare
from meshwright.data.sampler import TokenBatches, document_entries
from meshwright.ranks.errors import ConfigError
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from meshwright.tools.verify.reference_kit import ReferenceKit
from meshwright.training.rank_model import build_model
from meshwright.training.step import train_step as step_on
from tests.harness import build
from tests.oracle.batches import global_batch
from tests.oracle.context import BLOCKS, CUT, ONE_D, config_for
from tests.oracle.run import check, run
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
    """Return three rows of documents; each document's last token predicts nothing."""
    tokens = torch.randint(300, (3, 24), generator=torch.Generator().manual_seed(7))
    begins, labels = np.zeros((3, 24), dtype=bool), tokens.roll(-1, 1)
    for row, lengths in enumerate(LENGTHS):
        ends = np.cumsum(lengths)
        begins[row, ends[:-1]] = True
        labels[row, torch.from_numpy(ends - 1)] = IGNORED
    return {"tokens": tokens, "labels": labels} | document_entries(begins)


def loss_and_gradients(model: Chain, batches: list[Batch], total: int) -> tuple[float, dict[str, Tensor]]:
    """Return the mean over `total` valid tokens in all batches, and the gradients."""
    model.zero_grad()
    device = next(model.parameters()).device
    loss = torch.stack([model(to_device(batch, device), {"labels": 1 / total})[0] for batch in batches]).sum()
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


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3-next"])
def test_packed_documents_are_computed_as_one_by_one(name: str) -> None:
    [((loss, gradients), (expected, by_one))] = run_ranks(
        packed_and_one_by_one, Grid((("data", 1),)), separate(name, {})
    )
    assert loss == pytest.approx(expected, rel=1e-12)
    for parameter, gradient in by_one.items():
        assert (gradients[parameter] - gradient).norm() <= 1e-12 * gradient.norm(), parameter


ULYSSES, RING = ({"size": 2, "kind": kind} for kind in ("ulysses", "ring"))
LAYOUTS: dict[str, dict[str, Any]] = {
    "1-D, cut": {"tensor": CUT},
    "2-D": {"tensor": BLOCKS},
    "branches": {"tensor": {"kind": "subgraph", "size": 2, "branch": "attention-core"}},
    "stages": {"pipeline": {"size": 2, "schedule": "message-driven"}},
    "ulysses": {"context": ULYSSES},
    "ring": {"context": RING},
    "ring of 4": {"context": {"size": 4, "kind": "ring"}},
    "ring x 1-D x replicas": {
        "context": RING, "tensor": ONE_D, "data": {"size": 2, "sync": "zero1", "bucket": 8192},
    },
    "zero3": {"data": {"size": 2, "sync": "zero3"}},
}  # fmt: skip
HYBRID = {"size": 4, "sync": "zero3", "shard": 2}
BRANCHES = {"kind": "subgraph", "size": 2, "branch": "block", "common": "one"}
CROSSED: dict[str, tuple[str, dict[str, Any]]] = {
    "ulysses x 1-D, cut": ("llama", {"context": ULYSSES, "tensor": CUT}),
    "ulysses x 2-D": ("gpt2", {"context": ULYSSES, "tensor": BLOCKS}),
    "ulysses x branches": ("gpt2", {"context": ULYSSES, "tensor": BRANCHES}),
    "ulysses x stages": ("llama", {"context": ULYSSES, "pipeline": {"size": 2, "schedule": "1f1b"}}),
    "ulysses x shard groups": ("llama", {"context": ULYSSES, "data": HYBRID}),
    "ring x 1-D, cut": ("gpt2", {"context": RING, "tensor": CUT}),
    "ring x 2-D": ("llama", {"context": RING, "tensor": BLOCKS}),
    "ring x branches": ("gpt2", {"context": RING, "tensor": BRANCHES}),
    "ring x stages": ("gpt2", {"context": RING, "pipeline": {"size": 2, "schedule": "message-driven"}}),
    "ring x shard groups": ("gpt2", {"context": RING, "data": HYBRID}),
    "ring x experts": ("experts", {"context": RING, "data": {"size": 2, "expert": 2}}),
    "ring x latents": ("deepseek", {"context": RING, "tensor": ONE_D}),
}  # fmt: skip
"""Axes next to a cut sequence, each with the tested family."""
ONLY_LONG = {("gpt2", "ring of 4"), ("llama", "zero3"), ("gpt2", "branches"), ("gpt2", "zero3")}


@cache
def serial(name: str) -> Any:
    return run(separate(name, {}))[0]


@pytest.mark.few
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


@pytest.mark.few
@pytest.mark.parametrize("layout", CROSSED)
def test_equals_serial_where_sequences_are_cut_beside_other_axes(layout: str) -> None:
    name, tree = CROSSED[layout]
    check(run(separate(name, tree)), serial(name))


def gradients_of_one_document(mesh: Mesh, config: Config, changed: str) -> dict[str, Tensor]:
    """Return the gradients of the losses of each row's second document. `changed` names the documents with changed
    tokens."""
    parts, batch = build(config, mesh), global_batch(config, 0)
    begins = batch["positions"] == 0
    begins[:, 3] = begins[:, 17] = True  # every row has a second document
    batch |= document_entries(begins.numpy())
    second = begins.cumsum(1) == 2
    batch["labels"] = torch.where(second, 1, IGNORED)
    where = {"nothing": torch.zeros_like(second), "others": ~second, "itself": second}[changed]
    batch["tokens"] = torch.where(where, (batch["tokens"] + 7) % config.model.vocabulary, batch["tokens"])
    gradients: dict[str, Tensor] = {}

    def keep() -> None:
        for slot in parts.strategy.slots:
            for place in slot.places:
                part = slot.parameter.grad[place.start : place.stop].clone()
                gradients[f"{place.name} {place.box.offsets}"] = part

    step_on(parts, batch, 0, observe=keep)
    return gradients


LEAKS = {
    "one device": ("llama", {}),
    "ring of 4": ("gpt2", {"context": RING | {"size": 4}}),
    "ulysses x 2-D": CROSSED["ulysses x 2-D"],
    "ring x 1-D, cut": ("llama", {"context": RING, "tensor": CUT}),
    "ring x branches x stages": ("gpt2", {"context": RING, "tensor": BRANCHES, "pipeline": {"size": 2}}),
    "ulysses x shard groups": CROSSED["ulysses x shard groups"],
    "states": ("qwen3-next", {}),
    "states, ring of 4": ("qwen3-next", {"context": RING | {"size": 4}}),
    "states, ulysses x 1-D, cut": ("qwen3-next", {"context": ULYSSES, "tensor": CUT}),
    "states, 2-D x stages": ("qwen3-next", {"tensor": BLOCKS, "pipeline": {"size": 2}}),
}


@pytest.mark.few
@pytest.mark.parametrize("layout", LEAKS)
def test_what_changes_in_other_documents_changes_no_bit_of_a_gradient(layout: str) -> None:
    name, tree = LEAKS[layout]
    config = separate(name, tree)
    drawn, others, itself = (
        run_ranks(gradients_of_one_document, config.grid, config, changed, token_axes=config.layout.token_axes)
        for changed in ("nothing", "others", "itself")
    )
    for rank, gradients in enumerate(drawn):
        for parameter, gradient in gradients.items():
            assert torch.equal(gradient, others[rank][parameter]), parameter
    assert any(
        not torch.equal(gradient, itself[rank][parameter])
        for rank, gradients in enumerate(drawn)
        for parameter, gradient in gradients.items()
    ), "what changes in the document itself is seen"


def test_equals_serial_with_recomputation() -> None:
    layout = {"context": RING, "pipeline": {"size": 2}}
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
    """The reference that `verify` compares a layout with runs the same model file on torch's functions."""
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
