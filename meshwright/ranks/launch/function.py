"""`run(function, ranks, **arguments)`: a call of one function on every rank of a layout.

    results = run(function, Ranks((("data", 2),)), steps=3)
    def function(rank, steps): ...     # in every rank: rank.mesh, rank.stop

The function is sent as a name and the arguments as JSON. A Path or a pydantic model (a Config) is tagged with a class
name. Nothing is unpickled. The same call works through mpiexec, torchrun and srun. Train, verify, compare and calibrate
start ranks with `run`.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from meshwright.ranks.asked import Ranks
from meshwright.ranks.environment import Environment, Rendezvous, rendezvous
from meshwright.ranks.errors import ConfigError, LaunchError
from meshwright.ranks.grid import Grid
from meshwright.ranks.launch.launcher import Start, launch
from meshwright.ranks.launch.scripts import SCRIPT, load_script
from meshwright.ranks.launch.signals import StopRequest
from meshwright.ranks.launch.threads import launch_threads
from meshwright.ranks.launch.worker import Job, joined, run_worker
from meshwright.ranks.timeouts import Timeouts
from meshwright.ranks.transports import TRANSPORTS, TransportName

_ENTRY = "meshwright.ranks.launch.function:call_on_rank"

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshwright.ranks.mesh import Mesh
    from meshwright.ranks.thread_world import ThreadWorld


class Launchable(Protocol):
    """An object that describes the ranks it needs: a run's Config."""

    def ranks(self) -> Ranks:
        """Describe the ranks to start."""


@runtime_checkable
class Model(Protocol):
    """A pydantic model, as an argument of the ranks' function: written as JSON and read again."""

    def model_dump(self, *, mode: str, by_alias: bool) -> dict[str, Any]: ...

    @classmethod
    def model_validate(cls, obj: Any) -> Model: ...


@dataclass(frozen=True)
class Rank:
    """The first argument of the ranks' function: this rank's mesh, and `stop`, the request to end the job."""

    mesh: Mesh
    environment: Environment
    stop: StopRequest


def run(
    function: Callable[..., Any] | str,
    ranks: Ranks | Launchable | int,
    *,
    transport: TransportName = "torch",
    fewer: Callable[[int], tuple[Ranks, Mapping[str, Any]] | None] | None = None,
    **arguments: Any,
) -> list[Any]:
    """Call function(rank, **arguments) on every rank.

    Inside another launcher (torchrun, srun, mpirun) this process is one of the ranks. Over `threads` any function can
    be called, also a notebook's, and arguments and results are not converted to JSON.

    Args:
        function: a function, or its name `package.module:function`, in a module that a new process can import or in
            the script being run.
        ranks: number of data-parallel ranks, a resolved config, or Ranks.
        transport: used if `ranks` is a number.
        fewer: fewer(most) returns at most `most` ranks, and arguments, for a restart after the loss of a rank; None if
            the job cannot run on fewer ranks.
        arguments: keyword arguments of the function.

    Returns:
        The results in rank order, after a round trip through JSON; only this rank's inside another launcher.

    Raises:
        LaunchError: the first cause and its rank.
        Interrupted: a signal stopped the job.
    """
    if isinstance(ranks, int):
        ranks = Ranks((("data", ranks),), transport)
    elif not isinstance(ranks, Ranks):
        ranks = ranks.ranks()
    if TRANSPORTS[ranks.transport].in_process:
        return _run_here(_load(function) if isinstance(function, str) else function, ranks, arguments)
    name = function if isinstance(function, str) else name_of(function)

    def start_of(ranks: Ranks, arguments: Mapping[str, Any]) -> Start:
        described = asdict(ranks) | {"status": None}
        packed = {key: _packed(value) for key, value in arguments.items()}
        status = None if ranks.status is None else str(ranks.status)
        call = {"function": name, "ranks": described, "arguments": packed}
        # Modules of the function and of the ranks' layout, in addition to the entry's.
        preload = [name.rpartition(":")[0], *ranks.modules]
        return Start(Job(_ENTRY, call, status, preload), ranks.world_size, ranks.threads)

    def with_fewer(most: int) -> Start | None:
        smaller = None if fewer is None else fewer(most)
        return None if smaller is None else start_of(*smaller)

    start = start_of(ranks, arguments)
    if joined():
        return [run_worker(start.job, ranks.threads)]
    find(name)  # a wrong name fails here once, not on every rank
    return launch(
        start.job, start.num_ranks, ranks.transport, threads=start.threads, restarts=ranks.restarts, fewer=with_fewer
    )


def prepare(function: str, ranks: Ranks) -> None:
    """Start the fork server for a later run(function, ranks), if its ranks will be forked.

    The server imports torch and the ranks' modules while this process chooses the layout.
    """
    transport = TRANSPORTS[ranks.transport]
    if not (transport.in_process or transport.by_mpiexec or joined()):
        from meshwright.ranks.launch.forked import start_server

        with suppress(OSError):  # run() gets the same error, and reports the error
            start_server(Job(_ENTRY, preload=[function.rpartition(":")[0], *ranks.modules]))


def _run_here(function: Callable[..., Any], ranks: Ranks, arguments: Mapping[str, Any]) -> list[Any]:
    """Run the ranks as threads of this process."""
    from meshwright.ranks.mesh import open_mesh_in

    if joined():
        rule = "starts its ranks itself, and this process is a rank of another launcher already"
        raise ConfigError.of("layout.transport", ranks.transport, rule, "torch, mpi")

    def work(environment: Environment, world: ThreadWorld, stop: StopRequest) -> Any:
        grid = Grid(ranks.axes, ranks.copies, ranks.nesting)
        with open_mesh_in(world, grid, environment, ranks.token_axes) as mesh:
            return function(Rank(mesh, environment, stop), **arguments)

    return launch_threads(work, ranks.world_size, ranks.threads, ranks.device)


def call_on_rank(
    environment: Environment,
    stop: StopRequest,
    *,
    function: str,
    ranks: Mapping[str, Any],
    arguments: Mapping[str, Any],
) -> Any:
    """Open the mesh, call the function, and check that JSON can hold the result. Entry function of a rank's process."""
    layout = Ranks(**{
        **ranks, "axes": tuple((name, size) for name, size in ranks["axes"]), "token_axes": tuple(ranks["token_axes"]),
        "timeout": Timeouts(**ranks["timeout"]),
        "copies": tuple(ranks["copies"]) if ranks["copies"] else None,
        "nesting": tuple((name, size) for name, size in ranks["nesting"]),
    })  # fmt: skip
    entry = _load(function)
    point = None if TRANSPORTS[layout.transport].by_mpiexec else rendezvous(job=layout.name or function)
    with open_ranks(layout, environment, point) as mesh:
        values = {key: _unpacked(packed) for key, packed in arguments.items()}
        result = entry(Rank(mesh, environment, stop), **values)
    try:
        json.dumps(result)
    except (TypeError, ValueError) as error:
        rule = "results travel as JSON: return numbers, texts, lists and dicts, and write tensors to files"
        raise LaunchError(f"{function} returned what JSON cannot hold ({error}); {rule}") from error
    return result


@contextmanager
def open_ranks(ranks: Ranks, environment: Environment, point: Rendezvous | None) -> Iterator[Mesh]:
    """Open this rank's mesh as a context. `point`: address of the ranks' store; None over MPI."""
    import torch

    from meshwright.ranks.mesh import open_mesh

    device = torch.device("cpu")
    if ranks.device == "cuda":
        # A launcher that binds GPUs makes only one GPU visible to each rank.
        device = torch.device("cuda", environment.local_rank if torch.cuda.device_count() > 1 else 0)
        torch.cuda.set_device(device)
    grid = Grid(ranks.axes, ranks.copies, ranks.nesting)
    with open_mesh(grid, environment, ranks.transport, device, point, ranks.token_axes, ranks.timeout) as mesh:
        yield mesh


def _packed(value: Any) -> dict[str, Any]:
    """Convert an argument to JSON. Keys tag a pydantic model and a Path."""
    if isinstance(value, Model):
        model_class = type(value)
        return {
            "model": f"{model_class.__module__}:{model_class.__qualname__}",
            "fields": value.model_dump(mode="json", by_alias=True),
        }
    if isinstance(value, Path):
        return {"Path": str(value)}
    return {"value": value}


def _unpacked(packed: Mapping[str, Any]) -> Any:
    """Convert the JSON of `_packed` back to an argument."""
    if "model" in packed:
        model_class: type[Model] = _load(packed["model"])
        return model_class.model_validate(packed["fields"])
    return Path(packed["Path"]) if "Path" in packed else packed["value"]


def name_of(function: Callable[..., Any]) -> str:
    """Return the name for other processes to import the function. Raises LaunchError if no process can."""
    module, name = function.__module__, function.__qualname__
    # Ranks import the script under this name, so code outside of the main guard runs in every rank.
    if module == SCRIPT:
        rule = 'put what starts ranks under `if __name__ == "__main__":`'
        raise LaunchError(f"the script of {name} starts ranks while it is imported, as every rank imports it: {rule}")
    if "." in name or name == "<lambda>":
        raise LaunchError(f"{name} is no function of a module's own: ranks import what they run by its name")
    if module != "__main__":
        return f"{module}:{name}"
    script = vars(sys.modules["__main__"]).get("__file__")
    if script is None or not Path(script).is_file():
        rule = "was defined in a notebook or at a prompt, where other processes cannot import it"
        raise LaunchError(f"{name} {rule}: write it to a file (in a notebook `%%writefile steps.py`) and import it")
    return f"{Path(script).absolute()}:{name}"


def find(name: str) -> None:
    """Check that the named function exists, or at least its module; raise LaunchError if not.

    Imports no further module except a script.
    """
    module_name, _, function_name = name.rpartition(":")
    if not module_name or not function_name:
        raise LaunchError(f"{name} is not of the form package.module:function")
    if module_name in sys.modules or module_name.endswith(".py"):
        _load(name)
        return
    try:
        there = importlib.util.find_spec(module_name) is not None
    except ModuleNotFoundError:
        there = False
    if not there:
        raise LaunchError(f"function {name} does not exist: No module named {module_name}")


def _load(name: str) -> Any:
    """Import the named function. Raises LaunchError if the module or the function does not exist."""
    module_name, _, function_name = name.rpartition(":")
    try:
        module = load_script(Path(module_name)) if module_name.endswith(".py") else importlib.import_module(module_name)
        function = vars(module)[function_name]
    except (ModuleNotFoundError, FileNotFoundError, KeyError) as error:
        raise LaunchError(f"function {name} does not exist: {error}") from error
    return function
