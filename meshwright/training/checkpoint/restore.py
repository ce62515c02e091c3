"""The pieces that each rank writes into a checkpoint, and loading of a checkpoint written by any layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from meshwright.compute.models.adapter_section import INSIDE
from meshwright.compute.models.chain import make_chain
from meshwright.compute.parameters.bucket import Place, Slices
from meshwright.compute.parameters.shard import Box, ShardSpec, shard_specs
from meshwright.compute.tensor.serial import SerialKit
from meshwright.config.schema import Config, Model
from meshwright.ranks.errors import CheckpointError
from meshwright.ranks.mesh import Mesh, solo_mesh
from meshwright.training.checkpoint.manifest import Best, Progress
from meshwright.training.checkpoint.reader import Checkpoint
from meshwright.training.parts import Parts


@dataclass(frozen=True)
class Piece:
    """This rank's elements, flat, of a `kind` (weight, exp_avg, ...) of a parameter's box.

    `region`: name, shape and box of the parameter, and the box's range in flat memory. `first`: the number in the box,
    row by row, of the first element. `slices`: how ranks share the region's flat memory. The first of these ranks also
    has pieces without elements, so that this rank can list all pieces.
    """

    kind: str
    region: Place
    tensor: Tensor
    slices: Slices = field(default_factory=Slices)
    first: int = 0


def pieces_of(parts: Parts, *, adapters: bool = False) -> Iterator[Piece]:
    """Yield this rank's slices of weights and optimizer states. Of ranks with equal slices only the first has any.

    `adapters`: of adapters alone, since the checkpoint of step 0 has the frozen weights.
    """
    for slot, states in parts.stored():
        for state in states if parts.mesh.index(*slot.copy_axes) == 0 else ():
            slices, values = state.slices, state.values
            index = parts.mesh.index(*slices.axes)
            start = index * slices.length
            for region in slices.places:
                if adapters and INSIDE not in region.name:
                    continue
                begin, end = max(region.start, start), min(region.stop, start + values.numel())
                if region.start < region.stop and (begin < end or index == 0):
                    held = values[begin - start : end - start] if begin < end else values[:0]
                    yield Piece(state.kind, region, held, slices, begin - region.start)


def progress_of(parts: Parts, step: int, samples: int, best: Best | None = None) -> Progress:
    """Return the run's progress after `step` steps. `best`: the run's best validation."""
    optimizer = parts.optimizer
    return Progress(step, samples, optimizer.steps_taken, optimizer.scaler.scale, optimizer.scaler.good_steps, best)


def restore(parts: Parts, checkpoint: Checkpoint) -> Progress:
    """Load weights, optimizer states and loss scaling; return the progress, with the data cursor.

    Tables may have other padding.

    Raises:
        CheckpointError: the checkpoint is damaged, or of another model or optimizer.
    """
    checkpoint.check_frames(parts.mesh.rank, parts.mesh.grid.world_size)  # tensors are checked when read
    _check_shapes(parts.specs, checkpoint, parts.config.model)
    stored, wanted = checkpoint.config.optimizer.name, parts.config.optimizer.name
    state_names = {state_name for _, state_name in checkpoint.manifest.parts}
    if stored != wanted and state_names != {"weight"}:  # a checkpoint of weights only suits every optimizer
        raise CheckpointError(
            f"{checkpoint.folder} holds the states of another optimizer: optimizer.name={wanted} cannot go on from "
            f"those of {stored}; keep optimizer.name={stored}, or begin a new run"
        )
    progress = checkpoint.manifest.progress
    optimizer = parts.optimizer
    optimizer.prepare_states(progress.steps_taken)
    for state in (state for _, states in parts.stored() for state in states):
        # If every step so far overflowed, there are no stored states: states are zero.
        for region in state.places if state.kind in state_names else ():
            if (region.name, state.kind) not in checkpoint.holder(region.name, state.kind).manifest.parts:
                name = region.name
                raise CheckpointError(
                    f"{checkpoint.folder} has no {state.kind} of {name}, which its run did not train: zeros would make "
                    f"the first steps several times too long; keep {name} in model.frozen, or begin a new run from "
                    "its weights (meshwright convert export, and weights=FOLDER)"
                )
            values = _read(checkpoint, region.name, state.kind, region.box)
            state.values[region.start : region.stop] = values.flatten().to(state.values)
    if optimizer.scaler.dynamic and checkpoint.config.precision.dtype == "fp16":
        optimizer.scaler.resume(progress.loss_scale, progress.good_steps)
    # Half-precision weights are cast from the loaded master weights, then sent to the ranks that step other slices.
    optimizer.held.refresh()
    parts.strategy.publish()
    parts.strategy.publish_frozen()
    return progress


@torch.no_grad()
def load_weights(model: nn.Module, specs: dict[str, ShardSpec], mesh: Mesh, checkpoint: Checkpoint) -> None:
    """Load a model's parameters, without an optimizer."""
    _check_shapes(specs, checkpoint, checkpoint.config.model)
    for name, parameter in model.named_parameters():
        stored = _read(checkpoint, name, "weight", specs[name].box(mesh.grid, mesh.rank))
        parameter.copy_(stored.to(parameter))


def _read(checkpoint: Checkpoint, name: str, state_name: str, box: Box) -> Tensor:
    """Read the box of a parameter's tensor, with zeros in padding rows that are not in the checkpoint."""
    runs = checkpoint.holder(name, state_name).manifest.parts.get((name, state_name))
    shape = runs[0].shape if runs else checkpoint.shapes[name]
    if not shape or box.offsets[0] + box.lengths[0] <= shape[0]:
        return checkpoint.read(name, state_name, box)
    rows = max(0, shape[0] - box.offsets[0])
    there = checkpoint.read(name, state_name, Box((shape[0] - rows, *box.offsets[1:]), (rows, *box.lengths[1:])))
    return torch.cat([there, there.new_zeros(box.lengths[0] - rows, *box.lengths[1:])])


def misfit_of(config: Config, checkpoint: Checkpoint) -> str:
    """Describe the first parameter that differs between the checkpoint and the run's model; '' if none differs."""
    whole = make_chain(config, SerialKit(solo_mesh(torch.device("meta"))))
    return _misfit(shard_specs(whole), checkpoint, config.model)


def stateless_of(config: Config, checkpoint: Checkpoint) -> str:
    """Name the first parameter that the run trains and a trained run's checkpoint has no states for; '' if there is
    none."""
    state_names, parts = {state_name for _, state_name in checkpoint.manifest.parts}, checkpoint.manifest.parts
    update = config.optimizer.update
    whole = make_chain(config, SerialKit(solo_mesh(torch.device("meta"))))
    for name, spec in shard_specs(whole).items():
        states = {state.name for state in update.states_of(update.rule_of(spec.role))} & state_names
        if any((name, state) not in parts for state in states):
            return name
    return ""


def _check_shapes(specs: dict[str, ShardSpec], checkpoint: Checkpoint, model: Model) -> None:
    if misfit := _misfit(specs, checkpoint, model):
        raise CheckpointError(f"{checkpoint.folder} is of another model: {misfit}")


def _misfit(specs: dict[str, ShardSpec], checkpoint: Checkpoint, model: Model) -> str:
    shapes = checkpoint.shapes
    # If the models differ only in padding of tables, dropout or frozen parameters, a difference in rows is padding
    # (older versions had no padding in positions), and weights have the same meaning.
    free = dict.fromkeys(("vocabulary_multiple", "dropout", "frozen"))
    for name, spec in specs.items():
        there = shapes.get(name)
        if there == spec.shape:
            continue
        other_rows = there and there[1:] == spec.shape[1:]
        if other_rows and checkpoint.config.model.model_copy(update=free) == model.model_copy(update=free):
            continue
        stored = f"it has {list(there)}" if there is not None else "it has no such parameter"
        return f"{name} should be {list(spec.shape)}, and {stored}"
    extra = sorted(set(shapes) - set(specs))
    return f"it has {extra[0]}, which this one has not" if extra else ""
