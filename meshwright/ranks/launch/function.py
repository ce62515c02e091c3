"""`run(function, ranks, **arguments)`: call a function on every rank of a layout, and collect the results.

    results = run(function, Ranks((("data", 2),)), steps=3)
    def function(rank, steps): ...     # in every rank: rank.mesh, rank.stop

A function is sent as a name and its arguments as JSON, a Path and a model of pydantic (a Config) with the name of their
class. Nothing is unpickled, and the same works through mpiexec, torchrun and srun. Train, verify, compare and calibrate
start their ranks so.
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
    """Something that knows the ranks that it needs: a run's Config."""

    def ranks(self) -> Ranks:
        """Describe the ranks to start."""


@runtime_checkable
class Model(Protocol):
    """A model of pydantic, as an argument of the function that ranks call: it can be written as JSON and read again."""

    def model_dump(self, *, mode: str, by_alias: bool) -> dict[str, Any]: ...

    @classmethod
    def model_validate(cls, obj: Any) -> Model: ...


@dataclass(frozen=True)
class Rank:
    """A function's first argument: this rank's mesh, and `stop`, which says whether somebody asked the job to end."""

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
    """Call function(rank, **arguments) on every rank; the results in rank order, after a round trip through JSON.

    `function`: by itself or by name, `package.module:function`; it must stand in a module that a new process can
    import, or in the script that is run. `ranks`: a number of them, the layout of a resolved config, or Ranks.
    `transport`: of a number of ranks. `fewer(most)`: the ranks, at most so many, and the arguments with which a job
    that lost a rank is started again; None where it cannot do with fewer. Inside another launcher (torchrun, srun,
    mpirun) this process is one of the ranks, and the list has its result alone. Raises LaunchError with the first cause
    and its rank, Interrupted where somebody stopped the job.

    Over `threads` any function will do, a notebook cell's too, and its arguments and results are passed as they are.
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
        # The modules that the function and the ranks' layout need, besides the entry's.
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

    The server imports torch and the ranks' modules while this process decides the layout.
    """
    kind = TRANSPORTS[ranks.transport]
    if not (kind.in_process or kind.by_mpiexec or joined()):
        from meshwright.ranks.launch.forked import start_server

        with suppress(OSError):  # run() meets the same error, and reports it
            start_server(Job(_ENTRY, preload=[function.rpartition(":")[0], *ranks.modules]))


def _run_here(function: Callable[..., Any], ranks: Ranks, arguments: Mapping[str, Any]) -> list[Any]:
    """The ranks as threads of this process."""
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
    """The entry function of a rank's process: open the mesh, call the function, check what it returns."""
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
    """A context with this rank's mesh. `point`: where ranks meet; None over MPI."""
    import torch

    from meshwright.ranks.mesh import open_mesh

    device = torch.device("cpu")
    if ranks.device == "cuda":
        # A launcher that binds GPUs shows each rank its own GPU alone.
        device = torch.device("cuda", environment.local_rank if torch.cuda.device_count() > 1 else 0)
        torch.cuda.set_device(device)
    grid = Grid(ranks.axes, ranks.copies, ranks.nesting)
    with open_mesh(grid, environment, ranks.transport, device, point, ranks.token_axes, ranks.timeout) as mesh:
        yield mesh


def _packed(value: Any) -> dict[str, Any]:
    """Write an argument as JSON: a model of pydantic and a Path under a key that says so."""
    if isinstance(value, Model):
        kind = type(value)
        return {
            "model": f"{kind.__module__}:{kind.__qualname__}",
            "fields": value.model_dump(mode="json", by_alias=True),
        }
    if isinstance(value, Path):
        return {"Path": str(value)}
    return {"value": value}


def _unpacked(packed: Mapping[str, Any]) -> Any:
    """Read an argument of `_packed`."""
    if "model" in packed:
        kind: type[Model] = _load(packed["model"])
        return kind.model_validate(packed["fields"])
    return Path(packed["Path"]) if "Path" in packed else packed["value"]


def name_of(function: Callable[..., Any]) -> str:
    """The name under which another process finds the function. Raises LaunchError where it has none."""
    module, name = function.__module__, function.__qualname__
    # Ranks import the script under this name, so code outside of the main guard runs in them as well.
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
    """Raises LaunchError if the name leads nowhere. Imports no module that this process has not imported."""
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
    """The function of a name that `find` has found. Raises LaunchError where its module has none of that name."""
    module_name, _, function_name = name.rpartition(":")
    try:
        module = load_script(Path(module_name)) if module_name.endswith(".py") else importlib.import_module(module_name)
        function = vars(module)[function_name]
    except (ModuleNotFoundError, FileNotFoundError, KeyError) as error:
        raise LaunchError(f"function {name} does not exist: {error}") from error
    return function
