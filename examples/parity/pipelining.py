"""torch's pipelining: two stages, four microbatches, 1F1B."""

import torch
from model import Transformer, adamw, batch_of, loss_of
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import cross_entropy

import meshwright.parity as parity


def stage_of(model: nn.Module, rank: int) -> nn.Module:
    """Return a rank's stage: the first has the table and a block, the second a block and the head."""
    if rank == 0:
        model.norm, model.head = None, None
        del model.blocks[1]
    else:
        model.tokens, model.blocks = None, nn.ModuleDict({"1": model.blocks[1]})
        model.forward = lambda h: model.head(model.norm(model.blocks["1"](h)))
    return model


@parity.check(ranks=2, axes={"pipe": 2})
def pipelining(job: parity.Job) -> None:
    job.reference(Transformer(), loss=loss_of, batch=batch_of, optimizer=adamw, labels=None)
    model = stage_of(job.copy(), job.rank)
    stage = PipelineStage(model, job.rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=lambda y, labels: cross_entropy(y.flatten(0, 1), labels.flatten()))
    optimizer = adamw(list(model.parameters()))

    def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor | None:
        losses: list[Tensor] = []
        if job.rank == 0:
            schedule.step(batch["tokens"])
        else:
            schedule.step(target=batch["labels"], losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean() if losses else None

    job.parallel(model, step=step)
