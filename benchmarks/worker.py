"""One rank of a contender: connects to the harness and runs steps on request.

    python -m benchmarks.worker SOCKET CONTENDER-AS-JSON

is mpiexec's command; without MPI a worker is forked from a process that has imported torch and run nothing, as ranks of
`meshwright train` are. Between turns a worker sleeps in a read of the socket, outside MPI and gloo, and takes no time
from the others. A worker answers a line of JSON to each line: `{"steps": n}` -> the begin of the first step and the end
of each, by the machine's clock and by the processor time, the last loss, and the peak of memory beyond the imports.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from typing import IO, Any

from benchmarks.contender import Contender, Place, Step, find_factory
from meshwright.ranks.environment import read_environment
from meshwright.ranks.launch.tether import die_with_parent
from meshwright.ranks.machine import keep_freed_memory, peak_resident_bytes


def forked(path: str, description: str, variables: Mapping[str, str], log: str) -> None:
    """Run a worker in a process of the fork server. `log`: the file for printed text."""
    die_with_parent(None)
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    for output in (1, 2):
        os.dup2(descriptor, output)
    os.environ.update(variables)
    main(path, description)


def main(path: str, description: str) -> None:
    environment = read_environment()
    contender = Contender(**json.loads(description))
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        stream = connection.makefile("rw")
        _say(stream, {"name": contender.name, "rank": environment.rank})
        try:
            _serve(contender, Place(environment.rank, environment.world_size), stream)
        except Exception:
            _say(stream, {"error": traceback.format_exc()})
            raise


def _serve(contender: Contender, place: Place, stream: IO[str]) -> None:
    import torch

    if contender.allocator == "told":
        keep_freed_memory()
    torch.set_num_threads(1)
    factory = find_factory(contender.factory)
    before = peak_resident_bytes()
    with factory(place, **contender.options) as step:
        for line in stream:
            answer = _run(step, json.loads(line)["steps"])
            _say(stream, answer | {"held": peak_resident_bytes() - before})


def _run(step: Step, count: int) -> dict[str, Any]:
    clock, processor, loss = [time.monotonic()], [time.process_time()], 0.0
    for _ in range(count):
        loss = step()
        clock.append(time.monotonic())
        processor.append(time.process_time())
    return {"clock": clock, "processor": processor, "loss": loss}


def _say(stream: IO[str], message: dict[str, Any]) -> None:
    stream.write(json.dumps(message) + "\n")
    stream.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
