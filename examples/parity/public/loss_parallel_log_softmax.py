"""pytorch/pytorch#190746, in the installed torch: under loss_parallel() the backward pass of a log_softmax returns the
gradient unchanged. This is right for the cross entropy after the log_softmax and for no other term, such as an
entropy.
"""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module
from torch.nn.functional import cross_entropy, log_softmax

import meshwright.parity as parity


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(16, 12), nn.Linear(12, 16, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids))


def loss_of(model: nn.Module, batch: dict[str, Tensor], smoothing: float = 0.1) -> Tensor:
    logits = model(batch["ids"])
    return cross_entropy(logits, batch["labels"]) - smoothing * log_softmax(logits, -1).mean()


def batch_of(generator: torch.Generator) -> dict[str, Tensor]:
    return {name: torch.randint(0, 16, (8,), generator=generator) for name in ("ids", "labels")}


def words(job: parity.Job, smoothing: float) -> None:
    job.reference(Words(), loss=lambda model, batch: loss_of(model, batch, smoothing), batch=batch_of, labels=None)
    plan = {"head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}
    model = parallelize_module(job.copy(), job.device_mesh["tp"], plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        with loss_parallel():
            logits = model(batch["ids"])
            loss = cross_entropy(logits, batch["labels"])
            if smoothing:
                loss = loss - smoothing * log_softmax(logits, -1).mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.full_tensor().detach()

    job.parallel(model, step=step)


@parity.check(ranks=2, axes={"tp": 2})
def right_cross_entropy(job: parity.Job) -> None:
    words(job, 0.0)


@parity.check(ranks=2, axes={"tp": 2})
def wrong_entropy_term(job: parity.Job) -> None:
    words(job, 0.1)
