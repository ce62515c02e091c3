"""Starters of one job over several nodes, by each launcher."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from meshwright.ranks.machine import find_mpiexec
from tests.nodes import remote_shell
from tests.nodes.network import Network, Running
from tests.training.runs import tree_for

PORT = 29500
SHELL = Path(remote_shell.__file__)


def write_run(folder: Path, corpus: Path, ranks: int, **changes: object) -> Path:
    """Write a quick and exact run of `ranks` replicas: float64, one layer."""
    layout = {"data": {"size": ranks}, "transport": "torch"}
    tree = tree_for(corpus, **{"layout": layout, "timeout": {"join": 60, "wait": 5}, **changes})
    tree["model"]["dropout"] = 0.0  # no two layouts have the same masks
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def train_words(run: Path, out: Path, *words: str) -> list[str]:
    return ["-m", "meshwright", "train", str(run), "--out", str(out), *words]


def by_hand(network: Network, words: Sequence[str], variables: Mapping[str, str] | None = None) -> list[Running]:
    """Start one rank a node, with the variables of Kubernetes' PyTorchJob, and LOCAL_* by hand."""
    world = len(network.nodes)
    shared = {"MASTER_ADDR": network[0].name, "MASTER_PORT": str(PORT), "WORLD_SIZE": str(world)}
    shared |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", **(variables or {})}
    return [
        node.start(sys.executable, *words, variables={**shared, "RANK": str(rank)})
        for rank, node in enumerate(network.nodes)
    ]


def torchrun(network: Network, per_node: int, words: Sequence[str], *options: str) -> list[Running]:
    """Start torchrun on every node; the agents meet on the first node."""
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint={network[0].name}:{PORT}", "--rdzv-id=1"]
    counts = [f"--nnodes={len(network.nodes)}", f"--nproc-per-node={per_node}"]
    command = [sys.executable, "-m", "torch.distributed.run", *counts, *meeting, *options, *words]
    return [node.start(*command, variables={"OMP_NUM_THREADS": "1"}) for node in network.nodes]


def mpirun(network: Network, per_node: int, words: Sequence[str]) -> Running:
    """Start Open MPI on the first node, which starts a daemon on each other node by a remote shell."""
    mpiexec = find_mpiexec()
    assert mpiexec is not None
    for node in network.nodes[1:]:
        node.start(sys.executable, str(SHELL), "serve")
    head = network[0]
    hosts, shell = head.folder / "hosts.txt", head.folder / "shell.sh"
    hosts.write_text("".join(f"{node.name} slots={per_node}\n" for node in network.nodes))
    shell.write_text(f'#!/bin/sh\nexec {sys.executable} {SHELL} "$@"\n')
    shell.chmod(0o755)
    options = ["-n", str(per_node * len(network.nodes)), "--hostfile", str(hosts), "--bind-to", "none"]
    options += ["--prtemca", "plm_ssh_agent", str(shell), "--mca", "osc", "^ucx"]
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    passed = [word for name in ("PYTHONPATH", "PATH") for word in ("-x", name)]
    return head.start(str(mpiexec), *options, *passed, sys.executable, *words, variables=root)
