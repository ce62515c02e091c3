"""One rank of `meshwright train`: meets the others, builds its parts, and trains from a checkpoint or the beginning."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint import Checkpoint, CheckpointWriter, pieces_of, restore
from meshwright.checkpoint.manifest import Origin, Progress
from meshwright.checkpoint.restore import progress_of
from meshwright.config import Config
from meshwright.data.dataset import Opened
from meshwright.decisions import FIELDS, Resolved, resolve_layout, resolved_fields
from meshwright.errors import DamagedError
from meshwright.launch import Rank, StopRequest
from meshwright.machine import Machine
from meshwright.parts import Parts, build
from meshwright.ranks.agreement import all_rows, text_of_root
from meshwright.ranks.mesh import Mesh
from meshwright.section import field_of, with_field
from meshwright.training.console import RunDisplay
from meshwright.training.folder import CHECKPOINTS
from meshwright.training.loop import Trainer, validate
from meshwright.training.meeting import facts_of, meet
from meshwright.training.metrics import MetricsWriter
from meshwright.training.resume import checkpoint_of_run, decided_before, with_offer
from meshwright.training.trace import write_step


def train_rank(
    rank: Rank,
    config: Config,
    asked: Config,
    out: Path,
    data: Path,
    *,
    resume: bool,
    trace: Sequence[int] = (),
    notes: Sequence[str] = (),
) -> None:
    """One rank of a training job.

    `config`: resolved by our launcher; `asked`: as the user wrote it. `notes`: what is to be said when the run begins.
    """
    mesh, environment = rank.mesh, rank.environment
    meet(mesh, facts_of(asked, data, resume=resume, trace=list(trace)))
    opened = config.data.open(config, data)
    resume = resume or environment.attempt > 0
    name, found = checkpoint_of_run(out, resume=resume) if mesh.rank == 0 else ("", None)
    step = _agreed(mesh, found)
    if not environment.launched:
        resolved = _resolve_together(mesh, config, asked, out, resume=resume)
        config, notes = resolved.config, (*notes, *resolved.notes)
    opened = replace(opened, notes=(*notes, *opened.notes))
    dump = asked.model_dump(mode="json", by_alias=True)
    origin = Origin(dump, name, config.data.fingerprint(data), resolved_fields(asked, config))
    parts = build(config, mesh, out)
    _Run(parts, config, opened, out, frozenset(trace), origin).train(
        rank.stop, step, resume=resume, attempt=environment.attempt
    )


def _resolve_together(mesh: Mesh, settings: Config, asked: Config, out: Path, *, resume: bool) -> Resolved:
    """Inside another launcher, rank 0 decides for all ranks, with the memory of the one that has the least."""
    if mesh.device_type == "cuda":
        memory = torch.cuda.mem_get_info(mesh.device)[0]
    else:
        memory = Machine.here().rank_bytes(settings.layout.world_size)
    least = int(all_rows(torch.tensor([memory], device=mesh.device), mesh.world).min())
    resolved = Resolved(settings)
    if mesh.rank == 0:
        before = decided_before(asked, out) if resume else asked
        for field in FIELDS:
            settings = with_field(settings, field, field_of(before, field))
        resolved = resolve_layout(settings, Machine(cores=1, memory=least, shared=False))
    text = json.dumps([resolved.config.model_dump(mode="json", by_alias=True), resolved.notes])
    tree = json.loads(text_of_root(text, mesh.world, mesh.device))
    return Resolved(Config.model_validate(tree[0]), tuple(tree[1]))


def _agreed(mesh: Mesh, step: int | None) -> int | None:
    """The step that rank 0 found a checkpoint of: ranks may see a shared folder at different times."""
    found = torch.tensor([-1 if step is None else step], dtype=torch.int64, device=mesh.device)
    mesh.world.broadcast(found, 0)
    return None if int(found) < 0 else int(found)


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
        checkpoints = self.out / CHECKPOINTS
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
                # matplotlib: a second that the first step need not wait for
                from meshwright.training.curves import draw_loss

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
            raise with_offer(error, checkpoints, step) from error

    def _greet(self, display: RunDisplay, unfinished: Sequence[str], attempt: int) -> None:
        layout = self.config.layout
        display.say(f"{layout.world_size} ranks: {layout.summary}; writing to {self.out}")
        for note in self.data.notes:
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
