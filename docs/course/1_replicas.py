"""Exercise 1: two replicas, one mean. `meshwright parity docs/course/1_replicas.py` marks it."""

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import meshwright.parity as parity


def loss_of(model, batch):
    """One process: the mean over all labels that count; -100 marks the others."""
    return cross_entropy(model(batch["inputs"]), batch["labels"])


def batch_of(generator):
    inputs = torch.randn(8, 16, generator=generator)
    return {"inputs": inputs, "labels": torch.randint(0, 5, (8,), generator=generator)}


def replica_loss(model, batch):
    """A replica's loss of half of the rows; the factor cancels DDP's division by the number of replicas."""
    total = cross_entropy(model(batch["inputs"]), batch["labels"], reduction="sum")
    count = (batch["labels"] != -100).sum()
    count_of_all = count * dist.get_world_size()  # mend
    return total * dist.get_world_size() / count_of_all


@parity.check(ranks=2)
def replicas(job):
    job.reference(torch.nn.Linear(16, 5), loss=loss_of, batch=batch_of)
    job.parallel(DistributedDataParallel(job.copy()), loss=replica_loss, batch=job.rows("data"))
