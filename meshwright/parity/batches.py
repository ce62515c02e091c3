"""The batches of a check: equal on every rank, in the check's precision, with ids and labels that expose mistakes.

| batch   | changes by parity                                                                               |
|---------|-------------------------------------------------------------------------------------------------|
| all     | some token ids and labels are the first and last of the ranges that ranks may hold              |
| 3       | unequal numbers of labels in different rows; a last row of padding                              |
| a probe | batch 1, and a second time with one position of most rows changed                               |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

COMPARED_STEPS = 3
"""Number of compared steps: stale weights and a wrong optimizer are visible only after the first."""

HALVED_STEP = 2
"""The step that parity takes in two halves of the samples; the program must add up the gradients."""

DROPOUT_STEP = COMPARED_STEPS + 1
"""One more step, with dropout: replicas must stay equal."""

IGNORED_LABEL = -100
"""The label that torch's cross entropy ignores."""

Loss = Callable[[Any, Any], Any]
MakeOptimizer = Callable[[list[Tensor]], torch.optim.Optimizer]
MakeScheduler = Callable[[torch.optim.Optimizer], Any]


@dataclass(frozen=True)
class ReferenceRecipe:
    """The training of the reference."""

    loss: Loss
    batch: Callable[[torch.Generator], Any]
    optimizer: MakeOptimizer
    clip: float | None
    labels: Any
    """The global batch's key of labels; labels of -100 do not count."""
    dtype: torch.dtype | None
    scheduler: MakeScheduler | None = None
    ids: Mapping[Any, int] = field(default_factory=dict)
    """By key of integers that index a table or the logits, the number of rows."""
    sizes: tuple[int, ...] = ()
    """Numbers of ranks that may shard a table."""
    probe: str | None = None
    """Key of the samples that a probe changes; None: no probe."""

    def global_batch(self, step: int) -> Any:
        """Return the global batch of a step (from 1), equal on every rank.

        The rows of the last step have unequal numbers of labels.
        """
        generator = torch.Generator().manual_seed(1000 + step)
        with torch.random.fork_rng(devices=[]):
            # Seeded for a user's `batch` that ignores the generator: equal on every rank and in every run.
            torch.manual_seed(2000 + step)
            batch = cast_batch(self.batch(generator), self.dtype)
        for key, rows in self.ids.items():
            batch = replaced(batch, key, with_boundaries(tensors_by_key(batch)[str(key)], rows, self.sizes))
        return unequal(batch, self.labels) if step == COMPARED_STEPS else batch

    @property
    def probe_batches(self) -> tuple[Any, ...]:
        """The first batch, and a copy with some samples changed; empty if there is no probe."""
        if self.probe is None:
            return ()
        batch = self.global_batch(1)
        x = tensors_by_key(batch)[self.probe]
        rows = {str(key): n for key, n in self.ids.items()}.get(self.probe)
        return batch, replaced(batch, self.probe, with_changes(x, rows))


def probe_key(batch: Any, ids: Mapping[Any, int], labels: Any) -> str | None:
    """Return the key of the samples for a probe: token ids, else the first floating [rows, positions, ...] tensor."""
    tensors = tensors_by_key(batch)
    floating = [key for key, x in tensors.items() if x.is_floating_point() and x.ndim > 2]
    tokens = [str(key) for key in ids if tensors[str(key)].ndim == 2 and str(key) != str(labels)]
    return next(iter((*tokens, *floating)), None)


def changed_positions(rows: int, positions: int) -> list[int | None]:
    """Return the position that a probe changes in each row: first, last, middle, none, in turn."""
    # Under a causal mask the last position changes no earlier ones; the first changes nothing in later documents.
    every = (0, positions - 1, positions // 2, None)
    return [positions // 2] if rows == 1 else [every[row % 4] for row in range(rows)]


def with_changes(x: Tensor, ids: int | None) -> Tensor:
    """Return samples [rows, positions, ...] with one position of most rows changed. `ids`: the bound of integers."""
    changed = x.clone()
    for row, position in enumerate(changed_positions(*x.shape[:2])):
        if position is not None:
            changed[row, position] = (x[row, position] + 1 + (ids or 0) // 2) % ids if ids else x[row, position] + 1
    return changed


def cast_batch(batch: Any, dtype: torch.dtype | None) -> Any:
    """Return the batch with floating tensors cast to the check's precision."""
    if isinstance(batch, Tensor):
        return batch.to(dtype) if dtype is not None and batch.is_floating_point() else batch
    if isinstance(batch, Mapping):
        return {key: cast_batch(value, dtype) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return type(batch)(cast_batch(value, dtype) for value in batch)
    return batch


def tensors_by_key(batch: Any) -> dict[str, Tensor]:
    """Return a batch's tensors by key or position; a batch of a single tensor has the key `batch`."""
    if isinstance(batch, Tensor):
        return {"batch": batch}
    items = (
        batch.items() if isinstance(batch, Mapping) else enumerate(batch) if isinstance(batch, (tuple, list)) else ()
    )
    return {str(key): x for key, x in items if isinstance(x, Tensor)}


def replaced(batch: Any, key: Any, x: Tensor) -> Any:
    """Return a batch with another tensor under a key."""
    if isinstance(batch, Tensor):
        return x
    changed = dict(batch) if isinstance(batch, Mapping) else list(batch)
    changed[key if isinstance(batch, Mapping) else int(key)] = x
    return changed if isinstance(batch, Mapping) else type(batch)(changed)


def with_boundaries(ids: Tensor, rows: int, sizes: Sequence[int]) -> Tensor:
    """Return ids with some replaced by the first and last ids of the ranges that ranks may hold.

    Random ids may miss a mistake at the end of a range. Entries below 0 are kept. If an id is out of range, nothing is
    replaced.
    """
    allowed = (ids >= 0).flatten().nonzero()[:, 0]
    if ids.is_floating_point() or not len(allowed) or bool((ids >= rows).any()):
        return ids
    ends = [0, rows - 1]
    for size in sizes:
        chunk = -(-rows // size)
        ends += [edge for rank in range(1, size) for edge in (chunk * rank - 1, chunk * rank) if edge < rows]
    wanted = torch.tensor(list(dict.fromkeys(ends)), dtype=ids.dtype)[: max(1, len(allowed) // 4)]
    generator = torch.Generator().manual_seed(rows)
    places = allowed[torch.randperm(len(allowed), generator=generator)[: len(wanted)]]
    changed = ids.clone()
    changed.view(-1)[places] = wanted
    return changed


def ids_of(model: nn.Module, loss: Loss, batch: Any, labels: Any) -> dict[Any, int]:
    """Return the number of rows by key, for tensors of a batch that index a table of the model, and for labels.

    A tensor holds ids if an embedding received the tensor or a view.
    """
    known = {x.untyped_storage().data_ptr(): key for key, x in tensors_by_key(batch).items() if x.numel()}
    found: dict[Any, int] = {}
    classes = 0

    def taken(module: nn.Embedding, arguments: Any) -> None:
        x = arguments[0] if arguments else None
        key = known.get(x.untyped_storage().data_ptr()) if isinstance(x, Tensor) else None
        # If a tensor indexes two tables, the smaller one bounds the ids.
        if key is not None:
            found[key] = min(module.num_embeddings, found.get(key, module.num_embeddings))

    def given(module: nn.Linear, arguments: Any, result: Any) -> None:
        nonlocal classes
        classes = module.out_features

    tables = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
    handles = [m.register_forward_pre_hook(taken) for m in tables]
    handles += [m.register_forward_hook(given) for m in linears]
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        loss(model, batch)
    for handle in handles:
        handle.remove()
    # The last linear called is taken as the head, which gives the logits.
    targets = None if labels is None else tensors_by_key(batch).get(str(labels))
    if targets is not None and str(labels) not in found and classes and not targets.is_floating_point():
        found[str(labels)] = classes
    originals = dict(zip(map(str, batch), batch, strict=True)) if isinstance(batch, Mapping) else {}
    tensors = tensors_by_key(batch)
    return {originals.get(key, key): rows for key, rows in found.items() if not counts_up(tensors[key])}


def counts_up(ids: Tensor) -> bool:
    """Return True if integers mostly count up (positions, segments, documents).

    A program may compute such integers itself, and random ones would be meaningless.
    """
    if ids.ndim < 2 or ids.shape[-1] < 2:
        return False
    steps = ids[..., 1:] - ids[..., :-1]
    return float(((steps == 0) | (steps == 1)).double().mean()) > 0.5


def unequal(batch: Any, labels: Any) -> Any:
    """Return a batch with unequal numbers of labels on ranks.

    The first half of the rows keeps a quarter of the labels, and the last row is padding.
    """
    if labels is None:
        return batch
    changed = dict(batch) if isinstance(batch, Mapping) else list(batch)
    x = changed[labels].clone()
    # The first ranks hold the first half of the rows, so that a mean of means has wrong weights.
    half = x[: max(1, x.shape[0] // 2)]
    if half.ndim > 1:
        half[:, max(1, half.shape[1] // 4) :] = IGNORED_LABEL
    else:
        half[max(1, half.shape[0] // 4) :] = IGNORED_LABEL
    # A row of padding, as in the last batch of a data set; at least one row keeps all labels.
    if len(x) > len(half) + 1:
        x[-1] = IGNORED_LABEL
    changed[labels] = x
    return changed if isinstance(batch, Mapping) else type(batch)(changed)


def count_labels(batch: Any, labels: Any) -> int | None:
    """Return the number of counted labels of a batch; None without integer labels."""
    x = None if labels is None else tensors_by_key(batch).get(str(labels))
    return None if x is None or x.is_floating_point() else int((x != IGNORED_LABEL).sum())


def chunks_of(batch: Any, count: int) -> list[Any]:
    """Split a batch into equal chunks of rows; empty if the rows of a tensor are not divisible."""
    if isinstance(batch, Tensor):
        # Chunks must be equal, since a mean over unequal chunks is another number.
        fits = batch.ndim > 0 and len(batch) > 0 and len(batch) % count == 0
        return list(batch.chunk(count)) if fits else []
    if isinstance(batch, Mapping) and batch:
        parts = [chunks_of(x, count) for x in batch.values()]
        return [dict(zip(batch, each, strict=True)) for each in zip(*parts, strict=True)] if all(parts) else []
    if isinstance(batch, (tuple, list)) and batch:
        parts = [chunks_of(x, count) for x in batch]
        return [type(batch)(each) for each in zip(*parts, strict=True)] if all(parts) else []
    return []
