"""The log-probabilities of pairs under a run's first weights, the reference of a loss over pairs.

They are computed once, under the run's own layout, before the first step, and kept in the run's folder. So a run has
one model in memory, and a resumed run reads equal numbers under any layout.

| key of reference.json | value                                                                     |
|-----------------------|---------------------------------------------------------------------------|
| weights               | the root of the first weights (parameters/root.py)                        |
| data                  | the fingerprint of the prepared pairs                                     |
| train, validation     | [chosen, rejected] of each pair of the split, in the order of the file    |
| sha256                | the hash of the text of the other keys                                    |
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from meshwright.compute.model import IGNORED, Batch, Samples, to_device
from meshwright.compute.models.preferences import PAIRS, REFERENCE, ROWS, PreferenceChain
from meshwright.compute.parameters.root import held_hashes, root_text
from meshwright.data.dataset import Opened
from meshwright.data.preferences import PreferencePairs
from meshwright.ranks.agreement import all_rows
from meshwright.ranks.errors import CheckpointError, DamagedError
from meshwright.ranks.foreign import read_json
from meshwright.ranks.grid import DATA_AXES, PIPE
from meshwright.training.folder import write_whole
from meshwright.training.parts import Parts

FILE = "reference.json"
SPLITS = ("train", "validation")


class ReferredPairs:
    """Samples of pairs with the first weights' log-probabilities, float64 [B, 2]."""

    def __init__(self, pairs: Samples, table: Tensor) -> None:
        """`table`: [pairs of the split, 2], by the pair's number."""
        self._pairs, self._table = pairs, table

    def __len__(self) -> int:
        return len(self._pairs)

    def samples(self, first: int, count: int) -> Batch:
        """Read the samples first ... first + count - 1 of the run."""
        return self._referred(self._pairs.samples(first, count))

    def held_out(self, first: int, count: int) -> Batch:
        """Read the samples first ... first + count - 1 in the file's order."""
        return self._referred(self._pairs.held_out(first, count))

    def _referred(self, batch: Batch) -> Batch:
        return batch | {REFERENCE: self._table[batch[PAIRS].flatten()]}


@torch.no_grad()
def log_probabilities(parts: Parts, pairs: PreferencePairs, numbers: np.ndarray) -> Tensor:
    """Compute the log-probabilities of some pairs under the present weights, without dropout.

    Collective over the world: each replica computes a part of the pairs.

    Args:
        parts: the rank's parts of the run.
        pairs: the split.
        numbers: the pairs' numbers [n].

    Returns:
        The table [pairs of the split, 2], float64 on the host, equal on all ranks; zeros for other pairs.
    """
    config, mesh, model = parts.config, parts.mesh, parts.model
    assert isinstance(model, PreferenceChain), type(model)
    model.eval()
    table = torch.zeros(len(pairs), ROWS, dtype=torch.float64, device=mesh.device)
    mine, last = mesh.index(*DATA_AXES) * config.replica_batch, parts.pipeline.stages[-1]

    def add(h: Tensor, batch: Batch) -> None:
        for portion, (rows,) in parts.portions.of(batch, (h,)) if parts.portions is not None else [(batch, (h,))]:
            with last.autocast():
                found = model.log_probabilities(rows, portion)
            if model.chunk.last:  # other stages have at most a part of the head, and the same numbers
                indices = portion[PAIRS].flatten()
                table[indices[indices != IGNORED]] = found[indices != IGNORED]

    padded = np.concatenate([numbers, np.full(-len(numbers) % config.batch.global_, -1, dtype=np.int64)])
    with parts.strategy.whole_weights():
        for first in range(mine, len(padded), config.batch.global_):
            rows = pairs.numbered(padded[first : first + config.replica_batch])
            parts.pipeline.evaluate(parts.microbatches(to_device(rows, mesh.device)), add)
    mesh.comm(*config.layout.batch_axes, PIPE).all_reduce(table)
    return table.cpu()


def referred_steps(parts: Parts, pairs: Samples, steps: int) -> Samples:
    """Return the samples of a run's first steps with the present weights' log-probabilities. Collective."""
    assert isinstance(pairs, PreferencePairs), type(pairs)
    numbers = np.unique(pairs.order.rows(0, steps * parts.config.batch.global_))
    return ReferredPairs(pairs, log_probabilities(parts, pairs, numbers))


def weights_root(parts: Parts) -> str:
    """Return the root of the present weights, equal under every layout with equal weights. Collective."""
    held = (
        (state.kind, state.values.to(parts.mesh.device), state.places, slot.copy_axes)
        for slot, states in parts.stored()
        for state in states
        if state.kind == "weight"
    )
    total = sum(int(digest) for digest in held_hashes(held, parts.mesh).values()) % 2**64
    mine = torch.tensor([total - 2**64 if total >= 2**63 else total])
    return root_text(all_rows(mine, parts.mesh.world).flatten().tolist())


def referred(parts: Parts, opened: Opened, folder: Path, data: str, step: int) -> Opened:
    """Return a run's splits with the reference's numbers: of the folder's file, or computed before the first step.

    Splits of single texts are returned unchanged. Collective over the world.

    Args:
        parts: the rank's parts of the run, with the weights of `step`.
        opened: the splits.
        folder: the run's folder.
        data: the fingerprint of the prepared pairs.
        step: the number of steps that the weights have made.

    Raises:
        CheckpointError: the file is of other weights or pairs, or is missing after the first step.
        DamagedError: the file is damaged.
    """
    if parts.config.loss is None:
        return opened
    path, world = folder / FILE, parts.mesh.world
    splits = dict(zip(SPLITS, (opened.train, opened.held_out), strict=True))
    root = weights_root(parts) if step == 0 else ""
    # Rank 0 decides, since ranks may see a shared folder's files at different times.
    if not bool(all_rows(torch.tensor([path.is_file()]), world)[0]):
        if step:
            rule = f"has the numbers of the first weights, which step {step} has no longer"
            raise CheckpointError(f"{path}: is missing; it {rule}: put the file back, or begin a new run")
        tables = {
            name: log_probabilities(parts, pairs, np.arange(len(pairs), dtype=np.int64))
            for name, pairs in splits.items()
            if isinstance(pairs, PreferencePairs)
        }
        if parts.mesh.rank == 0:
            facts = {"weights": root, "data": data, **{name: table.tolist() for name, table in tables.items()}}
            write_whole(folder, FILE, json.dumps(facts | {"sha256": facts_hash(facts)}) + "\n")
    else:
        tables = read_tables(path, data, root)
    found: dict[str, Samples] = {}
    for name, pairs in splits.items():
        if pairs is None:
            continue
        if name not in tables or tables[name].shape != (len(pairs), ROWS):
            rule = f"has not the numbers of the {len(pairs)} pairs of the {name} split"
            raise CheckpointError(f"{path}: {rule}: resume with data and validation as before, or begin a new run")
        found[name] = ReferredPairs(pairs, tables[name])
    return replace(opened, train=found[SPLITS[0]], held_out=found.get(SPLITS[1]))


def facts_hash(facts: Mapping[str, object]) -> str:
    """Return the hash of a file's keys without `sha256`."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def read_tables(path: Path, data: str, root: str) -> dict[str, Tensor]:
    """Read a run's reference numbers, by split.

    Args:
        path: the file.
        data: the fingerprint of the prepared pairs.
        root: the root of the first weights; empty if the run has other weights now.

    Raises:
        CheckpointError: the file is of other weights or pairs.
        DamagedError: the file is damaged.
    """
    try:
        facts = read_json(path)
        if facts.pop("sha256") != facts_hash(facts):
            raise ValueError("its hash is another")
        tables = {name: torch.tensor(facts[name], dtype=torch.float64) for name in SPLITS if name in facts}
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise DamagedError(f"{path}: is damaged: {error}; begin a new run") from error
    if facts["data"] != data:
        raise CheckpointError(f"{path}: has the numbers of other pairs than data.source; begin a new run")
    if root and facts["weights"] != root:
        raise CheckpointError(f"{path}: has the numbers of other weights than the run's first; begin a new run")
    return tables
