"""What one rank holds and sends, counted on the rank: inside of a worker.

| part | what is counted |
|---|---|
| weights, gradients | the flat memory of the buckets, padding too |
| states | the optimizer's tensors that are no weights; master weights of half-precision ones |

Of an offloaded optimizer the states are what passes through the device: its staging (memory/staging.py), without the
one number that counts its steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from meshwright.batch import Batch, Samples, to_device
from meshwright.build import Parts
from meshwright.memory.offload import Offloaded

COUNT_BYTES = 4
"""Of the step's number, which torch's AdamW wants as a tensor."""


@dataclass(frozen=True)
class Held:
    """Bytes on one rank between two steps."""

    weights: int
    gradients: int
    states: int


def held_by(parts: Parts) -> Held:
    """What a rank holds that has made a step."""
    slots = parts.strategy.slots  # views of whole buckets, also where only a part of one is stepped
    weights = storages(slot.parameter.detach() for slot in slots)
    gradients = storages(slot.parameter.grad for slot in slots if slot.parameter.grad is not None)
    if isinstance(parts.optimizer.held, Offloaded):
        states = parts.optimizer.held.tier.live_bytes - COUNT_BYTES
    else:
        kept = (tensor for index in range(len(slots)) for tensor in parts.optimizer.states(index).values())
        states = sum(size for address, size in storages(kept).items() if address not in weights)
    return Held(sum(weights.values()), sum(gradients.values()), states)


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """The memory behind some tensors, each piece once: bytes by address."""
    found = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in found if storage.nbytes()}


def count_sent(parts: Parts, train: Samples, samples: int) -> dict[tuple[str, str], tuple[int, int]]:
    """(calls, bytes) that this rank sends in one step, by axis and verb: passes, the gradients' sums, the weights'
    publishing. Not the norm and the step report, which a plan does not count either (plan/predict.py).

    It makes these parts of a step, with the labels' plain sum as loss, and leaves the gradients as they then are: call
    it last.
    """
    config, ledger = parts.config, parts.mesh.ledger

    def load(first: int, count: int) -> Batch:
        return to_device(train.samples(samples + first, count), parts.mesh.device)

    batch = parts.strategy.share(load, config.replica_batch)
    before = {key: (entry.calls, entry.sent_bytes) for key, entry in ledger.traffic.items()}
    parts.module.train()
    parts.passes.train(parts.microbatches(batch), dict.fromkeys(parts.model.labels, 1.0), lambda index: None)
    parts.strategy.finish()
    parts.strategy.publish()
    parts.kit.end_step()
    sent: defaultdict[tuple[str, str], tuple[int, int]] = defaultdict(lambda: (0, 0))
    for key, entry in ledger.traffic.items():
        calls, sent_bytes = before.get(key, (0, 0))
        if entry.calls > calls:
            sent[key] = (entry.calls - calls, entry.sent_bytes - sent_bytes)
    return dict(sent)
