"""`python -m tests.training.typed`: the 32 planted mistakes and 30 right programs of tests.parity, by types alone.

Each program's rank runs on meta tensors, and meshwright/typed follows the verbs of torch.distributed. There is no other
rank and no number. Prints a row a mistake: the error, or the reason why types cannot tell the mistake; and the right
programs that are refused.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from meshwright.ranks.comm import Comm
from meshwright.ranks.errors import SumError
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from meshwright.training.typed.check import check_sharding, refused
from meshwright.training.typed.sharding import Sharding, cut_at, uncut
from meshwright.training.typed.verbs import typed_mesh
from meshwright.training.typed.watch import Neighbour, Watch
from tests.parity import programs
from tests.parity.cases import MISTAKES, RIGHT
from tests.parity.programs import ROWS, TOKENS, Program, Setting, Transformer

FACTOR = "a factor: every sum is made, over the right axis"
PART = "a part of the right size, but another"
DATA = "random numbers are not followed"
LATER = "a mistake after the gradients: weights, states, the next step"
WHY_NOT = {
    "qkv-contiguous": PART, "same-slice": PART, "positions": PART, "vocabulary-mask": PART,
    "mean-for-sum": FACTOR, "counts-ignored": FACTOR, "micro-mean": FACTOR,
    "dropout": DATA, "tied-once": "a term that is left out, and no sum between ranks",
    "not-zeroed": LATER, "not-published": LATER, "stale-copy": LATER, "decay-on-all": LATER,
}  # fmt: skip
"""The mistakes that types do not tell, and why."""


@dataclass
class Verbs:
    """torch.distributed as the programs call it; a group is an axis's name."""

    mesh: Mesh

    def _comm(self, group: Any) -> Comm:
        return self.mesh.world if group is None else self.mesh.comm(group)

    def get_world_size(self, group: Any) -> int:
        return self._comm(group).size

    def get_rank(self, group: Any) -> int:
        return self._comm(group).index

    def all_reduce(self, x: Tensor, group: Any = None) -> None:
        self._comm(group).all_reduce(x)

    def all_gather(self, parts: list[Tensor], x: Tensor, group: Any = None) -> None:
        everyone = x.new_empty(len(parts), *x.shape)
        self._comm(group).all_gather(everyone, x)
        for part, own in zip(parts, everyone, strict=True):
            part.copy_(own)

    def broadcast(self, x: Tensor, src: int) -> None:
        self.mesh.world.broadcast(x, src)


@dataclass
class Job:
    """A stand-in for ParityJob with the attributes and methods that the programs use."""

    mesh: Mesh
    setting: Setting
    axes: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.axes = dict(self.setting.axes)

    @property
    def device_mesh(self) -> Job:
        return self

    def get_group(self, axis: str) -> str:
        return axis

    def index(self, axis: str) -> int:
        return self.mesh.index(axis)

    @property
    def rank(self) -> int:
        return self.mesh.rank

    def copy(self) -> nn.Module:
        with torch.device("meta"):
            return Transformer(self.setting.dropout, self.setting.tied)


CUT = {"qkv.weight": 0, "qkv.bias": 0, "up.weight": 0, "up.bias": 0, "out.weight": 1, "down.weight": 1}


def cut_dim(name: str, setting: Setting) -> int | None:
    """Return the dim of a parameter that tp cuts."""
    if "tp" not in dict(setting.axes):
        return None
    if setting.vocabulary and name in ("tokens.weight", "head.weight"):
        return 0
    return next((dim for ending, dim in CUT.items() if name.endswith(ending)), None)


def run_rank(setting: Setting, wrong: str, rank: int, watch: Watch) -> None:
    """Run a rank's step. Raises SumError."""
    mesh = typed_mesh(Grid(setting.axes), rank, (), watch)
    with patch.object(programs, "dist", Verbs(mesh)):
        program: Any = Program(Job(mesh, setting), setting, wrong)  # type: ignore[arg-type]
        if wrong == "tied-once":
            program.model.norm.register_forward_hook(lambda module, _, y: setattr(module, "output", y))
        for name, parameter in program.model.named_parameters():
            dim = cut_dim(name, setting)
            sharding = Sharding(uncut(parameter.shape))
            watch.declare(name, parameter, sharding if dim is None else cut_at(sharding, dim, "tp"))
        batch = {name: torch.zeros(ROWS, TOKENS, dtype=torch.long, device="meta") for name in ("tokens", "labels")}
        for x in batch.values():
            watch.say(x, Sharding(uncut(x.shape)))
        with refused(), torch.device("meta"), watch, watch.modules(program.model):
            program.step(program.model, program.share(batch))
        for name, parameter in program.model.named_parameters():
            cut = ("tp",) if cut_dim(name, setting) is not None else ()
            check_sharding(name, cut, watch.sharding(parameter.grad), mesh.grid)


def refusal(setting: Setting, wrong: str = "") -> str:
    """Return the sentence of types that refuses a program; empty if types find no mistake."""
    grid = Grid(setting.axes)
    neighbours = []
    for axis, _ in setting.axes:
        recording = Watch(records=True)
        run_rank(setting, wrong, grid.rank(grid.coordinates(0) | {axis: 1}), recording)
        neighbours.append(Neighbour(axis, recording.stretches))
    try:
        run_rank(setting, wrong, 0, Watch(neighbours))
    except SumError as error:
        return str(error)
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    started, found = time.perf_counter(), 0
    print("| planted mistake | refused with (the remedy left out), or why not |\n|---|---|")
    for mistake in MISTAKES:
        said = refusal(mistake.setting, mistake.wrong)
        found += bool(said)
        shown = said.partition("): ")[0] + ")" if said else f"not: {WHY_NOT.get(mistake.wrong, 'NOT FOUND')}"
        print(f"| {mistake.wrong} | {shown} |")
    alarms = [(setting, said) for setting in RIGHT if (said := refusal(setting))]
    for setting, said in alarms:
        print(f"FALSE ALARM {setting}: {said}")
    seconds = (time.perf_counter() - started) / (len(MISTAKES) + len(RIGHT))
    print(
        f"{found} of {len(MISTAKES)} found, {len(alarms)} of {len(RIGHT)} right programs refused, {seconds:.2f} s each"
    )


if __name__ == "__main__":
    main()
