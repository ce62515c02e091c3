"""torch's DistributedDataParallel averages gradients over ranks, so the loss must count the labels of all ranks."""

import torch.distributed as dist
from model import Transformer, adamw, batch_of, loss_of
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import meshwright.parity as parity


def global_mean(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return this rank's losses divided by the count of all ranks' labels, times the ranks: DDP divides by ranks."""
    count = (batch["labels"] != -100).sum()
    dist.all_reduce(count)
    total = cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    return total * dist.get_world_size() / count


@parity.check(ranks=2)
def ddp(job: parity.Job) -> None:
    job.reference(Transformer(), loss=loss_of, batch=batch_of, optimizer=adamw)
    job.parallel(DistributedDataParallel(job.copy()), loss=global_mean, batch=job.rows("data"))


@parity.check(ranks=2)
def ddp_mean_of_means(job: parity.Job) -> None:
    """Each rank takes a local mean, as most loops do: wrong as soon as ranks have unequal counts of labels."""
    job.reference(Transformer(), loss=loss_of, batch=batch_of, optimizer=adamw)
    job.parallel(DistributedDataParallel(job.copy()), batch=job.rows("data"))
