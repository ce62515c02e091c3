"""Locate each of a rank's parameters within the reference's weights.

Parameters are located by value first, which needs no declaration and finds wrong slices. Norms and biases had constant
values until parity changed the reference's elements (`spread_constants`). These parameters get new values by other
facts on their places: a DTensor's placements, an equal shape, the rows of the module's weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from meshwright.parity.parts import PADDING, Part, box_part, find_part, is_constant
from meshwright.ranks.dtensor import box_of, is_strided, local_of, write_local

PartOf = Callable[[str], tuple[str, tuple[slice, ...]]]


def locate(
    parameters: Mapping[str, Tensor],
    wholes: Mapping[str, Tensor],
    constants: Mapping[str, float],
    load: bool,
    slices_of: PartOf | None,
    places: Mapping[str, tuple[int, int]],
) -> tuple[dict[str, Part], dict[str, str]]:
    """Locate each parameter.

    Args:
        parameters: this rank's parameters by name.
        wholes: the reference's parameters by name.
        constants: by name, the value of a reference's parameter before its elements were changed.
        load: write the reference's values instead of searching for the parameter's values.
        slices_of: the user's function: slices_of(name) gives the reference's name and slices.
        places: (this rank's index, size) of every axis, outermost first.

    Returns:
        (part of each located parameter, shapes of other parameters).
    """
    parts: dict[str, Part] = {}
    lost: dict[str, str] = {}
    for name in sorted(parameters, key=lambda name: parameters[name].ndim < 2):  # a module's weight before the bias
        local = local_of(parameters[name])
        stated = _stated(name, parameters[name], wholes, slices_of, parts, places)
        found = None
        if not load:
            # The stated part first: equal slices have several places, and the program states the intended one.
            values = None if stated is None else stated.take(wholes[stated.name]).to(local.dtype)
            if values is not None and values.shape == local.shape and bool((values == local).all()):
                found = stated
            else:
                # A program may use other names: then any parameter of the reference may match.
                likely = [name] if name in wholes else list(wholes)
                by_value = (find_part(candidate, local, wholes[candidate].to(local.dtype)) for candidate in likely)
                found = next((piece for piece in by_value if piece is not None), None)
        if found is None and stated is not None:
            before = constants.get(stated.name)
            # A newly built program still has the constant (a norm's ones) from before the reference was changed. That
            # is no mistake, so the values are written.
            fresh = before is not None and is_constant(local) and float(local.flatten()[0]) == before
            if load or fresh:
                write_local(parameters[name], stated.take(wholes[stated.name]))
                found = stated
        if found is None:
            lost[name] = f"shape {tuple(local.shape)}"
        else:
            parts[name] = found
    return parts, lost


def _stated(
    name: str, x: Tensor, wholes: Mapping[str, Tensor], slices_of: PartOf | None, parts: Mapping[str, Part],
    places: Mapping[str, tuple[int, int]],
) -> Part | None:  # fmt: skip
    """Return the part by the user's function, a DTensor's placements, Megatron's attributes, an equal shape, or the
    module's other parameter; None if none applies."""
    # The user's function has priority: it is given if other sources are missing or wrong.
    if slices_of is not None:
        target, slices = slices_of(name)
        pairs = zip(slices, wholes[target].shape, strict=True)
        return Part(target, tuple(tuple(range(*cut.indices(length))) for cut, length in pairs))
    if name not in wholes:
        return None
    local, whole = local_of(x), wholes[name]
    # A DTensor has offsets, but a flattened one has other dims and does not describe this parameter.
    box = box_of(x)
    if box is not None and len(box[0]) == whole.ndim:
        return box_part(name, *box, whole.shape)
    if vars(x).get("tensor_model_parallel") and local.ndim == whole.ndim:
        return _megatron_part(name, local, whole, vars(x)["partition_dim"], vars(x).get("partition_stride", 1), places)
    if local.shape == whole.shape:
        return Part(name, (None,) * whole.ndim)
    # A constant bias cannot be found by value; it has the rows of the module's weight, which is already located.
    module = name.rpartition(".")[0]
    for sibling, beside in parts.items():
        rows = beside.index[0] if beside.index else None
        if sibling.rpartition(".")[0] == module and local.ndim == 1 and rows is not None and len(rows) == len(local):
            return Part(name, (rows,))
    return None


def _megatron_part(
    name: str, local: Tensor, whole: Tensor, dim: int, stride: int, places: Mapping[str, tuple[int, int]]
) -> Part | None:
    """Return the part by Megatron-Core's attributes: of n ranks, rank r holds chunks r, r + n, ... of `stride` * n.

    SwiGLU's fused gate and up have stride 2; q, k and v are stored group by group. Tables are padded to a divisible
    size. The axis is the innermost axis of the fitting size, as in Megatron's order of ranks.
    """
    length, local_length = whole.shape[dim], local.shape[dim]
    ranks = -(-length // local_length)
    index = 0 if ranks == 1 else next((i for i, size in list(places.values())[::-1] if size == ranks), None)
    if index is None:
        return None
    chunk = local_length // stride
    # Chunk s of this rank begins at (s * ranks + index) * chunk of the whole.
    rows = [start + i for s in range(stride) for start in [(s * ranks + index) * chunk] for i in range(chunk)]
    held = tuple(row if row < length else PADDING for row in rows)
    return Part(name, tuple(held if d == dim else None for d in range(whole.ndim)))


def placed_otherwise(
    weights: Mapping[str, Tensor], parts: Mapping[str, Part], wholes: Mapping[str, Tensor]
) -> dict[str, str]:
    """Return the parts by DTensors' placements, for parameters with the values of another part.

    Args:
        weights: This rank's tensors by name.
        parts: The parts by value.
        wholes: The reference's tensors by name.
    """
    said: dict[str, str] = {}
    for name, x in weights.items():
        box = None if name not in parts or is_strided(x) else box_of(x)
        whole = wholes[parts[name].name] if box is not None else None
        if box is not None and whole is not None and len(box[0]) == whole.ndim:
            named = box_part(parts[name].name, *box, whole.shape)
            if named != parts[name]:
                said[name] = str(named)
    return said
