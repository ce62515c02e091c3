"""A process's place in a job, derived from the launcher's variables. Reads a mapping, never the environment.

| launcher | recognised by |
|---|---|
| torchrun, or a user | RANK and WORLD_SIZE; WORLD_SIZE=1 alone |
| Open MPI | OMPI_COMM_WORLD_RANK |
| MPICH | PMI_RANK, and MPI_LOCALRANKID or no step of srun's |
| Slurm | SLURM_STEP_ID of a step of several tasks, unless the process is the shell of `srun --pty` |
| none | no variable of these; a step of one task, a batch script |

A missing variable is derived if only one value is possible:

| missing | derived |
|---|---|
| RANK | 0 of WORLD_SIZE=1; Slurm's or MPI's, if their size is WORLD_SIZE |
| LOCAL_RANK, LOCAL_WORLD_SIZE | Slurm's or MPI's, if RANK and WORLD_SIZE are equal to Slurm's or MPI's |
| both, or LOCAL_RANK of LOCAL_WORLD_SIZE=1 | 0 of 1: one rank a node; RANK of WORLD_SIZE if MASTER_ADDR is loopback |
| LOCAL_RANK | RANK if LOCAL_WORLD_SIZE is WORLD_SIZE |
| LOCAL_WORLD_SIZE | 1 of WORLD_SIZE=1, or if each node is a group; WORLD_SIZE if all ranks are here |

All other cases raise LaunchError with the variable, the value and the remedy.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from meshwright.ranks.errors import LaunchError

LauncherName = Literal["none", "torchrun", "slurm", "mpi"]

ATTEMPT = "MESHWRIGHT_ATTEMPT"
"""Number of restarts of the job, set by our own mpiexec launcher."""

PLACE_VARIABLES: Mapping[str, tuple[str, ...]] = {
    # rank, world size, local rank, local world size, attempt
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"),
    "openmpi": (*(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")), ATTEMPT),
    "mpich": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", ATTEMPT),
    "slurm": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE", "SLURM_RESTART_COUNT"),
}
"""The variables of each launcher for a process's place. For srun, SLURM_STEP_TASKS_PER_NODE is more exact."""
_LOOPBACK = re.compile(r"localhost|127\.\d+\.\d+\.\d+|::1")
_SLURM_SPECIAL_STEPS = 0xFFFFFFF0
"""Step numbers from here on are Slurm's own (batch script, interactive shell): no srun started them."""


@dataclass(frozen=True)
class Environment:
    """This process's place in a job. `attempt` counts restarts, from 0.

    `status_folder`: the folder of ranks' records (hang.py), if any. `launched`: True if our own launcher started the
    process; that launcher explains a job's failure.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    attempt: int
    launcher: LauncherName
    status_folder: Path | None = None
    launched: bool = False


def place_of(variables: Mapping[str, str], *, terminal: bool) -> Environment:
    """Derive the place from a launcher's variables. `terminal`: stdin is a terminal, as for the shell of `srun --pty`.

    Raises LaunchError on a variable that is missing, no number, or contradicts another one.
    """
    outer = outer_place(variables, terminal=terminal)
    if "RANK" not in variables and "WORLD_SIZE" not in variables:
        if outer is None and (
            name := next((name for name in PLACE_VARIABLES["torchrun"][2:4] if name in variables), "")
        ):
            rule = "is set, and RANK and WORLD_SIZE are not"
            raise LaunchError(
                f"{name}={variables[name]} {rule}: set them for each process, or unset {name} to run alone"
            )
        return outer or Environment(0, 1, 0, 1, 0, "none")
    size = number_of(variables, "WORLD_SIZE") if "WORLD_SIZE" in variables else None
    if size == 0:
        raise LaunchError("WORLD_SIZE=0 is no number of ranks: set it to the number of all processes of the job")
    rank = number_of(variables, "RANK") if "RANK" in variables else None
    if outer is not None and (rank is None or size is None):
        # A script exports one of both for its own use: Slurm or MPI sets both, and must agree on that one.
        theirs, name = (outer.world_size, "WORLD_SIZE") if rank is None else (outer.rank, "RANK")
        if theirs != (size if rank is None else rank):
            where = f"{outer.launcher} says {theirs} for this process"
            raise LaunchError(f"{name}={variables[name]}, and {where}: unset {name}, or set RANK and WORLD_SIZE both")
        return outer
    if size is None:
        raise LaunchError(
            f"RANK={rank} is set, and WORLD_SIZE is not: set it to the number of all processes of the job"
        )
    if rank is None and size > 1:
        rule = f"set RANK to each process's number, 0 to {size - 1}, or unset WORLD_SIZE to run alone"
        raise LaunchError(f"WORLD_SIZE={size} is set, and RANK is not: {rule}")
    local = _local(variables, rank or 0, size, outer)
    attempt = number_of(variables, "TORCHELASTIC_RESTART_COUNT", 0)
    return _checked(Environment(rank or 0, size, *local, attempt, "torchrun"), "torchrun")


def outer_place(variables: Mapping[str, str], *, terminal: bool) -> Environment | None:
    """Return the place by MPI's or Slurm's variables; None without such variables."""
    step = in_slurm_step(variables, terminal=terminal)
    if "OMPI_COMM_WORLD_RANK" in variables:
        return _place("mpi", "openmpi", variables)
    if "PMI_RANK" in variables and ("MPI_LOCALRANKID" in variables or not step):
        # MPICH's mpiexec starts proxies with srun: Slurm's numbers are then the proxy's, not ours.
        return _place("mpi", "mpich", variables)
    return _place("slurm", "slurm", variables) if step else None


def _place(launcher: LauncherName, names: str, variables: Mapping[str, str]) -> Environment:
    rank_name, size_name, local_name, local_size_name, attempt = PLACE_VARIABLES[names]
    rank, size = number_of(variables, rank_name), number_of(variables, size_name)
    here: int | None = None
    if launcher == "slurm" and "SLURM_STEP_TASKS_PER_NODE" in variables:
        here = _slurm_tasks_here(variables)
    elif local_size_name in variables:
        here = number_of(variables, local_size_name)
    elif size == 1 or number_of(variables, "SLURM_STEP_NUM_NODES", 0) == size:
        here = 1
    elif launcher == "slurm" and number_of(variables, "SLURM_STEP_NUM_NODES", 0) == 1:
        here = size
    if local_name not in variables and here in (1, size):
        local = 0 if here == 1 else rank
    else:
        local = number_of(variables, local_name)
    here = number_of(variables, local_size_name) if here is None else here
    return _checked(Environment(rank, size, local, here, number_of(variables, attempt, 0), launcher), names)


def _local(variables: Mapping[str, str], rank: int, size: int, outer: Environment | None) -> tuple[int, int]:
    """Return LOCAL_RANK and LOCAL_WORLD_SIZE of a process with RANK and WORLD_SIZE."""
    local, here = (
        number_of(variables, name) if name in variables else None for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
    )
    if local is not None and here is not None:
        return local, here
    if outer is not None and (outer.rank, outer.world_size) == (rank, size):
        return (outer.local_rank if local is None else local), (outer.local_world_size if here is None else here)
    groups = number_of(variables, "GROUP_WORLD_SIZE", 0)
    all_here = groups == 1 or bool(_LOOPBACK.fullmatch(variables.get("MASTER_ADDR", "")))
    if here is None:
        if local is None and not groups:
            return (rank, size) if all_here else (0, 1)  # no variable mentions other ranks of this node
        if size == 1 or all_here or groups == size:
            here = size if all_here else 1
        else:
            known = f"GROUP_WORLD_SIZE={groups}" if local is None else f"LOCAL_RANK={local}"
            rule = "set it to the number of ranks of this host, 1 if each host has one"
            raise LaunchError(f"{known} is set, and LOCAL_WORLD_SIZE is not: {rule}")
    if local is None:
        if here not in (1, size):
            rule = f"set LOCAL_RANK to the process's number on its host, 0 to {here - 1}"
            raise LaunchError(f"LOCAL_RANK is not set, and LOCAL_WORLD_SIZE={here}: {rule}")
        local = 0 if here == 1 else rank
    return local, here


def _checked(environment: Environment, names: str) -> Environment:
    """Return the environment if its numbers are consistent. Raises LaunchError."""
    rank, size, local_rank, local_size, _ = PLACE_VARIABLES[names]
    if not environment.rank < environment.world_size:
        text = (
            f"the launcher's variables say rank {environment.rank} of {environment.world_size} ranks ({rank}, {size})"
        )
        raise LaunchError(f"{text}: set {rank} to 0 to {environment.world_size - 1}")
    if environment.local_world_size > environment.world_size:
        text = f"{local_size}={environment.local_world_size} is more than all ranks, {size}={environment.world_size}"
        raise LaunchError(f"{text}: set it to the number of ranks of this host")
    if not environment.local_rank < environment.local_world_size:
        ranks = f"{environment.local_world_size} ({local_size})"
        text = f"{local_rank}={environment.local_rank} is no rank of this host's {ranks}"
        raise LaunchError(
            f"{text}: set {local_rank} to 0 to {environment.local_world_size - 1}, or {local_size} to its ranks"
        )
    return environment


def in_slurm_step(variables: Mapping[str, str], *, terminal: bool) -> bool:
    """Return whether srun started this process as one of several tasks. A step of one task is an ordinary shell."""
    if "SLURM_STEP_ID" not in variables or "SLURM_PROCID" not in variables:
        return False
    # The shell of srun --pty has the step's variables. So has every srun started by the shell, but without a terminal.
    if "SLURM_PTY_PORT" in variables and terminal:
        return False
    srun = number_of(variables, "SLURM_STEP_ID") < _SLURM_SPECIAL_STEPS
    # A shell inside salloc has Slurm's variables too, and is no rank.
    return srun and number_of(variables, "SLURM_NTASKS", 1) > 1


def _slurm_tasks_here(variables: Mapping[str, str]) -> int:
    """Return the number of tasks on this node, from a list in node order such as `2(x3),1`."""
    text = variables["SLURM_STEP_TASKS_PER_NODE"]
    tasks: list[int] = []
    for entry in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", entry.strip())
        if match is None:
            raise LaunchError(f"SLURM_STEP_TASKS_PER_NODE={text} is not of the form 2(x3),1")
        tasks += [int(match[1])] * int(match[2] or 1)
    node = number_of(variables, "SLURM_NODEID", 0)
    if node >= len(tasks):
        raise LaunchError(f"SLURM_NODEID={node}, but SLURM_STEP_TASKS_PER_NODE={text} has {len(tasks)} nodes")
    return tasks[node]


def text_of(variables: Mapping[str, str], name: str) -> str:
    """Return a variable. Raises LaunchError if the variable is not set."""
    if name not in variables:
        raise LaunchError(f"{name} is not set, though this process's launcher should set it")
    return variables[name]


def number_of(variables: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return a variable as a count, or `default` if not set. Raises LaunchError if the text is no count."""
    if default is not None and name not in variables:
        return default
    text = text_of(variables, name)
    if not (text.isascii() and text.isdecimal()):
        raise LaunchError(f"{name}={text} is not a count: set it to a number from 0 on, or unset it")
    return int(text)
