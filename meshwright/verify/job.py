"""`meshwright verify`: the same steps on the run's layout and on one device of this machine, then the comparison."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.build import build
from meshwright.checkpoint import Checkpoint, CheckpointWriter, pieces_of
from meshwright.checkpoint.manifest import Progress
from meshwright.checkpoint.restore import Piece, gradient_pieces
from meshwright.config import Config, parse_config
from meshwright.data.progress import Progress as Report
from meshwright.data.progress import silent
from meshwright.environment import Environment
from meshwright.errors import LaunchError, MismatchError
from meshwright.families import family_of
from meshwright.launch import Job, StopRequest, joined
from meshwright.mesh import Mesh
from meshwright.train.job import open_layout, resources_of, run_ranks, worker_device
from meshwright.train.loop import Trainer
from meshwright.verify.compare import Row, Tolerance, compare_losses, compare_tensors, tolerance_of

WORKER = "meshwright.verify.job:worker"


@dataclass(frozen=True)
class Verdict:
    """All comparisons of a verification."""

    config: Config
    steps: int
    rows: tuple[Row, ...]

    @property
    def failed(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if not row.holds)

    def worst(self, kind: str) -> Row:
        """The row of a kind that is furthest off. Not-a-number is further than any number."""
        return max((row for row in self.rows if row.kind == kind), key=lambda row: (row.error != row.error, row.error))

    def check(self) -> None:
        """Raises MismatchError where something differs."""
        if self.failed:
            first = self.failed[0]
            count = f"{len(self.failed)} of {len(self.rows)} comparisons fail"
            error = f"relative error {first.error:.2e} > {first.allowed:.0e}"
            raise MismatchError(
                f"the layout does not compute what one device computes: {count}, first the {first.kind} of "
                f"{first.name}: {error}"
            )


def comparable(config: Config, *, as_configured: bool) -> Config:
    """The config to verify: no dropout, whose masks no two layouts share, and in float64 unless `as_configured`."""
    tree = config.model_dump(mode="json", by_alias=True)
    tree["model"]["dropout"] = 0.0
    tree["restarts"] = 0
    tree["layout"]["ranks_per_node"] = "auto"  # all of them start here
    if not as_configured:
        tree["precision"] |= {"level": "O0", "dtype": "float64"}
        tree["memory"]["offload"]["to"] = "none"  # there are no float32 masters to offload
    return parse_config(tree)


def serial_twin(config: Config) -> Config:
    """The same run on one device, with the same microbatches."""
    tree = config.model_dump(mode="json", by_alias=True)
    tree["layout"] = {"data": {"size": 1, "sync": "allreduce"}, "transport": "torch"}
    tree["batch"]["micro"] = config.micro
    tree["memory"]["offload"]["to"] = "none"
    return parse_config(tree)


def verify(config: Config, *, steps: int, as_configured: bool = False, report: Report = silent) -> Verdict:
    """Run `steps` steps both ways and compare. The gradients are those of the first step."""
    if joined():
        raise LaunchError("verify starts its own workers: run it outside of torchrun, srun and mpirun")
    config = comparable(config, as_configured=as_configured)
    data = family_of(config).dataset.prepare(config, report)
    with tempfile.TemporaryDirectory(prefix="meshwright-verify-") as folder:
        left = []
        for name, run in (("layout", config), ("serial", serial_twin(config))):
            report(f"{run.layout.world_size} ranks, {steps} steps", None)
            out = Path(folder) / name
            out.mkdir()
            left.append(_run(run, out, data, steps))
        rows = tuple(_compare(left[0], left[1], tolerance_of(config)))
    return Verdict(config, steps, rows)


@dataclass(frozen=True)
class _Left:
    """What a run left behind."""

    losses: list[float]
    gradients: Checkpoint
    weights: Checkpoint


def _run(config: Config, out: Path, data: Path, steps: int) -> _Left:
    resources = resources_of(config)
    arguments = {
        "config": config.model_dump(mode="json", by_alias=True),
        "out": str(out),
        "data": str(data),
        "steps": steps,
        "transport": resources.transport,
        "device": resources.device,
    }
    run_ranks(config, Job(WORKER, arguments), resources)
    losses = json.loads((out / "losses.json").read_text())
    return _Left(losses, Checkpoint(out / "gradients" / "step-0"), Checkpoint(out / "weights" / f"step-{steps}"))


def _compare(layout: _Left, serial: _Left, allowed: Tolerance) -> Iterable[Row]:
    yield from compare_losses(layout.losses, serial.losses, allowed.loss)
    yield from compare_tensors(layout.gradients, serial.gradients, "gradient", allowed.gradient)
    yield from compare_tensors(layout.weights, serial.weights, "weight", allowed.weight)


def worker(
    environment: Environment,
    stop: StopRequest,
    *,
    config: dict[str, Any],
    out: str,
    data: str,
    steps: int,
    transport: str,
    device: str,
) -> None:
    """One rank: some steps, the first one's gradients, the last one's weights."""
    settings = Config.model_validate(config)
    folder = Path(out)
    where = worker_device(device, environment)
    with open_layout(settings.layout, environment, transport, where) as mesh:
        parts = build(settings, mesh, folder)
        trainer = Trainer(parts, family_of(settings).dataset.open(settings, Path(data)).train)
        losses = []
        for step in range(steps):
            scale = parts.optimizer.scaler.scale

            def keep_gradients(scale: float = scale) -> None:
                unscaled = (
                    Piece(piece.kind, piece.place, piece.tensor.double() / scale) for piece in gradient_pieces(parts)
                )
                _save(mesh, folder / "gradients", 0, unscaled)

            line, _ = trainer.turn(stop, keep_gradients if step == 0 else None)
            losses.append(line["loss"])
        _save(mesh, folder / "weights", steps, pieces_of(parts))
        if mesh.rank == 0:
            (folder / "losses.json").write_text(json.dumps(losses))


def _save(mesh: Mesh, folder: Path, step: int, pieces: Iterable[Piece]) -> None:
    writer = CheckpointWriter(folder, mesh, 1, {"seed": 0}, None)
    writer.save(Progress(step=step), pieces)
    writer.wait()
