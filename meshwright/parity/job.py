"""A check on one rank: both models of the user take steps on equal samples, and are recorded.

The comparison sends no messages: each rank writes a file, rank 0 also the reference's, and the starting process reads
all files (judge.py). So a check works with any communication library, and does not disturb it.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from meshwright.parity.batches import (
    COMPARED_STEPS,
    DROPOUT_STEP,
    HALVED_STEP,
    Loss,
    MakeOptimizer,
    MakeScheduler,
    ReferenceRecipe,
    changed_positions,
    chunks_of,
    count_labels,
    ids_of,
    probe_key,
    tensors_by_key,
)
from meshwright.parity.compare import NARROW
from meshwright.parity.locate import locate, placed_otherwise
from meshwright.parity.parts import Part, find_part, parts_alike
from meshwright.parity.program import Model, SteppedProgram, named_models, takes_job
from meshwright.parity.record import (
    CHUNK,
    LOCAL,
    PARALLEL,
    PASSES,
    PROBES,
    REFERENCE,
    ROUNDED,
    UPDATED,
    USE,
    PartFacts,
    ReferenceFacts,
    write_record,
)
from meshwright.parity.reference import (
    PERTURBED_RUNS,
    UNREADABLE,
    StepRecording,
    cast_model,
    check_repeatable,
    dead_parameters,
    floating_buffers,
    gradient_alone,
    gradient_of_rounded,
    gradients_by_use,
    keep,
    may_accumulate,
    movements,
    record,
    spread_constants,
    without_dropout,
)
from meshwright.parity.trace import Trace
from meshwright.ranks.dtensor import DeviceMesh, device_mesh, local_of
from meshwright.ranks.errors import ParityError
from meshwright.ranks.grid import Grid


def sgd(parameters: list[Tensor]) -> torch.optim.Optimizer:
    """Return the default optimizer of a check."""
    return torch.optim.SGD(parameters, lr=0.1)


DROPOUT_PASS = "@dropout"
"""The suffix of kinds in the pass with dropout."""
STEPS = range(1, COMPARED_STEPS + 1)
MOST_MICRO = 16
"""The largest number of microbatches with gradients that are recorded separately."""


class Place(Protocol):
    """A rank's place in a grid; a Mesh is one."""

    rank: int
    grid: Grid


class ParityJob:
    """A check on one rank: call `reference`, then `parallel`.

    A program's `step` has all of forward, backward, reduction, clipping and optimizer. It returns the loss; None on a
    rank without a loss. Without `step` in `parallel`, parity calls `loss(model, batch).backward()` and the reference's
    optimizer. The second step then adds up gradients of two halves of the samples, if one process gives equal gradients
    that way.

    Without `load` in `parallel`, a weight that is no part of the reference's is a finding.

    Attributes:
        rank: This rank.
        world_size: Number of ranks.
        axes: Names and sizes of the axes, outermost first.
        compared: Whether `parallel` was called.
    """

    def __init__(self, mesh: Place, dtype: torch.dtype | None, folder: Path) -> None:
        self.rank, self.world_size = mesh.rank, mesh.grid.world_size
        self.axes = dict(mesh.grid.axes)
        self._grid, self._dtype, self._folder = mesh.grid, dtype, folder
        self._mesh: DeviceMesh | None = None
        self._model: nn.Module | None = None
        self._recipe: ReferenceRecipe | None = None
        self._constants: dict[str, float] = {}
        self._program: SteppedProgram | None = None
        self.compared = False

    @property
    def device_mesh(self) -> DeviceMesh:
        """torch's device mesh over all ranks, with the check's axes. Collective at the first use."""
        # Not made in __init__, since it opens process groups, which checks of other libraries do not need.
        if self._mesh is None:
            self._mesh = device_mesh(tuple(self.axes.items()))
        return self._mesh

    def index(self, axis: str) -> int:
        """Return this rank's index on an axis."""
        return self._grid.index(self.rank, axis)

    def rows(self, axis: str) -> Callable[[Any], Any]:
        """Return a function for `batch=`: it takes this rank's equal share of rows, by the index on an axis."""
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
        scheduler: MakeScheduler | None = None,
        clip: float | None = None,
        labels: Any = "labels",
    ) -> None:
        """Define the reference: the whole model on one process.

        Parameters without requires_grad are frozen; only their weights are compared.

        Args:
            model: the whole model; cast in place to the check's precision.
            loss: loss(model, batch) returns a scalar.
            batch: batch(generator) makes a global batch.
            optimizer: optimizer(parameters) makes the optimizer of the reference, and of a program without `step`.
            scheduler: scheduler(optimizer) makes a learning-rate scheduler, stepped once per step.
            clip: the global norm to which the reference's gradients are clipped.
            labels: the batch's key of labels; labels of -100 do not count. The third step then has unequal numbers of
                labels on different ranks. None: no such step.
        """
        if self._dtype is not None:
            cast_model(model, self._dtype)
        # In the user's model, not in the copy, so that programs built from the model begin with equal values.
        self._constants = spread_constants(model)
        recipe = ReferenceRecipe(loss, batch, optimizer, clip, None, self._dtype, scheduler)
        first = recipe.global_batch(1)
        # The key of the labels if the batch has it, else None.
        numbered = isinstance(labels, int) and isinstance(first, (tuple, list))
        key = labels if (labels in first if isinstance(first, Mapping) else numbered) else None
        ids = ids_of(copy.deepcopy(model), loss, first, key)
        sizes = tuple(sorted({*self.axes.values(), self.world_size}))
        recipe = replace(recipe, labels=key, ids=ids, sizes=sizes, probe=probe_key(first, ids, key))
        self._model, self._recipe = copy.deepcopy(model), recipe
        with without_dropout(self._model), torch.random.fork_rng(devices=[]):
            self._calls, still = self._probe_reference(recipe)
            self._recipe = recipe = recipe if still else replace(recipe, probe=None)
            # Only on rank 0: other ranks would compute the same.
            if self.rank == 0:
                narrow = check_repeatable(self._model, recipe)
                self._write_reference(record(self._model, recipe, COMPARED_STEPS), narrow)
        torch.manual_seed(1)  # equal random state on all ranks, though only rank 0 trained

    def _probe_reference(self, recipe: ReferenceRecipe) -> tuple[Counter[str], bool]:
        """Run the probe on the reference.

        Returns:
            (number of calls of each module in a pass, True if some output of a changed row stays unchanged, so that a
            probe can show a leak).
        """
        model, traces = copy.deepcopy(self._known[0]), []
        for batch in recipe.probe_batches or (recipe.global_batch(1),):
            traces.append(Trace(model))
            with traces[-1], torch.no_grad():
                recipe.loss(model, batch)
        calls = Counter(name for name, _ in traces[0].order)
        if recipe.probe is None:
            return calls, False
        shape = tensors_by_key(recipe.global_batch(1))[recipe.probe].shape[:2]
        rows = [row for row, position in enumerate(changed_positions(*shape)) if position is not None]
        pairs = ((x, traces[1].tensors.get(key)) for key, x in traces[0].tensors.items() if key[0] == "output")
        still = (x.shape[:2] == shape and y is not None and x.shape == y.shape and (x[rows] == y[rows]).all(-1).any()
                 and not torch.equal(x, y) for x, y in pairs if x.ndim > 2)  # fmt: skip
        return calls, any(still)

    def copy(self) -> nn.Module:
        """Return a copy of the reference's model with the first weights, to make parallel."""
        return copy.deepcopy(self._known[0])

    @property
    def _known(self) -> tuple[nn.Module, ReferenceRecipe]:
        if self._model is None or self._recipe is None:
            raise ParityError("job.parallel() was called before job.reference(): say first what is right")
        return self._model, self._recipe

    def _write_reference(self, exact: StepRecording, narrow: str) -> None:
        model, recipe = self._known
        trace = exact.traces[PASSES[1]]
        initial = {name: p.detach() for name, p in model.named_parameters()}
        frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
        # First weights are in the record, so that the judge needs neither the model nor its code.
        keep(exact, "initial", 0, initial)
        for name, uses in gradients_by_use(model, recipe).items():
            for index, x in enumerate(uses):
                keep(exact, f"{USE}{index}", 1, {name: x})
        born = next(iter(initial.values())).dtype
        for name, coarse in NARROW:
            if torch.finfo(coarse).eps > torch.finfo(born).eps:
                keep(exact, f"{ROUNDED}{name}", 1, gradient_of_rounded(model, recipe, coarse))
        with torch.no_grad():
            # The loss in the second step of a program that steps other weights than it computes with. Computed on a
            # copy, since a pass may change running statistics.
            stale = float(recipe.loss(copy.deepcopy(model), recipe.global_batch(2)))
        # Tied parameters appear once in `named_parameters()`; second names need remove_duplicate=False.
        names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        parents = {name: name.rpartition(".")[0] for name, _ in model.named_modules() if name}
        moved = [name for name, x in floating_buffers(model).items()
                 if any(not torch.equal(x, exact.tensors["buffer", step, name])
                        for step in range(1, COMPARED_STEPS + 1))]  # fmt: skip
        facts = ReferenceFacts(
            names=list(initial), losses=exact.losses, norms=exact.norms,
            dtype=str(next(iter(initial.values())).dtype).removeprefix("torch."),
            moved=movements(exact, (record(model, recipe, COMPARED_STEPS, seed) for seed in range(PERTURBED_RUNS))),
            dead=dead_parameters(exact, [name for name in initial if name not in frozen]),
            tied=[name for name in names if name not in initial], clip=recipe.clip,
            batch={key: list(x.shape) for key, x in tensors_by_key(recipe.global_batch(1)).items()},
            unequal=recipe.labels is not None, stale_loss=stale, order=trace.order,
            consumers=trace.consumers, parents=parents,
            classes={name: type(module).__name__ for name, module in model.named_modules()},
            frozen=frozen, narrow=narrow, rates=exact.rates, buffers=moved, probe=recipe.probe or "",
        )  # fmt: skip
        write_record(self._folder, REFERENCE, exact.tensors, facts, exact.traces)

    def parallel(
        self,
        model: Model,
        loss: Loss | None = None,
        step: Callable[..., Any] | None = None,
        batch: Callable[[Any], Any] | None = None,
        *,
        load: bool = False,
        part: Callable[[str], tuple[str, tuple[slice, ...]]] | None = None,
        gradients: bool = True,
        weights: Callable[[], Mapping[str, Tensor]] | None = None,
        buffers: bool = True,
    ) -> None:
        """Run the same training by the parallel program. Call once on every rank.

        Args:
            model: a module; or stages: a list of modules with the reference's names, or a mapping by reference path.
            loss: the loss function; None: the reference's.
            step: step(model, batch) or step(model, batch, job) takes one whole step, and returns the loss or None.
            batch: batch(global_batch) returns this rank's share; None: the whole batch.
            load: write the reference's weights, by `part`, a DTensor's placements or Megatron-Core's attributes.
            part: part(name) returns (the reference's name, slices) of this rank's parameter `name`.
            gradients: whether `.grad` holds the whole gradient before the optimizer's step; see `keep_gradients`.
            weights: weights() returns this rank's weights between steps, if parameters do not hold them (ZeRO 3).
            buffers: compare buffers.
        """
        (whole, recipe), self.compared = self._known, True
        # The program's norm for clipping is compared, so parity cannot clip for the program.
        if step is None and recipe.clip is not None:
            raise ParityError("job.reference(clip=...) needs job.parallel(step=...), which clips as the program does")
        wholes = {name: p.detach() for name, p in whole.named_parameters()}
        axes = {axis: (self.index(axis), size) for axis, size in self.axes.items()}
        if step is not None and takes_job(step):
            given = step
            step = lambda model, batch: given(model, batch, self)  # noqa: E731
        optimizer = None if step else recipe.optimizer([p for _, m in named_models(model) for p in m.parameters()])
        self._program = program = SteppedProgram(
            model, frozenset(name for name, _ in whole.named_modules()), weights, loss or recipe.loss, step, optimizer,
            None if optimizer is None or recipe.scheduler is None else recipe.scheduler(optimizer),
            batch or (lambda everything: everything), gradients, buffers,
            step is None and may_accumulate(whole, recipe, recipe.global_batch(HALVED_STEP)),
        )  # fmt: skip
        parts, lost = locate(program.weights(), wholes, self._constants, load, part, axes)
        # Read before the steps change the values that gave the parts.
        said = placed_otherwise(program.weights(), parts, wholes)
        recording, drops, probed = self._take_steps(program)
        micro = self._keep_alone(recording, parts, program.share if batch else None)
        first = recipe.global_batch(1)
        taken, wanted = tensors_by_key(program.share(first)), tensors_by_key(first)
        # Samples with another number of dims have a private form. None: right number of dims, but no part of the batch.
        found = {k: find_part(k, x, wanted[k]) for k, x in taken.items() if k in wanted and x.ndim == wanted[k].ndim}
        facts = PartFacts(
            program.losses, {n: p.as_json() for n, p in parts.items()}, {axis: self.index(axis) for axis in self.axes},
            lost=lost, dropout=drops, halves=program.halves, stepped=program.stepped, rates=recording.rates,
            rows={key: None if p is None else p.as_json() for key, p in found.items()}, micro=micro,
            alike={k: [p.as_json() for p in parts_alike(k, taken[k], wanted[k])] for k, p in found.items() if p},
            counts=[count_labels(program.share(recipe.global_batch(n)), recipe.labels) for n in STEPS], probed=probed,
            said=said,
        )  # fmt: skip
        write_record(self._folder, f"{PARALLEL}-{self.rank}", recording.tensors, facts, recording.traces)

    def _take_steps(self, program: SteppedProgram) -> tuple[StepRecording, bool, bool]:
        """Take all steps of the program: the compared steps, the probe, and one step with dropout.

        Returns:
            (recording, True if the model has dropout, True if the probe left the weights unchanged).
        """
        recipe, recording = self._known[1], StepRecording()
        with without_dropout(*(m for _, m in named_models(program.model))) as drops:
            for step in STEPS:
                at = None if step > 1 and program.compiled else PASSES.get(step)
                program.take_step(recording, step, program.share(recipe.global_batch(step)), at)
            probed = bool(recipe.probe) and program.take_probe(
                recording, dict(zip(PROBES, map(program.share, recipe.probe_batches), strict=True))
            )
        if drops:  # last, since random masks move weights away from the reference's
            program.take_step(recording, DROPOUT_STEP, program.share(recipe.global_batch(1)), DROPOUT_PASS)
        return recording, drops, probed

    def _keep_alone(
        self, recording: StepRecording, parts: Mapping[str, Part], share: Callable[[Any], Any] | None
    ) -> int:
        """Record the results of known mistakes, for the judge to compare with.

        These are the gradient of this rank's share alone, of each microbatch, and the optimizer's update of each part
        alone. Returns the number of microbatches.
        """
        whole, recipe = self._known
        samples = recipe.global_batch(1) if share is None else share(recipe.global_batch(1))
        # The number of microbatches follows from the number of calls of modules.
        called = Counter(name for name, _ in recording.traces[PASSES[1]].order)
        ratios = Counter(called[name] // n for name, n in self._calls.items() if called[name] % n == 0)
        micro = max((ratio for ratio in ratios if ratio), key=lambda ratio: ratios[ratio], default=1)
        if share is not None:
            keep(recording, LOCAL, 1, gradient_alone(whole, recipe, [samples]))
        if 1 < micro <= MOST_MICRO:
            for index, chunk in enumerate(chunks_of(samples, micro)):
                keep(recording, f"{CHUNK}{micro}:{index}", 1, gradient_alone(whole, recipe, [chunk]))
        gradients = {
            name: x for (quantity, step, name), x in recording.tensors.items() if (quantity, step) == ("gradient", 1)
        }
        wholes = {name: p.detach() for name, p in whole.named_parameters()}
        local: dict[str, Tensor] = {
            name: nn.Parameter(shard.take(wholes[shard.name]).to(gradients[name]))
            for name, shard in parts.items()
            if name in gradients
        }
        if any(not parts[name].whole for name in local):
            for name, p in local.items():
                p.grad = gradients[name].view_as(p)
            try:
                recipe.optimizer(list(local.values())).step()
            except UNREADABLE:  # an optimizer that needs whole shapes
                return micro
            keep(recording, UPDATED, 1, {n: local_of(p) for n, p in local.items() if not parts[n].whole})
        return micro

    def keep_gradients(self, named: Mapping[str, Tensor]) -> None:
        """Pass this rank's whole gradients by name, inside of `step`, if `.grad` does not hold these."""
        assert self._program is not None
        # Cloned, since the program may reuse the memory before the end of the step.
        self._program.given |= {n: local_of(x).clone() for n, x in self._program.by_reference_names(named).items()}
