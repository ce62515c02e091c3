"""Ranks that join a job's store, are missing, or belong to another job. Each rank is a forked process on loopback."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist

from meshwright.ranks import comm_store
from meshwright.ranks.environment import Environment, Rendezvous
from meshwright.ranks.errors import LaunchError
from tests.patience import PATIENCE_SECONDS
from tests.workers import free_port

HOST = socket.gethostname()
CONTEXT = multiprocessing.get_context("fork")


def come(
    rank: int, world: int, point: Rendezvous, seconds: float, answers: Any, attempt: int = 0, device: str = "cpu"
) -> None:
    environment = Environment(rank, world, rank, world, attempt, "torchrun")
    try:
        store, _ = comm_store.join_job(environment, point, seconds, device)
        answers.put((rank, "met"))
        store.set(f"left-{rank}", "")
        store.wait([f"left-{other}" for other in range(world)])  # rank 0 holds the store for the others
        time.sleep(0.2 if rank == 0 else 0)
    except LaunchError as error:
        answers.put((rank, str(error)))
        time.sleep(0.5)  # as a worker lingers


@contextmanager
def job(ranks: list[int], world: int, point: Rendezvous, seconds: float) -> Iterator[tuple[Any, list[Any]]]:
    answers = CONTEXT.Queue()
    processes = [CONTEXT.Process(target=come, args=(rank, world, point, seconds, answers)) for rank in ranks]
    for process in processes:
        process.start()
    try:
        yield answers, processes
    finally:
        for process in processes:
            process.join(PATIENCE_SECONDS)
            process.kill()


def answers_of(ranks: list[int], world: int, point: Rendezvous, seconds: float = 20.0) -> dict[int, str]:
    with job(ranks, world, point, seconds) as (answers, _):
        return dict(answers.get(timeout=PATIENCE_SECONDS) for _ in ranks)


def test_a_job_meets() -> None:
    point = Rendezvous("127.0.0.1", free_port(), hosted=False, job="out/a")
    assert answers_of([0, 1, 2], 3, point) == {0: "met", 1: "met", 2: "met"}


def test_a_rank_that_never_comes_is_named_by_all_who_did() -> None:
    point = Rendezvous("127.0.0.1", free_port(), hosted=False)
    said = answers_of([0, 2], 4, point, seconds=2)
    who = f"2 of 4 ranks came to 127.0.0.1:{point.port} within 2 s (timeout.join): rank 0 on {HOST}, 2 on {HOST}"
    assert said[0] == f"{who}; missing: rank 1, 3"
    assert said[2] in (said[0], f"rank 2 on {HOST} lost the store at 127.0.0.1:{point.port}: the job's rank 0 has left")


def test_a_rank_without_a_gpu_may_wait_in_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under mpirun, `transport: auto` is MPI on a host without a GPU, so this host's rank never joins the store."""
    for name, value in {"RANK": "0", "SIZE": "2", "LOCAL_RANK": "0", "LOCAL_SIZE": "2"}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    hint = "A rank that finds no GPU waits in MPI instead: set device, and see that every host shows its GPUs"
    answers = CONTEXT.Queue()
    for rank, device in ((0, "cuda"), (1, "cuda"), (0, "cpu")):
        point = Rendezvous("127.0.0.1", free_port(), hosted=False)
        process = CONTEXT.Process(target=come, args=(rank, 2, point, 0.2, answers, 0, device))
        process.start()
        _, said = answers.get(timeout=PATIENCE_SECONDS)
        process.join(PATIENCE_SECONDS)
        assert said.endswith(hint) == (device == "cuda"), said


def test_nobody_there() -> None:
    point = Rendezvous("127.0.0.1", free_port(), hosted=False)
    said = answers_of([1], 2, point, seconds=1)
    assert f"rank 1 on {HOST} found nobody at 127.0.0.1:{point.port} within 1 s (Connection refused)" in said[1]


def test_a_rank_of_another_job_is_turned_away_and_does_not_disturb() -> None:
    """Job B has job A's port. Job B's rank 1 connects first, and job A still meets with its rank 1."""
    port = free_port()
    ours, theirs = (Rendezvous("127.0.0.1", port, hosted=False, job=name) for name in ("out/a", "out/b"))
    with job([0], 2, ours, 20) as (answers, _):
        stranger = answers_of([1], 2, theirs)[1]
        assert (
            f"rank 1 on {HOST} is of out/b (2 ranks), but rank 0 on {HOST}, at 127.0.0.1:{port}, of out/a" in stranger
        )
        assert "MASTER_PORT of its own" in stranger
        assert answers_of([1], 2, ours) == {1: "met"}
        assert answers.get(timeout=PATIENCE_SECONDS) == (0, "met")


def test_a_rank_that_comes_twice() -> None:
    point = Rendezvous("127.0.0.1", free_port(), hosted=False)
    with job([0, 1], 3, point, 10) as (answers, _):
        time.sleep(1.0)
        assert "second rank 1 that came" in answers_of([1], 3, point)[1]
        assert answers_of([2], 3, point) == {2: "met"}
        assert sorted(answers.get(timeout=PATIENCE_SECONDS) for _ in range(2)) == [(0, "met"), (1, "met")]


def test_a_restart_meets_over_the_store_of_the_attempt_before() -> None:
    """torchrun's agent keeps the store. The failed node's agent has counted the attempt, rank 0's agent has not."""
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    point = Rendezvous("127.0.0.1", agent.port, hosted=True, job="out/a")
    assert answers_of([0, 1], 2, point) == {0: "met", 1: "met"}
    answers = CONTEXT.Queue()
    again = [CONTEXT.Process(target=come, args=(rank, 2, point, 20.0, answers, rank)) for rank in (1, 0)]
    for process in again:
        process.start()
        time.sleep(1.0)  # rank 1 joins while the store has only the dead attempt's rank 0
    assert sorted(answers.get(timeout=PATIENCE_SECONDS) for _ in again) == [(0, "met"), (1, "met")]
    for process in again:
        process.join(PATIENCE_SECONDS)


def test_ranks_of_different_devices_are_named() -> None:
    point, answers = Rendezvous("127.0.0.1", free_port(), hosted=False), CONTEXT.Queue()
    processes = [
        CONTEXT.Process(target=come, args=(rank, 3, point, 20.0, answers, 0, device))
        for rank, device in enumerate(("cuda", "cuda", "cpu"))
    ]
    for process in processes:
        process.start()
    text = f"rank 2 on {HOST} computes on cpu, rank 0 on {HOST} computes on cuda: set device"
    assert all(text in answers.get(timeout=PATIENCE_SECONDS)[1] for _ in processes)
    for process in processes:
        process.join(PATIENCE_SECONDS)


def test_a_port_that_is_taken() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        point = Rendezvous("127.0.0.1", other.getsockname()[1], hosted=False)
        said = answers_of([0], 2, point, seconds=2)
    assert said[0].startswith(f"rank 0 on {HOST} cannot open port {point.port}: it is taken, perhaps by another job")


def test_a_host_that_does_not_exist() -> None:
    point = Rendezvous("no-such-host.invalid", 29500, hosted=False)
    with pytest.raises(LaunchError, match=r"MASTER_ADDR=no-such-host.invalid is not a host that .* knows"):
        comm_store.join_job(Environment(1, 2, 1, 2, 0, "torchrun"), point, 1)


@pytest.mark.parametrize("rank", [0, 1])
def test_sigterm_ends_a_rank_that_waits(rank: int) -> None:
    """Rank 0 waits for a rank that never joins. Rank 1 waits for a rank 0 that has opened the store and is silent."""
    point = Rendezvous("127.0.0.1", free_port(), hosted=False)
    with job([rank], 2, point, 60) as (_, processes):
        time.sleep(1.0)
        os.kill(processes[0].pid, signal.SIGTERM)
        processes[0].join(PATIENCE_SECONDS)
        assert processes[0].exitcode == -signal.SIGTERM
