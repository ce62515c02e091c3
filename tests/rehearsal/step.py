"""One step of some layouts on one rank, as on a GPU, in a process with a fake GPU.

    python -m tests.rehearsal.step LIBRARY       # a line of JSON in is a run, a line out its report

One process takes all runs: torch is imported once, and has the shapes of most operations from earlier runs. A run is a
config's tree and a rank. Collectives pass through torch.distributed to the backend `fake`, which answers at once. A
stage's messages arrive at once.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self
from unittest.mock import patch

from tests.rehearsal.fake_cuda import fake_cuda, load

if TYPE_CHECKING:
    from meshwright.config import Config
    from meshwright.ranks.mesh import Mesh


@dataclass(frozen=True)
class Run:
    """A rank of a layout.

    Attributes:
        tree: The resolved config's tree.
        steps: The number of steps. The last is tallied, because the first makes moments for all later steps. A single
            step is flushed.
        evaluated: The batches of an evaluation, which is tallied instead.
        staged: Whether the copies of two checkpoints are tallied instead.
    """

    name: str
    rank: int
    tree: dict[str, Any]
    steps: int = 1
    evaluated: int = 0
    staged: bool = False


@dataclass(frozen=True)
class Report:
    """The costs of a rank's step, or the reason of a failure; without an error, `tally` has the work of the fake
    device.

    `host_bytes`: The most bytes of host tensors at a time while the rank's parts were built.
    """

    name: str
    rank: int
    tally: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    host_bytes: int = 0


class FakeGpu:
    """The process with a fake GPU, while entered."""

    def __init__(self, library: Path) -> None:
        self._command = [sys.executable, "-W", "ignore", "-m", "tests.rehearsal.step", str(library)]

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate()

    def rehearse(self, runs: Iterable[Run]) -> list[Report]:
        """Return each run's report."""
        ask, answers = self._process.stdin, self._process.stdout
        assert ask is not None
        assert answers is not None
        return [self._report(run, ask, answers) for run in runs]

    def _report(self, run: Run, ask: IO[str], answers: IO[str]) -> Report:
        ask.write(json.dumps(vars(run)) + "\n")
        ask.flush()
        for line in answers:
            report = Report(**json.loads(line))
            if (report.name, report.rank) == (run.name, run.rank):  # else the report of a run of an ended test
                return report
        raise AssertionError(f"{run.name}, rank {run.rank}: the process of the fake GPU has ended")


def rehearse(run: Run) -> Report:
    """Run all steps and report the last."""
    from meshwright.config import Config
    from meshwright.training.checkpoint.restore import pieces_of
    from meshwright.training.checkpoint.staging import Staging
    from meshwright.training.loop import Trainer, validate
    from meshwright.training.parts import build
    from tests.fuzz.check import HeldOut

    config = Config.model_validate(run.tree)
    with fake_cuda() as tally, _mesh(config, run.rank) as mesh:
        with host_bytes() as most:
            parts = build(config, mesh)
        trainer = Trainer(parts, HeldOut(config))
        for _ in range(run.steps):
            tally.clear()
            trainer.turn(None)
        if run.steps == 1:
            trainer.flush()
        if run.evaluated:
            tally.clear()
            validate(trainer.parts, trainer.train, run.evaluated)
        if run.staged:
            tally.clear()
            staging = Staging(mesh.device)
            for _ in range(2):
                staging.copy([piece.tensor for piece in pieces_of(trainer.parts)])
    return Report(run.name, run.rank, vars(tally), host_bytes=most())


@contextmanager
def host_bytes() -> Iterator[Callable[[], int]]:
    """Count the bytes of the host's tensors. Yields a function that returns the most bytes at a time."""
    from torch import Tensor
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.utils._python_dispatch import TorchDispatchMode

    held: dict[int, tuple[StorageWeakRef, int]] = {}
    most = 0

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal most
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.device.type == "cpu":
                memory = out.untyped_storage()
                for key in [key for key, (alive, _) in held.items() if alive.expired()]:
                    del held[key]
                held.setdefault(memory._cdata, (StorageWeakRef(memory), memory.nbytes()))
                most = max(most, sum(size for _, size in held.values()))
            return out

    with Count():
        yield lambda: most


@contextmanager
def _mesh(config: Config, rank: int) -> Iterator[Mesh]:
    """Yield the rank's mesh on a fake GPU. Ranks of a stage decide separately and equally: there is no other rank to
    tell."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from meshwright.ranks.grid import Grid
    from meshwright.ranks.mesh import Mesh
    from meshwright.ranks.timeouts import Timeouts
    from meshwright.ranks.transport import Transport

    device, grid = torch.device("cuda", 0), Grid(config.layout.axes)
    if grid.world_size > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=grid.world_size)
        transport: Any = _transport(rank)
    else:
        transport = Transport()
    alone = patch("meshwright.strategies.pipeline.pipeline.agreed", lambda rule, *others, planned: rule.schedule)
    try:
        made = staticmethod(_on_real_tensors(DeviceMesh.from_group))
        with alone, patch.object(DeviceMesh, "from_group", made):
            yield Mesh(grid, rank, device, transport, config.layout.token_axes, timeout=Timeouts())
    finally:
        if grid.world_size > 1:
            dist.destroy_process_group()


def _on_real_tensors(make: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, run outside fake tensors: a DeviceMesh searches for a rank among numbers, which fake tensors
    lack."""
    from torch.utils._python_dispatch import _disable_current_modes

    def made(*arguments: Any, **named: Any) -> Any:
        with _disable_current_modes():
            return make(*arguments, **named)

    return made


def _transport(rank: int) -> Any:
    """Return torch's transport, except for the mailbox, which has every message at once."""
    from datetime import timedelta

    import torch

    from meshwright.ranks.comm import RankGroup
    from meshwright.ranks.mailbox import Mailbox
    from meshwright.ranks.peers import Peers
    from meshwright.ranks.planned import PlannedMailbox
    from meshwright.ranks.torch_comm import TorchTransport

    class HastyMailbox(PlannedMailbox):
        device = "cuda:0"

    class Transport(TorchTransport):
        def mailbox(self, group: RankGroup, device: torch.device) -> Mailbox:
            return HastyMailbox(group) if len(group.ranks) > 1 else Mailbox(group.axis)

    return Transport(timedelta(seconds=60), torch.device("cuda", 0), births=True, peers=Peers([], rank))


def main() -> None:
    load(Path(sys.argv[1]))
    import torch

    torch.set_num_threads(1)
    for line in sys.stdin:
        run = Run(**json.loads(line))
        try:
            report = rehearse(run)
        except Exception:
            report = Report(run.name, run.rank, error=traceback.format_exc())
        print(json.dumps(vars(report)), flush=True)
        gc.collect()
        gc.freeze()  # torch's caches for the next run need no collection


if __name__ == "__main__":
    main()
