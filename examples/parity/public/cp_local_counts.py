"""NVIDIA/Megatron-LM#7452, finding 9 (fixed by #7513): under context parallelism each rank divides the losses of a
slice of the sequence by this slice's labels, and the ranks' gradients are averaged. Slices seldom have equal counts of
labels. Rewritten here.
"""

from typing import Any

from common import averaged, sgd_step, summed, word_batch
from torch import Tensor, nn

import meshwright.parity as parity


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())


def parts(job: parity.Job, whole_sequence: bool) -> None:
    reference = nn.Sequential(nn.Embedding(16, 16), nn.Linear(16, 16), nn.Linear(16, 16))
    job.reference(reference, loss=loss_of, batch=word_batch)
    model, group = job.copy(), job.device_mesh.get_group("cp")

    def loss_of_part(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        labels = (batch["labels"] != -100).sum()
        # Twice the whole sequence's mean: the average over both ranks halves the loss.
        divisor = summed(labels, group) / 2 if whole_sequence else labels
        logits = model(batch["ids"]).flatten(0, 1)
        return nn.functional.cross_entropy(logits, batch["labels"].flatten(), reduction="sum") / divisor

    step = sgd_step(model, loss_of_part, lambda: averaged(model, group))

    def reported(model: nn.Module, batch: Any) -> Tensor:
        return summed(step(model, batch), group) / 2

    job.parallel(model, step=reported, batch=lambda batch: {k: x.chunk(2, 1)[job.rank] for k, x in batch.items()})


@parity.check(ranks=2, axes={"cp": 2})
def right_whole_sequences_labels(job: parity.Job) -> None:
    parts(job, True)


@parity.check(ranks=2, axes={"cp": 2})
def wrong_own_parts_labels(job: parity.Job) -> None:
    parts(job, False)
