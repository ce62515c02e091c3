"""Ranks on a Ray cluster: one actor per rank, which starts the rank as a separate process.

    placement group   one bundle per node, on different nodes
    actor             reports the node's address and a free port; runs the rank; forwards a request to stop

The rank is a process and not the actor itself, for three reasons: a run has signal handlers, which need a main thread;
a run ends by itself if other ranks are gone; and a run reads the environment once.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from meshwright.ranks.environment import rank_variables
from meshwright.ranks.errors import LaunchError
from meshwright.ranks.launch.signals import STOPPED_EXIT_CODE
from meshwright.ranks.launch.tether import die_with_parent

PLACE_SECONDS = 300.0
RUN = "RUN"
"""Placeholder for the run file in a rank's words: each rank has its own copy."""
_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Placement:
    """The ranks to run, and the resources of each."""

    words: Sequence[str]
    """Arguments of a rank's interpreter, with RUN for the run file."""
    nodes: int
    ranks_per_node: int
    run: str = ""
    """The run file's text, if `file` is empty."""
    file: str = ""
    """The run file's path on the script's node."""
    cpus: int = 1
    """CPU cores of a rank."""
    gpus: int = 0
    """GPUs of a rank."""
    restarts: int = 0
    """How many times the ranks may be placed again after a failure."""

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def bundle(self) -> dict[str, float]:
        """The resources that a node must have."""
        bundle = {"CPU": float(self.cpus * self.ranks_per_node)}
        return bundle | ({"GPU": float(self.gpus * self.ranks_per_node)} if self.gpus else {})


class RankProcess:
    """Ray actor that runs one rank as a process; the process ends with the actor."""

    _process: subprocess.Popen[bytes] | None = None
    _folder: tempfile.TemporaryDirectory[str] | None = None

    def address(self) -> tuple[str, int]:
        """Return this node's address in the cluster, and a port that is free there now."""
        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def begin(self, run: str, words: Sequence[str], variables: dict[str, str]) -> None:
        """Start the rank with a copy of the run file, so that only the script's node needs the file.

        Args:
            run: The run file's text.
            words: Arguments of the interpreter, with RUN for the run file.
            variables: The rank's variables, as torchrun would set them.
        """
        self._folder = tempfile.TemporaryDirectory(prefix="meshwright-")
        copy = Path(self._folder.name, "run.yaml")
        copy.write_text(run)
        self._process = subprocess.Popen(
            [sys.executable, *(str(copy) if word == RUN else word for word in words)],
            env=rank_variables(variables),  # without the shipped folder, which Ray adds to the search path
            preexec_fn=lambda: die_with_parent(None),  # noqa: PLW1509 - one system call, which takes no lock
        )

    def code(self) -> int | None:
        """Return the rank's exit code; None while the rank runs."""
        return None if self._process is None else self._process.poll()

    def stop(self) -> None:
        """Ask the rank to finish the current step, save and end."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()


def place_ranks(placement: Placement) -> int:
    """Run the ranks to the end; return the exit code. On SIGTERM or SIGINT the ranks save and end with code 75.

    If a rank fails or a node is lost, all ranks are placed again, up to `restarts` times, and resume from the newest
    checkpoint. Raises LaunchError if the cluster has no room for the ranks.
    """
    import ray

    asked: list[int] = []

    def ask(signum: int, frame: FrameType | None) -> None:
        asked.append(signum)

    ray.init(ignore_reinit_error=True, log_to_driver=True)
    before = {signum: signal.signal(signum, ask) for signum in (signal.SIGTERM, signal.SIGINT)}
    try:
        for attempt in range(placement.restarts + 1):
            code = _attempt(placement, asked)
            if code == 0 or asked:
                break
            print(f"attempt {attempt} ended with code {code}", file=sys.stderr)
        return code
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
        ray.shutdown()


def _attempt(placement: Placement, asked: Sequence[int]) -> int:
    """Run the ranks once; return the highest exit code of a rank, or 1 if a node was lost."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    strategy = "STRICT_SPREAD" if placement.nodes > 1 else "STRICT_PACK"
    group = placement_group([placement.bundle] * placement.nodes, strategy=strategy)
    try:
        if not group.wait(PLACE_SECONDS):
            room = f"{placement.nodes} nodes with {placement.bundle} each"
            raise LaunchError(f"the Ray cluster has had no room for {room} within {PLACE_SECONDS:g} s")
        actor = ray.remote(num_cpus=placement.cpus, num_gpus=placement.gpus)(RankProcess)
        actors = [
            actor.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, node)).remote()
            for node in range(placement.nodes)
            for _ in range(placement.ranks_per_node)
        ]
        return _codes_of(placement, actors, asked)
    except ray.exceptions.RayActorError as error:
        print(f"a rank's actor is gone: {error}", file=sys.stderr)
        return 1
    finally:
        remove_placement_group(group)


def _codes_of(placement: Placement, actors: Sequence[Any], asked: Sequence[int]) -> int:
    import ray

    run = Path(placement.file).read_text() if placement.file else placement.run
    address, port = ray.get(actors[0].address.remote())
    per_node = placement.ranks_per_node
    for rank, actor in enumerate(actors):
        variables = {
            "RANK": rank,
            "WORLD_SIZE": placement.world_size,
            "LOCAL_RANK": rank % per_node,
            "LOCAL_WORLD_SIZE": per_node,
            "MASTER_ADDR": address,
            "MASTER_PORT": port,
        }
        named = {key: str(value) for key, value in variables.items()}
        ray.get(actor.begin.remote(run, list(placement.words), named))
    passed = False
    while True:
        codes = ray.get([actor.code.remote() for actor in actors])
        # After a requested stop the job ends with that code, even if a rank failed because its peers were gone.
        if None not in codes:
            return STOPPED_EXIT_CODE if STOPPED_EXIT_CODE in codes and asked else max(map(abs, codes))
        if any(code not in (None, 0, STOPPED_EXIT_CODE) for code in codes):
            time.sleep(_POLL_SECONDS)  # other ranks notice by themselves, or end with the actors
        if asked and not passed:
            passed = True
            ray.get([actor.stop.remote() for actor in actors])
        time.sleep(_POLL_SECONDS)
