"""The file that each side of a comparison leaves, and its reader: the reference's, and one a rank.

Tensors lie under a kind, a step and a name (parameters' gradients, weights and optimizer states) or under a kind, a
call and a module's path (what the trace kept); numbers and names stand beside them as JSON. `meshwright parity` and
`meshwright verify` write the same file, so that one comparison (judge.py) serves both.
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
"""The names of the two sides' records; that of a rank ends with its number."""
LOCAL = "alone"
"""The kind of the reference's gradients of one rank's share of the data alone."""
CHUNK = "alone:"
"""Kinds that begin so are the same of one of several chunks of the share's rows: `alone:2:0`, the first of two."""
USE = "use:"
"""Kinds that begin so are the reference's gradients by the uses of a parameter: `use:0`, the first in a pass."""
ROUNDED = "rounded:"
"""Kinds that begin so are the reference's gradients, had its outputs been rounded to a type: `rounded:bfloat16`."""
UPDATED = "updated-alone"
"""The kind of the weights that the reference's optimizer makes of one rank's part as if there were no other."""
PASSES = {1: "", 2: "@2"}
"""The traced steps, and the mark that the kinds of their trace end with."""
PROBES = ("@before", "@after")
"""The marks of the two passes of a probe: before and after some samples change."""
CLIPPED = "clipped"
"""The kind of a recorded run's gradients behind clipping; `gradient` is then the kind of those before it."""
STATE = "state:"
"""Kinds of tensors that begin so are an optimizer's: `state:exp_avg`."""

StepTensors = Mapping[tuple[str, int, str], Tensor]
"""By kind, step and name."""


@dataclass(frozen=True)
class ReferenceFacts:
    """`stated`: the largest relative error of a kind that is promised; of other kinds it is derived from `moved`, what
    one rounding moves by (kind, step, name). `together`: kinds whose parameters are compared as one tensor.

    `dead`: parameters whose gradient is zero everywhere. `frozen`: those that ask for none. `tied`: second names of
    parameters. `batch`: shapes by key.
    `order`: calls of modules as their forward passes end; `consumers`, `parents`, `classes`: of modules, by path.
    `unequal`: the last step's samples have unequal numbers of labels. `stale_loss`: the first weights' on the second
    batch. `narrow`: a narrower type that the reference itself rounds to. `rates`: learning rates by step.
    `buffers`: those that training moves. `probe`: key of the samples that the probe changes.
    """

    names: list[str]
    losses: list[float]
    norms: list[float]
    dtype: str
    stated: dict[str, float] = field(default_factory=dict)
    together: list[str] = field(default_factory=list)
    moved: list[tuple[str, int, str, float]] = field(default_factory=list)
    dead: list[str] = field(default_factory=list)
    tied: list[str] = field(default_factory=list)
    clip: float | None = None
    batch: dict[str, list[int]] = field(default_factory=dict)
    unequal: bool = False
    stale_loss: float | None = None
    order: list[tuple[str, int]] = field(default_factory=list)
    consumers: dict[str, str] = field(default_factory=dict)
    parents: dict[str, str] = field(default_factory=dict)
    classes: dict[str, str] = field(default_factory=dict)
    frozen: list[str] = field(default_factory=list)
    narrow: str = ""
    rates: list[list[float]] = field(default_factory=list)
    buffers: list[str] = field(default_factory=list)
    probe: str = ""


@dataclass(frozen=True)
class PartFacts:
    """`losses` and `norms` by step, None where this rank has none. `parts`: what each of its tensors is of the
    reference's parameters, by its own name. `lost`: first weights that are no part of them. `rows`: which part of every
    tensor of the global batch it took, and `alike` all parts of the same values. `dropout`: the last step was made with
    it. `halves`: the second was made in two halves of the samples, whose gradients were added up. `counts`: labels of
    its share by step. `stepped`: how often an optimizer stepped in each step, `rates`: its learning rates. `micro`:
    microbatches in the first. `probed`: whether the probe's passes are there. `said`: the parts by the placements of
    DTensors that hold another part."""

    losses: list[float | None]
    parts: dict[str, Any]
    coordinates: dict[str, int]
    norms: list[float | None] = field(default_factory=list)
    lost: dict[str, str] = field(default_factory=dict)
    dropout: bool = False
    halves: bool = False
    rows: dict[str, Any] = field(default_factory=dict)
    alike: dict[str, list[Any]] = field(default_factory=dict)
    counts: list[int | None] = field(default_factory=list)
    stepped: list[int] = field(default_factory=list)
    rates: list[list[float]] = field(default_factory=list)
    micro: int = 1
    probed: bool = False
    said: dict[str, str] = field(default_factory=dict)


COARSE = ("bfloat16", "float16")
"""Dtypes with coarse rounding, for which copies are also compared with each other: their bits must be equal."""

SideFacts = TypeVar("SideFacts", ReferenceFacts, PartFacts)


def write_record(
    folder: Path, name: str, tensors: StepTensors, facts: ReferenceFacts | PartFacts,
    traces: Mapping[str, Trace] | None = None,
) -> None:  # fmt: skip
    """Leave one side's record in a folder. `traces`: by the mark of their pass."""
    # "|" is in no name of a parameter or module, and dots are in all of them.
    named = {f"{kind}|{step}|{own}": x for (kind, step, own), x in tensors.items()}
    for at, trace in (traces or {}).items():
        named |= {f"{kind}{at}|{call}|{module}": x for (kind, module, call), x in trace.tensors.items()}
    write_tensors(folder / f"{name}.safetensors", named)
    (folder / f"{name}.json").write_text(json.dumps(asdict(facts)))


class SideRecord(Generic[SideFacts]):
    """One side's record, read: its facts, and its tensors in float64."""

    def __init__(self, folder: Path, name: str, facts: type[SideFacts]) -> None:
        self.facts: SideFacts = facts(**read_json(folder / f"{name}.json"))
        self._file = TensorFile(folder / f"{name}.safetensors")
        self._keys = self._file.keys

    def get(self, kind: str, step: int, name: str) -> Tensor | None:
        """A tensor in float64, by kind, step (or call) and name (or module's path); None where it was not kept."""
        key = f"{kind}|{step}|{name}"
        if key not in self._keys:
            return None
        x = self._file.get(key)
        # Differences of narrower types would round once more, by as much as is measured.
        return x.to(torch.float64)

    @cached_property
    def recorded(self) -> set[tuple[str, int]]:
        """The kinds and steps of which there are tensors."""
        return {(kind, int(step)) for kind, step, _ in (key.split("|", 2) for key in self._keys)}

    def num_calls(self, name: str, at: str = "") -> int:
        """How often a module was called in a traced pass of this side; `at`: the mark of the pass."""
        return next(call for call in count() if f"output{at}|{call}|{name}" not in self._keys)

    def unused(self, name: str, at: str = "") -> bool:
        """Whether a module's outputs have gradients that are zero everywhere."""
        calls = range(self.num_calls(name, at))
        gradients = [x for n in calls if (x := self.get(f"output-gradient{at}", n, name)) is not None]
        return bool(gradients) and not any(x.any() for x in gradients)

    def call(
        self, kind: str, name: str, number: int, calls: int, skip: int = 0, once: bool = True, at: str = "",
        dim: int = 0,
    ) -> Tensor | None:  # fmt: skip
        """A module's tensor in its call `number` of `calls` in a pass over the model, of all microbatches together.

        Microbatches one after the other are the batch. `once`: what a module gives alike in each (a table of positions)
        is kept once; the gradients of its outputs are added. `skip`: calls at the beginning that are no microbatch's.
        `dim`: along which microbatches are put together; 1 where a loss is taken in chunks of the sequence.
        """
        every = range(self.num_calls(name, at))
        # A pass without gradients, by which a pipeline learns its shapes, is no microbatch.
        first = next((n for n in every if f"output-gradient{at}|{n}|{name}" in self._keys), len(every))
        trained = every[first:]
        # Call i of microbatch m is number m * calls + i.
        numbers = (trained or every)[skip + number :: calls]
        tensors = [x for n in numbers if (x := self.get(f"{kind}{at}", n, name)) is not None]
        if len(tensors) < 2 or tensors[0].ndim == 0:  # every microbatch's loss has the gradient 1
            return tensors[0] if tensors else None
        outputs = [x for n in numbers if (x := self.get(f"output{at}", n, name)) is not None]
        if once and all(torch.equal(x, outputs[0]) for x in outputs):
            return torch.stack(tensors).sum(0) if kind == "output-gradient" else tensors[0]
        # What has other shapes beside that dim cannot be put together: the first stands for all.
        beside = {tuple(y.shape[:dim]) + tuple(y.shape[dim + 1 :]) for y in tensors}
        alike = len(beside) == 1 and tensors[0].ndim > dim
        return torch.cat(tensors, dim) if alike else tensors[0]
