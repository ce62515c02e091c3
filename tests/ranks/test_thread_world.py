"""Ranks that are threads: one runs at a time, no rank waits for ever, and a failure is named."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from meshwright.api import train
from meshwright.config import load_config
from meshwright.ranks import window_comm
from meshwright.ranks.errors import ConfigError, LaunchError, LostRankError
from meshwright.ranks.grid import Grid
from meshwright.ranks.launch import Interrupted, Rank, run
from meshwright.ranks.mesh import Mesh
from tests.patience import PATIENCE_SECONDS
from tests.ranks.runs import RUN
from tests.workers import run_ranks


def test_a_function_of_no_module_runs_on_every_rank_and_returns_what_it_likes() -> None:
    seen = []

    def doubled(rank: Rank, factor: int) -> torch.Tensor:
        x = torch.tensor([rank.mesh.rank + 1.0])
        rank.mesh.world.all_reduce(x)
        seen.append(threading.current_thread().name)
        return factor * x

    assert run(doubled, 3, transport="threads", factor=2) == [torch.tensor([12.0])] * 3
    assert sorted(seen) == ["rank 0", "rank 1", "rank 2"]


def test_one_rank_runs_at_a_time() -> None:
    """A rank runs until it waits for another rank, so a list written by two ranks has no mixture of both."""
    lines: list[int] = []

    def write(rank: Rank) -> None:
        for _ in range(2):
            for _ in range(50):
                lines.append(rank.mesh.rank)
                threading.Event().wait(0.0001)
            rank.mesh.world.barrier()

    run(write, 2, transport="threads")
    for start in range(0, 200, 50):
        assert len(set(lines[start : start + 50])) == 1


def test_a_sender_may_change_its_tensor_before_it_is_taken() -> None:
    def passed_on(rank: Rank) -> list[float]:
        mine, came = torch.full((2,), rank.mesh.rank + 1.0), torch.empty(2)
        work = rank.mesh.world.exchange(mine, 1 - rank.mesh.rank, came, 1 - rank.mesh.rank, wait=False)
        mine.zero_()
        work.wait()
        return came.tolist()

    assert run(passed_on, 2, transport="threads") == [[2.0, 2.0], [1.0, 1.0]]


def test_every_rank_has_random_numbers_to_itself() -> None:
    def drawn(rank: Rank) -> list[float]:
        torch.manual_seed(rank.mesh.rank)
        numbers = []
        for _ in range(3):
            numbers.append(float(torch.rand(())))
            rank.mesh.world.barrier()
        return numbers

    def alone(seed: int) -> list[float]:
        torch.manual_seed(seed)
        return [float(torch.rand(())) for _ in range(3)]

    torch.manual_seed(7)
    state = torch.get_rng_state()
    answers = run(drawn, 3, transport="threads")
    assert torch.equal(torch.get_rng_state(), state), "the caller's random numbers go on"
    assert answers == [alone(rank) for rank in range(3)]


def test_every_rank_has_a_default_dtype_to_itself() -> None:
    """Ranks set and restore the dtype in turns, as parity's checks do. A shared dtype would end as the first set it."""

    def widened(rank: Rank) -> str:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        rank.mesh.world.barrier()
        torch.set_default_dtype(before)
        rank.mesh.world.barrier()
        return str(torch.zeros(1).dtype)

    assert run(widened, 3, transport="threads") == ["torch.float32"] * 3
    assert torch.get_default_dtype() == torch.float32


def in_a_circle(rank: Rank) -> None:
    rank.mesh.world.receive(torch.zeros(3), (rank.mesh.rank + 1) % 3)


def apart(rank: Rank) -> None:
    if rank.mesh.rank == 1:
        rank.mesh.world.all_reduce(torch.zeros(2))
    else:
        rank.mesh.world.broadcast(torch.zeros(2), 0)


def leaves_early(rank: Rank) -> None:
    if rank.mesh.rank < 2:
        rank.mesh.world.receive(torch.zeros(3), 2)


def raises(rank: Rank) -> None:
    if rank.mesh.rank == 2:
        raise ValueError("in its first step")
    rank.mesh.world.barrier()


@pytest.mark.parametrize(
    "work, text",
    [
        (in_a_circle, r"no progress: rank 0 .* sent nothing on axis data; rank 2 waits"),
        (apart, r"ranks of one group have parted: one is in \w+, another in \w+"),
        (leaves_early, r"have parted|rank 2 .* waits in barrier"),
        (raises, r"rank 2 failed: ValueError: in its first step"),
    ],
)
def test_ranks_that_cannot_go_on_end_at_once_with_a_cause(work: Callable[[Rank], None], text: str) -> None:
    with pytest.raises(LaunchError, match=text):
        run(work, 3, transport="threads")


def test_ranks_that_wait_for_one_that_failed_are_told() -> None:
    told: list[str] = []

    def listens(rank: Rank) -> None:
        try:
            raises(rank)
        except LostRankError as error:
            told.append(str(error))
            raise

    with pytest.raises(LaunchError):
        run(listens, 3, transport="threads")
    assert told == ["rank 2 failed: in its first step"] * 2


def test_a_rank_set_aside_lets_the_others_run() -> None:
    """A rank that waits for a thread is set aside, since the thread may wait for another rank."""
    happened = threading.Event()

    def work(rank: Rank) -> bool:
        if rank.mesh.rank == 0:
            with rank.mesh.transport.aside():
                return happened.wait(PATIENCE_SECONDS)
        happened.set()
        return True

    assert run(work, 2, transport="threads") == [True, True]


def test_a_run_has_the_bits_that_processes_give_it(tmp_path: Path) -> None:
    """Losses and weights equal the processes', with dropout's masks, stages, gathered weights and checkpoints."""
    (tmp_path / "run.yaml").write_text(RUN)
    seen = {}
    for transport in ("threads", "torch"):
        out = tmp_path / transport
        train(load_config(tmp_path / "run.yaml", [f"layout.transport={transport}", "model.dropout=0.1"]), out)
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        weights = sorted((out / "checkpoints/step-4").glob("*.safetensors"))
        numbers = [[line[key] for key in ("loss", "grad_norm")] for line in lines]
        seen[transport] = numbers, [path.read_bytes() for path in weights]
    assert seen["threads"] == seen["torch"]


def test_what_cannot_be_had_is_refused_before_a_thread_starts(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(RUN)
    with pytest.raises(ConfigError, match="threads"):
        load_config(tmp_path / "run.yaml", ["layout.transport=threads", "layout.pipeline.size=1", "restarts=1"])


def test_a_request_to_stop_ends_in_who_asked() -> None:
    def asks(rank: Rank) -> bool:
        heard = rank.stop.requested  # the rank listens from here on
        rank.mesh.world.barrier()
        signal.raise_signal(signal.SIGTERM)
        rank.mesh.world.barrier()
        return heard

    with pytest.raises(Interrupted, match="stopped by SIGTERM"):
        run(asks, 2, transport="threads")


def sums_small_alone(mesh: Mesh) -> None:
    window_comm.SMALL_BYTES = 1


def test_what_a_function_leaves_changed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change that a function leaves would change later tests."""
    monkeypatch.setattr(window_comm, "SMALL_BYTES", window_comm.SMALL_BYTES)  # monkeypatch restores the value
    grid = Grid((("data", 1),))
    with pytest.raises(pytest.fail.Exception, match=r"sums_small_alone leaves meshwright\S+\.SMALL_BYTES changed"):
        run_ranks(sums_small_alone, grid)
    run_ranks(sums_small_alone, grid, forked=True)
