"""The inside of a check on one rank: the user's two models are stepped on the same samples, and leave what they gave.

No message is sent for the comparison: each rank writes a file, the first one the reference's as well, and the process
that started them reads all (judge.py). So a check works with any communication library, and disturbs none.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from meshwright.errors import ParityError
from meshwright.parity.locate import locate
from meshwright.parity.parts import find_part
from meshwright.parity.record import LOCAL, REFERENCE, PartFacts, ReferenceFacts, rank_file, write_record
from meshwright.parity.reference import (
    COMPARED_STEPS,
    DROPOUT_STEP,
    HALVED_STEP,
    PERTURBED_RUNS,
    Loss,
    MakeOptimizer,
    ReferenceRecipe,
    StepRecording,
    backward_of,
    cast_model,
    check_repeatable,
    dead_parameters,
    gradient_alone,
    halves_of,
    keep,
    keep_states,
    label_key,
    may_accumulate,
    movements,
    record,
    spread_constants,
    without_dropout,
)
from meshwright.parity.trace import Trace, clean_names
from meshwright.ranks.dtensor import DeviceMesh, device_mesh, gradient_of, local_of
from meshwright.ranks.mesh import Mesh


def sgd(parameters: list[Tensor]) -> torch.optim.Optimizer:
    """The optimizer of a check that names none."""
    return torch.optim.SGD(parameters, lr=0.1)


@dataclass(frozen=True)
class SteppedProgram:
    """A parallel program as `parallel` was told of it. `weights`: this rank's, by the reference's names where it has
    these; `share`: this rank's part of a global batch; `gradients`: whether `.grad` has them; `halves`: one step may be
    taken in two halves of the samples."""

    model: nn.Module
    weights: Callable[[], dict[str, Tensor]]
    loss: Loss
    step: Callable[[Any, Any], Any] | None
    optimizer: torch.optim.Optimizer | None
    share: Callable[[Any], Any]
    gradients: bool
    halves: bool


class ParityJob:
    """A check as one rank sees it: say what the reference is, then what the parallel program is.

    `rank`, `world_size`, `axes` (names and sizes, outermost first); `device_mesh`: torch's, with the axes' names.
    """

    def __init__(self, mesh: Mesh, dtype: torch.dtype | None, folder: Path) -> None:
        self.rank, self.world_size = mesh.rank, mesh.grid.world_size
        self.axes = dict(mesh.grid.axes)
        self._grid, self._dtype, self._folder = mesh.grid, dtype, folder
        self._mesh: DeviceMesh | None = None
        self._model: nn.Module | None = None
        self._recipe: ReferenceRecipe | None = None
        self._constants: dict[str, float] = {}
        self._losses: list[float | None] = []
        self._given: dict[str, Tensor] = {}
        self.compared = False

    @property
    def device_mesh(self) -> DeviceMesh:
        """torch's device mesh over all ranks, with the check's axes. Made when it is first asked for, by all ranks."""
        # Not in __init__: torch then opens process groups, which a check of another library has no use for.
        if self._mesh is None:
            self._mesh = device_mesh(tuple(self.axes.items()))
        return self._mesh

    def index(self, axis: str) -> int:
        """This rank's place on an axis."""
        return self._grid.index(self.rank, axis)

    def rows(self, axis: str) -> Callable[[Any], Any]:
        """For `batch=`: this rank's equal share of the rows of every tensor in a batch, by its place on an axis."""
        index, size = self.index(axis), self.axes[axis]

        def share(batch: Any) -> Any:
            if isinstance(batch, Tensor):
                return batch.chunk(size)[index] if batch.ndim else batch
            if isinstance(batch, Mapping):
                return {key: share(value) for key, value in batch.items()}
            return type(batch)(share(value) for value in batch)

        return share

    def reference(
        self,
        model: nn.Module,
        loss: Loss,
        batch: Callable[[torch.Generator], Any],
        *,
        optimizer: MakeOptimizer = sgd,
        clip: float | None = None,
        labels: Any = "labels",
    ) -> None:
        """The whole model on one process. `loss(model, batch)` is a scalar, `batch(generator)` makes a global batch.

        `optimizer(parameters)` makes the optimizer of the reference, and of a parallel program without `step`. `clip`:
        the global norm to which the reference's gradients are clipped. `labels`: the batch's key of labels whose -100
        do not count; the third step then has unequal numbers of them on different ranks. None: no such step.
        """
        if self._dtype is not None:
            cast_model(model, self._dtype)
        # In the user's model, not in the copy: programs that are built from it later begin with the same values.
        self._constants = spread_constants(model)
        recipe = ReferenceRecipe(loss, batch, optimizer, clip, None, self._dtype)
        self._recipe = ReferenceRecipe(
            loss, batch, optimizer, clip, label_key(recipe.global_batch(1), labels), self._dtype
        )
        self._model = copy.deepcopy(model)
        # One rank is enough, and the others would only compute the same for as long.
        if self.rank == 0:
            with without_dropout(self._model), torch.random.fork_rng(devices=[]):
                check_repeatable(self._model, self._recipe)
                self._write_reference(record(self._model, self._recipe, COMPARED_STEPS))
        torch.manual_seed(1)  # rank 0 has drawn as much as the others

    def copy(self) -> nn.Module:
        """A copy of the reference's model with its first weights: what is to be made parallel."""
        return copy.deepcopy(self._known[0])

    @property
    def _known(self) -> tuple[nn.Module, ReferenceRecipe]:
        if self._model is None or self._recipe is None:
            raise ParityError("job.parallel() was called before job.reference(): say first what is right")
        return self._model, self._recipe

    def _write_reference(self, exact: StepRecording) -> None:
        model, recipe = self._known
        assert exact.trace is not None
        initial = {name: p.detach() for name, p in model.named_parameters()}
        # First weights lie in the record, so that the judge needs neither the model nor its code.
        keep(exact, "initial", 0, initial)
        with torch.no_grad():
            # The loss that a program would report in its second step if it had stepped other weights than it computes
            # with.
            stale = float(recipe.loss(model, recipe.global_batch(2)))
        # Tied parameters appear once under `named_parameters()`; their second names come with the duplicates.
        names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        parents = {name: name.rpartition(".")[0] for name, _ in model.named_modules() if name}
        facts = ReferenceFacts(
            names=list(initial), losses=exact.losses, norms=exact.norms,
            dtype=str(next(iter(initial.values())).dtype).removeprefix("torch."),
            moved=movements(exact, (record(model, recipe, COMPARED_STEPS, seed) for seed in range(PERTURBED_RUNS))),
            dead=dead_parameters(exact, list(initial)), tied=[name for name in names if name not in initial],
            clip=recipe.clip, batch={key: list(x.shape) for key, x in _tensors_by_key(recipe.global_batch(1)).items()},
            unequal=recipe.labels is not None, stale_loss=stale, order=exact.trace.order,
            consumers=exact.trace.consumers, parents=parents,
            classes={name: type(module).__name__ for name, module in model.named_modules()},
        )  # fmt: skip
        write_record(self._folder, REFERENCE, exact.tensors, facts, exact.trace)

    def parallel(
        self,
        model: nn.Module,
        loss: Loss | None = None,
        step: Callable[[Any, Any], Any] | None = None,
        batch: Callable[[Any], Any] | None = None,
        *,
        load: bool = False,
        part: Callable[[str], tuple[str, tuple[slice, ...]]] | None = None,
        gradients: bool = True,
        weights: Callable[[], Mapping[str, Tensor]] | None = None,
    ) -> None:
        """The same training by the parallel program; call it on every rank, once.

        `batch(global_batch)` is this rank's share (without it: all of it). `step(model, batch)` takes one whole step
        (forward, backward, reduction, clipping, optimizer) and returns the loss, or None on a rank that has none;
        without it parity does `loss(model, batch).backward()` and a step of the reference's optimizer, once in two
        halves of the samples whose gradients are added up, where that is the same on one process.
        `load`: give this rank the reference's weights wherever `part(name)`, a DTensor's placements or Megatron-Core's
        attributes say which they are; without it the model must have them already, and what it does not have is a
        finding. `part(name)`: the reference's parameter that this rank's `name` is a part of, and its slices.
        `gradients`: whether `.grad` holds the whole gradient when the optimizer steps; see also `keep_gradients`.
        `weights()`: what this rank holds of the weights between steps, by names of its own, where the model's
        parameters are not that: slices of flat memory, as ZeRO 3 has them while weights are not gathered.
        """
        whole, recipe = self._known
        self.compared = True
        wholes = {name: p.detach() for name, p in whole.named_parameters()}
        axes = {axis: (self.index(axis), size) for axis, size in self.axes.items()}

        def held() -> dict[str, Tensor]:
            return self._by_reference_names(dict(model.named_parameters()) if weights is None else weights())

        parts, lost = locate(held(), wholes, self._constants, load, part, axes)
        share = batch or (lambda everything: everything)
        # Which norm a parallel program clips by is what is to be checked: parity cannot clip in its place.
        if step is None and recipe.clip is not None:
            raise ParityError("job.reference(clip=...) needs job.parallel(step=...), which clips as the program does")
        halves = step is None and may_accumulate(whole, recipe, recipe.global_batch(HALVED_STEP))
        optimizer = None if step is not None else recipe.optimizer(list(model.parameters()))
        program = SteppedProgram(model, held, loss or recipe.loss, step, optimizer, share, gradients, halves)
        recording = StepRecording()
        with without_dropout(model) as drops:
            for number in range(1, COMPARED_STEPS + 1):
                self._step(program, recording, number)
        trace = recording.trace
        assert trace is not None
        if drops:  # last, as its random masks move the weights away from the reference's
            self._step(program, recording, DROPOUT_STEP)
            assert recording.trace is not None
            recording.tensors |= {("dropout", call, name): x for (kind, name, call), x
                                  in recording.trace.tensors.items() if kind == "output"}  # fmt: skip
        own = share(recipe.global_batch(1))
        keep(recording, LOCAL, 1, {} if batch is None else gradient_alone(whole, recipe, own))
        wanted = _tensors_by_key(recipe.global_batch(1))
        found = {key: find_part(key, x, wanted[key]) for key, x in _tensors_by_key(own).items() if key in wanted}
        rows = {key: None if taken is None else taken.as_json() for key, taken in found.items()}
        known_parts, places = {n: p.as_json() for n, p in parts.items()}, {axis: self.index(axis) for axis in self.axes}
        facts = PartFacts(self._losses, known_parts, places, lost=lost, dropout=drops, halves=halves, rows=rows)
        write_record(self._folder, rank_file(self.rank), recording.tensors, facts, trace)

    def keep_gradients(self, named: Mapping[str, Tensor]) -> None:
        """Inside of `step`: this rank's whole gradients by its parameters' names, where they are not in `.grad` when
        the optimizer steps."""
        # Cloned: the program may use their memory again before its step ends.
        self._given |= {name: local_of(x).clone() for name, x in self._by_reference_names(named).items()}

    def _by_reference_names(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors under the names that the reference has for them: without the words of wrappers."""
        names = clean_names(list(named), frozenset(name for name, _ in self._known[0].named_modules()))
        return {names[raw]: x for raw, x in named.items()}

    def _step(self, program: SteppedProgram, recording: StepRecording, number: int) -> None:
        """One step of the parallel program, traced where it is the first or the one with dropout."""
        recipe, model = self._known[1], program.model
        batch = program.share(recipe.global_batch(1 if number == DROPOUT_STEP else number))
        parameters = program.weights()
        kept, optimizers = not program.gradients, set[torch.optim.Optimizer]()

        def keep_gradients(stepped: torch.optim.Optimizer | None = None) -> None:
            nonlocal kept
            if stepped is not None:
                optimizers.add(stepped)
            if not kept:  # at the first of several optimizers
                keep(recording, "gradient", number, {name: gradient_of(p) for name, p in parameters.items()})
            kept = True

        trace = Trace(model, frozenset(name for name, _ in self._known[0].named_modules()))
        # The program's own step may clear gradients as it ends: they are read as the first of its optimizers begins.
        before_optimizers = register_optimizer_step_pre_hook(lambda optimizer, *_: keep_gradients(optimizer))
        with trace if number in (1, DROPOUT_STEP) else nullcontext(), before_optimizers:
            if program.step is not None:
                value = program.step(model, batch)
                keep_gradients()
            else:
                assert program.optimizer is not None
                halves = halves_of(batch) if program.halves and number == HALVED_STEP else []
                value = backward_of(model, program.loss, halves or [batch])
                keep_gradients()
                program.optimizer.step()
                program.optimizer.zero_grad()
        if number in (1, DROPOUT_STEP):
            recording.trace = trace
        if self._given:
            keep(recording, "gradient", number, self._given)
            self._given.clear()
        # None on ranks without a loss, such as a pipeline's first stage.
        self._losses.append(None if value is None else float(local_of(torch.as_tensor(value))))
        # `weights()` again, not `parameters`: wrappers may have put other tensors in their place.
        keep(recording, "weight", number, {n: local_of(p) for n, p in program.weights().items()})
        keep_states(recording, number, optimizers, parameters)


def _tensors_by_key(batch: Any) -> dict[str, Tensor]:
    if isinstance(batch, Tensor):
        return {"batch": batch}
    items = (
        batch.items() if isinstance(batch, Mapping) else enumerate(batch) if isinstance(batch, (tuple, list)) else ()
    )
    return {str(key): x for key, x in items if isinstance(x, Tensor)}
