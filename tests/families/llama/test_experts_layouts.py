"""Experts under every axis equal one device: float64 gradients to 1e-12 relative, losses and balance to 1e-10.

Labels are masked and differ from sequence to sequence, so a balance by counted tokens, by microbatch or by replica
would be another number. So would a capacity that is not by whole sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.config import parse_config
from meshwright.ranks.errors import ConfigError
from meshwright.ranks.mesh import Mesh
from tests.families.llama.experts import BOUNDED, BOUNDED_LAYOUTS, LAYOUTS, MODEL, bounded_serial, experts, serial
from tests.mpi_cases import EXPERTS as OVER_MPI
from tests.mpi_workers import Answer, flat, unflat
from tests.oracle.data_parallel import SYNCS
from tests.oracle.run import check, run, train

ONLY_LONG = {
    "1-D", "ring", "experts x slices", "experts x stages x ring", "experts",
    "experts x slices of gradients x chunks in a v",
}  # fmt: skip

BOUNDED_IN_CI = {"ring x cut", "experts x ring x stages"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name in ONLY_LONG else name for name in LAYOUTS]
)
def test_equals_serial(name: str) -> None:
    check(run(experts(LAYOUTS[name])), serial())


@pytest.mark.parametrize(
    "name, activation",
    [("experts x cut", "relu2"), ("experts x stages x ring", "gelu"), ("experts x replicas", "gelu"), ("1-D", "relu2")],
)
def test_experts_of_two_plain_linears_equal_serial(name: str, activation: str) -> None:
    """Experts with another function between the linears, next to a shared expert, equal one device."""
    model = MODEL | {"activation": activation, "experts": MODEL["experts"] | {"shared": 12}}
    alone = run(experts({}, model=model))[0]
    check(run(experts(LAYOUTS[name], model=model)), alone)
    assert alone[0] != serial()[0]


@pytest.mark.parametrize(
    "name",
    [name if name in BOUNDED_IN_CI else pytest.param(name, marks=pytest.mark.long) for name in BOUNDED_LAYOUTS],
)
def test_a_capacity_is_a_sequences(name: str) -> None:
    check(run(experts(BOUNDED_LAYOUTS[name], model=BOUNDED)), bounded_serial())
    assert bounded_serial()[0] != serial()[0], "nothing was dropped"


ROWS_OVER_MPI = {2: 8, 3: 6, 4: 8}
"""The global batch by world size."""


def train_for_files(mesh: Mesh, layout: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    """Train on two ranks experts without a capacity, with rows sent by the router's counts; on more ranks, with one."""
    size = mesh.grid.world_size
    model, rows = MODEL if size == 2 else BOUNDED, ROWS_OVER_MPI[size]
    losses, gradients = train(mesh, experts(layout, model=model, batch={"global": rows, "micro": 2}))
    return losses, flat(gradients)


@pytest.mark.parametrize(
    "size, name",
    [
        pytest.param(size, name, marks=pytest.mark.long if size > 2 else ())
        for size, layouts in OVER_MPI.items()
        for name in layouts
    ],
)
def test_equals_serial_over_mpi(size: int, name: str, mpi: Callable[[int], dict[str, list[Answer]]]) -> None:
    expected = serial() if size == 2 else bounded_serial(ROWS_OVER_MPI[size])
    check([(losses, unflat(parts)) for losses, parts in mpi(size)[name]], expected)


@pytest.mark.parametrize("sync", [sync for sync in SYNCS if sync != "server-loss"])
def test_equals_serial_with_every_sync(sync: str) -> None:
    check(run(experts({"data": {"size": 2, "sync": sync, "bucket": 8192}})), serial())


@pytest.mark.parametrize(
    "name, recompute",
    [
        ("ulysses x cut", "selective"),
        ("experts x cut", 1),
        ("experts x cut", "offload"),
        pytest.param("ulysses x cut", 1, marks=pytest.mark.long),
        pytest.param("experts x chunks", "selective", marks=pytest.mark.long),
        pytest.param("experts x groups of slices", 1, marks=pytest.mark.long),
    ],
)
def test_equals_serial_with_recomputation(name: str, recompute: str | int) -> None:
    """If layers are recomputed, rows are sent again."""
    check(run(experts(LAYOUTS[name], memory={"recompute": recompute})), serial())


ON_HOST, ON_DISK = ({"offload": {"to": to, "bucket": 4096, "chunk": 512}} for to in ("host", "disk"))


@pytest.mark.parametrize(
    "level, name, memory",
    [
        ("O1", "1-D", {}),
        ("O2", "experts", ON_HOST),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in [
                ("O1", "experts", {}),
                ("O2", "1-D", {}),
                ("O2", "experts x groups of slices", {}),
                ("O2", "experts x groups of slices", ON_DISK | {"recompute": 1}),
                ("O2", "experts x chunks", ON_HOST),
            ]
        ),
    ],
)
def test_half_precision_trains_as_on_one_device(level: str, name: str, memory: dict[str, Any]) -> None:
    """Masters and moments of a rank's experts may be off the device."""
    precision = {"level": level, "dtype": "bf16"}
    expected, _ = run(experts({}, precision=precision))[0]
    for losses, _ in run(experts(LAYOUTS[name], precision=precision, memory=memory)):
        torch.testing.assert_close(losses, expected, rtol=5e-3, atol=0)


@pytest.mark.parametrize(
    "model, layout, message",
    [
        (
            {},
            {"tensor": {"kind": "tesseract", "q": 2}},
            "layout.tensor.kind=tesseract does not cut the experts of model.experts.count=4; valid: none, megatron",
        ),
        (
            {"experts": {"count": 4, "per_token": 1}},
            {},
            "model.experts.renormalise=true makes the one weight of model.experts.per_token=1 a 1, by which a router "
            "learns nothing; valid: false, model.experts.per_token=2, or a model.experts.balance",
        ),
        (
            {"experts": {"count": 4, "per_token": 5}},
            {},
            "model.experts.per_token=5 is more than model.experts.count=4; valid: 4 or less",
        ),
        (
            {"biases": ["feed-forward"]},
            {},
            "model.biases=[feed-forward] has feed-forward, and the linears of model.experts have none; valid: query",
        ),
        (
            {"experts": {"count": 4, "balance": 0.1}},
            {"data": {"size": 2, "sync": "server-loss"}},
            "layout.data.sync=server-loss computes losses where all outputs come together, and model.experts.balance "
            "gives layers losses of their own; valid: ",
        ),
    ],
)
def test_what_does_not_go_is_refused(model: dict[str, Any], layout: dict[str, Any], message: str) -> None:
    shape = {"family": "llama", "layers": 1, "hidden": 24, "heads": 4, "feed_forward": 24, "vocabulary": 300}
    with pytest.raises(ConfigError) as refusal:
        parse_config({"model": shape | {"experts": {"count": 4}} | model, "data": {"sequence": 16}, "layout": layout})
    assert message in str(refusal.value)
