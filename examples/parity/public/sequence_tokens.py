"""A review of huggingface/transformers#46775: labels are counted over all ranks, and the count is divided by the ranks
of an axis that is not data. This is right if the ranks have the same batch (tensor parallelism). Ranks with slices of a
sequence count each label once. Rewritten here.
"""

import torch.distributed as dist
from common import sgd_step, summed, word_batch
from torch import Tensor, nn

import meshwright.parity as parity


def parts(job: parity.Job, copies: int) -> None:
    def sum_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(
            model(batch["ids"]).flatten(0, 1), batch["labels"].flatten(), reduction="sum"
        )

    def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return sum_of(model, batch) / (batch["labels"] != -100).sum()

    reference = nn.Sequential(nn.Embedding(16, 16), nn.Linear(16, 16), nn.Linear(16, 16))
    job.reference(reference, loss=loss_of, batch=word_batch)
    model, group = job.copy(), job.device_mesh.get_group("sp")

    def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        counted = summed((batch["labels"] != -100).sum(), group)
        return sum_of(model, batch) / (counted // copies)

    def reduce() -> None:
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)

    step = sgd_step(model, own_loss, reduce)
    half = lambda batch: {name: x.chunk(2, 1)[job.rank] for name, x in batch.items()}  # noqa: E731
    job.parallel(model, step=lambda model, batch: summed(step(model, batch), group), batch=half)


@parity.check(ranks=2, axes={"sp": 2})
def right_counted_once(job: parity.Job) -> None:
    parts(job, 1)


@parity.check(ranks=2, axes={"sp": 2})
def wrong_divided_by_ranks(job: parity.Job) -> None:
    parts(job, 2)
