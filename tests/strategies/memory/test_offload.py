"""The place of the states changes no bit: ten steps of every optimizer, with overflows, clipping and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn

from meshwright.compute.parameters.bucket import Slot
from meshwright.compute.parameters.role import StepRule
from meshwright.compute.parameters.rounding import Draw
from meshwright.ranks.errors import DivergedError
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh, solo_mesh
from meshwright.strategies.memory.offload import Offloaded
from meshwright.strategies.optim.optimizer import Optimizer
from meshwright.training import parts as parts_file
from meshwright.training.checkpoint import Checkpoint, pieces_of, restore
from meshwright.training.checkpoint.restore import progress_of
from meshwright.training.measured_run import resident_bytes
from tests.oracle.data_parallel import config_for
from tests.strategies.memory.runs import (
    BUCKET,
    STEPS,
    Case,
    Outcome,
    assert_same_bits,
    config_of,
    offloaded,
    outcome,
    parts_of,
    run,
    train_step,
)
from tests.training.checkpoint.states import open_writer
from tests.workers import run_ranks

CASES = [
    *(
        Case(sync, dtype, clip=clip)
        for sync in ("allreduce", "zero1")
        for dtype in ("bf16", "fp16")
        for clip in (None, 0.5)
    ),
    *(Case("allreduce", "bf16", optimizer, None) for optimizer in ("sgd", "momentum")),
    *(Case("zero1", "fp16", optimizer, 0.5) for optimizer in ("sgd", "momentum")),
]

ROUNDED = [
    Case("zero1", states="bf16", masters="bf16"),
    Case("allreduce", "fp16", states="bf16"),
    Case("allreduce", clip=None, optimizer="momentum", masters="bf16"),
]

DECAYS = StepRule("elements", decays=True)


def run_all(mesh: Mesh, cases: list[Case], folder: Path) -> dict[Case, Outcome]:
    return {case: run(mesh, case, folder) for case in cases}


@pytest.mark.parametrize(
    "to, size",
    [
        ("host", 2),
        ("disk", 1),
        pytest.param("host", 1, marks=pytest.mark.long),
        pytest.param("disk", 2, marks=pytest.mark.long),
    ],
)
def test_no_bit_changes(to: str, size: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    grid = Grid((("data", size),))
    # Every optimizer, precision and sync for each store; all combinations with --long.
    few = CASES if request.config.getoption("--long") else CASES[2 * (to == "disk") :: 3]
    pairs = {case: replace(case, to=to) for case in few}
    for answers in run_ranks(run_all, grid, [*pairs, *pairs.values()], tmp_path):
        for case, elsewhere in pairs.items():
            assert_same_bits(answers[elsewhere], answers[case])
            skipped = [applied for _, applied in answers[case].steps].count(False)
            assert skipped == (3 if case.dtype == "fp16" else 0), case
    assert list(tmp_path.iterdir()) == []  # no file is left


@pytest.mark.parametrize("to", ["host", "disk"])
def test_no_bit_of_what_is_rounded_at_random_changes(to: str, tmp_path: Path) -> None:
    """The pieces, of 256 elements, differ from the pieces in place."""
    pairs = {case: replace(case, to=to) for case in ROUNDED}
    ranks = run_ranks(run_all, Grid((("data", 2),)), [*pairs, *pairs.values()], tmp_path)
    for case, elsewhere in pairs.items():
        for answers in ranks:
            assert_same_bits(answers[elsewhere], answers[case])
        # Rank 0 alone has states of replicas to write.
        moments = {x.dtype for answers in ranks for kind, *_, x in answers[elsewhere].held if kind != "weight"}
        assert moments == {torch.bfloat16 if case.states == "bf16" else torch.float32}
    assert list(tmp_path.iterdir()) == []


def compared_alone(mesh: Mesh, case: Case, folder: Path) -> list[str]:
    """Compare the replicas of a lone rank: no state may be read."""
    parts = parts_of(mesh, case, folder)
    with patch.multiple(Offloaded, tensors=None, update_masters=None, refresh=None):
        return [*parts.strategy.make_replicas_equal(), *parts.optimizer.make_replicas_equal()]


def test_a_lone_rank_reads_no_state_to_compare_replicas(tmp_path: Path) -> None:
    assert run_ranks(compared_alone, Grid((("data", 1),)), Case(to="host"), tmp_path) == [[]]


def test_the_size_of_chunks_changes_no_weight(tmp_path: Path) -> None:
    """Slots are longer or shorter; the norm that clips all slots is the same."""
    cases = [Case("zero1", to="host", chunk=chunk) for chunk in (1, 3, 1000)]
    for answers in run_ranks(run_all, Grid((("data", 2),)), cases, tmp_path):
        for case in cases[1:]:
            for name, weight in answers[cases[0]].weights.items():
                assert torch.equal(answers[case].weights[name], weight), f"{name} with {case.chunk} buckets a chunk"


def test_parameter_server(tmp_path: Path) -> None:
    """The workers' slots are empty: no state is stepped or kept."""
    case = Case("server-gradient")
    for answers in run_ranks(run_all, Grid((("data", 2),)), [case, replace(case, to="host")], tmp_path):
        assert_same_bits(answers[replace(case, to="host")], answers[case])


def resume(mesh: Mesh, first: Case, second: Case, folder: Path) -> tuple[Outcome, Outcome]:
    """Make half of the steps with the first case, write a checkpoint, and make the rest with the second; then all steps
    with the first."""
    parts = parts_of(mesh, first, folder)
    steps = [train_step(parts, step) for step in range(STEPS // 2)]
    writer = open_writer(mesh, parts.config, folder / "checkpoints")
    writer.save(progress_of(parts, STEPS // 2, 0), pieces_of(parts))
    writer.wait()
    going_on = parts_of(mesh, second, folder)
    mesh.world.barrier()
    restore(going_on, Checkpoint(folder / "checkpoints" / f"step-{STEPS // 2}"))
    assert going_on.optimizer.make_replicas_equal() == []
    steps += [train_step(going_on, step) for step in range(STEPS // 2, STEPS)]
    return outcome(going_on, steps), run(mesh, first, folder)


@pytest.mark.few(2)
@pytest.mark.diagonal
@pytest.mark.parametrize("pair", [("host", "none"), ("none", "host"), ("disk", "host"), ("none", "disk")])
@pytest.mark.parametrize(
    "case",
    [Case("zero1", "fp16"), Case("allreduce", "bf16", "momentum", None), Case("zero1", states="bf16", masters="bf16")],
    ids=str,
)
def test_a_checkpoint_does_not_know_where_states_lived(case: Case, pair: tuple[str, str], tmp_path: Path) -> None:
    first, second = (replace(case, to=to) for to in pair)
    for resumed, whole in run_ranks(resume, Grid((("data", 2),)), first, second, tmp_path):
        assert_same_bits(resumed, whole)


def account(mesh: Mesh, case: Case, folder: Path) -> tuple[int, int]:
    parts = parts_of(mesh, case, folder)
    train_step(parts, 0)
    return offloaded(parts).staging.num_bytes, resident_bytes(parts)["states"]


@pytest.mark.parametrize("optimizer, element_bytes", [("adamw", 16), ("momentum", 12), ("sgd", 8)])
def test_the_device_holds_a_bucket_of_states(optimizer: str, element_bytes: int, tmp_path: Path) -> None:
    ((staged, compared),) = run_ranks(account, Grid((("data", 1),)), Case(optimizer=optimizer, to="host"), tmp_path)
    assert staged == compared == element_bytes * BUCKET


def diverge(mesh: Mesh, case: Case, folder: Path) -> str:
    parts = parts_of(mesh, case, folder)
    assert parts.optimizer.streams
    train_step(parts, 0)
    parts.strategy.slots[0].parameter.data[0] = torch.nan
    try:
        train_step(parts, 1)
    except DivergedError as error:
        return str(error)
    return ""


def test_a_streamed_step_still_finds_out_that_a_run_has_diverged(tmp_path: Path) -> None:
    ((text),) = run_ranks(diverge, Grid((("data", 1),)), Case(clip=None, to="host"), tmp_path)
    assert text.startswith("step 2: the gradient norm is nan: the run has diverged")


def order(mesh: Mesh, case: Case, folder: Path) -> tuple[list[str], int]:
    """Return the slots that are stepped at each slot's arrival, and the number of slots."""
    parts = parts_of(mesh, case, folder)
    slots, events = parts.strategy.slots, []
    before = [slot.parameter.detach().clone() for slot in slots]
    for slot in slots:
        slot.parameter.grad = torch.ones_like(slot.parameter, dtype=slot.parameter.grad_dtype)

    def arrivals() -> Iterator[int]:
        for index in range(len(slots)):
            if index == len(slots) - 1:  # all earlier slots must be stepped before the last slot arrives
                for earlier in range(index if parts.optimizer.streams else 0):
                    _await_change(slots[earlier], before[earlier])
            moved = [not torch.equal(slot.parameter, old) for slot, old in zip(slots, before, strict=True)]
            events.append("".join("x" if moved_one else "." for moved_one in moved))
            yield index

    parts.optimizer.step(5, arrivals())
    return events, len(slots)


def _await_change(slot: Slot, old: torch.Tensor) -> None:
    for _ in range(10_000):
        if not torch.equal(slot.parameter, old):
            return
        torch.mm(torch.ones(64, 64), torch.ones(64, 64))
    raise AssertionError("a slot whose gradient had arrived was not stepped")


def test_a_chunk_is_stepped_while_the_next_is_on_its_way(tmp_path: Path) -> None:
    ((events, count),) = run_ranks(order, Grid((("data", 1),)), Case(clip=None, to="host", chunk=2), tmp_path)
    assert count > 3
    assert events[-1] == "x" * (count - 1) + "."


@pytest.mark.parametrize("case", [Case(to="host", chunk=2), Case(dtype="fp16", clip=None, to="host", chunk=2)], ids=str)
def test_nothing_is_written_before_a_norm_that_decides_is_known(case: Case, tmp_path: Path) -> None:
    ((events, count),) = run_ranks(order, Grid((("data", 1),)), case, tmp_path)
    assert events == ["." * count] * count


def step_one(mesh: Mesh, length: int, folder: Path) -> list[tuple[int, int, int]]:
    """Step a slot of `length`. Return the sizes by the states' own count, and the sizes of a float32 slot."""
    config = config_of(Case(to="host"), 1)
    sizes = []
    for place in (10**9, folder / "f"):
        ones = [torch.ones(length, dtype=dtype, device=mesh.device) for dtype in (torch.bfloat16, torch.float32)]
        parameters = [nn.Parameter(x) for x in ones]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        states = Offloaded(config, [Slot(parameter, (), DECAYS, ()) for parameter in parameters], mesh.device, place)
        states.step(range(2), Optimizer(config, [], mesh)._update(0.5), Draw(0, 0))
        half, full = (states.tensors(index) for index in range(2))
        assert full["weight"].data_ptr() == parameters[1].data_ptr()  # float32 is the slot's own master
        assert torch.equal(half["weight"].cpu(), full["weight"].cpu())
        sizes.append((half["weight"].numel(), full["exp_avg"].numel(), len(half)))
    return sizes


@pytest.mark.parametrize("length", [0, 1, BUCKET // 2, BUCKET // 2 + 1, 5 * BUCKET + 3])
def test_slots_of_every_length(length: int, tmp_path: Path) -> None:
    (sizes,) = run_ranks(step_one, Grid((("data", 1),)), length, tmp_path)
    assert sizes == [(length, length, 3)] * 2


def test_the_ranks_of_a_node_share_the_memory_of_their_stores() -> None:
    """A rank has a fourth of the memory: the memory is shared by the ranks of the node, not of the whole job."""
    mesh = replace(solo_mesh(torch.device("cpu")), ranks_here=4)
    with (
        patch.object(parts_file, "available_memory_bytes", lambda: 4000),
        patch.object(parts_file, "Offloaded") as made,
    ):
        parts_file.STATES["host"](mesh, Path())(config_for("allreduce", 1), [])
    assert made.call_args.kwargs["storage"] == 1000
