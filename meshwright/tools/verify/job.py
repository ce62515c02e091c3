"""`meshwright verify`: the same steps on the run's layout and by the reference on one device (reference.py), then the
comparison. Both are jobs of their own, one after the other, and leave files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from meshwright.checkpoint import Checkpoint, CheckpointWriter, pieces_of
from meshwright.checkpoint.manifest import Origin, Progress
from meshwright.checkpoint.restore import Piece, gradient_pieces
from meshwright.config import Config
from meshwright.config.schema import Check, Layout, Offload, Precision
from meshwright.data.files import ShowProgress as Report
from meshwright.data.files import silent
from meshwright.decisions import resolve, resolve_process, this_machine
from meshwright.errors import DivergedError, LaunchError, MismatchError, ZeroGradientError
from meshwright.launch import Interrupted, Rank, Ranks, StopRequest, joined, run
from meshwright.launch.session import temporary_folder
from meshwright.model import Samples
from meshwright.parameters.shard import Box
from meshwright.parity.compare import (
    Row,
    axis_words,
    compare_numbers,
    compare_tensors,
    compare_together,
    factor_of,
    zero_tensors,
)
from meshwright.parts import Parts, build
from meshwright.section import with_field
from meshwright.tools.verify.reference import reference_run
from meshwright.tools.verify.tolerance import tolerance_of
from meshwright.training.loop import Trainer

WORKER = "meshwright.tools.verify.job:verify_rank"
REFERENCE_WORKER = "meshwright.tools.verify.job:reference_worker"
NUMBERS = "numbers.json"
TENSORS = ("initial", "gradient", "weight")
"""The kinds of tensors that both sides leave."""


@dataclass(frozen=True)
class Verdict:
    """All comparisons of a verification. `zero_gradients`: parameters about which they say nothing. `hint`: where in
    the model wrong gradients begin, and by which factor they are wrong, if by any."""

    config: Config
    steps: int
    rows: tuple[Row, ...]
    zero_gradients: tuple[str, ...] = ()
    hint: str = ""

    @property
    def failed(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if not row.holds)

    @property
    def holds(self) -> bool:
        return not self.failed and not self.zero_gradients

    def worst(self, kind: str) -> Row:
        """The row of a kind that is furthest off. Not-a-number is further than any number."""
        return max((row for row in self.rows if row.kind == kind), key=lambda row: (row.error != row.error, row.error))

    def check(self) -> None:
        """Raises MismatchError where something differs, ZeroGradientError where a gradient is zero on both sides."""
        if self.failed:
            first = self.failed[0]
            count = f"{len(self.failed)} of {len(self.rows)} comparisons fail"
            error = f"relative error {first.error:.2e} > {first.allowed:.0e}"
            raise MismatchError(
                f"the layout does not compute what one device computes: {count}, first the {first.kind} of "
                f"{first.name}: {error}{self.hint}"
            )
        if self.zero_gradients:
            name, *others = self.zero_gradients
            more = f" (and of {len(others)} more)" if others else ""
            raise ZeroGradientError(
                f"the gradient of {name}{more} is zero everywhere, also on one device, so that equal numbers prove "
                "nothing: take a model, data and a batch whose loss depends on every parameter"
            )


def comparable(config: Config, *, as_configured: bool) -> Config:
    """The config to verify: no dropout, whose masks no two layouts share, and in float64 unless `as_configured`.

    Fields that lose their effect by it are not asked about again.
    """
    changes: dict[str, Any] = {
        "model": config.model.model_copy(update={"dropout": 0.0}),
        "layout": config.layout.model_copy(update={"ranks_per_node": "auto"}),  # all of them start here
        "restarts": 0,
    }
    if not as_configured:
        changes["precision"] = Precision(level="O0", dtype="float64")
        changes["memory"] = config.memory.model_copy(update={"offload": Offload()})  # there are no masters to offload
    return config.model_copy(update=changes)


def one_device(config: Config) -> Config:
    """The same run for the reference: one rank, and the microbatches that fit in memory."""
    batch = config.batch.model_copy(update={"micro": config.micro})
    return config.model_copy(update={"layout": Layout(transport="torch"), "batch": batch})


def verify(config: Config, *, steps: int, as_configured: bool = False, report: Report = silent) -> Verdict:
    """Run `steps` steps both ways and compare. The gradients are those of the first step that did not overflow."""
    if joined():
        raise LaunchError("verify starts its own workers: run it outside of torchrun, srun and mpirun")
    config = comparable(config, as_configured=as_configured)
    process = resolve_process(config, this_machine())
    config = with_field(config, "device", process.config.device)  # the reference's too: one GPU might do for it alone
    for note in process.notes:
        report(note, None)
    data = config.data.prepare(config, report)
    with temporary_folder() as folder:
        layout, reference = folder / "layout", folder / "reference"
        report(f"{config.layout.world_size} ranks, {steps} steps", None)
        _run(config, WORKER, "the layout", layout, data, steps)
        report(f"the reference on one device, {steps} steps", None)
        _run(one_device(config), REFERENCE_WORKER, "the reference on one device", reference, data, steps)
        return compare_runs(config, layout, reference, steps)


def _run(config: Config, worker: str, what: str, out: Path, data: Path, steps: int) -> None:
    out.mkdir()
    config = resolve(config, this_machine()).config
    try:
        run(worker, Ranks.of(config), config=config, out=out, data=data, steps=steps)
    except Interrupted:
        raise
    except LaunchError as error:
        raise LaunchError(f"{what} did not get to its end: {error}") from error


def compare_runs(config: Config, layout: Path, reference: Path, steps: int) -> Verdict:
    """Compare what `leave_layout` and `leave_reference` have left in two folders."""
    numbers = json.loads((reference / NUMBERS).read_text())
    files = {kind: load_file(reference / f"{kind}.safetensors") for kind in TENSORS}
    whole = {kind: {name: tensors[name] for name in numbers["names"]} for kind, tensors in files.items()}
    rows = tuple(_compare(config, layout, numbers, whole))
    hint = _hint(config, Checkpoint(layout / "step-0"), whole["gradient"], rows)
    return Verdict(config, steps, rows, zero_tensors(whole["gradient"]), hint)


def _hint(config: Config, parts: Checkpoint, gradients: dict[str, Tensor], rows: tuple[Row, ...]) -> str:
    """Backward passes go from the model's end: the last wrong gradient is where the mistake shows first."""
    wrong = [row.name for row in rows if row.kind == "gradient" and not row.holds]
    if not wrong:
        return ""
    factor = factor_of(_read_whole(parts, "gradient", wrong[-1]), gradients[wrong[-1]])
    times = "" if factor is None else f" times {factor:.4g}{axis_words(dict(config.layout.axes), factor)}"
    return f"; the last wrong gradient in the model's order is {wrong[-1]}'s" + (
        f": the reference's{times}" if times else ""
    )


def _compare(
    config: Config, layout: Path, numbers: dict[str, Any], whole: dict[str, dict[str, Tensor]]
) -> Iterator[Row]:
    ours, parts = json.loads((layout / NUMBERS).read_text()), Checkpoint(layout / "step-0")
    if other := parts.shapes.keys() ^ whole["weight"].keys():
        raise MismatchError(f"only one of the layout's model and the reference's has {', '.join(sorted(other))}")

    read = {kind: partial(_read_whole, parts, kind) for kind in TENSORS}
    allowed = tolerance_of(config)
    yield from compare_tensors("initial", read["initial"], whole["initial"], allowed.weight)
    yield from compare_numbers("loss", ours["loss"], numbers["loss"], allowed.loss)
    yield from compare_numbers("norm", ours["norm"], numbers["norm"], allowed.norm)
    yield from compare_tensors("gradient", read["gradient"], whole["gradient"], allowed.gradient)
    compare_weights = compare_together if allowed.together else compare_tensors
    yield from compare_weights("weight", read["weight"], whole["weight"], allowed.weight)


def _read_whole(checkpoint: Checkpoint, kind: str, name: str) -> Tensor:
    """A parameter put together; a part that no rank holds raises CheckpointError."""
    shape = checkpoint.shapes[name]
    return checkpoint.read(name, kind, Box(tuple(0 for _ in shape), shape))


def verify_rank(rank: Rank, config: Config, out: Path, data: Path, steps: int) -> None:
    """One rank of the layout."""
    parts = build(config, rank.mesh, out)
    leave_layout(parts, config.data.open(config, data).train, out, steps, rank.stop)


def leave_layout(parts: Parts, train: Samples, folder: Path, steps: int, stop: StopRequest | None = None) -> None:
    """Some steps of a rank. Leaves losses and norms, and of this rank's part of the weights those before the first
    step and after the last, and the gradients of the first step that did not overflow."""
    initial, gradients = _weights(parts, "initial"), list[Piece]()
    unchecked = parts.config.model_copy(update={"check": Check(every=0)})  # wrong replicas are what is looked for
    trainer = Trainer(replace(parts, config=unchecked), train, late=False)
    numbers: dict[str, list[object]] = {"loss": [], "norm": []}
    applied = False
    for _ in range(steps):
        scale = parts.optimizer.scaler.scale

        def keep_gradients(scale: float = scale) -> None:
            gradients[:] = (replace(piece, tensor=piece.tensor.double() / scale) for piece in gradient_pieces(parts))

        (line,), stopping = trainer.turn(stop, None if applied else keep_gradients)
        if stopping:
            return
        applied = applied or bool(line["applied"])
        numbers["loss"].append(line["loss"])
        numbers["norm"].append(line["grad_norm"])
    writer = CheckpointWriter(folder, parts.mesh, 1, Origin(config={}), None)
    writer.save(Progress(), [*initial, *gradients, *_weights(parts, "weight")])
    writer.wait()
    if parts.mesh.rank == 0:
        (folder / NUMBERS).write_text(json.dumps(numbers))


def _weights(parts: Parts, kind: str) -> list[Piece]:
    """Copies of the weights, in the precision that is stepped."""
    weights = (piece for piece in pieces_of(parts) if piece.kind == "weight")
    return [replace(piece, kind=kind, tensor=piece.tensor.clone()) for piece in weights]


def reference_worker(rank: Rank, config: Config, out: Path, data: Path, steps: int) -> None:
    """The reference: one process."""
    leave_reference(config, config.data.open(config, data).train, out, steps, rank.mesh.device)


def leave_reference(config: Config, train: Samples, folder: Path, steps: int, device: torch.device) -> None:
    """The reference's steps. Leaves what `leave_layout` does, in whole tensors."""
    rows = config.batch.global_
    outcome = reference_run(config, (train.samples(step * rows, rows) for step in range(steps)), steps, device)
    if not outcome.gradients:
        hint = "lower precision.loss_scale.initial or optimizer.lr, or take more steps"
        raise DivergedError(
            f"no step has a finite gradient (norms: {outcome.norms}), so there is none to compare: {hint}"
        )
    for kind, tensors in zip(TENSORS, (outcome.initial, outcome.gradients, outcome.weights), strict=True):
        save_file(tensors, folder / f"{kind}.safetensors")
    numbers = {"loss": outcome.losses, "norm": outcome.norms, "names": list(outcome.weights)}
    (folder / NUMBERS).write_text(json.dumps(numbers))
