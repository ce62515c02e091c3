"""Every verb on every transport gives the right result on each rank; bytes in the ledger equal the verb's formula."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from meshwright.ranks.grid import Grid
from meshwright.ranks.ledger import Ledger
from meshwright.ranks.transports import TransportName
from tests.comm_cases import DTYPES, PIECE, VERBS, run_subgroups, run_verbs
from tests.comm_results import expected
from tests.mpi_workers import Answer
from tests.workers import run_ranks

GLOO_SIZES = (1, 2, 3, 4)  # 1: SoloComm
MPI_SIZES = (2, 4)


@cache
def on_gloo(size: int) -> list[Answer]:
    return run_ranks(run_verbs, Grid((("data", size),)), transport="torch")


@cache
def on_threads(size: int) -> list[Answer]:
    return run_ranks(run_verbs, Grid((("data", size),)))


@cache
def on_gloo_alone(size: int) -> list[Answer]:
    """Return the results of gloo's verbs without a shared window, as on ranks of several nodes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meshwright.ranks.torch_comm.open_window", lambda *arguments: None)
        return run_ranks(run_verbs, Grid((("data", size),)), transport="torch")


LOCAL = {"gloo": on_gloo, "gloo alone": on_gloo_alone, "threads": on_threads}


@pytest.fixture(
    params=[
        *(pytest.param(("gloo", size), id=f"gloo-{size}") for size in GLOO_SIZES),
        *(pytest.param(("gloo alone", size), id=f"gloo-alone-{size}") for size in (2, 3)),
        *(pytest.param(("threads", size), id=f"threads-{size}") for size in (2, 3, 4)),
        *(pytest.param(("mpi", size), id=f"mpi-{size}") for size in MPI_SIZES),
        pytest.param(("mpi", 3), id="mpi-3", marks=pytest.mark.long),
    ],
)
def answers(request: pytest.FixtureRequest) -> list[Answer]:
    """Return the results of all ranks of one transport and size."""
    transport, size = request.param
    if transport in LOCAL:
        return LOCAL[transport](size)
    mpi: Callable[[int], dict[str, list[Answer]]] = request.getfixturevalue("mpi")
    return mpi(size)["verbs"]


def expected_entries(verb: str, index: int, size: int, width: int) -> list[list[Any]]:
    """Return [axis, verb, calls, bytes], from the Ledger's docstring; `width`: bytes of an element."""
    part, others = PIECE * width, size - 1
    is_root = index == others

    def all_reduce(elements: int, calls: int = 1) -> list[list[Any]]:
        return [["data", "all_reduce", calls, calls * (2 * others * elements * width // size)]]

    match verb:
        case "all_reduce":
            return all_reduce(7)
        case "all_reduce_matrix":
            return all_reduce(6)
        case "all_reduce_scalar":
            return all_reduce(1)
        case "all_reduce_later":
            return all_reduce(4, calls=2)
        case "all_to_all_unequal":
            sent = sum(index + other for other in range(size)) * width
            return [["data", "all_to_all", 1, others * sent // size]]
        case "broadcast":
            return [["data", verb, 1, others * part if is_root else 0]]
        case "reduce":
            return [["data", verb, 1, 0 if is_root else part + width]]
        case "gather":
            return [["data", verb, 1, 0 if is_root else part]]
        case "scatter":
            return [["data", verb, 1, others * part if is_root else 0]]
        case "exchange":
            return [["data", "send", 1, part]]
        case "exchange_later":
            return [["data", "send", 2, 2 * part]]
        case "relay":
            return [] if is_root else [["data", "send", 1, part]]
        case "nothing":
            moving = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
            return [["data", name, 1, 0] for name in (*moving, "broadcast", "reduce", "gather", "scatter", "send")]
    return [["data", verb.removesuffix("_in_place"), 1, others * part]]  # (n-1)/n of n pieces


@pytest.mark.parametrize("verb", VERBS)
def test_results(answers: list[Answer], verb: str) -> None:
    for name, dtype in DTYPES.items():
        for index, (_, results) in enumerate(answers):
            wanted = expected(verb, index, len(answers), dtype)
            if wanted is not None:
                text = f"{verb} of {name} at rank {index}"
                torch.testing.assert_close(
                    results[f"{verb}/{name}"], wanted, rtol=0, atol=0, msg=lambda m, t=text: f"{t}: {m}"
                )


@pytest.mark.parametrize("verb", VERBS)
def test_ledger(answers: list[Answer], verb: str) -> None:
    for name, dtype in DTYPES.items():
        for index, (entries, _) in enumerate(answers):
            wanted = expected_entries(verb, index, len(answers), dtype.itemsize) if len(answers) > 1 else []
            assert entries[f"{verb}/{name}"] == wanted, f"{verb} of {name} at rank {index}"


@pytest.mark.parametrize("transport", ["torch", "threads", "mpi"])
def test_subgroups(transport: TransportName, request: pytest.FixtureRequest) -> None:
    if transport != "mpi":
        answers = run_ranks(run_subgroups, Grid((("outer", 2), ("inner", 2))), transport=transport)
    else:
        answers = request.getfixturevalue("mpi")(4)["subgroups"]
    for rank, (facts, results) in enumerate(answers):
        outer, inner = divmod(rank, 2)
        assert facts["outer"] == [inner, inner + 2]
        assert facts["inner"] == [2 * outer, 2 * outer + 1]
        assert facts["outer+inner"] == [0, 1, 2, 3]
        assert results["outer"].tolist() == [2 * inner + 2, inner + 2]
        assert results["inner"].tolist() == [4 * outer + 1, 2 * outer + 1]
        assert results["outer+inner"].tolist() == [6, 1]
        # all-reduce of 4 bytes: 4 bytes with two ranks, 6 with four; broadcast at the root: 4 bytes for each other rank
        wanted = {"outer": 4 + 4 * outer, "inner": 4 + 4 * inner, "outer+inner": 6 + 12 * (rank == 1)}
        assert facts["sent"] == wanted


def test_ledger_sums_by_axis() -> None:
    ledger = Ledger()
    ledger.record("data", "all_reduce", 10)
    ledger.record("data", "all_reduce", 5)
    ledger.record("data", "send", 1)
    ledger.record("pipe", "send", 7)
    assert ledger.traffic["data", "all_reduce"].calls == 2
    assert ledger.sent_bytes() == {"data": 16, "pipe": 7}
