"""Environment variables, read only here: this process's launcher, the address of the job's store, the cache folder.

Every function takes the variables as a mapping, so that a test can pass a dict. This module imports no torch.

A launcher is recognised by variables (table in launchers.py). Without any of them a process is alone.
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
"""The folder of workers' early stderr files, set by our own launcher for the fork server."""
OWN_PATH = "MESHWRIGHT_OWN_PYTHONPATH"
"""The user's PYTHONPATH, kept by our own launcher while a rank starts; the rank restores the value."""
SECRET = "MESHWRIGHT_SECRET"
"""The secret for connections to a job's store, set by the user to the same value on all hosts."""
ENTRIES = "MESHWRIGHT_ENTRIES"
"""The strategies that a script has registered, as JSON, inherited by all processes that the script starts."""

_LOOPBACK = "127.0.0.1"
_SECRET_LENGTH = 16
_DERIVED_PORTS = range(20000, 32000)
"""Below Linux's ephemeral ports, so that no outgoing connection can hold the port."""


@dataclass(frozen=True)
class Rendezvous:
    """The address of a job's store. `hosted`: a store already listens there, so rank 0 must not open one.

    Port 0 (only for a single process): any free port. `job`: distinguishes this job from others with the same port.
    """

    address: str
    port: int
    hosted: bool
    job: str = ""


def read_environment(variables: Mapping[str, str] = os.environ, *, terminal: bool | None = None) -> Environment:
    """Read this process's rank and launcher. `terminal`: True if stdin is a terminal; None: ask the system.

    Raises LaunchError on a variable that is missing, no number, or contradicts another one.
    """
    return place_of(variables, terminal=os.isatty(0) if terminal is None else terminal)


def rendezvous(variables: Mapping[str, str] = os.environ, job: str = "") -> Rendezvous:
    """Return the address of the store of the job `job`: MASTER_ADDR and MASTER_PORT if set, else derived.

    The derived address is loopback for the ranks of one host, and the first host of a Slurm step over several. The
    derived port is a hash of the launcher's job id. Raises LaunchError for an mpirun over several hosts, which names no
    host.
    """
    environment = read_environment(variables)
    if environment.launcher == "none":
        return Rendezvous(_LOOPBACK, 0, hosted=False, job=job)
    hosted = variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address = variables.get("MASTER_ADDR", "")
    if not address and environment.local_world_size == environment.world_size:
        address = _LOOPBACK  # all ranks are on this host, and no other host can connect
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
        return Rendezvous(_LOOPBACK, 0, hosted=False, job=job)  # no other process needs the port
    return Rendezvous(address, _derived_port(environment, variables), hosted, job)


def job_secret(variables: Mapping[str, str] = os.environ) -> str:
    """Read MESHWRIGHT_SECRET; empty if not set. Raises LaunchError for a short secret, or one of several lines."""
    secret = variables.get(SECRET, "")
    if 0 < len(secret) < _SECRET_LENGTH or "\n" in secret:
        rule = f"{SECRET} has {len(secret)} characters, or several lines: give {_SECRET_LENGTH} or more on one"
        raise LaunchError(f"{rule}, such as those of `openssl rand -hex 16`")
    return secret


def starts_mpi(variables: Mapping[str, str] = os.environ) -> bool:
    """Return whether the launcher has started this process as a rank of MPI: plain srun has not."""
    launcher = read_environment(variables).launcher
    return launcher == "mpi" or (launcher == "slurm" and ("PMIX_RANK" in variables or "PMI_RANK" in variables))


def registered(variables: Mapping[str, str] = os.environ) -> list[tuple[str, str, str, str]]:
    """Read the strategies that a script or notebook has registered, in this process or a parent process.

    Each has a group, a name, `module:attribute`, and the folder from which the module is imported.
    """
    entries: list[list[str]] = json.loads(variables.get(ENTRIES, "[]"))
    return [(group, name, value, folder) for group, name, value, folder in entries]


def remember_registered(
    entries: Sequence[tuple[str, str, str, str]], variables: MutableMapping[str, str] = os.environ
) -> None:
    """Register these strategies for this process and for every process started from now on."""
    variables[ENTRIES] = json.dumps(entries)


def cache_folder(variables: Mapping[str, str] = os.environ) -> Path:
    """Return the folder for derived data: $MESHWRIGHT_CACHE, $XDG_CACHE_HOME/meshwright, or ~/.cache/meshwright."""
    if variables.get("MESHWRIGHT_CACHE"):
        return Path(variables["MESHWRIGHT_CACHE"]).expanduser()
    if variables.get("XDG_CACHE_HOME"):
        return Path(variables["XDG_CACHE_HOME"]) / "meshwright"
    return Path("~/.cache/meshwright").expanduser()


def config_folder(variables: Mapping[str, str] = os.environ) -> Path:
    """Return the folder for the user's own key: $XDG_CONFIG_HOME/meshwright, or ~/.config/meshwright."""
    folder = variables.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(folder).expanduser() / "meshwright"


def import_variables(path: Sequence[str], variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return variables that make a new Python import from `path`, and never from the current folder.

    PYTHONSAFEPATH keeps `python -c` and `python -m` from putting the current folder first. Processes that a rank starts
    inherit PYTHONSAFEPATH. `restore_python_path` restores the user's PYTHONPATH.
    """
    # `path` contains the launcher's standard library, which another Python, started by a rank, must not import.
    settings = {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(entry or os.curdir for entry in path)}
    return settings | {OWN_PATH: variables.get("PYTHONPATH", "")}


def restore_python_path(variables: MutableMapping[str, str] = os.environ) -> None:
    """Restore the user's PYTHONPATH in this process, which was started with `import_variables`."""
    if OWN_PATH in variables:
        if user_path := variables.pop(OWN_PATH):
            variables["PYTHONPATH"] = user_path
        else:
            variables.pop("PYTHONPATH", None)


@contextmanager
def server_variables(
    folder: Path, path: Sequence[str], variables: MutableMapping[str, str] = os.environ
) -> Iterator[None]:
    """Set the variables for the start of a fork server inside the context.

    The server imports from `path`. Workers write stderr to files in `folder` until they receive the launcher's stderr.
    """
    settings = {**import_variables(path, variables), EARLY_ERRORS: str(folder)}
    before = {name: variables.get(name) for name in settings}
    variables.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del variables[name]
            else:
                variables[name] = value


def early_errors_folder(variables: Mapping[str, str] = os.environ) -> Path | None:
    """Return the folder of `server_variables`; None in a process without the variable."""
    return Path(variables[EARLY_ERRORS]) if EARLY_ERRORS in variables else None


def enter_local_rank(
    rank: int, num_ranks: int, attempt: int, port: int, variables: MutableMapping[str, str] = os.environ
) -> None:
    """Make this process a rank of a local job, as torchrun would, with the job's store at `port` on loopback."""
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


def go_offline(variables: MutableMapping[str, str] = os.environ) -> None:
    """Let libraries of Hugging Face read their caches alone and in one thread, and trackers send nothing, in this
    process."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_DISABLE_TELEMETRY"):
        variables[name] = "1"
    # torch's modes see one thread.
    variables["HF_DEACTIVATE_ASYNC_LOAD"] = "1"
    variables.update({"WANDB_MODE": "disabled", "HF_UPDATE_DOWNLOAD_COUNTS": "0", "TOKENIZERS_PARALLELISM": "false"})


def rank_variables(rank_settings: Mapping[str, str], variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment of a rank started by this process: this environment with `rank_settings`.

    The rank does not search the current folder for modules.
    """
    search_path, here = variables.get("PYTHONPATH", "").split(os.pathsep), Path.cwd().resolve()
    folders = [folder for folder in search_path if folder and Path(folder).resolve() != here]
    return {**variables, **rank_settings, "PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(folders)}


def use_interface(name: str, local: bool, variables: MutableMapping[str, str] = os.environ) -> None:
    """Make gloo use the interface, unless the user has named one.

    `local`: all ranks are on this host. NCCL then gets the interface too: by default NCCL would listen on one that
    other hosts can reach. Over several hosts NCCL's own choice is used.
    """
    variables.setdefault("GLOO_SOCKET_IFNAME", name)
    if local:
        variables.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # without `=`: all names with this prefix


def use_cublas_workspace(size: str, variables: MutableMapping[str, str] = os.environ) -> None:
    """Make cuBLAS use workspaces of a fixed size from the first product on, unless the user has set a size."""
    variables.setdefault("CUBLAS_WORKSPACE_CONFIG", size)


def carry_messages_first(variables: MutableMapping[str, str] = os.environ) -> None:
    """Make NCCL's kernels run in streams of high priority, unless the user has chosen.

    Else a message's kernel begins only after a matrix product that fills the GPU has ended.
    """
    variables.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")


def fuse_multiply_adds(variables: MutableMapping[str, str] = os.environ) -> None:
    """Make Triton fuse a product and a sum into one operation, unless the user has chosen.

    Triton 3.9 does so by default with a warning in each rank; later releases do not fuse.
    """
    variables.setdefault("TRITON_DEFAULT_FP_FUSION", "1")


def chosen_interface(variables: Mapping[str, str] = os.environ) -> str:
    """Return the interface chosen for gloo; empty if gloo uses the interface of the host's name."""
    return variables.get("GLOO_SOCKET_IFNAME", "")


def has_agent(variables: Mapping[str, str] = os.environ) -> bool:
    """Return whether an agent of torchrun started this process and watches it.

    RANK and WORLD_SIZE are no proof, since other launchers set both too.
    """
    return "TORCHELASTIC_RUN_ID" in variables


def mpi_worker_variables(
    attempt: int,
    threads: int,
    port: int,
    import_path: Sequence[str],
    temporary: Path,
    variables: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """Return the environment of an mpiexec for local workers, which inherit the variables.

    Args:
        attempt: number of restarts so far.
        threads: CPU threads per rank, read by OpenMP when torch is imported.
        port: a free port on loopback, for a torch process group inside an MPI job.
        import_path: the launcher's sys.path, so that workers import the same code.
        temporary: folder for Open MPI's files.
        variables: this process's environment.
    """
    settings = {
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
    return {**variables, **settings}


def _derived_port(environment: Environment, variables: Mapping[str, str]) -> int:
    """Derive a port from the launcher's job id: equal on all ranks of a job, seldom equal for two jobs on a host."""
    if environment.launcher == "slurm":
        job = f"{text_of(variables, 'SLURM_JOB_ID')}.{text_of(variables, 'SLURM_STEP_ID')}"
    elif "PMIX_NAMESPACE" in variables:
        job = variables["PMIX_NAMESPACE"]
    else:
        raise LaunchError("MASTER_PORT is not set: set it to a port that is free on rank 0's host")
    # Not Python's hash(), which differs between processes: ranks must agree before they communicate.
    return _DERIVED_PORTS[crc32(job.encode()) % len(_DERIVED_PORTS)]


def first_host(node_list: str) -> str:
    """Return the first host of a Slurm node list: `node[07-09,12]-ib,gpu1` -> `node07-ib`."""
    first = re.split(r",(?![^\[]*\])", node_list)[0]
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first)
