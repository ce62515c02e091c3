"""pytorch/torchtitan#3412: a loss in chunks of the sequence, with a head cut over the vocabulary, adds the chunks'
gradients of the head's input. Each gradient is a partial sum over tensor ranks, and is returned as the whole.
Rewritten here.
"""

import torch
from common import SumForward, own, summed
from torch import Tensor, nn

import meshwright.parity as parity


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.body, self.head = nn.Embedding(16, 12), nn.Linear(12, 12), nn.Linear(12, 16, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.table(ids)))


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())


def batch_of(generator: torch.Generator) -> dict[str, Tensor]:
    return {name: torch.randint(0, 16, (4, 6), generator=generator) for name in ("ids", "labels")}


def words(job: parity.Job, mended: bool) -> None:
    job.reference(Words(), loss=loss_of, batch=batch_of, labels=None)
    model, group = job.copy(), job.device_mesh.get_group("tp")
    model.head.weight = own(model.head.weight, job.rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        hidden = model.body(model.table(batch["ids"]))
        taken, total = hidden.detach().requires_grad_(), torch.zeros(())
        for x, labels in zip(taken.chunk(2, 1), batch["labels"].chunk(2, 1), strict=True):
            logits, first = model.head(x), job.rank * 8
            inside = (labels >= first) & (labels < first + 8)
            chosen = logits.gather(-1, (labels - first).clamp(0, 7)[..., None])[..., 0] * inside
            total_exp = SumForward.apply(logits.exp().sum(-1), group)
            loss = (total_exp.log() - SumForward.apply(chosen, group)).sum() / batch["labels"].numel()
            loss.backward()
            total = total + loss.detach()
        hidden.backward(summed(taken.grad, group) if mended else taken.grad)
        optimizer.step()
        optimizer.zero_grad()
        return total

    job.parallel(model, step=step)


@parity.check(ranks=2, axes={"tp": 2})
def right_added_up(job: parity.Job) -> None:
    words(job, True)


@parity.check(ranks=2, axes={"tp": 2})
def wrong_partial_sums(job: parity.Job) -> None:
    words(job, False)
