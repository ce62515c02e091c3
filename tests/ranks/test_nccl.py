"""Ranks under NCCL that share one GPU: `pytest --device cuda -k nccl`.

NCCL refuses two ranks of one host on one GPU, and compares hosts by NCCL_HOSTID. With an id for each process, the ranks
count as ranks of two hosts, and send over the loopback interface. So order, streams, deadlocks and results are NCCL's;
the speed is not. Without a GPU, a few of these processes (with `--long`, all) run over gloo on CPUs.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.config import Config
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from tests import mailbox_cases
from tests.comm_cases import DTYPES, VERBS, run_subgroups, run_verbs
from tests.comm_results import expected
from tests.mailbox_cases import FORMS, values
from tests.oracle.run import check, train
from tests.oracle.tensor import ONE_D, SEQUENCE, config_for, serial
from tests.workers import DEVICE, run_ranks

ON_GPU = os.environ.get(DEVICE, "cpu") == "cuda"
SIZES = (2, 4)


def on_device(mesh: Mesh, function: Any) -> Any:
    """Return function(mesh) with new tensors on the rank's device."""
    with torch.device(mesh.device):
        return function(mesh)


@cache
def verbs(size: int) -> list[tuple[dict[str, Any], dict[str, Tensor]]]:
    return run_ranks(on_device, Grid((("data", size),)), run_verbs, transport="nccl")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_nccl_has_every_verb(size: int, dtype: str) -> None:
    for index, (_, results) in enumerate(verbs(size)):
        for verb in VERBS:
            wanted = expected(verb, index, size, DTYPES[dtype])
            if wanted is not None:
                assert torch.equal(results[f"{verb}/{dtype}"], wanted), f"{verb} on rank {index}"


def test_nccl_has_groups_of_axes() -> None:
    answers = run_ranks(on_device, Grid((("outer", 2), ("inner", 2))), run_subgroups, transport="nccl")
    for rank, (facts, results) in enumerate(answers):
        for axis, wanted in {"outer": (rank % 2, rank % 2 + 2), "inner": (rank // 2 * 2, rank // 2 * 2 + 1)}.items():
            assert facts[axis] == list(wanted)
            assert results[axis].tolist() == [sum(wanted), wanted[1]]


@pytest.mark.parametrize("case", ["ping_pong", "both_ways", "epochs"])
def test_nccl_carries_messages_of_neighbours(case: str) -> None:
    answers = run_ranks(on_device, Grid((("pipe", 2),)), vars(mailbox_cases)[case], transport="nccl")
    alone = run_ranks(vars(mailbox_cases)[case], Grid((("pipe", 2),)))
    for (_, results), (_, wanted) in zip(answers, alone, strict=True):
        assert results.keys() == wanted.keys()
        assert all(torch.equal(results[name], wanted[name]) for name in wanted)


def test_messages_of_tests_are_not_empty() -> None:
    """The values that the case above compares are not all zero."""
    assert any(values(3, form).count_nonzero() for forms in FORMS.values() for form in forms)


DATA = {"bucket": 8192}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        f"{sync}, {size} ranks": ("gpt2", {"data": {"size": size, "sync": sync, **({} if sync == "zero3" else DATA)}})
        for sync in ("allreduce", "ring", "rooted", "server-gradient", "zero1", "zero2", "zero3")
        for size in SIZES
    },
    "megatron, 2 ranks": ("gpt2", {"tensor": ONE_D[0]}),
    "megatron, 4 ranks": ("gpt2", {"tensor": ONE_D[2]}),
    "megatron, cut by sequence, 2 ranks": ("gpt2", {"tensor": SEQUENCE[0]}),
    "2-D, 4 ranks": ("gpt2", {"tensor": {"kind": "tesseract", "q": 2}}),
    **{
        f"{schedule}, 2 stages": ("gpt2", {"pipeline": {"size": 2, "schedule": schedule}})
        for schedule in ("gpipe", "1f1b", "axonn", "message-driven")
    },
    "2 stages of 2 replicas": ("gpt2", {"pipeline": 2, "data": {"size": 2, **DATA}}),
    "2 stages of 2 tensor ranks": ("gpt2", {"pipeline": {"size": 2, "schedule": "message-driven"}, "tensor": ONE_D[0]}),
    "ring, 2 ranks": ("gpt2", {"context": {"size": 2, "kind": "ring"}}),
    "Ulysses, 2 ranks": ("gpt2", {"context": {"size": 2, "kind": "ulysses"}}),
    "experts, 2 ranks": ("experts", {"data": {"size": 2, "expert": 2}}),
    "experts by messages, 2 ranks": ("experts", {"data": {"size": 2, "expert": 2, "exchange": "messages"}}),
}
FEW = ("zero3, 2 ranks", "2 stages of 2 tensor ranks", "experts, 2 ranks")


def config_of(name: str) -> Config:
    model, layout = LAYOUTS[name]
    return config_for(model, {"kind": "none"}, layout=layout, batch={"global": 24, "micro": 6}, steps=3)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if ON_GPU or name in FEW else pytest.mark.long) for name in LAYOUTS]
)
def test_nccl_runs_a_layout_as_one_device_does(name: str) -> None:
    config = config_of(name)
    results = run_ranks(train, config.grid, config, token_axes=config.layout.token_axes, transport="nccl")
    check(results, serial(LAYOUTS[name][0]))
