"""Locate each of a rank's parameters within the reference's weights.

First by value, which needs no declaration and shows a wrong slice as what it is. Norms and biases, whose elements were
all equal until parity spread the reference's, get their new values by what is known of their places: a DTensor's
placements, an equal shape, the rows that the module's weight has.
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
    part: PartOf | None,
    places: Mapping[str, tuple[int, int]],
) -> tuple[dict[str, Part], dict[str, str]]:
    """The part of each parameter, and the parameters that are none, with their shapes.

    `constants`: parameters of the reference that were spread, and their value before. `load`: write the reference's
    values instead of looking for the parameter's own. `places`: this rank's index and the size of every axis, outermost
    first.
    """
    parts: dict[str, Part] = {}
    lost: dict[str, str] = {}
    for name in sorted(parameters, key=lambda name: parameters[name].ndim < 2):  # weights before the biases beside them
        local = local_of(parameters[name])
        stated = _stated(name, parameters[name], wholes, part, parts, places)
        found = None
        if not load:
            # The stated part first: equal slices have several places, and this is the one that the program means.
            values = None if stated is None else stated.take(wholes[stated.name]).to(local.dtype)
            if values is not None and values.shape == local.shape and bool((values == local).all()):
                found = stated
            else:
                # A program may call its parameters otherwise: then any parameter of the reference may be the one.
                likely = [name] if name in wholes else list(wholes)
                by_value = (find_part(other, local, wholes[other].to(local.dtype)) for other in likely)
                found = next((piece for piece in by_value if piece is not None), None)
        if found is None and stated is not None:
            before = constants.get(stated.name)
            # A program that was built anew has the norm's ones where the reference was spread: no mistake, so it gets
            # the values.
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
    name: str, x: Tensor, wholes: Mapping[str, Tensor], part: PartOf | None, parts: Mapping[str, Part],
    places: Mapping[str, tuple[int, int]],
) -> Part | None:  # fmt: skip
    """The part by the user's function, a DTensor's placements, Megatron's attributes, an equal shape, or the module's
    other parameter."""
    # The user's word goes first: it is asked for where all else is silent or wrong.
    if part is not None:
        target, slices = part(name)
        pairs = zip(slices, wholes[target].shape, strict=True)
        return Part(target, tuple(tuple(range(*cut.indices(length))) for cut, length in pairs))
    if name not in wholes:
        return None
    local, whole = local_of(x), wholes[name]
    # A DTensor knows its offsets; a flattened one has other dims and says nothing about this parameter.
    box = box_of(x)
    if box is not None and len(box[0]) == whole.ndim:
        return box_part(name, *box, whole.shape)
    if vars(x).get("tensor_model_parallel") and local.ndim == whole.ndim:
        return _megatron_part(name, local, whole, vars(x)["partition_dim"], vars(x).get("partition_stride", 1), places)
    if local.shape == whole.shape:
        return Part(name, (None,) * whole.ndim)
    # A bias has no values to be found by; its rows are those of the weight beside it, which has been found already.
    module = name.rpartition(".")[0]
    for other, beside in parts.items():
        rows = beside.index[0] if beside.index else None
        if other.rpartition(".")[0] == module and local.ndim == 1 and rows is not None and len(rows) == len(local):
            return Part(name, (rows,))
    return None


def _megatron_part(
    name: str, local: Tensor, whole: Tensor, dim: int, stride: int, places: Mapping[str, tuple[int, int]]
) -> Part | None:
    """The part that Megatron-Core's attributes say: of n ranks rank r holds chunks r, r + n, ... of `stride` * n.

    SwiGLU's fused gate and up have stride 2, q, k and v of whole groups of heads lie beside each other. Tables are
    padded to what divides. The axis is the innermost of the fitting size, as Megatron orders its ranks.
    """
    length, own = whole.shape[dim], local.shape[dim]
    ranks = -(-length // own)
    index = 0 if ranks == 1 else next((i for i, size in list(places.values())[::-1] if size == ranks), None)
    if index is None:
        return None
    chunk = own // stride
    # Chunk s of this rank begins at (s * ranks + index) * chunk of the whole.
    rows = [start + i for s in range(stride) for start in [(s * ranks + index) * chunk] for i in range(chunk)]
    held = tuple(row if row < length else PADDING for row in rows)
    return Part(name, tuple(held if d == dim else None for d in range(whole.ndim)))


def placed_otherwise(
    weights: Mapping[str, Tensor], parts: Mapping[str, Part], wholes: Mapping[str, Tensor]
) -> dict[str, str]:
    """The parts that DTensors' placements name, by parameter, if the values are those of another part.

    Args:
        weights: This rank's tensors by name.
        parts: The parts that their values are.
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
