"""The record of each side of a comparison: one file of the reference, and one per rank; with a reader.

Tensors have the key (quantity, step, name) for parameters' gradients, weights and optimizer states, or (quantity, call,
path of the module) for traced tensors. Numbers and names are in a JSON file next to the tensors. `meshwright parity`
and `meshwright verify` write the same form, so that one comparison (judge.py) serves both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from meshwright.parity.tensors import TensorFile, write_tensors
from meshwright.parity.trace import Trace
from meshwright.ranks.foreign import read_json

REFERENCE, PARALLEL = "reference", "rank"
"""The names of the two sides' records; a rank's name ends with the rank's number."""
LOCAL = "alone"
"""The quantity: the reference's gradients of one rank's share of the data alone."""
CHUNK = "alone:"
"""Prefix of quantities: the reference's gradients of one chunk of the share's rows: `alone:2:0`, the first of two."""
USE = "use:"
"""Prefix of quantities: the reference's gradients by use of a parameter: `use:0`, the first use in a pass."""
ROUNDED = "rounded:"
"""Prefix of quantities: the reference's gradients after the outputs are rounded to a type: `rounded:bfloat16`."""
UPDATED = "updated-alone"
"""The quantity: weights after the reference's optimizer stepped one rank's part as a whole parameter."""
PASSES = {1: "", 2: "@2"}
"""The traced steps, each with the suffix of quantities in the step's trace."""
PROBES = ("@before", "@after")
"""The suffixes of quantities in the two passes of a probe: before and after some samples change."""
CLIPPED = "clipped"
"""The quantity: a recorded run's gradients after clipping; `gradient` is then the quantity before clipping."""
STATE = "state:"
"""Prefix of quantities: an optimizer's states: `state:exp_avg`."""

StepTensors = Mapping[tuple[str, int, str], Tensor]
"""By quantity, step and name."""


@dataclass(frozen=True)
class ReferenceFacts:
    """Facts of the reference."""

    names: list[str]
    """The parameters."""
    losses: list[float]
    """By step."""
    norms: list[float]
    """By step: the norm of the gradients before clipping."""
    dtype: str
    stated: dict[str, float] = field(default_factory=dict)
    """By quantity, the stated largest relative error; for other quantities the error is derived from `moved`."""
    together: list[str] = field(default_factory=list)
    """Kinds with all parameters compared as one tensor."""
    moved: list[tuple[str, int, str, float]] = field(default_factory=list)
    """(quantity, step, name, relative change by one rounding)."""
    dead: list[str] = field(default_factory=list)
    """Parameters with gradients that are zero everywhere."""
    tied: list[str] = field(default_factory=list)
    """Second names of parameters."""
    clip: float | None = None
    batch: dict[str, list[int]] = field(default_factory=dict)
    """Shapes of the global batch's tensors, by key."""
    unequal: bool = False
    """True if the samples of the last step have unequal numbers of labels."""
    stale_loss: float | None = None
    """The loss of the first weights on the second batch."""
    order: list[tuple[str, int]] = field(default_factory=list)
    """(module, call) in the order of ending forward passes."""
    consumers: dict[str, str] = field(default_factory=dict)
    """By module, the module that reads the output."""
    parents: dict[str, str] = field(default_factory=dict)
    classes: dict[str, str] = field(default_factory=dict)
    frozen: list[str] = field(default_factory=list)
    """Parameters without requires_grad."""
    narrow: str = ""
    """A narrower type to which the reference itself rounds."""
    rates: list[list[float]] = field(default_factory=list)
    """Learning rates by step."""
    buffers: list[str] = field(default_factory=list)
    """Buffers that training changes."""
    probe: str = ""
    """Key of the samples that the probe changes."""


@dataclass(frozen=True)
class PartFacts:
    """Facts of one rank."""

    losses: list[float | None]
    """By step; None if this rank has no loss."""
    parts: dict[str, Any]
    """By this rank's name of a tensor, the part of the reference's parameter."""
    coordinates: dict[str, int]
    norms: list[float | None] = field(default_factory=list)
    """By step; None if this rank has no norm."""
    lost: dict[str, str] = field(default_factory=dict)
    """First weights that are no part of the reference's parameters."""
    dropout: bool = False
    """True if the last step had dropout."""
    halves: bool = False
    """True if the second step added up the gradients of two halves of the samples."""
    rows: dict[str, Any] = field(default_factory=dict)
    """By key, this rank's part of the global batch."""
    alike: dict[str, list[Any]] = field(default_factory=dict)
    """By key, all parts of the global batch with equal values."""
    counts: list[int | None] = field(default_factory=list)
    """By step, the number of labels in this rank's share."""
    stepped: list[int] = field(default_factory=list)
    """By step, the number of steps of an optimizer."""
    rates: list[list[float]] = field(default_factory=list)
    """By step, the optimizers' learning rates."""
    micro: int = 1
    """Number of microbatches in the first step."""
    probed: bool = False
    """True if the passes of the probe are recorded."""
    said: dict[str, str] = field(default_factory=dict)
    """By name, the part according to a DTensor's placements, if the tensor holds another part."""


COARSE = ("bfloat16", "float16")
"""Dtypes with coarse rounding, for which copies are also compared with each other: their bits must be equal."""

SideFacts = TypeVar("SideFacts", ReferenceFacts, PartFacts)


def write_record(
    folder: Path, name: str, tensors: StepTensors, facts: ReferenceFacts | PartFacts,
    traces: Mapping[str, Trace] | None = None,
) -> None:  # fmt: skip
    """Write one side's record to a folder. `traces`: by the suffix of the pass."""
    # "|" is in no name of a parameter or module.
    named = {f"{quantity}|{step}|{parameter}": x for (quantity, step, parameter), x in tensors.items()}
    for at, trace in (traces or {}).items():
        named |= {f"{quantity}{at}|{call}|{module}": x for (quantity, module, call), x in trace.tensors.items()}
    write_tensors(folder / f"{name}.safetensors", named)
    (folder / f"{name}.json").write_text(json.dumps(asdict(facts)))


class SideRecord(Generic[SideFacts]):
    """Reader of one side's record: facts, and tensors in float64."""

    def __init__(self, folder: Path, name: str, facts: type[SideFacts]) -> None:
        self.facts: SideFacts = facts(**read_json(folder / f"{name}.json"))
        self._file = TensorFile(folder / f"{name}.safetensors")
        self._keys = self._file.keys

    def get(self, quantity: str, step: int, name: str) -> Tensor | None:
        """Return a tensor in float64, by quantity, step (or call) and name (or module's path); None if not recorded."""
        key = f"{quantity}|{step}|{name}"
        if key not in self._keys:
            return None
        x = self._file.get(key)
        # Differences in narrower types would round again, by about the measured error.
        return x.to(torch.float64)

    @cached_property
    def recorded(self) -> set[tuple[str, int]]:
        """The quantities and steps of recorded tensors."""
        return {(quantity, int(step)) for quantity, step, _ in (key.split("|", 2) for key in self._keys)}

    def num_calls(self, name: str, at: str = "") -> int:
        """Return the number of calls of a module in a traced pass of this side. `at`: the suffix of the pass."""
        return next(call for call in count() if f"output{at}|{call}|{name}" not in self._keys)

    def unused(self, name: str, at: str = "") -> bool:
        """Return True if the gradients of a module's outputs are zero everywhere."""
        calls = range(self.num_calls(name, at))
        gradients = [x for n in calls if (x := self.get(f"output-gradient{at}", n, name)) is not None]
        return bool(gradients) and not any(x.any() for x in gradients)

    def call(
        self, quantity: str, name: str, call: int, calls: int, skip: int = 0, once: bool = True, at: str = "",
        dim: int = 0,
    ) -> Tensor | None:  # fmt: skip
        """Return a module's tensor in one call of a pass, with all microbatches joined to the batch.

        Args:
            quantity: `output`, `input`, `output-gradient` or another traced quantity.
            name: the module.
            call: index of the call in a pass over the model, from 0.
            calls: number of calls in a pass over the model.
            skip: number of first calls that belong to no microbatch.
            once: keep a tensor that is equal in all microbatches (a table of positions) once, and add the gradients.
            at: the suffix of the traced pass.
            dim: the dim along which microbatches are joined; 1 if the loss is computed in chunks of the sequence.
        """
        every = range(self.num_calls(name, at))
        # A pass without gradients, by a pipeline that infers shapes, is no microbatch.
        first = next((n for n in every if f"output-gradient{at}|{n}|{name}" in self._keys), len(every))
        trained = every[first:]
        # Call i of microbatch m is number m * calls + i.
        numbers = (trained or every)[skip + call :: calls]
        tensors = [x for n in numbers if (x := self.get(f"{quantity}{at}", n, name)) is not None]
        if len(tensors) < 2 or tensors[0].ndim == 0:  # every microbatch's loss has the gradient 1
            return tensors[0] if tensors else None
        outputs = [x for n in numbers if (x := self.get(f"output{at}", n, name)) is not None]
        if once and all(torch.equal(x, outputs[0]) for x in outputs):
            return torch.stack(tensors).sum(0) if quantity == "output-gradient" else tensors[0]
        # Tensors with other shapes besides that dim cannot be joined: the first one is returned.
        beside = {tuple(y.shape[:dim]) + tuple(y.shape[dim + 1 :]) for y in tensors}
        alike = len(beside) == 1 and tensors[0].ndim > dim
        return torch.cat(tensors, dim) if alike else tensors[0]
