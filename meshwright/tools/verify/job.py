"""`meshwright verify`: runs the same steps on the run's layout and on one device by the reference (reference.py), then
compares. Layout and reference run as separate jobs, one after the other, and write records."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from meshwright.compute.bits.section import Bits
from meshwright.compute.model import Samples
from meshwright.compute.models.chain import chain_of
from meshwright.compute.parameters.root import held_hashes
from meshwright.compute.precision import DTYPES
from meshwright.config import Config
from meshwright.config.layout import Layout
from meshwright.config.schema import Check, Offload, Precision
from meshwright.config.section import with_field
from meshwright.data.files import ShowProgress as Report
from meshwright.data.files import silent
from meshwright.parity.compare import Row
from meshwright.parity.gradients import Mistake
from meshwright.parity.judge import Evidence, explain_modules
from meshwright.parity.kinds import first_finding
from meshwright.parity.parts import box_part
from meshwright.parity.record import PARALLEL, PASSES, REFERENCE, STATE, PartFacts, ReferenceFacts, write_record
from meshwright.parity.reference import StepRecording, keep
from meshwright.parity.rows import compare_all
from meshwright.parity.trace import Trace
from meshwright.ranks.errors import ConfigError, DivergedError, LaunchError, MismatchError, ZeroGradientError
from meshwright.ranks.launch import Interrupted, Rank, StopRequest, joined, run
from meshwright.ranks.launch.session import temporary_folder
from meshwright.tools.verify.outcome import reference_run, trace_reference
from meshwright.tools.verify.tolerance import TOGETHER, tolerance_of
from meshwright.training.decisions import in_steps, resolve, resolve_process, this_machine
from meshwright.training.loop import Trainer
from meshwright.training.parts import Parts, build
from meshwright.training.references import referred_steps
from meshwright.training.typed.check import checked

WORKER = "meshwright.tools.verify.job:verify_rank"
REFERENCE_WORKER = "meshwright.tools.verify.job:reference_worker"
BITS_WORKER = "meshwright.tools.verify.job:bits_rank"

FEW_FLOPS = 2 * 10**11
"""Floating-point operations up to which a reference on a CPU runs on one thread, in seconds. With several threads and
small operations the threads spin while waiting: this took four times the processor time when other processes ran."""


@dataclass
class Verdict:
    """Result of a verification. `hint` is the finding in words."""

    config: Config
    steps: int
    rows: tuple[Row, ...]
    """All comparisons."""
    zero_gradients: tuple[str, ...] = ()
    """Parameters with a gradient of zero on both sides; equal numbers prove nothing for these."""
    finding: Mistake | None = None
    """The first mistake, if any was found."""

    def __post_init__(self) -> None:
        found = self.finding
        self.hint = "" if found is None else f"{found.kind} at {found.module or 'the model'}: {found.text}"
        self.failed = tuple(row for row in self.rows if not row.holds)
        self.holds = not self.failed and not self.zero_gradients

    def worst(self, row_kind: str) -> Row:
        """Return the row of a kind with the largest error. NaN counts as larger than any number."""
        return max(
            (row for row in self.rows if row.kind == row_kind), key=lambda row: (row.error != row.error, row.error)
        )

    def check(self) -> None:
        """Raise MismatchError if a comparison fails, ZeroGradientError if a gradient is zero on both sides."""
        if self.failed:
            first = self.failed[0]
            count = f"{len(self.failed)} of {len(self.rows)} comparisons fail"
            error = f"relative error {first.error:.2e} > {first.allowed:.0e}"
            raise MismatchError(
                f"the layout does not compute what one device computes: {count}, first the {first.kind} of "
                f"{first.name}: {error}{'; ' if self.hint else ''}{self.hint}"
            )
        if self.zero_gradients:
            name, *others = self.zero_gradients
            more = f" (and of {len(others)} more)" if others else ""
            raise ZeroGradientError(
                f"the gradient of {name}{more} is zero everywhere, also on one device, so that equal numbers prove "
                "nothing: take a model, data and a batch whose loss depends on every parameter"
            )


def comparable(config: Config, *, as_configured: bool) -> Config:
    """Return the config to verify: without dropout, since masks differ between layouts; in float64 unless
    `as_configured`.

    Fields without an effect in float64 are reset. Raises ConfigError, if `as_configured`, for bf16 states or masters.
    """
    adapter = config.model.adapter
    if adapter is not None:
        adapter = adapter.model_copy(update={"dropout": 0.0, "begin": "random"})
    changes: dict[str, Any] = {
        "model": config.model.model_copy(update={"dropout": 0.0, "adapter": adapter}),
        "layout": config.layout.model_copy(update={"ranks_per_node": "auto"}),  # all ranks run on this machine
        "restarts": config.restarts.model_copy(update={"times": 0}),
    }
    rounded = [name for name in ("states", "masters") if getattr(config.optimizer, name) == "bf16"]
    if not as_configured:
        if rounded:  # float64 runs have no bf16 states or masters
            changes["optimizer"] = config.optimizer.model_copy(update=dict.fromkeys(rounded, "float32"))
        changes["bits"] = Bits()  # compare_bits compares the bits of the run itself
        changes["precision"] = Precision(level="O0", dtype="float64")
        changes["memory"] = config.memory.model_copy(update={"offload": Offload()})  # there are no masters to offload
    elif rounded:
        rule_text = "is rounded at random, and the steps of plain torch are not"
        raise ConfigError.of(f"optimizer.{rounded[0]}", "bf16", rule_text, "float32, or verify without --as-configured")
    return config.model_copy(update=changes)


def one_device(config: Config, steps: int) -> Config:
    """Return the run's config for the reference: one rank, and the run's microbatch size, which fits in memory.

    At most FEW_FLOPS floating-point operations are computed on one thread.
    """
    changes: dict[str, Any] = {"layout": Layout(transport="torch")}
    changes["batch"] = config.batch.model_copy(update={"micro": config.micro})
    flops = steps * config.batch.global_ * chain_of(config).flops_per_sample(config)
    if config.threads == "auto" and config.device == "cpu" and flops <= FEW_FLOPS:
        changes["threads"] = 1
    return config.model_copy(update=changes)


def verify(config: Config, *, steps: int, as_configured: bool = False, report: Report = silent) -> Verdict:
    """Run `steps` steps on the layout and by the reference, and compare.

    Gradients are compared in the first step that did not overflow. If the run's bits are layout-free, the bits of the
    run itself are compared too. After a failure the first step runs again with every module's output recorded.

    Args:
        config: The run.
        steps: Number of steps.
        as_configured: Keep the run's precision instead of float64.
        report: Called with lines on the progress.

    Raises:
        LaunchError: The caller is itself a rank; or one of the jobs failed.
        ConfigError: As `comparable`, or the run cannot start here.
    """
    if joined():
        raise LaunchError("verify starts its own workers: run it outside of torchrun, srun and mpirun")
    asked, config = config, comparable(config, as_configured=as_configured)
    process = resolve_process(config, this_machine())
    config = with_field(config, "device", process.config.device)  # the reference's as well, even if one GPU is free
    for note in process.notes:
        report(note, None)
    for note in checked(resolve(config, this_machine()).config):
        report(note, None)
    data = config.data.prepare(config, report)
    config = in_steps(config, data).config
    with temporary_folder() as folder:
        verdict = _compare_steps(config, folder, data, steps, report, traced=False)
        if asked.bits.layout_free:
            changes = {field: getattr(config, field) for field in ("device", "layout", "restarts", "steps", "epochs")}
            rows = compare_bits(asked.model_copy(update=changes), data, steps, report)
            verdict = replace(verdict, rows=verdict.rows + rows)
        if not verdict.failed:
            return verdict
        report("the first step again, with every module's output", None)
        try:
            first = _compare_steps(config, folder, data, 1, silent, traced=True)
        except Interrupted:
            raise
        except LaunchError as error:  # recording takes more memory, and the first step may overflow
            report(f"the modules cannot be compared: {error}", None)
            return verdict
        return replace(verdict, finding=first.finding or verdict.finding)


def _compare_steps(config: Config, folder: Path, data: Path, steps: int, report: Report, *, traced: bool) -> Verdict:
    """Run the layout, then the reference, and compare."""
    layout, reference = (folder / f"{name}{'-traced' if traced else ''}" for name in ("layout", "reference"))
    report(f"{config.layout.world_size} ranks, {steps} steps", None)
    _run(config, WORKER, "the layout", layout, data, steps, traced)
    report(f"the reference on one device, {steps} steps", None)
    # One after the other: each may fill the memory.
    _run(one_device(config, steps), REFERENCE_WORKER, "the reference on one device", reference, data, steps, traced)
    return compare_runs(config, layout, reference, steps)


def compare_bits(config: Config, data: Path, steps: int, report: Report) -> tuple[Row, ...]:
    """Compare the bits of a layout-free run between the layout and one device, with dropout and in the run's precision.

    Returns a row for each step's loss and norm, and for each tensor after the last step. The error is 0 if the bits are
    equal, else 1; 0 is required.
    """
    found: list[dict[str, str]] = []
    for run_config, what in ((config, "the layout"), (one_device(config, steps), "one device")):
        report(f"{what}'s own bits, {steps} steps", None)
        known = resolve(run_config, this_machine()).config
        ranks = run(BITS_WORKER, known.ranks(), config=known, data=data, steps=steps)
        sums: dict[str, int] = {}
        for numbers in ranks:
            # A tensor's hash is the sum of the elements' hashes. Each element is counted on one rank only.
            for name, tensor_hash in numbers["tensors"].items():
                sums[name] = (sums.get(name, 0) + int(tensor_hash)) % 2**64
        found.append({**ranks[0]["steps"], **{name: str(tensor_hash) for name, tensor_hash in sums.items()}})
    layout, alone = found
    names = [*layout, *(name for name in alone if name not in layout)]
    return tuple(Row("bits", name, float(layout.get(name) != alone.get(name)), 0.0) for name in names)


def bits_rank(rank: Rank, config: Config, data: Path, steps: int) -> dict[str, dict[str, str]]:
    """Run the steps on one rank; return each step's loss and norm to the last digit, and hashes of the rank's tensors.

    Elements with copies on several ranks are hashed on the first of these ranks.
    """
    parts = build(config, rank.mesh)
    trainer = Trainer(parts, train_of(parts, data, steps), late=False)
    numbers = {}
    for step in range(1, steps + 1):
        for line in trainer.turn(rank.stop)[0]:
            numbers[f"loss of step {step}"] = repr(line.get("loss"))
            numbers[f"norm of step {step}"] = repr(line.get("grad_norm"))
    held = (
        (state.kind, state.values.to(parts.mesh.device), state.places, slot.copy_axes)
        for slot, states in parts.stored()
        for state in states
    )
    return {
        "steps": numbers,
        "tensors": {name: str(int(tensor_hash)) for name, tensor_hash in held_hashes(held, parts.mesh).items()},
    }


def _run(config: Config, worker: str, what: str, out: Path, data: Path, steps: int, traced: bool) -> None:
    out.mkdir()
    config = resolve(config, this_machine()).config
    try:
        run(worker, config.ranks(), config=config, out=out, data=data, steps=steps, traced=traced)
    except Interrupted:
        raise
    except LaunchError as error:
        raise LaunchError(f"{what} did not get to its end: {error}") from error


def compare_runs(config: Config, layout: Path, reference: Path, steps: int) -> Verdict:
    """Compare the records of `leave_layout` and `leave_reference` in two folders."""
    evidence = Evidence(layout, config.layout.world_size, reference)
    known = {shard.name for parts in evidence.parts for shard in parts.values()}
    # A parameter of one side only would not be compared, and so would pass.
    if unmatched := known ^ set(evidence.names):
        raise MismatchError(f"only one of the layout's model and the reference's has {', '.join(sorted(unmatched))}")
    rows = tuple(compare_all(evidence))
    evidence.modules = explain_modules(evidence)
    return Verdict(config, steps, rows, tuple(evidence.reference.facts.dead), first_finding(evidence, rows))


def verify_rank(rank: Rank, config: Config, out: Path, data: Path, steps: int, traced: bool) -> None:
    """Run the steps on one rank of the layout."""
    parts = build(config, rank.mesh, out)
    leave_layout(parts, train_of(parts, data, steps), out, steps, rank.stop, traced=traced)


def train_of(parts: Parts, data: Path, steps: int) -> Samples:
    """Open the training samples of a run's first steps, with the reference's numbers of pairs."""
    train = parts.config.data.open(parts.config, data).train
    return train if parts.config.loss is None else referred_steps(parts, train, steps)


def leave_layout(
    parts: Parts,
    train: Samples,
    folder: Path,
    steps: int,
    stop: StopRequest | None = None,
    *,
    traced: bool = False,
) -> None:
    """Run some steps on one rank and write the rank's record.

    | recorded                                 | when                                                      |
    |------------------------------------------|-----------------------------------------------------------|
    | losses, norms                            | each step, on rank 0                                      |
    | this rank's part of the weights          | before the first step, after the last                     |
    | this rank's part of the gradients        | the first step that did not overflow                      |
    | this rank's part of the optimizer states | after the last step; with a tolerance of `states_early`,  |
    |                                          | after the first step that did not overflow                |
    | outputs of all modules, with `traced`    | the first step                                            |
    """
    recording, known = StepRecording(), dict[str, Any]()
    _keep_places(parts, recording, known, "initial", 0)
    unchecked = parts.config.model_copy(update={"check": Check(every=0)})  # verify finds differing replicas
    trainer = Trainer(replace(parts, config=unchecked), train, late=False)
    losses, norms = list[float | None](), list[float | None]()
    applied, trace, early = False, Trace(parts.model), tolerance_of(parts.config).states_early
    keep_gradients = partial(_keep_places, parts, recording, known, "gradient", 1)
    for step in range(steps):
        with trace if traced and step == 0 else nullcontext():
            (line,), stopping = trainer.turn(stop, None if applied else keep_gradients)
        if stopping:
            return
        first_applied, applied = bool(line["applied"]) and not applied, applied or bool(line["applied"])
        if first_applied if early else step == steps - 1:
            _keep_places(parts, recording, known, STATE, 1 if early else steps)
        first = parts.mesh.rank == 0  # only rank 0 records losses and norms
        losses.append(cast(float, line["loss"]) if first else None)
        norms.append(cast(float, line["grad_norm"]) if first else None)
    _keep_places(parts, recording, known, "weight", steps)
    grid, rank = parts.mesh.grid, parts.mesh.rank
    facts = PartFacts(losses, known, {axis: grid.index(rank, axis) for axis in grid.names}, norms)
    write_record(folder, f"{PARALLEL}-{rank}", recording.tensors, facts, {PASSES[1]: trace})


def _keep_places(parts: Parts, recording: StepRecording, known: dict[str, Any], record_name: str, step: int) -> None:
    """Record this rank's places of all parameters: gradients, weights (masters if there are any), or optimizer states.

    Of ranks with equal copies only the first records.
    """
    for slot, (weight, *states) in parts.stored():
        if parts.mesh.index(*slot.copy_axes):
            continue
        if record_name == "gradient":
            if slot.parameter.grad is None:
                continue  # frozen
            flat = {record_name: replace(weight, values=slot.parameter.grad.double() / parts.optimizer.scaler.scale)}
        else:
            flat = (
                {f"{STATE}{state.kind}": state for state in states} if record_name == STATE else {record_name: weight}
            )
        for index, region in enumerate(slot.places):
            shard_name = f"{region.name}@{'.'.join(map(str, region.box.offsets))}"
            known[shard_name] = box_part(region.name, region.box.offsets, region.box.lengths, region.shape).as_json()
            for name, state in flat.items():
                there = state.places[index]  # differs from the weight's place if the state has another shape
                keep(
                    recording, name, step, {shard_name: state.values[there.start : there.stop].view(there.box.lengths)}
                )


def reference_worker(rank: Rank, config: Config, out: Path, data: Path, steps: int, traced: bool) -> None:
    """Run the reference in one process."""
    leave_reference(config, config.data.open(config, data).train, out, steps, rank.mesh.device, traced=traced)


def leave_reference(
    config: Config, train: Samples, folder: Path, steps: int, device: torch.device, *, traced: bool = False
) -> None:
    """Run the reference's steps and write the record, with whole tensors and the allowed errors.

    Raises DivergedError if no step has a finite gradient.
    """
    rows = config.batch.global_
    outcome = reference_run(config, (train.samples(step * rows, rows) for step in range(steps)), steps, device)
    if not outcome.gradients:
        hint = "lower precision.loss_scale.initial or optimizer.lr, or take more steps"
        raise DivergedError(
            f"no step has a finite gradient (norms: {outcome.norms}), so there is none to compare: {hint}"
        )
    allowed = tolerance_of(config)
    recording = StepRecording()
    for record_name, step, tensors in (("initial", 0, outcome.initial), ("gradient", 1, outcome.gradients),
                                ("weight", steps, outcome.weights)):  # fmt: skip
        keep(recording, record_name, step, tensors)
    for state, tensors in outcome.states.items():
        keep(recording, f"{STATE}{state}", 1 if allowed.states_early else steps, tensors)
    facts = ReferenceFacts(
        list(outcome.weights), outcome.losses, outcome.norms,
        dtype=str(DTYPES[config.precision.dtype]).removeprefix("torch."),
        stated=allowed.by_kind, together=list(TOGETHER) if allowed.together else [],
        dead=[name for name, gradient in outcome.gradients.items() if not gradient.any()],
        frozen=[name for name in outcome.weights if name not in outcome.gradients],
    )  # fmt: skip
    trace = Trace(nn.Module())
    if traced:
        trace, of_modules = trace_reference(config, train.samples(0, rows), device)
        facts = replace(facts, **of_modules)
    write_record(folder, REFERENCE, recording.tensors, facts, {PASSES[1]: trace})
