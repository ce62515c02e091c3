"""The shell of a node on which nobody else starts the ranks: a pod's program, and what a SkyPilot task runs.

It starts the node's ranks with the variables that torchrun would set, and passes SIGTERM on to them. torchrun's own
agent is of no use here: it ends with 1 whatever its ranks end with, and the engine must tell a run that was stopped
(started again, as often as it takes) from one that failed (started again `restarts` times).
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from meshwright.tools.submit.image import LOCK_HELPER
from meshwright.tools.submit.job import SAFE_PATH, Submission
from meshwright.training.status import STATUS

RUN_FOLDER = "/etc/meshwright"
"""Where a node finds the run file, which travels with the job."""

ALIVE_SECONDS = 60
"""A rank that lives renews its record every second; a file system may hold one up."""

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
"""A signal ends `wait` early: it is repeated while the rank lives."""

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
"""NCCL would fall back to sockets without a word. The helper's own start loses LD_LIBRARY_PATH and TMPDIR: it is
privileged, and the loader clears these."""

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
    """How a node of an engine's job finds its place, in shell: which node it is, and where rank 0's is.

    `closing`: how the shell ends, with `$code`, the highest that a rank has ended with. `locks`: whether RDMA needs
    locked memory. `expands`: whether the engine replaces $(NAME) before the shell is started, as Kubernetes does.
    """

    node: str
    address: str
    port: str = "29500"
    closing: str = 'exit "$code"'
    locks: bool = False
    expands: bool = True


def node_shell(submission: Submission, place: NodePlace) -> str:
    """Return the program of one node."""
    words = shlex.join(submission.train_words("python", Path(RUN_FOLDER, "run.yaml")))
    per_node, world = submission.ranks_per_node, submission.config.layout.world_size
    return _SHELL.format(
        world=world, per_node=per_node, last=per_node - 1, address=place.address, port=place.port, node=place.node,
        words=_literal(words) if place.expands else words, closing=place.closing, safe_path=SAFE_PATH,
        lock=_LOCK if place.locks else "",
    )  # fmt: skip


def alive_shell(submission: Submission, place: NodePlace) -> str:
    """Return a node's check that each of its ranks has left a record within ALIVE_SECONDS, by the node's own clock."""
    per_node, folder = submission.ranks_per_node, shlex.quote(str(submission.out / STATUS))
    return _ALIVE.format(
        per_node=per_node, last=per_node - 1, node=place.node, folder=_literal(folder), seconds=ALIVE_SECONDS
    )


def _literal(words: str) -> str:
    """Return words in which Kubernetes replaces nothing: $(NAME) of a command is a variable's value there, and $$ a $
    (core/v1, Container.command)."""
    return words.replace("$$", "$$$$").replace("$(", "$$(")
