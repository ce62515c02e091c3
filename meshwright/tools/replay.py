"""`meshwright replay OUT --step N [words]`: repeat a run's step from the checkpoint before it, and compare.

The replay runs on this machine, with the run's layout or, if the run's bits are layout-free, with any other. The start
and the number of steps are printed before the first step. If the checkpoint is damaged, replay stops with an error;
`--from` selects an older one. Equal numbers show that program and machine are sound. If numbers differ, the step is
repeated once more:

| the second replay                   | verdict | what is wrong                                                    |
|-------------------------------------|---------|------------------------------------------------------------------|
| equals the run                      | machine | the first replay: this machine sometimes computes other bits     |
| equals neither                      | machine | this machine never computes a step twice with equal bits         |
| equals the first, and not the run   | program | code, library or layout compute other bits than the run's did,   |
|                                     |         | or the run's machine erred: replay there to distinguish the two  |
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from meshwright.compute.parameters.root import comparable
from meshwright.config import Config, load_config
from meshwright.config.schema import Logging
from meshwright.config.section import with_field
from meshwright.data.files import silent
from meshwright.output import terminal
from meshwright.ranks.errors import CheckpointError, ConfigError, MeshwrightError, MismatchError
from meshwright.ranks.foreign import plain, plain_folder
from meshwright.ranks.launch.session import temporary_folder
from meshwright.tools.diff import NUMBERS
from meshwright.tools.differing import Part
from meshwright.training.checkpoint.reader import Checkpoint, newest_whole, steps_in
from meshwright.training.folder import CHECKPOINTS, CONFIG, IDENTITY, OF_TRACKERS
from meshwright.training.follow import METRICS, read_history
from meshwright.training.job import train

Lines = dict[int, dict[str, Any]]
"""A run's steps by number."""


@dataclass(frozen=True)
class Seen:
    """A replay's state after the last repeated step, compared with the run's."""

    root: str
    """Identifies the state."""
    parts: tuple[Part, ...]
    """The differences from the run's state."""


Look = Callable[[Path], Seen]
"""Compares the checkpoint of a replay's last repeated step, in a temporary folder, with the run's."""


@dataclass(frozen=True)
class Replayed:
    """Result of a replay."""

    verdict: str
    """equal, machine or program."""
    first: int
    last: int
    """The first and the last repeated step."""
    roots: int
    """The number of compared roots; roots of another version are not compared."""
    step: int | None
    """The first step that differs; None if no step does."""
    numbers: dict[str, list[Any]]
    """By name: the numbers of `step` in the run, the first replay and the second replay."""
    parts: tuple[Part, ...] = ()
    """The tensors that differ after the last step; empty if states were not compared."""

    def check(self) -> None:
        """Raise MismatchError if the replay differs from the run."""
        if self.verdict != "equal":
            raise MismatchError(f"step {self.step} is not what the run had: {self.verdict}")


def replay(
    out: Path,
    step: int,
    words: Sequence[str] = (),
    *,
    start: int | None = None,
    accept_changes: bool = False,
    say: Callable[[str], object] = lambda text: None,
    look: Look | None = None,
) -> Replayed:
    """Repeat the steps from the newest checkpoint before `step`, or from the checkpoint of `start`, up to `step`.

    Args:
        out: The run's folder.
        step: The last step to repeat.
        words: Another layout's fields.
        start: The step of a checkpoint; 0 is the run's beginning.
        accept_changes: Allow another seed, data, sequence or global batch, as `train --resume` does.
        say: Called with a line on the start and the number of steps, before the first step.
        look: Also compares the state after `step`; None: numbers are compared alone.

    Raises:
        ConfigError: The run has no numbers of that step, or has no such checkpoint; and as `train`.
        CheckpointError: The checkpoint is damaged.
    """
    plain_folder(out, OF_TRACKERS)
    run = {int(line["step"]): line for line in read_history(out / METRICS)}
    if step not in run:
        rule = "is no step whose numbers the run has"
        raise ConfigError.of("--step", step, rule, f"{min(run, default=0)} to {max(run, default=0)}")
    checkpoint = _checkpoint(out / CHECKPOINTS, step, start)
    first = 1 if checkpoint is None else int(checkpoint.name.removeprefix("step-")) + 1
    config = with_field(
        load_config(plain(out / CONFIG), words), "logging", Logging(level="error")
    )  # the answer is its only output
    if checkpoint is None and not accept_changes:
        _require_same_data(config, out)
    where = "the beginning" if checkpoint is None else checkpoint.name
    count = step - first + 1
    say(f"repeats steps {first} to {step} from {where} of {out}: {count} step{'s' if count > 1 else ''}")

    if look is not None:
        # A multiple of `step` is due at `step`; the replay ends a step or two later with one more.
        config = with_field(config, "checkpoint", config.checkpoint.model_copy(update={"every": step, "keep": 9}))
    again = partial(_repeated, config, out, checkpoint, step, accept_changes=accept_changes, look=look)
    first_replay, state = again()
    parts = () if state is None else state.parts
    parted = _first_difference(run, first_replay, first, step)
    if parted is None and parts:
        parted = step
    both = ([lines[each].get("root") for lines in (run, first_replay)] for each in range(first, step + 1))
    roots = sum(comparable(*each) for each in both)
    if parted is None:
        return Replayed("equal", first, step, roots, None, {})
    # Only now: an equal step needs no second replay.
    second_replay, second_state = again()
    names = [name for name in NUMBERS if name in run[parted]]
    numbers = {name: [lines[parted].get(name) for lines in (run, first_replay, second_replay)] for name in names}
    alike = _first_difference(first_replay, second_replay, first, step) is None and state == second_state
    return Replayed("program" if alike else "machine", first, step, roots, parted, numbers, parts)


def _require_same_data(config: Config, out: Path) -> None:
    """Raise ConfigError if the newest checkpoint was trained on other data.

    For a replay from the run's beginning; from a checkpoint `train` makes this check.
    """
    for _, path in steps_in(out / CHECKPOINTS)[-1:]:
        origin = Checkpoint(path).manifest.origin
        if origin.data and origin.data != config.data.fingerprint(config.data.prepare(config, silent)):
            rule = f"holds other tokens or samples than those that {path} was trained on"
            raise ConfigError.of("data.source", config.data.source, rule, "the same data, or --accept-changes")


def _repeated(
    config: Config, out: Path, checkpoint: Path | None, step: int, *, accept_changes: bool, look: Look | None
) -> tuple[Lines, Seen | None]:
    """Train from a copy of the checkpoint up to `step`, in a temporary folder; return the steps' lines and the state.

    Errors name the run's folder instead of the temporary one, which the user cannot repair.
    """
    with temporary_folder() as folder:
        if checkpoint is not None:
            shutil.copytree(checkpoint, folder / CHECKPOINTS / checkpoint.name)
            for file in (IDENTITY, CONFIG):
                shutil.copy(plain(out / file), folder / file)
        resume, mine, theirs = checkpoint is not None, str(folder), str(out)
        try:
            train(
                config, folder, resume=resume, accept_changes=resume and accept_changes,
                each=lambda line: line["step"] >= step,
            )  # fmt: skip
        except ConfigError as error:
            told = [
                replace(
                    problem,
                    value=theirs if str(problem.value) == mine else problem.value,
                    rule=problem.rule.replace(mine, theirs),
                )
                for problem in error.problems
            ]
            raise ConfigError(told) from error
        except MeshwrightError as error:
            error.args = (str(error).replace(mine, theirs),)
            raise
        lines = {int(line["step"]): line for line in read_history(folder / METRICS)}
        return lines, None if look is None else look(folder / CHECKPOINTS / f"step-{step}")


def _checkpoint(folder: Path, step: int, start: int | None) -> Path | None:
    """Return the checkpoint to replay `step` from; None: from the run's beginning."""
    before = {earlier_step: path for earlier_step, path in steps_in(folder) if earlier_step < step}
    if start is None:
        start = max(before, default=0)
    if start and start not in before:
        valid = ", ".join(map(str, sorted({0, *before}, reverse=True)))
        raise ConfigError.of("--from", start, f"is no checkpoint before step {step} in {folder}", valid)
    path = before.get(start)
    if path is not None:
        try:
            Checkpoint(path).check_files()
        except CheckpointError as error:
            older = newest_whole(folder, start)
            earlier_step = 0 if older is None else int(older.name.removeprefix("step-"))
            offer = f"--from {earlier_step} repeats steps {earlier_step + 1} to {step} instead"
            raise type(error)(f"{error}; {offer}, from {'the beginning' if older is None else older.name}") from error
    return path


def _first_difference(first_lines: Lines, second_lines: Lines, first: int, last: int) -> int | None:
    """Return the first step with another loss, norm or root; None if no step differs."""
    for step in range(first, last + 1):
        roots = [lines[step].get("root") for lines in (first_lines, second_lines)]
        names = NUMBERS if comparable(*roots) or None in roots else [name for name in NUMBERS if name != "root"]
        # repr compares to the last bit, and a NaN equals itself.
        if any(repr(first_lines[step].get(name)) != repr(second_lines[step].get(name)) for name in names):
            return step
    return None


def as_dict(found: Replayed) -> dict[str, Any]:
    return asdict(found)


def render(found: Replayed) -> None:
    """Print the verdict, and the numbers in which the replays differ from the run."""
    console = terminal.console()
    steps = f"steps {found.first} to {found.last}"
    if found.verdict == "equal":
        roots = {0: "and norms; no root was compared", 1: "and norms, and one root"}
        numbers = roots.get(found.roots, f"and norms, and {found.roots} roots")
        console.print(f"equal: {steps} have the run's losses {numbers}; program and machine are sound")
        return
    for name, (run, first_replay, second_replay) in found.numbers.items():
        console.print(
            f"step {found.step}, {name}: the run {run!r}, replayed {first_replay!r}, once more {second_replay!r}"
        )
    if found.verdict == "machine":
        console.print("machine: two replays differ, so this machine does not compute a step twice alike")
    else:
        console.print(
            "program: two replays agree with each other and not with the run; code, library or layout compute "
            "otherwise than the run's did, or its machine erred (replay it there to tell)"
        )
