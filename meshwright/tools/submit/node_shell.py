"""The shell of a node on which nobody else starts the ranks: a pod's program, and what a SkyPilot task runs.

It starts the node's ranks with the variables that torchrun would set, and passes SIGTERM on to them. torchrun's own
agent is of no use here: it ends with 1 whatever its ranks end with, and the engine must tell a run that was stopped
(started again, as often as it takes) from one that failed (started again `restarts` times).
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from meshwright.tools.submit.job import Submission

RUN_FOLDER = "/etc/meshwright"
"""Where a node finds the run file, which travels with the job."""

_SHELL = """\
export WORLD_SIZE={world} LOCAL_WORLD_SIZE={per_node} MASTER_ADDR={address} MASTER_PORT={port}
first=$(({per_node} * {node}))
pids=
trap 'kill -TERM $pids' TERM
for local in $(seq 0 {last}); do
  LOCAL_RANK=$local RANK=$((first + local)) {words} &
  pids="$pids $!"
done
code=0
for pid in $pids; do
  wait "$pid"; ended=$?
  while kill -0 "$pid" 2>/dev/null; do wait "$pid"; ended=$?; done
  [ "$ended" -le "$code" ] || code=$ended
done
{closing}
"""
"""A signal ends `wait` early: it is repeated while the rank lives."""


@dataclass(frozen=True)
class NodePlace:
    """How a node of an engine's job finds its place, in shell: which node it is, and where rank 0's is.

    `closing`: how the shell ends, with `$code`, the highest that a rank has ended with.
    """

    node: str
    address: str
    port: str = "29500"
    closing: str = 'exit "$code"'


def node_shell(submission: Submission, place: NodePlace) -> str:
    """The program of one node. It always says --resume: a node that is started again does not know that it is."""
    words = submission.train_words("python", Path(RUN_FOLDER, "run.yaml"), resume=True)
    per_node, world = submission.ranks_per_node, submission.config.layout.world_size
    return _SHELL.format(
        world=world, per_node=per_node, last=per_node - 1, address=place.address, port=place.port, node=place.node,
        words=shlex.join(words), closing=place.closing,
    )  # fmt: skip
