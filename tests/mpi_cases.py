"""The cases that one mpiexec of each world size runs, at the first test's request."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from meshwright.config import parse_config
from meshwright.config.layout import Layout
from tests.mpi_workers import Case

SIZES = (2, 3, 4)
ODD = 3
"""The world size of --long: each size takes a start of mpiexec, which is half of the size's time."""

SYNCS = ("server-loss", "server-gradient", "rooted", "allreduce", "ring", "zero1")
"""Every sync except zero2 and zero3, which sum while ranks compute."""

SCHEDULES = ("gpipe", "1f1b", "axonn", "message-driven")

TENSOR: dict[int, dict[str, dict[str, object]]] = {
    2: {
        "megatron-2": {"kind": "megatron", "size": 2},
        "subgraph-2-all": {"kind": "subgraph", "size": 2, "common": "all", "branch": "attention-core"},
        "subgraph-2-one": {"kind": "subgraph", "size": 2, "common": "one", "branch": "attention-core"},
        "subgraph-2-one-block": {"kind": "subgraph", "size": 2, "common": "one", "branch": "block"},
    },
    3: {"megatron-3-cut": {"kind": "megatron", "size": 3, "sequence_parallel": True}},
    4: {"tesseract-2": {"kind": "tesseract", "q": 2, "d": 1}},
}
"""Tensor layouts by world size."""

REAL_VOCABULARIES: dict[str, dict[str, object]] = {"t5": {"kind": "megatron", "size": 2}}
"""Tensor layouts of two ranks that hold different numbers of real words, by model."""

PIPELINES: dict[int, dict[str, tuple[int, int, str, dict[str, object]]]] = {
    2: {f"pipe-2-{schedule}": (1, 2, schedule, {"kind": "none"}) for schedule in SCHEDULES},
    3: {"pipe-3": (1, 3, "message-driven", {"kind": "none"})},
    4: {
        "pipe-4": (1, 4, "message-driven", {"kind": "none"}),
        "data-2-pipe-2": (2, 2, "message-driven", {"kind": "none"}),
        "pipe-2-megatron-2": (1, 2, "message-driven", {"kind": "megatron", "size": 2}),
        "pipe-2-subgraph-2-one": (1, 2, "message-driven", {"kind": "subgraph", "size": 2, "common": "one"}),
    },
}
"""Pipelines by world size: replicas, stages, schedule, tensor layout."""

EXPERTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "experts-2": {"data": {"size": 2, "expert": 2}},
        "experts-2-messages": {"data": {"size": 2, "expert": 2, "exchange": "messages"}},
    },
    3: {"experts-3": {"data": {"size": 3, "expert": 3}}},
    4: {
        "experts-2-zero1": {"data": {"size": 4, "expert": 2, "sync": "zero1", "bucket": 8192}},
        "experts-2-ring": {"data": {"size": 2, "expert": 2}, "context": {"size": 2, "kind": "ring"}},
    },
}
"""Layouts of experts by world size; more than two ranks run with --long."""

OF_EXPERTS = {"family": "llama", "feed_forward": 12, "experts": {"count": 6}}

ORDERED = {"order": ["branch", "data"], "data": {"size": 2}, "tensor": {"kind": "subgraph", "size": 2}}
"""Axes in another order than the default."""


def laid_out(*, model: Mapping[str, object] = MappingProxyType({}), **layout: object) -> Layout:
    """Return the layout of a model that every kit can cut."""
    shape = {"heads": 12, "vocabulary_multiple": 12, "positions": 12, **model}
    return parse_config({"layout": layout, "model": shape, "data": {"sequence": 12}, "batch": {"global": 12}}).layout


def cases(num_ranks: int, *, long: bool) -> list[Case]:
    """Return all cases of a world size; `long`: also the cases of --long."""
    data = (("data", num_ranks),)
    listed = [Case("verbs", "tests.comm_cases:run_verbs", (), data)]
    if num_ranks == 4:
        listed.append(Case("subgroups", "tests.comm_cases:run_subgroups", (), (("outer", 2), ("inner", 2))))
        axes = (("data", 1), ("branch", 4))
        listed.append(Case("branches", "tests.compute.subgraph.test_branches:over_mpi", (), axes, ("data", "branch")))
        axes = (("data", 2), ("pipe", 2), ("row", 1))
        listed.append(Case("stages-ask", "tests.mesh_cases:ask_by_stage", (), axes))
    if num_ranks == 2:
        for model, tensor in REAL_VOCABULARIES.items():
            layout, function = laid_out(tensor=tensor), "tests.compute.tensor.test_real_sizes:train_for_files"
            listed.append(Case(f"{model}-words", function, (model, tensor), layout.axes, layout.token_axes))
        for case in ("ping_pong", "out_of_step", "both_ways", "epochs"):
            listed.append(Case(f"mailbox-{case}", f"tests.mailbox_cases:{case}", (), (("pipe", 2),), ()))
    else:
        row = (("data", 1), ("pipe", 3)) if num_ranks == 3 else (("data", 2), ("pipe", 2))
        listed.append(Case("mailbox-relay", "tests.mailbox_cases:relay", (), row))
    for sync in SYNCS:
        listed.append(
            Case(sync, "tests.strategies.data_parallel.test_equality_mpi:train_for_files", (sync, num_ranks), data)
        )
    for name, tensor in TENSOR[num_ranks].items():
        layout = laid_out(tensor=tensor)
        function = "tests.compute.tensor.test_equality_mpi:train_for_files"
        listed.append(Case(name, function, (tensor,), layout.axes, layout.token_axes))
    if num_ranks == 4:
        layout = parse_config({"layout": ORDERED}).layout
        listed.append(Case("branch-data", "tests.test_order:train_for_files", ("branch-data",), layout.axes,
                           layout.token_axes))  # fmt: skip
    for name, layout in EXPERTS[num_ranks].items() if long or num_ranks == 2 else ():
        of_experts, function = (
            laid_out(model=OF_EXPERTS, **layout),
            "tests.families.llama.test_experts_layouts:train_for_files",
        )
        listed.append(Case(name, function, (layout,), of_experts.axes, of_experts.token_axes))
    for name, (data, stages, schedule, tensor) in PIPELINES[num_ranks].items():
        layout = laid_out(data={"size": data}, pipeline={"size": stages}, tensor=tensor)
        function = "tests.strategies.pipeline.test_equality_mpi:train_for_files"
        listed.append(Case(name, function, (data, stages, schedule, tensor), layout.axes, layout.token_axes))
    return listed
