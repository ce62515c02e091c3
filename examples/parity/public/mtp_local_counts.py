"""NVIDIA/Megatron-LM#7452, finding 3: the loss of multi-token prediction has fewer labels than the main loss. The ratio
of both counts is the weight, so that one division by the main loss's labels of all ranks is enough. The ratio is each
rank's alone. Rewritten here.
"""

from typing import Any

import torch.distributed as dist
from common import sgd_step, summed, word_batch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import meshwright.parity as parity


def sums(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the main loss's sum and labels, then the sum and labels of the loss one token ahead."""
    labels, ahead = batch["labels"], nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    table, body, further, head = model
    hidden = body(table(batch["ids"]))
    first = cross_entropy(head(hidden).flatten(0, 1), labels.flatten(), reduction="sum")
    second = cross_entropy(head(further(hidden)).flatten(0, 1), ahead.flatten(), reduction="sum")
    return first, (labels != -100).sum(), second, (ahead != -100).sum().clamp(min=1)


def loss_of(model: Any, batch: dict[str, Tensor]) -> Tensor:
    first, labels, second, labels_ahead = sums(model, batch)
    return first / labels + 0.5 * second / labels_ahead


def two_losses(job: parity.Job, all_ranks: bool) -> None:
    reference = nn.Sequential(nn.Embedding(16, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16))
    job.reference(reference, loss=loss_of, batch=word_batch)
    model, group = job.copy(), job.device_mesh.get_group("data")

    def own_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        first, labels, second, labels_ahead = sums(model, batch)
        all_labels = summed(labels, group)
        ratio = all_labels / summed(labels_ahead, group) if all_ranks else labels / labels_ahead
        return (first + 0.5 * second * ratio) / all_labels

    def reduce() -> None:
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)

    step = sgd_step(model, own_loss, reduce)
    job.parallel(model, step=lambda model, batch: summed(step(model, batch), group), batch=job.rows("data"))


@parity.check(ranks=2)
def right_all_ranks_counts(job: parity.Job) -> None:
    two_losses(job, True)


@parity.check(ranks=2)
def wrong_own_counts(job: parity.Job) -> None:
    two_losses(job, False)
