"""Ranks on a Ray cluster: an actor a rank, which starts the rank as a process of its own.

    placement group   a bundle a node, on different nodes
    actor             says where it is and which port is free there; runs the rank; passes a request to stop on

The rank is a process and not the actor itself: a run has handlers of signals, which want a main thread, ends by itself
where its peers are gone, and reads its environment once.
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
"""Stands for the run file in a rank's words: each rank has a copy of its own."""
_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Placement:
    """`words`: what a rank's interpreter is given, with RUN for the run file: `run`, its text, or `file`, its path
    on the script's node.

    `cpus`, `gpus`: of a rank. `restarts`: after a rank was lost.
    """

    words: Sequence[str]
    nodes: int
    ranks_per_node: int
    run: str = ""
    file: str = ""
    cpus: int = 1
    gpus: int = 0
    restarts: int = 0

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def bundle(self) -> dict[str, float]:
        """The resources that one node must have."""
        bundle = {"CPU": float(self.cpus * self.ranks_per_node)}
        return bundle | ({"GPU": float(self.gpus * self.ranks_per_node)} if self.gpus else {})


class RankProcess:
    """An actor's content: one rank, as a process that ends with the actor."""

    _process: subprocess.Popen[bytes] | None = None
    _folder: tempfile.TemporaryDirectory[str] | None = None

    def address(self) -> tuple[str, int]:
        """This node's address in the cluster, and a port that is free there now."""
        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def begin(self, run: str, words: Sequence[str], variables: dict[str, str]) -> None:
        """Start the rank with a copy of the run file, whose text is `run`: the script alone need have it."""
        self._folder = tempfile.TemporaryDirectory(prefix="meshwright-")
        copy = Path(self._folder.name, "run.yaml")
        copy.write_text(run)
        self._process = subprocess.Popen(
            [sys.executable, *(str(copy) if word == RUN else word for word in words)],
            env=rank_variables(variables),  # Ray has the folder searched that it ships
            preexec_fn=lambda: die_with_parent(None),  # noqa: PLW1509 - one system call, which takes no lock
        )

    def code(self) -> int | None:
        """The rank's exit code; None while it runs."""
        return None if self._process is None else self._process.poll()

    def stop(self) -> None:
        """Ask the rank to finish its step, save and leave."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()


def place_ranks(placement: Placement) -> int:
    """Run the ranks until they have ended; the exit code. SIGTERM and SIGINT ask them to save and leave (75).

    Ranks that end with another code, or whose node is gone, are placed again up to `restarts` times, and go on from
    their newest checkpoint. Raises LaunchError where the cluster has no room for them.
    """
    import ray

    asked: list[int] = []

    def ask(number: int, frame: FrameType | None) -> None:
        asked.append(number)

    ray.init(ignore_reinit_error=True, log_to_driver=True)
    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        for attempt in range(placement.restarts + 1):
            code = _attempt(placement, asked)
            if code == 0 or asked:
                break
            print(f"attempt {attempt} ended with code {code}", file=sys.stderr)
        return code
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        ray.shutdown()


def _attempt(placement: Placement, asked: Sequence[int]) -> int:
    """One attempt's exit code: the highest of its ranks'; 1 where a node was lost."""
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
        # A stop that was asked for is what the job ends with, also where a rank that lost its peers ended otherwise.
        if None not in codes:
            return STOPPED_EXIT_CODE if STOPPED_EXIT_CODE in codes and asked else max(map(abs, codes))
        if any(code not in (None, 0, STOPPED_EXIT_CODE) for code in codes):
            time.sleep(_POLL_SECONDS)  # other ranks notice by themselves, or end with their actors
        if asked and not passed:
            passed = True
            ray.get([actor.stop.remote() for actor in actors])
        time.sleep(_POLL_SECONDS)
