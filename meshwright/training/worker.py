"""One rank of `meshwright train`: compares facts with all ranks, builds parts, and trains from a checkpoint or anew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from meshwright.compute.model import Samples
from meshwright.compute.parameters.root import order_root
from meshwright.config import Config
from meshwright.config.sense import Facts, remarks
from meshwright.data.dataset import Opened
from meshwright.data.published import SOURCE, read_published
from meshwright.output.drawing import PictureError
from meshwright.ranks.agreement import all_rows
from meshwright.ranks.errors import DamagedError, LaunchError
from meshwright.ranks.hang import names_of
from meshwright.ranks.launch import Rank, StopRequest
from meshwright.ranks.machine import Machine
from meshwright.training.best import BestWatch
from meshwright.training.checkpoint import Checkpoint, CheckpointWriter, pieces_of, restore
from meshwright.training.checkpoint.manifest import TOKENIZER_FILE, Best, Origin, Progress
from meshwright.training.checkpoint.reader import BASE, BEST
from meshwright.training.checkpoint.restore import progress_of
from meshwright.training.console import RunDisplay
from meshwright.training.convert import resting_token
from meshwright.training.decisions import resolved_fields
from meshwright.training.folder import CHECKPOINTS, begin, refuse_used
from meshwright.training.follow import StepTeller
from meshwright.training.loop import StepLine, Trainer, validate
from meshwright.training.meeting import facts_of, meet, placement_notes, ranks_without
from meshwright.training.metrics import MetricsWriter
from meshwright.training.parts import Parts, build
from meshwright.training.references import referred
from meshwright.training.resume import base_of, checkpoint_of_run, go_on, resolve_together, with_offer
from meshwright.training.sinks import TrackedRun, absent_sinks, open_sinks


def train_rank(
    rank: Rank,
    config: Config,
    asked: Config,
    out: Path,
    data: Path,
    *,
    resume: bool,
    resume_from: int | None = None,
    accept_changes: bool = False,
    trace: Sequence[int] = (),
    notes: Sequence[str] = (),
    follow: Path | None = None,
) -> None:
    """Run one rank of a training job.

    `config`: resolved by our launcher; `asked`: as written by the user. `notes`: printed when the run begins.
    `follow`: the folder of the named pipe that gets rank 0's steps (follow.py).
    Inside another launcher rank 0 prepares the run's folder here, after all nodes' counts of restarts are known.
    """
    mesh, environment = rank.mesh, rank.environment
    meet(mesh, facts_of(asked, data, resume=resume, trace=list(trace)))
    attempt = int(all_rows(torch.tensor([environment.attempt]), mesh.world).max())
    if not environment.launched and mesh.grid.world_size > 1:
        if blind := ranks_without(mesh, out):
            rule = "--out must be a folder that all hosts share; no step was made"
            raise LaunchError(f"{names_of(blind)} does not see what rank 0 writes to {out}: {rule}")
        notes = (*notes, *placement_notes(mesh))
    opened = config.data.open(config, data)
    if not environment.launched and mesh.rank == 0:
        if resume or attempt:
            step_asked = None if attempt else resume_from  # a restart uses this job's own checkpoints
            changes = accept_changes or attempt > 0
            notes = [*notes, *go_on(out, asked, config.data.fingerprint(data), step_asked, accept_changes=changes)]
        else:
            refuse_used(out)
            begin(out, asked)
    resume = resume or attempt > 0
    name, found = checkpoint_of_run(out) if mesh.rank == 0 else ("", None)
    # Rank 0's step is broadcast: ranks may see a shared folder's checkpoints at different times.
    told = torch.tensor([-1 if found is None else found], dtype=torch.int64)
    mesh.world.broadcast(told, 0)
    step = None if int(told) < 0 else int(told)
    if not environment.launched:
        resolved = resolve_together(mesh, config, asked, out, resume=resume)
        config, notes = resolved.config, (*notes, *resolved.notes)
    opened = replace(opened, notes=(*notes, *opened.notes))
    dump = asked.model_dump(mode="json", by_alias=True)
    decided = resolved_fields(asked, config)
    origin = Origin(dump, name, config.data.fingerprint(data), decided | base_of(config, out, mesh))
    parts = build(config, mesh, out, drawn=step is None)
    _Run(parts, opened, out, frozenset(trace), origin, StepTeller(follow)).train(
        rank.stop, step, resume=resume, attempt=attempt, live=environment.launched
    )


@dataclass(frozen=True)
class _Run:
    """A rank's training run: the trainer with checkpoints, validation, metrics and the display."""

    parts: Parts
    data: Opened
    out: Path
    traced: frozenset[int]
    origin: Origin
    teller: StepTeller

    def train(self, stop: StopRequest, step: int | None, *, resume: bool, attempt: int, live: bool) -> None:
        """Train from the checkpoint of `step`, or the beginning, to the last step or a stop request.

        `live`: draw a bar on a terminal; true only under our own launcher, since mpirun's ranks get a false terminal.
        """
        parts, config, mesh = self.parts, self.parts.config, self.parts.mesh
        checkpoints = self.out / CHECKPOINTS
        writer = CheckpointWriter(checkpoints, mesh, config.checkpoint.keep, self.origin, self._beside())
        started = Progress()
        if step is not None:
            try:
                started = restore(parts, Checkpoint(checkpoints / f"step-{step}"))
            except DamagedError as error:
                raise with_offer(error, checkpoints, step) from error
        data = referred(parts, self.data, self.out, self.origin.data, started.step)
        level, speaks = config.logging.level, mesh.rank == 0
        display = RunDisplay(started.step, config.steps, speaks=speaks, live=live, level=level)
        with display.bar:
            self._greet(display, writer.unfinished, attempt)
            if step == 0 and config.weights is not None:
                display.say(f"starting from the weights of {config.weights}")
                if config.model.routing.num_experts and not config.model.losses_in_layers:
                    display.say(f"no balance loss of the experts: {config.model.balance_of_folders}")
            elif step is not None:
                display.say(f"going on from checkpoint step-{step}")
            elif resume:
                display.say("no complete checkpoint to go on from: starting at the first step")
            if past := sorted(step for step in self.traced if step <= started.step):
                display.say(f"no trace of what was made before: step {', '.join(map(str, past))}")
            metrics = None
            if mesh.rank == 0:
                run = TrackedRun.of(config.metrics, self.out, self.origin.run, self.origin.config, started.step)
                metrics = MetricsWriter(self.out, started.step, open_sinks(config.metrics, run))
            trainer = Trainer(parts, data.train, step=started.step, samples=started.samples)
            watch = BestWatch(config, mesh, started.best)
            stopping, due, every = False, False, config.checkpoint.every
            while trainer.step < config.steps and not (stopping or watch.over):
                due |= bool(every) and (trainer.step + 1) % every == 0
                lines, stopping = self._step(trainer, data.held_out, stop, saves=due)
                due |= bool(lines) and watch.judge(trainer.step, lines[-1])
                if metrics is not None:
                    for line in lines:
                        display.say(*metrics.write(line), level="warning")
                        display.step(line)
                        if self.teller.tell(line):
                            stop.request()
                last = stopping or watch.over or trainer.step == config.steps
                if last or (due and lines[-1]["applied"]):
                    due = False  # else still due: a skipped step's would hold older weights under a later name
                    trainer.require_good_state()
                    mesh.recorder.enter("checkpoint")
                    display.say(*self._save(trainer, writer, watch.best), level="warning")
            mesh.recorder.enter("last checkpoint")
            writer.wait()
            if metrics is not None:
                metrics.close()
                self._farewell(display, trainer.step, watch)
            if stopping:  # srun and mpirun end a job when the first rank exits with a code: exit together
                stop.request()
                mesh.world.barrier()

    def _save(self, trainer: Trainer, writer: CheckpointWriter, best: Best | None) -> list[str]:
        """Start to write the checkpoint of the last step; return the writer's notes."""
        root, samples = None, trainer.batch.samples
        if self.parts.mesh.rank == 0:  # reads the sample after the cursor, which identifies the order of data
            following = self.data.train.samples(samples, 1)
            root = order_root(self.origin.data, self.parts.config.seed, samples, following)
        pieces = pieces_of(self.parts, adapters=BASE in self.origin.resolved)
        return writer.save(progress_of(self.parts, trainer.step, samples, best), pieces, root)

    def _beside(self) -> dict[str, str]:
        """Return the files that rank 0 adds to each checkpoint: the tokenizer, and the settings kept by the run."""
        if self.parts.mesh.rank:
            return {}
        texts, tokenizer = read_published(self.out / SOURCE), self.data.tokenizer
        if tokenizer is None:
            return texts
        if self.parts.config.data.begins:
            texts = tokenizer.settings_beside(texts)
        return {TOKENIZER_FILE: tokenizer.to_json(), **texts}

    def _step(
        self, trainer: Trainer, held_out: Samples | None, stop: StopRequest, *, saves: bool
    ) -> tuple[list[StepLine], bool]:  # fmt: skip
        """Make a step; trace and validate if due. `saves`: a checkpoint may follow. Returns the lines of the known
        steps, and whether to stop. If validation, a checkpoint or the end follows, the last line is this step's."""
        parts, config, step = self.parts, self.parts.config, trainer.step + 1
        if held_out is not None and step % config.validation.every and step < config.steps:
            held_out = None  # validation is not due
        try:
            before = trainer.flush() if step in self.traced else []  # a trace begins on an idle device
            lines, stopping = trainer.turn(stop)
            if saves or stopping or held_out is not None or step == config.steps:
                lines += trainer.flush()
        except Exception as error:
            error.add_note(f"in step {step}")  # lets the launcher recognise an error that recurs
            raise
        if step in self.traced:
            from meshwright.training.pictures import write_step  # matplotlib: only a traced step needs it

            write_step(trainer.spans, parts.mesh, trainer.step, self.out)
        if held_out is not None:
            parts.mesh.recorder.enter("validation")
            lines[-1] |= validate(
                parts, held_out, min(config.validation.batches, len(held_out) // config.batch.global_)
            )
        return before + lines, stopping

    def _greet(self, display: RunDisplay, unfinished: Sequence[str], attempt: int) -> None:
        config = self.parts.config
        display.say(f"{config.layout.world_size} ranks: {config.layout.summary}; writing to {self.out}")
        display.say(config.batch_summary, *self.data.notes)
        tokenizer, machine = self.data.tokenizer, Machine.here()
        facts = Facts(
            tokens=None if tokenizer is None else tokenizer.vocabulary_size,
            samples=len(self.data.train),
            cores=None if machine.joined else machine.cores,  # another launcher may assign cores to each rank
            local_ranks=machine.ranks_here(config.layout.world_size),
            padding=None if config.weights is None else resting_token(config.weights),
        )
        display.say(*remarks(config, facts))
        display.say(*absent_sinks(config.metrics).values(), level="warning")
        display.say(*(f"removed a checkpoint that was never finished: {name}" for name in unfinished))
        if attempt:
            # Another launcher has its own limit.
            display.say(f"restart {attempt}" + (f" of {config.restarts.times}" if config.restarts.times else ""))
        for name in (*self.parts.strategy.make_replicas_equal(), *self.parts.optimizer.make_replicas_equal()):
            display.say(f"warning: {name} differed between replicas; rank 0's was given to all", level="warning")

    def _farewell(self, display: RunDisplay, step: int, watch: BestWatch) -> None:
        """Draw the losses, and print how the run ended."""
        from meshwright.training.pictures import draw_loss  # matplotlib: a second that the first step need not wait for

        written = [str(self.out / CHECKPOINTS / f"step-{step}"), "metrics.jsonl"]
        try:
            draw_loss(self.out / "metrics.jsonl", self.out / "loss.png")
            written.append("loss.png")
        except OSError as error:  # not fatal: the last checkpoint is written
            display.say(f"warning: loss.png could not be drawn: {error.strerror}", level="warning")
        except PictureError as error:
            display.say(f"loss.png is not drawn: {error}")
        config = self.parts.config
        steps = config.steps
        ended = "finished" if step == steps else "stopped; --resume goes on from here"
        if watch.over and step < steps:
            ended = f"ended early, no validation was better for validation.patience={config.validation.patience}"
        if skipped := step - self.parts.optimizer.steps_taken:
            ended += f" ({skipped} of {step} steps overflowed and were skipped)"
        if step > steps:
            ended = f"nothing to do for steps={steps}"
        display.say(f"{ended}: {', '.join(written)}")
        if (best := watch.best) is not None:
            where = f": {self.out / BEST}" if config.checkpoint.best else ""
            display.say(f"best: step-{best.step}, validation {best.metric} {best.value:.4f}{where}")
