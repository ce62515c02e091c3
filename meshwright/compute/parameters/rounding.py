"""Stochastic rounding: states and weights that are stored in bf16, and stepped in float32.

bf16 has 8 bits of mantissa. A step that changes a number by less than half of the last bit is lost if the result is
rounded to nearest: with beta2 = 0.999 a second moment v moves by at most 0.001 v toward a smaller square, half of v's
last bit is at least 0.00195 v, and v never falls. Rounded at random, x with bf16 neighbours a <= x <= b becomes

    b with probability (x - a) / (b - a), else a        so that the mean of the rounded x is x

(arXiv 1502.02551; for weights of a bf16 run arXiv 2010.06192). It is one addition: 16 random bits are added to the low
half of the 32 bits of x, and the low half is cut off. A number of bf16 is kept as it is.

The random bits are a hash of (seed, parameter, kind of tensor, applied steps, number of the element in the whole
parameter), with no generator and no state: a rank that holds a part of a parameter draws the bits of the part. Under
every layout and after every resume an element therefore has the same bits. Two elements with numbers 2^32 apart have
equal bits.

All is plain torch, in pieces that stay in a CPU's cache; one fused kernel would be faster on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from meshwright.compute.parameters.bucket import Place, Slot, StepWeights
from meshwright.compute.parameters.shard import Box, seed_of

if TYPE_CHECKING:
    from meshwright.config.schema import OptimizerSection
    from meshwright.strategies.optim.section import StateSpec

WEIGHT = "weight"

PIECE = {"cpu": 2**16, "cuda": 2**22}
"""Elements that are widened at a time: 256 KiB a tensor stay in a CPU's cache, a GPU wants few kernels."""

NOISE_TENSORS = 5
"""Tensors of a piece, of four bytes an element, besides states: the weight, the gradient, and three of noise."""
NOISE_BYTES = 166
"""Bytes an element that the operations of a rounding read and write, widening among them."""

FIRST, SECOND = 0x7FEB352D, 0x846CA68B - 2**32
"""The factors of lowbias32, a hash of 32 bits with little bias (Wellons, hash-prospector). The product's upper half is
used."""


def master_dtype(settings: OptimizerSection, stored: torch.dtype) -> torch.dtype:
    """Return the dtype of the master of weights that are stored in a dtype; the same one if weights have no master."""
    return stored if settings.masters == "bf16" else torch.promote_types(stored, torch.float32)


def state_dtype(settings: OptimizerSection, spec: StateSpec, stored: torch.dtype) -> torch.dtype:
    """Return the dtype of a state of weights that are stored in a dtype."""
    if spec.dtype != "master":
        dtype: torch.dtype = vars(torch)[spec.dtype]
        return dtype
    return torch.bfloat16 if settings.states == "bf16" else torch.promote_types(stored, torch.float32)


@dataclass(frozen=True)
class Draw:
    """The random bits of one step. `steps_taken`: the applied steps before."""

    seed: int
    steps_taken: int

    def noise(self, state_name: str, region: Place, device: torch.device) -> Tensor:
        """Draw 16 bits for each element of a region of the weights or of the state `state_name`, int32 [n]."""
        key = seed_of(f"{self.seed}/{region.name}/{state_name}/{self.steps_taken}")
        bits = global_index(region.shape, region.box, device).add_(_signed(key))
        # The second half of the key is between the rounds: without it the bits of two steps would be one row of
        # numbers, begun at two places.
        bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF)).mul_(FIRST).bitwise_xor_(_signed(key >> 32))
        bits.bitwise_xor_((bits >> 15).bitwise_and_(0x1FFFF)).mul_(SECOND)
        return bits.bitwise_right_shift_(16).bitwise_and_(0xFFFF)

    def round(self, out: Tensor, values: Tensor, state_name: str, places: Sequence[Place]) -> None:
        """Round float32 values [n] to bf16 into out [n], at random. Infinities and NaN stay. `places`: in both; memory
        of no place is left as it is."""
        for region in places:
            wide = values[region.start : region.stop]
            noisy = self.noise(state_name, region, values.device).add_(wide.view(torch.int32)).bitwise_and_(-(2**16))
            # The addition keeps the bits of an infinity; the bits of a NaN may overflow.
            out[region.start : region.stop] = noisy.view(torch.float32).where(wide == wide, wide)


def _signed(value: int) -> int:
    """The number of an int32 with the lowest 32 bits of `value`."""
    return (value + 2**31) % 2**32 - 2**31


def global_index(shape: tuple[int, ...], box: Box, device: torch.device) -> Tensor:
    """Return the numbers of a box's elements in the whole tensor, row by row, modulo 2^32 and signed: int32 [n]."""
    index = torch.zeros((), dtype=torch.int32, device=device)
    for size, offset, length in zip(shape, box.offsets, box.lengths, strict=True):
        along = torch.arange(length, dtype=torch.int32, device=device)
        index = (index * _signed(size)).unsqueeze(-1) + along.add_(_signed(offset))  # int32 wraps around
    return index.flatten()


@dataclass(frozen=True)
class Part:
    """Elements of one kind of a slot's tensors, with their places in `values`."""

    values: Tensor
    places: tuple[Place, ...]
    shape: tuple[int, ...]
    """The shape of the elements for the step."""


def step_rounded(
    slot: Slot, start: int, tensors: Mapping[str, Tensor], gradient: Tensor, specs: Sequence[StateSpec],
    step: StepWeights, draw: Draw,
) -> None:  # fmt: skip
    """Step elements of a slot in float32, a piece at a time, and round each piece to the stored dtypes.

    Args:
        slot: the slot, which is stepped by elements or by matrices.
        start: the first of the slot's elements in `tensors`.
        tensors: the weights, and the states by name, [n].
        gradient: of the weights [n], of any dtype.
        specs: the states, in the order of the step's arguments.
        step: the optimizer's step.
        draw: the random bits.
    """
    narrow = {spec.name for spec in specs if spec.dtype != "master"}  # the optimizer itself steps them as they are
    for parts, piece_gradient in _pieces(slot, start, tensors, gradient, specs):
        wide = {
            name: elements.values
            if elements.values.dtype != torch.bfloat16 or name in narrow
            else elements.values.float()
            for name, elements in parts.items()
        }
        weight, *states = ([values.view(parts[name].shape)] for name, values in wide.items())
        step(weight, [piece_gradient.to(weight[0].dtype).view(parts[WEIGHT].shape)], states, slot.rule)
        for name, elements in parts.items():
            if wide[name] is not elements.values:
                draw.round(elements.values, wide[name], name, elements.places)


def _pieces(
    slot: Slot, start: int, tensors: Mapping[str, Tensor], gradient: Tensor, specs: Sequence[StateSpec]
) -> Iterator[tuple[dict[str, Part], Tensor]]:
    """Yield the parts of the weights and of each state that are stepped at a time, and their gradient."""
    if slot.rule.by == "matrices":
        shapes = {WEIGHT: None} | {spec.name: spec.shape for spec in specs}
        places_by_name = {
            name: slot.state_slices(shape).places if shape else slot.places for name, shape in shapes.items()
        }
        for index, whole in enumerate(slot.places):
            parts = {}
            for name, places in places_by_name.items():
                state_region = places[index]
                shape = state_region.shape if shapes[name] else (state_region.shape[0], -1)
                clipped = tuple(state_region.clip(state_region.start, state_region.stop))
                parts[name] = Part(tensors[name][state_region.start : state_region.stop], clipped, shape)
            yield parts, gradient[whole.start : whole.stop]
        return
    length = PIECE[gradient.device.type]
    for first in range(0, gradient.numel(), length):
        stop = min(first + length, gradient.numel())
        reach = start + first, start + stop
        near = (region for region in slot.places if region.start < reach[1] and reach[0] < region.stop)
        reached = tuple(piece for region in near for piece in region.clip(*reach))
        names = (WEIGHT, *(spec.name for spec in specs))
        yield {name: Part(tensors[name][first:stop], reached, (-1,)) for name in names}, gradient[first:stop]
