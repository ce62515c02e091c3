"""One rank of a contender: connects back to the harness and runs steps when it is told to.

    python -m benchmarks.worker SOCKET CONTENDER-AS-JSON

Between its turns it sleeps in a read of the socket, outside MPI and gloo, so that it takes no time from the others.
It answers a line of JSON to each line: `{"steps": n}` -> the milliseconds of each step and the last loss.
"""

from __future__ import annotations

import json
import socket
import sys
import time
import traceback
from typing import IO, Any

from benchmarks.contender import Contender, Place, Step, find_factory
from meshwright.ranks.environment import read_environment


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

    torch.set_num_threads(1)
    with find_factory(contender.factory)(place, **contender.options) as step:
        for line in stream:
            _say(stream, _run(step, json.loads(line)["steps"]))


def _run(step: Step, count: int) -> dict[str, Any]:
    times, loss = [], 0.0
    for _ in range(count):
        start = time.perf_counter()
        loss = step()
        times.append((time.perf_counter() - start) * 1e3)
    return {"times": times, "loss": loss}


def _say(stream: IO[str], message: dict[str, Any]) -> None:
    stream.write(json.dumps(message) + "\n")
    stream.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
