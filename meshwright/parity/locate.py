"""Which part of the reference's weights each parameter of a rank is.

First by value, which asks nothing and hides nothing: a rank that took a wrong slice has it. Norms and biases, whose
elements were all equal until parity spread the reference's, get their new values by what is known of their places: a
DTensor's placements, an equal shape, the rows that the module's weight has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from meshwright.parity.parts import Part, box_part, find_part, is_constant
from meshwright.parity.trace import clean_names
from meshwright.ranks.dtensor import box_of, local_of, write_local

PartOf = Callable[[str], tuple[str, tuple[slice, ...]]]


def locate(
    model: nn.Module,
    wholes: Mapping[str, Tensor],
    constants: Mapping[str, float],
    known: frozenset[str],
    load: bool,
    part: PartOf | None,
) -> tuple[dict[str, Part], dict[str, str]]:
    """The part of each parameter, under the reference's name; and the parameters that are none, with their shapes.

    `constants`: parameters of the reference that were spread, and their value before. `known`: its modules' names.
    `load`: write the reference's values instead of looking for the parameter's own.
    """
    parameters = dict(model.named_parameters())
    names = clean_names(list(parameters), known)
    parts: dict[str, Part] = {}
    lost: dict[str, str] = {}
    for raw in sorted(parameters, key=lambda raw: parameters[raw].ndim < 2):  # weights before the biases beside them
        name, local = names[raw], local_of(parameters[raw])
        stated = _stated(name, parameters[raw], wholes, part, parts)
        found = None
        if not load:
            found = _confirmed(stated, local, wholes) or _found(name, local, wholes)
        if found is None and stated is not None:
            before = constants.get(stated.name)
            fresh = before is not None and is_constant(local) and float(local.flatten()[0]) == before
            if load or fresh:
                write_local(parameters[raw], stated.take(wholes[stated.name]))
                found = stated
        if found is None:
            lost[name] = f"shape {tuple(local.shape)}"
        else:
            parts[name] = found
    return parts, lost


def _stated(
    name: str, x: Tensor, wholes: Mapping[str, Tensor], part: PartOf | None, parts: Mapping[str, Part]
) -> Part | None:
    """The part by the user's function, a DTensor's placements, an equal shape, or the module's other parameter."""
    if part is not None:
        target, slices = part(name)
        pairs = zip(slices, wholes[target].shape, strict=True)
        return Part(target, tuple(tuple(range(*cut.indices(length))) for cut, length in pairs))
    if name not in wholes:
        return None
    local, whole = local_of(x), wholes[name]
    box = box_of(x)
    if box is not None and len(box[0]) == whole.ndim:
        return box_part(name, *box, whole.shape)
    if local.shape == whole.shape:
        return Part(name, (None,) * whole.ndim)
    module = name.rpartition(".")[0]
    for other, beside in parts.items():
        rows = beside.index[0] if beside.index else None
        if other.rpartition(".")[0] == module and local.ndim == 1 and rows is not None and len(rows) == len(local):
            return Part(name, (rows,))
    return None


def _confirmed(part: Part | None, local: Tensor, wholes: Mapping[str, Tensor]) -> Part | None:
    """The stated part, where the local values are its."""
    if part is None:
        return None
    values = part.take(wholes[part.name]).to(local.dtype)
    return part if values.shape == local.shape and bool((values == local).all()) else None


def _found(name: str, local: Tensor, wholes: Mapping[str, Tensor]) -> Part | None:
    """The part by value: of the parameter of this name, else of any."""
    candidates = [name] if name in wholes else list(wholes)
    parts = (find_part(other, local, wholes[other].to(local.dtype)) for other in candidates)
    return next((found for found in parts if found is not None), None)
