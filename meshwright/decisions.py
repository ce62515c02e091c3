"""What `auto` becomes when a run begins: decided once by all ranks together, said, and kept with the run.

| field                     | is decided by                       | from                                        |
|---------------------------|-------------------------------------|---------------------------------------------|
| layout.pipeline.partition | the model (auto), rank 0 (measured) | counted or measured costs (stages.py)       |
| memory.summa              | the rank with the least memory      | a part of that memory (tensor/gathered.py)  |
| layout.pipeline.limit     | the rank that can hold fewest       | half of its memory, what a microbatch holds |

All ranks take the same, so that a run says what it does in a line. A run that is resumed on the same layout takes what
it had decided: the order of sums hangs on these, and with it their last bits, which must not depend on how full the
machine is on the day of the resume.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import ValidationError

from meshwright.config import Config
from meshwright.config.rules import PARTITION_RULES
from meshwright.errors import CheckpointError
from meshwright.ranks.mesh import Mesh
from meshwright.section import field_of, with_field
from meshwright.stages import Stages
from meshwright.tensor.gathered import choose_form
from meshwright.tensor.summa import Form

PARTITION, LIMIT, SUMMA = "layout.pipeline.partition", "layout.pipeline.limit", "memory.summa"
FIELDS = (PARTITION, LIMIT, SUMMA)

POLICIES = {"gather": Form(streams=False, keeps=True), "whole": Form(False, False), "stream": Form(True, False)}
"""Ways of 2-D products, the hungriest first."""

SAME = ("model", "batch", "layout", "precision", "memory")
"""Sections on which decisions rest. A run that is resumed with another one decides anew."""


@dataclass(frozen=True)
class Decided:
    """A config without the `auto`s of this module, and a line for each that was decided now."""

    config: Config
    notes: tuple[str, ...] = ()

    def and_also(self, field: str, value: Any, note: str) -> Decided:
        asked = field_of(self.config, field)
        return Decided(with_field(self.config, field, value), (*self.notes, f"{field}={asked}: {note}"))


def resolved_fields(asked: Config, decided: Config) -> dict[str, Any]:
    """What was decided, by field, as JSON keeps it."""
    changed = [field for field in FIELDS if field_of(asked, field) != field_of(decided, field)]
    return {field: field_of(decided.model_dump(mode="json", by_alias=True), field) for field in changed}


def as_before(config: Config, dump: Mapping[str, Any], resolved: Mapping[str, Any]) -> Config:
    """The config of a resumed run with what it had decided. `dump`: the config that it had then.

    Raises CheckpointError where what was decided is no legal value.
    """
    own = config.model_dump(mode="json", by_alias=True)
    if any(own[section] != dump.get(section) for section in SAME):
        return config
    for field in FIELDS:
        if field in resolved:
            own = with_field(own, field, resolved[field])
    try:
        before = Config.model_validate(own)
    except ValidationError as error:
        raise CheckpointError(f"the checkpoint's decisions {dict(resolved)} cannot be read: {error}") from error
    if problems := [problem for rule in PARTITION_RULES for problem in rule.check(before)]:
        raise CheckpointError(f"the checkpoint's decisions do not fit its config: {problems[0]}")
    return before


def decide_partition(config: Config, stages: Stages) -> Decided:
    """How many layers each stage has, where the config does not say."""
    if config.layout.pipeline.size == 1 or not isinstance(config.layout.pipeline.partition, str):
        return Decided(config)
    layers = tuple(len(stretch.layers) for stretch in stages.stretches)
    return Decided(config).and_also(PARTITION, layers, f"{' + '.join(map(str, layers))} layers")


def decide_summa(decided: Decided, mesh: Mesh, block_bytes: list[int], free: int) -> Decided:
    """How operands of 2-D products travel: as the rank can afford that has the least memory for its weights."""
    if decided.config.memory.summa != "auto":
        return decided
    q = mesh.size("row")
    ways = list(POLICIES)
    mine = ways.index(next(way for way in ways if POLICIES[way] == choose_form("auto", block_bytes, q, free)))
    way, gathered, least = max(_of_all(mesh, mine, q * sum(block_bytes), free), key=lambda row: (row[0], -row[2]))
    note = f"{ways[way]}, for gathered weights of {_size(gathered)} in {_size(least)} of free memory"
    return decided.and_also(SUMMA, ways[way], note)


def decide_limit(decided: Decided, mesh: Mesh, microbatch_bytes: int, free: int) -> Decided:
    """How many microbatches a stage may have in flight: as many as every rank can hold in half of its memory."""
    config = decided.config
    mine = max(1, min(config.num_microbatches, free // 2 // max(1, microbatch_bytes)))
    limit, each, least = min(_of_all(mesh, mine, microbatch_bytes, free), key=lambda row: (row[0], row[2]))
    note = f"{limit} microbatches in {_size(limit * each)} of {_size(least)} of free memory"
    return decided.and_also(LIMIT, limit, note)


def _of_all(mesh: Mesh, *numbers: int) -> list[list[int]]:
    """Every rank's numbers. A plan knows its own rank's alone."""
    if mesh.device.type == "meta":
        return [list(numbers)]
    told = torch.tensor(numbers, device=mesh.device, dtype=torch.int64)
    everyone = told.new_empty(mesh.world.size * len(numbers))
    mesh.world.all_gather(everyone, told)
    return [[int(number) for number in row] for row in everyone.view(-1, len(numbers)).tolist()]


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.2f} MB"
