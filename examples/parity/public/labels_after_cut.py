"""verl-project/verl#4250: under context parallelism every rank shifts the labels of a slice of the sequence: the last
label is the slice's first token, instead of the next slice's first. Rewritten here; fixed in verl.
"""

from typing import Any

import torch
import torch.distributed as dist
from common import sgd_step
from torch import Tensor, nn

import meshwright.parity as parity

VOCABULARY = 24


def batch_of(generator: torch.Generator) -> Tensor:
    return torch.randint(0, VOCABULARY, (4, 12), generator=generator)


def shifted(tokens: Tensor) -> dict[str, Tensor]:
    return {"tokens": tokens, "labels": tokens.roll(-1, 1)}


def losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["tokens"])
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def cut(job: parity.Job, before: bool) -> None:
    reference = nn.Sequential(nn.Embedding(VOCABULARY, 16), nn.Linear(16, 16), nn.Linear(16, VOCABULARY))
    job.reference(reference, loss=lambda model, tokens: losses(model, shifted(tokens)), batch=batch_of, labels=None)
    model, group = job.copy(), job.device_mesh.get_group("cp")

    def reduce() -> None:
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)
            p.grad /= 2

    step = sgd_step(model, losses, reduce)

    def part(x: Tensor) -> Tensor:
        return x.chunk(2, 1)[job.rank]

    def whole(model: nn.Module, batch: Any) -> Tensor:
        mine = {key: part(x) for key, x in shifted(batch).items()} if before else shifted(part(batch))
        total = step(model, mine) / 2
        dist.all_reduce(total, group=group)
        return total

    job.parallel(model, step=whole)


@parity.check(ranks=2, axes={"cp": 2})
def right_shifted_before(job: parity.Job) -> None:
    cut(job, True)


@parity.check(ranks=2, axes={"cp": 2})
def wrong_shifted_after(job: parity.Job) -> None:
    cut(job, False)
