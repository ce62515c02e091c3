"""NVIDIA/Megatron-LM#7452, finding 2: the cross entropy of a vocabulary cut over ranks takes gathered logits for this
rank's shard, and counts all words once per rank: the loss is too large by the log of the count of ranks, and the
gradient is wrong. Rewritten here.
"""

from typing import Any

import torch
import torch.distributed as dist
from common import SumBackward, SumForward, own, sgd_step, word_batch
from torch import Tensor, nn

import meshwright.parity as parity


class GatheredWords(torch.autograd.Function):
    """The logits of all ranks' words; backward: the gradient of this rank's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.rank, parts = dist.get_rank(group), [torch.empty_like(x) for _ in range(2)]
        dist.all_gather(parts, x, group=group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0].chunk(2, -1)[ctx.rank], None


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())


def words(job: parity.Job, gathered: bool) -> None:
    reference = nn.Sequential(nn.Embedding(16, 16), nn.Linear(16, 16), nn.Linear(16, 16, bias=False))
    job.reference(reference, loss=loss_of, batch=word_batch, labels=None)
    model, group = job.copy(), job.device_mesh.get_group("tp")
    model[2].weight = own(model[2].weight, job.rank)

    def loss_of_cut_words(model: Any, batch: dict[str, Tensor]) -> Tensor:
        logits = model[2](SumBackward.apply(model[1](model[0](batch["ids"])), group))
        if gathered:
            logits = GatheredWords.apply(logits, group)
        own_labels = batch["labels"] - job.rank * logits.shape[-1]
        inside = (own_labels >= 0) & (own_labels < logits.shape[-1])
        chosen = logits.gather(-1, own_labels.clamp(0, logits.shape[-1] - 1)[..., None])[..., 0] * inside
        total = SumForward.apply(logits.exp().sum(-1), group)
        return (total.log() - SumForward.apply(chosen, group)).mean()

    job.parallel(model, step=sgd_step(model, loss_of_cut_words))


@parity.check(ranks=2, axes={"tp": 2})
def right_own_words(job: parity.Job) -> None:
    words(job, False)


@parity.check(ranks=2, axes={"tp": 2})
def wrong_all_words(job: parity.Job) -> None:
    words(job, True)
