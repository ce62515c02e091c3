"""Reads the record of a run: the steps of each rank, with microbatches concatenated and samples at common strides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from meshwright.parity.record import CLIPPED
from meshwright.parity.recorder import RunFacts, StepFacts
from meshwright.parity.sampling import Strides, are_aligned, coarser
from meshwright.parity.tensors import TensorFile
from meshwright.ranks.errors import ParityError
from meshwright.ranks.foreign import plain_folder, read_json

Key = tuple[str, int, str]
"""Kind, call (1 for tensors without calls) and the name of the module or parameter."""


class RenamedFile:
    """A file of tensors with other keys. `names`: new key -> key in the file."""

    def __init__(self, file: TensorFile | RenamedFile, names: Mapping[str, str]) -> None:
        self._file, self._names, self.keys = file, names, set(names)

    def get(self, key: str) -> Tensor:
        return self._file.get(self._names[key])


@dataclass(frozen=True)
class RecordedStep:
    """A recorded step of a rank: facts and tensors."""

    facts: StepFacts
    file: TensorFile | RenamedFile

    @property
    def clipped(self) -> bool:
        """True if gradients are recorded both before and after clipping."""
        return any(text.startswith(f"{CLIPPED}|") for text in self.file.keys)

    def as_stepped(self) -> RecordedStep:
        """Return the step with the optimizer's gradients as `gradient`, and gradients before clipping as
        `raw-gradient`."""
        kinds = {CLIPPED: "gradient", "gradient": "raw-gradient"} if self.clipped else {}

        def renamed(text: str) -> str:
            quantity, rest = text.split("|", 1)
            return f"{kinds.get(quantity, quantity)}|{rest}"

        samples = {renamed(text): x for text, x in self.facts.kept.items()}
        facts = replace(self.facts, kept=samples, norms={renamed(text): x for text, x in self.facts.norms.items()})
        return RecordedStep(facts, RenamedFile(self.file, {renamed(text): text for text in self.file.keys}))

    def kept(self, key: Key, x: Tensor) -> tuple[tuple[int, ...], Strides]:
        """Return (the shape of the whole tensor, the strides of the samples x)."""
        shape, strides = self.facts.kept.get("{}|{}|{}".format(*key), (x.shape, (1,) * x.ndim))
        return tuple(shape), tuple(strides)

    @cached_property
    def tensors(self) -> dict[Key, Tensor]:
        found: dict[Key, Tensor] = {}
        for text in self.file.keys:
            quantity, call, name = text.split("|", 2)
            found[quantity, int(call), name] = self.file.get(text)
        return found


class RecordedRank:
    """One rank's folder. `steps`: the finished steps."""

    def __init__(self, folder: Path) -> None:
        tree = read_json(folder / "run.json")
        self.facts = RunFacts(**tree | {"axes": [(name, size) for name, size in tree["axes"]]})
        self.steps = {int(path.stem.removeprefix("step-")) for path in folder.glob("step-*.json")}
        self._folder = folder

    @cached_property
    def first(self) -> dict[str, Tensor]:
        """The weights before the first step."""
        file = TensorFile(self._folder / "first.safetensors")
        return {name: file.get(name) for name in self.facts.names}

    def step(self, step: int) -> RecordedStep:
        facts = StepFacts(**read_json(self._folder / f"step-{step}.json"))
        return RecordedStep(facts, TensorFile(self._folder / f"step-{step}.safetensors"))


@dataclass(frozen=True)
class RecordedRun:
    """All ranks of a run, in order."""

    folder: Path
    ranks: tuple[RecordedRank, ...]
    axes: tuple[tuple[str, int], ...]
    """Names and sizes of the ranks' axes, outermost first: from the record, or another reading of the ranks."""

    @classmethod
    def read(cls, folder: Path) -> RecordedRun:
        """Read a folder.

        Raises:
            ParityError: the folder has no record, or lacks ranks.
        """
        plain_folder(folder)
        found = {int(path.parent.name.removeprefix("rank-")): path.parent for path in folder.glob("rank-*/run.json")}
        if not found:
            raise ParityError(f"{folder} holds no record: make one with `parity record --out {folder} SCRIPT`")
        ranks = [RecordedRank(found[rank]) for rank in sorted(found)]
        missing = sorted(set(range(ranks[0].facts.world_size)) - set(found))
        if missing:
            raise ParityError(
                f"{folder} lacks rank {missing[0]} of {ranks[0].facts.world_size}: record on all ranks to one folder "
                "that all of them see"
            )
        return cls(folder, tuple(ranks), tuple(ranks[0].facts.axes))

    @property
    def steps(self) -> list[int]:
        """The steps that are finished on all ranks."""
        return sorted(set.intersection(*(rank.steps for rank in self.ranks)))

    @property
    def readings(self) -> list[RecordedRun]:
        """The run with the recorded axes. If no axes were given, also with each pair of axes of the right size."""
        world_size = len(self.ranks)
        if self.axes != (("rank", world_size),):
            return [self]
        sizes = [size for size in range(2, world_size) if world_size % size == 0]
        return [self, *(replace(self, axes=(("outer", size), ("inner", world_size // size))) for size in sizes)]

    @property
    def coordinates(self) -> list[dict[str, int]]:
        """The index of each rank on every axis."""
        names = [name for name, _ in self.axes]
        return [dict(zip(names, indices, strict=True)) for indices in product(*(range(size) for _, size in self.axes))]


def put_together(step: RecordedStep) -> tuple[dict[Key, Tensor], list[tuple[str, int]]]:
    """Join the microbatches of a step to one pass, row by row in the order of the calls.

    A tensor that is equal in all microbatches, such as a table of positions, is kept once; its gradients are summed.

    Returns:
        (tensors of the step, calls of modules in one pass).
    """
    passes = max(1, step.facts.passes)
    calls = Counter(name for name, _ in step.facts.order)
    per_pass = {name: n // passes if n % passes == 0 else n for name, n in calls.items()}
    tensors: dict[Key, Tensor] = {}
    for key, x in step.tensors.items():
        quantity, call, name = key
        n = per_pass.get(name, 0)
        if quantity.startswith("sample:"):
            n = 1
        if quantity not in ("output", "input", "output-gradient") and not quantity.startswith("sample:"):
            tensors[key] = x
        elif call < n:
            parts = [
                step.tensors[at]
                for microbatch in range(passes)
                if (at := (quantity, call + microbatch * n, name)) in step.tensors
            ]
            outputs = [step.tensors[at] for microbatch in range(passes)
                       if (at := ("output", call + microbatch * n, name)) in step.tensors]  # fmt: skip
            tensors[key] = rows_of_microbatches(quantity, parts, outputs)
    order = [(name, call) for name, call in step.facts.order if call < per_pass[name]]
    return tensors, order


def rows_of_microbatches(quantity: str, parts: Sequence[Tensor], outputs: Sequence[Tensor]) -> Tensor:
    if len(parts) < 2 or parts[0].ndim == 0 or len({x.shape[1:] for x in parts}) > 1:
        return parts[0]
    if not quantity.startswith("sample:") and outputs and all(torch.equal(x, outputs[0]) for x in outputs):
        return torch.stack(list(parts)).sum(0) if quantity == "output-gradient" else parts[0]
    return torch.cat(list(parts))


def common_strides(steps: Iterable[RecordedStep]) -> tuple[dict[tuple[str, str], Strides], list[tuple[str, str]]]:
    """Find common samples of the tensors of several steps.

    Returns:
        (strides of the common samples by quantity and name, quantities and names without common samples: parts begin
        between samples, or dims differ).
    """
    samples: dict[tuple[str, str], list[tuple[tuple[int, ...], Strides]]] = {}
    for step in steps:
        for key, x in step.tensors.items():
            samples.setdefault((key[0], key[2]), []).append(step.kept(key, x))
    return _common(samples)


def common_first(ranks: Iterable[RecordedRank]) -> tuple[dict[tuple[str, str], Strides], list[tuple[str, str]]]:
    """Find common samples of the first weights of several ranks, as `common_strides`."""
    samples: dict[tuple[str, str], list[tuple[tuple[int, ...], Strides]]] = {}
    for rank in ranks:
        for name, x in rank.first.items():
            shape, strides = rank.facts.kept.get(name, (x.shape, (1,) * x.ndim))
            samples.setdefault(("first", name), []).append((tuple(shape), tuple(strides)))
    return _common(samples)


def _common(
    samples: Mapping[tuple[str, str], Sequence[tuple[tuple[int, ...], Strides]]],
) -> tuple[dict[tuple[str, str], Strides], list[tuple[str, str]]]:
    found: dict[tuple[str, str], Strides] = {}
    lost: list[tuple[str, str]] = []
    for key, held in samples.items():
        dims = {len(shape) for shape, _ in held}
        if all(max(strides, default=1) == 1 for _, strides in held):
            continue
        strides = tuple(max(column) for column in zip(*(s for _, s in held), strict=True)) if len(dims) == 1 else ()
        if len(dims) > 1 or not are_aligned([shape for shape, _ in held], strides):
            lost.append(key)
        else:
            found[key] = strides
    return found, lost


def at_strides(
    step: RecordedStep, common: Mapping[tuple[str, str], Strides], lost: Iterable[tuple[str, str]]
) -> RecordedStep:
    """Return a step with tensors reduced to the common samples, without the `lost` tensors."""
    gone, tensors = set(lost), {}
    for key, x in step.tensors.items():
        if (at := (key[0], key[2])) not in gone:
            strides = step.kept(key, x)[1]
            tensors[key] = coarser(x, strides, common[at]) if at in common else x
    reduced = RecordedStep(step.facts, step.file)
    vars(reduced)["tensors"] = tensors
    return reduced
