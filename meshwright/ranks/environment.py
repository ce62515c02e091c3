"""The one place that reads environment variables: who started this process, where its peers meet, where caches lie.

Every function takes the variables as a mapping, so that a test hands in a dict. Nothing here imports torch.

A launcher is recognised by its variables (launchers.py has the table). Without any, a process is alone.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

from meshwright.ranks.errors import LaunchError
from meshwright.ranks.launchers import ATTEMPT, Environment, number_of, place_of, text_of

EARLY_ERRORS = "MESHWRIGHT_EARLY_ERRORS"
"""Our own launcher says in it where workers of its fork server leave their first errors."""
OWN_PATH = "MESHWRIGHT_OWN_PYTHONPATH"
"""Our own launcher keeps the user's PYTHONPATH in it while a rank starts; a rank puts the value back."""
SECRET = "MESHWRIGHT_SECRET"
"""The user says in it, the same on all hosts, what a process must know to reach a job's store."""
ENTRIES = "MESHWRIGHT_ENTRIES"
"""The strategies that a script has registered, as JSON: all processes that it starts inherit it."""

_LOOPBACK = "127.0.0.1"
_SECRET_LENGTH = 16
_DERIVED_PORTS = range(20000, 32000)
"""Below Linux's ephemeral ports, so that an outgoing connection does not happen to hold the port."""


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of a job meet. `hosted`: a store already listens there, so rank 0 must not open one.

    Port 0 (a lone process only): any free port. `job`: what tells this job from others that are given the same port.
    """

    address: str
    port: int
    hosted: bool
    job: str = ""


def read_environment(variables: Mapping[str, str] = os.environ, *, terminal: bool | None = None) -> Environment:
    """This process's rank and launcher. `terminal`: whether a person types to this process; None: asks stdin.

    Raises LaunchError on a variable that is missing, no number, or contradicts another one.
    """
    return place_of(variables, terminal=os.isatty(0) if terminal is None else terminal)


def rendezvous(variables: Mapping[str, str] = os.environ, job: str = "") -> Rendezvous:
    """Where the ranks of this job, called `job`, meet: MASTER_ADDR and MASTER_PORT where set, else derived.

    Without them, the ranks of one host meet on loopback and a Slurm step over several on its first host, at a port made
    of the job's name. Raises LaunchError for an mpirun over several hosts, which names none of them.
    """
    environment = read_environment(variables)
    if environment.launcher == "none":
        return Rendezvous(_LOOPBACK, 0, hosted=False, job=job)
    hosted = variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address = variables.get("MASTER_ADDR", "")
    if not address and environment.local_world_size == environment.world_size:
        address = _LOOPBACK  # all ranks are here, and no other host can reach them
    elif not address and environment.launcher == "slurm":
        address = first_host(text_of(variables, "SLURM_STEP_NODELIST"))
    elif not address:
        raise LaunchError("MASTER_ADDR is not set: set it, and MASTER_PORT, to rank 0's host and a free port there")
    if "MASTER_PORT" in variables:
        port = number_of(variables, "MASTER_PORT")
        if not 1 <= port < 2**16:
            raise LaunchError(
                f"MASTER_PORT={port} is no port: set it to one from 1 to {2**16 - 1}, free on rank 0's host"
            )
        return Rendezvous(address, port, hosted, job)
    if environment.world_size == 1:
        return Rendezvous(_LOOPBACK, 0, hosted=False, job=job)  # nobody else needs to know the port
    return Rendezvous(address, _derived_port(environment, variables), hosted, job)


def job_secret(variables: Mapping[str, str] = os.environ) -> str:
    """The secret of MESHWRIGHT_SECRET; empty without one. Raises LaunchError for one that can be guessed."""
    secret = variables.get(SECRET, "")
    if 0 < len(secret) < _SECRET_LENGTH or "\n" in secret:
        rule = f"{SECRET} has {len(secret)} characters, or several lines: give {_SECRET_LENGTH} or more on one"
        raise LaunchError(f"{rule}, such as those of `openssl rand -hex 16`")
    return secret


def starts_mpi(variables: Mapping[str, str] = os.environ) -> bool:
    """Whether the launcher that started this process has made it a rank of MPI's: plain srun has not."""
    launcher = read_environment(variables).launcher
    return launcher == "mpi" or (launcher == "slurm" and ("PMIX_RANK" in variables or "PMI_RANK" in variables))


def registered(variables: Mapping[str, str] = os.environ) -> list[tuple[str, str, str, str]]:
    """The strategies that a script or notebook has registered, in this process or one that has started it: group, name,
    `module:attribute`, the folder that the module is imported from."""
    entries: list[list[str]] = json.loads(variables.get(ENTRIES, "[]"))
    return [(group, name, value, folder) for group, name, value, folder in entries]


def remember_registered(
    entries: Sequence[tuple[str, str, str, str]], variables: MutableMapping[str, str] = os.environ
) -> None:
    """Let this process, and every one that it starts from now on, know these strategies."""
    variables[ENTRIES] = json.dumps(entries)


def cache_folder(variables: Mapping[str, str] = os.environ) -> Path:
    """Where derived data may be kept: $MESHWRIGHT_CACHE, else $XDG_CACHE_HOME/meshwright, else ~/.cache/meshwright."""
    if variables.get("MESHWRIGHT_CACHE"):
        return Path(variables["MESHWRIGHT_CACHE"]).expanduser()
    if variables.get("XDG_CACHE_HOME"):
        return Path(variables["XDG_CACHE_HOME"]) / "meshwright"
    return Path("~/.cache/meshwright").expanduser()


def import_variables(path: Sequence[str], variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables with which a new Python imports from `path`, and never from the folder that it is started in.

    PYTHONSAFEPATH keeps `python -c` and `python -m` from putting the current folder first. Processes that a rank starts
    inherit PYTHONSAFEPATH; PYTHONPATH is the user's again as soon as `restore_python_path` is called.
    """
    # The list has the launcher's standard library: another Python, started by a rank, must not import from there.
    own = {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(entry or os.curdir for entry in path)}
    return own | {OWN_PATH: variables.get("PYTHONPATH", "")}


def restore_python_path(variables: MutableMapping[str, str] = os.environ) -> None:
    """Give this process, which was started with `import_variables`, the PYTHONPATH of the launcher's user."""
    if OWN_PATH in variables:
        if own := variables.pop(OWN_PATH):
            variables["PYTHONPATH"] = own
        else:
            variables.pop("PYTHONPATH", None)


@contextmanager
def server_variables(
    folder: Path, path: Sequence[str], variables: MutableMapping[str, str] = os.environ
) -> Iterator[None]:
    """A context in which a fork server is started: the server imports from `path`, and workers of the server leave in
    `folder` their errors of the time before they have our stderr."""
    own = {**import_variables(path, variables), EARLY_ERRORS: str(folder)}
    before = {name: variables.get(name) for name in own}
    variables.update(own)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del variables[name]
            else:
                variables[name] = value


def early_errors_folder(variables: Mapping[str, str] = os.environ) -> Path | None:
    """The folder of `server_variables`; None in a process that was not told."""
    return Path(variables[EARLY_ERRORS]) if EARLY_ERRORS in variables else None


def enter_local_rank(
    rank: int, num_ranks: int, attempt: int, port: int, variables: MutableMapping[str, str] = os.environ
) -> None:
    """Make this process a rank of a local job, as torchrun would, whose ranks meet at a store on loopback's `port`."""
    variables.update(
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "MASTER_ADDR": _LOOPBACK,
            "MASTER_PORT": str(port),
        }
    )


def rank_variables(own: Mapping[str, str], variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment of a rank that this process starts: its own with the rank's variables, and such that the
    rank does not search the current folder for modules."""
    places, here = variables.get("PYTHONPATH", "").split(os.pathsep), Path.cwd().resolve()
    kept = [place for place in places if place and Path(place).resolve() != here]
    return {**variables, **own, "PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(kept)}


def use_interface(name: str, local: bool, variables: MutableMapping[str, str] = os.environ) -> None:
    """Have gloo talk over the interface, unless the user has named one.

    `local`: all ranks are of this host. Over several hosts NCCL finds its interface itself; here it would listen on one
    that other hosts reach, so that loopback must be named.
    """
    variables.setdefault("GLOO_SOCKET_IFNAME", name)
    if local:
        variables.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # without `=`, all whose names begin so


def use_cublas_workspace(size: str, variables: MutableMapping[str, str] = os.environ) -> None:
    """Have cuBLAS work in workspaces of a fixed size from its first product on, unless the user has said which."""
    variables.setdefault("CUBLAS_WORKSPACE_CONFIG", size)


def carry_messages_first(variables: MutableMapping[str, str] = os.environ) -> None:
    """Have NCCL's kernels run in streams of high priority, unless the user has chosen: else one that carries a message
    begins when a product that fills the GPU has ended."""
    variables.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")


def fuse_multiply_adds(variables: MutableMapping[str, str] = os.environ) -> None:
    """Have Triton make one operation of a product and a sum, unless the user has chosen: Triton 3.9 does so with a
    warning in each rank, and later releases do not."""
    variables.setdefault("TRITON_DEFAULT_FP_FUSION", "1")


def chosen_interface(variables: Mapping[str, str] = os.environ) -> str:
    """The interface that gloo talks over; empty where it takes that of the host's name."""
    return variables.get("GLOO_SOCKET_IFNAME", "")


def has_agent(variables: Mapping[str, str] = os.environ) -> bool:
    """Whether an agent of torchrun's started this process and watches it: others set RANK and WORLD_SIZE as well."""
    return "TORCHELASTIC_RUN_ID" in variables


def mpi_worker_variables(
    attempt: int,
    threads: int,
    port: int,
    import_path: Sequence[str],
    temporary: Path,
    variables: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """The environment of an mpiexec that runs local workers, which inherit it.

    `threads`: CPU threads a rank, read by OpenMP when torch is imported. `port`: a free one on loopback, for a torch
    process group inside an MPI job. `import_path`: the launcher's sys.path, so that workers import the same code.
    `temporary`: where Open MPI may leave files.
    """
    own = {
        ATTEMPT: str(attempt),
        "OMP_NUM_THREADS": str(threads),
        "MASTER_ADDR": _LOOPBACK,
        "MASTER_PORT": str(port),
        "TMPDIR": str(temporary),
        **import_variables(import_path, variables),
        # Open MPI refuses root without both; containers often have no other user.
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    return {**variables, **own}


def _derived_port(environment: Environment, variables: Mapping[str, str]) -> int:
    """A port that all ranks of a job agree on and that two jobs on a host seldom share."""
    if environment.launcher == "slurm":
        job = f"{text_of(variables, 'SLURM_JOB_ID')}.{text_of(variables, 'SLURM_STEP_ID')}"
    elif "PMIX_NAMESPACE" in variables:
        job = variables["PMIX_NAMESPACE"]
    else:
        raise LaunchError("MASTER_PORT is not set: set it to a port that is free on rank 0's host")
    # Python's own hash() differs from process to process; ranks that have said nothing to each other must agree.
    return _DERIVED_PORTS[crc32(job.encode()) % len(_DERIVED_PORTS)]


def first_host(node_list: str) -> str:
    """The first host of a Slurm node list: `node[07-09,12]-ib,gpu1` -> `node07-ib`."""
    first = re.split(r",(?![^\[]*\])", node_list)[0]
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first)
