"""The shell script that starts the ranks of a node, for engines that do not: a pod's program, or a SkyPilot task's.

The script sets the variables that torchrun would set, starts the node's ranks, and forwards SIGTERM. torchrun's agent
is not used because its exit code is 1 whatever the ranks' codes are. The engine must distinguish a stopped run
(restarted without limit) from a failed one (restarted `restarts` times).
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from meshwright.tools.submit.image import LOCK_HELPER
from meshwright.tools.submit.job import SAFE_PATH, Submission
from meshwright.training.status import STATUS

RUN_FOLDER = "/etc/meshwright"
"""The folder of a node with the run file, which is part of the job."""

ALIVE_SECONDS = 60
"""Largest age of a living rank's record. Ranks write a record every second; a slow file system may delay one."""

_SHELL = """\
export WORLD_SIZE={world} LOCAL_WORLD_SIZE={per_node} MASTER_ADDR={address} MASTER_PORT={port} {safe_path}=1
first=$(({per_node} * {node}))
set --
{lock}pids=
trap 'kill -TERM $pids' TERM
for local in $(seq 0 {last}); do
  LOCAL_RANK=$local RANK=$((first + local)) "$@" {words} &
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
"""A signal ends `wait` early: `wait` is repeated while the rank is alive."""

_LOCK = f"""\
# RDMA registers memory that must be locked. Either the node's limit allows it, or CAP_IPC_LOCK does (bit 14), which a
# user that is not root gets from the image's {LOCK_HELPER} alone.
while read -r key value; do [ "$key" != CapEff: ] || caps=$value; done < /proc/self/status
if [ "$(ulimit -l)" != unlimited ] && [ $((0x$caps & 0x4000)) -eq 0 ]; then
  set -- {LOCK_HELPER} --inh-caps +ipc_lock --ambient-caps +ipc_lock env \\
    "LD_LIBRARY_PATH=${{LD_LIBRARY_PATH-}}" "TMPDIR=${{TMPDIR:-/tmp}}"
  "$@" true || {{
    echo "RDMA cannot lock memory: ulimit -l is $(ulimit -l) KiB, and {LOCK_HELPER} gives no CAP_IPC_LOCK. Use" \\
      "packaging/docker/Dockerfile.cuda's image, user=0, or LimitMEMLOCK=infinity for the nodes' containerd." >&2
    exit 1
  }}
fi
"""
"""Without this check NCCL would silently fall back to sockets. LD_LIBRARY_PATH and TMPDIR are set again because the
loader clears these variables for a privileged program such as the helper."""

_ALIVE = """\
now=$(date +%s)
first=$(({per_node} * {node}))
for rank in $(seq $first $((first + {last}))); do
  at=$(sed -n 's/.*"seconds": [0-9.e+-]*, "time": \\([0-9]*\\).*/\\1/p' {folder}/rank-$rank.json)
  [ "${{at:-0}}" -gt $((now - {seconds})) ] || exit 1
done
"""


@dataclass(frozen=True)
class NodePlace:
    """A node's place in an engine's job, as shell expressions."""

    node: str
    """The node's number."""
    address: str
    """The address of rank 0's node."""
    port: str = "29500"
    closing: str = 'exit "$code"'
    """The script's end; `$code` is the highest exit code of a rank."""
    locks: bool = False
    """Whether RDMA needs locked memory."""
    expands: bool = True
    """Whether the engine replaces $(NAME) before the shell starts, as Kubernetes does."""


def node_shell(submission: Submission, node_place: NodePlace) -> str:
    """Return the script that runs one node's ranks."""
    words = shlex.join(submission.train_words("python", Path(RUN_FOLDER, "run.yaml")))
    per_node, world = submission.ranks_per_node, submission.config.layout.world_size
    return _SHELL.format(
        world=world, per_node=per_node, last=per_node - 1, address=node_place.address, port=node_place.port,
        node=node_place.node,
        words=_literal(words) if node_place.expands else words, closing=node_place.closing, safe_path=SAFE_PATH,
        lock=_LOCK if node_place.locks else "",
    )  # fmt: skip


def alive_shell(submission: Submission, node_place: NodePlace) -> str:
    """Return a script that fails unless each rank of the node wrote a record in the last ALIVE_SECONDS.

    Times are by the node's own clock.
    """
    per_node, folder = submission.ranks_per_node, shlex.quote(str(submission.out / STATUS))
    return _ALIVE.format(
        per_node=per_node, last=per_node - 1, node=node_place.node, folder=_literal(folder), seconds=ALIVE_SECONDS
    )


def _literal(words: str) -> str:
    """Escape words for Kubernetes, which replaces $(NAME) in a command by a variable's value, and $$ by $ (core/v1,
    Container.command)."""
    return words.replace("$$", "$$$$").replace("$(", "$$(")
