"""A rank without memory or open files is told the limit to raise, in one sentence. Limits are of forked processes."""

from __future__ import annotations

import multiprocessing
import re
import resource
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from meshwright.ranks.errors import LaunchError
from meshwright.ranks.launch.failure import Report, allow_open_files, memory_sentence

HOST = socket.gethostname()


def in_a_fork(function: Callable[[], Any]) -> Any:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=lambda: sender.send(function()))
    process.start()
    try:
        assert receiver.poll(60)
        return receiver.recv()
    finally:
        process.join(60)


def starved(ask: Callable[[], object]) -> str:
    """Return a rank's report on an allocation beyond `ulimit -v`, which is 256 MiB above the memory in use."""
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + 2**28, resource.RLIM_INFINITY))
    try:
        ask()
    except (RuntimeError, MemoryError) as error:
        report = Report.of(1, error)
        assert report.certain
        return str(report)
    return "all of it was there"


@pytest.mark.parametrize("asker", ["torch", "numpy"])
def test_memory_that_ends_is_one_line(asker: str) -> None:
    ask = {"torch": lambda: torch.empty(2**31), "numpy": lambda: np.empty(2**31, dtype=np.float32)}[asker]
    said = in_a_fork(lambda: starved(ask))
    assert said.startswith("rank 1 failed: memory ended: 8")
    free = re.search(r"GiB more asked for, ([\d.]+) [MG]iB free on", said)
    assert free is not None, said
    assert float(free[1]) < 256
    assert f" free on {HOST}; set a smaller batch.micro, memory.recompute=auto" in said
    assert "\n" not in said


def test_a_gpus_own_words() -> None:
    text = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a capacity of 79 GiB of which 5.50 MiB is free."
    said = memory_sentence(torch.OutOfMemoryError(text))
    assert said is not None
    assert said.startswith(f"memory ended: 20 MiB more asked for, 5.50 MiB of the GPU's free on {HOST}; ")


def test_other_errors_are_not_of_memory() -> None:
    assert memory_sentence(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None
    assert "too many" not in str(Report.of(0, OSError(2, "No such file")))


def test_a_compiler_that_fails_is_named_with_the_way_back() -> None:
    def backend(*_: object) -> None:
        raise NotImplementedError("no code for this layer")

    with pytest.raises(RuntimeError) as caught:
        torch.compile(torch.sin, backend=backend)(torch.ones(1))
    report = Report.of(1, caught.value)
    first = str(report).splitlines()[0]
    assert first.startswith("rank 1 failed: torch's compiler failed (BackendCompilerFailed: ")
    assert first.endswith("); set compile=islands, or compile=none")
    assert report.certain
    assert "no code for this layer" in report.details


def limited(soft: int, hard: int) -> str:
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        allow_open_files(4)
    except LaunchError as error:
        return str(error)
    return str(resource.getrlimit(resource.RLIMIT_NOFILE))


@pytest.mark.parametrize(
    "soft, hard, outcome",
    [
        (24, 24, "a job of 4 ranks needs 96 open files a process, and 24 are allowed here: ulimit -n 1024"),
        (24, 200, "(96, 200)"),
        (150, 200, "(150, 200)"),
    ],
)
def test_open_files_are_allowed_or_refused_at_once(soft: int, hard: int, outcome: str) -> None:
    assert in_a_fork(lambda: limited(soft, hard)).startswith(outcome)
