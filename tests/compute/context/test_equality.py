"""Sequences that are cut over ranks train as on one device: float64 gradients to 1e-12 relative, losses to 1e-10."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.oracle.context import BLOCKS, CUT, KINDS, ONE_D, config_for, serial
from tests.oracle.data_parallel import SYNCS
from tests.oracle.run import check, run
from tests.oracle.tensor import MODELS

SERIAL: dict[str, Any] = {"kind": "none"}


SIZES = [
    *[("gpt2", size) for size in (2, 3, 4)],
    *[(model, 3) for model in ("untied", "bert", "megatron-bert")],
    *[
        pytest.param(model, size, marks=pytest.mark.long)
        for model in ("untied", "bert", "megatron-bert")
        for size in (2, 4)
    ],
]
"""The model does not matter to the ranks that cut a sequence: models other than GPT-2 have one number without
--long."""


@pytest.mark.few
@pytest.mark.parametrize("model, size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_serial(kind: str, model: str, size: int) -> None:
    check(run(config_for(model, {"size": size, "kind": kind})), serial(model))


@pytest.mark.diagonal
@pytest.mark.parametrize("tensor", [ONE_D, CUT, BLOCKS, BLOCKS | {"d": 2}], ids=["1-D", "cut", "2-D", "2.5-D"])
@pytest.mark.parametrize("model", ["gpt2", "bert"])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_serial_with_tensor_parallelism(kind: str, model: str, tensor: dict[str, Any]) -> None:
    check(run(config_for(model, {"size": 2, "kind": kind}, layout={"tensor": tensor})), serial(model))


@pytest.mark.diagonal
@pytest.mark.parametrize("branch", ["attention-core", "attention", "block"])
@pytest.mark.parametrize("common", ["all", "one"])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_serial_with_subgraphs(kind: str, common: str, branch: str) -> None:
    tensor = {"kind": "subgraph", "size": 2, "common": common, "branch": branch}
    check(run(config_for("bert", {"size": 2, "kind": kind}, layout={"tensor": tensor})), serial("bert"))


@pytest.mark.diagonal
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "axonn", "message-driven"])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_serial_with_stages(kind: str, schedule: str) -> None:
    layout = {"pipeline": {"size": 2, "schedule": schedule}}
    config = config_for("gpt2", {"size": 2, "kind": kind}, layout=layout, batch={"global": 8, "micro": 2})
    check(run(config), serial("gpt2"))


@pytest.mark.parametrize("sync", SYNCS)
def test_equals_serial_with_every_sync(sync: str) -> None:
    layout = {"data": {"size": 2, "sync": sync, "bucket": 8192}}
    check(run(config_for("gpt2", {"size": 2}, layout=layout, batch={"global": 8, "micro": 2})), serial("gpt2"))


@pytest.mark.diagonal
@pytest.mark.parametrize("recompute", ["auto", "selective", 1, "offload"])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_serial_with_recomputation(kind: str, recompute: str | int) -> None:
    check(run(config_for("gpt2", {"size": 2, "kind": kind}, memory={"recompute": recompute})), serial("gpt2"))


@pytest.mark.parametrize("kind", KINDS)
def test_equals_serial_with_slices_in_shard_groups(kind: str) -> None:
    """A slice is cut over the data axis of a group and the context; the groups' sums are added once a step."""
    layout = {"data": {"size": 4, "sync": "zero3", "shard": 2}}
    config = config_for("gpt2", {"size": 2, "kind": kind}, layout=layout, batch={"global": 8, "micro": 1})
    check(run(config), serial("gpt2"))


def test_equals_serial_with_everything_at_once() -> None:
    layout = {
        "data": {"size": 2, "sync": "zero1", "bucket": 8192}, "pipeline": {"size": 2}, "tensor": CUT,
    }  # fmt: skip
    config = config_for("gpt2", {"size": 2}, layout=layout, batch={"global": 8, "micro": 2}, memory={"recompute": 1})
    check(run(config), serial("gpt2"))


@pytest.mark.parametrize("kind", KINDS)
def test_equals_serial_with_a_real_vocabulary(kind: str) -> None:
    model = {"family": "gpt2", "layers": 1, "hidden": 12, "heads": 2, "positions": 16, "dropout": 0.0}
    changes = {"model": model, "data": {"sequence": 16}, "batch": {"global": 2}}  # 50257 tokens, as gpt2 has
    check(run(config_for("gpt2", {"size": 2, "kind": kind}, **changes)), run(config_for("gpt2", {}, **changes))[0])


@pytest.mark.few(2)
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_trains_as_on_one_device(kind: str, level: str) -> None:
    precision = {"level": level, "dtype": "bf16"}
    expected, _ = run(config_for("bert", {}, precision=precision))[0]
    for losses, _ in run(config_for("bert", {"size": 2, "kind": kind}, precision=precision)):
        torch.testing.assert_close(losses, expected, rtol=5e-3, atol=0)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", KINDS)
def test_two_runs_have_the_same_bits(kind: str) -> None:
    dropout = 0.0 if kind == "ring" else 0.1
    shape = MODELS["gpt2"] | {"layers": 2, "hidden": 24, "heads": 12, "positions": 48, "dropout": dropout}
    config = config_for("gpt2", {"size": 2, "kind": kind}, layout={"tensor": ONE_D}, model=shape)
    (losses, gradients), (again, gradients_again) = run(config)[0], run(config)[0]
    assert losses == again
    for name, held in gradients.items():
        for offsets, part in held.items():
            assert torch.equal(part, gradients_again[name][offsets]), name
