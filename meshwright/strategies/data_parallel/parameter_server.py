"""One rank sums for all: both of Bai's parameter-server variants, and the rooted all-reduce.

| sync            | batch         | loss            | gradients of S bytes   | optimizer | then             |
|-----------------|---------------|-----------------|------------------------|-----------|------------------|
| rooted          | read by all   | on every rank   | gather, sum, broadcast | all       | -                |
| server-gradient | scattered     | on every rank   | summed on the server   | server    | model broadcast  |
| server-loss     | scattered     | on the server   | summed on the server   | server    | model broadcast  |

Rooted: a worker sends S, the root (n-1)S. Server: a worker sends S, the server (n-1)S of parameters and (n-1)/n of the
batch. With server-loss a worker also sends hidden states [B/n, T, H], and the server sends the gradients of these. The
'outputs' that are gathered are the hidden states before the head. Here the head with its loss is one layer, and
gathering logits [B, T, V] would send V/H times the bytes.
"""

from __future__ import annotations

import torch

from meshwright.compute.model import Batch, Hidden, LoadRows, Model, Scales
from meshwright.compute.parameters.bucket import Bucket
from meshwright.ranks.collectives import gather
from meshwright.ranks.comm import Comm, Work
from meshwright.strategies.data_parallel.strategy import Policy, Synchroniser

_ROOT = 0
"""The first rank: the owner under `first` (Policy.owners)."""


class Rooted(Policy):
    """The root gathers every rank's gradients, sums them in rank order and broadcasts the sum."""

    blocks = True  # the root sums between two verbs

    def reduce(self, bucket: Bucket, comm: Comm) -> Work:
        rows = comm.size if comm.index == _ROOT else 0
        sums = bucket.gradients.view(-1)
        everyone = sums.new_empty(rows, sums.numel())
        comm.gather(everyone, sums, _ROOT)
        if comm.index == _ROOT:
            torch.sum(everyone, 0, out=sums)
        return comm.broadcast(sums, _ROOT, wait=False)


class Server(Policy):
    """The server owns every bucket; the workers own nothing."""

    owners = "first"


class ServerGradient(Synchroniser):
    """Variant 'gradient': the server scatters the batch; every rank runs its own loss and backward pass."""

    def share(self, load: LoadRows, replica_batch: int) -> Batch:
        comm = self.mesh.comm("data")
        everyone = load(0, replica_batch * (comm.size if comm.index == _ROOT else 1))
        mine = {name: torch.empty_like(x[:replica_batch]) for name, x in everyone.items()}
        for name, rows in mine.items():
            comm.scatter(rows, everyone[name], _ROOT)
        return mine


class ServerLoss(ServerGradient):
    """Variant 'loss': the workers' outputs are gathered, and the server alone computes the loss.

    Only the server runs the head, so only there the head's gradients could fill a bucket early. No bucket may be sent
    before the outputs' gradient is scattered, since all ranks must send in the same order. The autograd graph of the
    forward pass is the whole protocol: a separate stage would duplicate the code of passes.
    """

    def expect(self, final: bool) -> None:
        super().expect(False)
        self._final_comes = final

    def forward(self, model: Model, batch: Batch, scales: Scales, incoming: Hidden) -> Hidden:
        comm = self.mesh.comm("data")
        (hidden,) = model.hidden_states(batch, incoming)
        outputs = gather(hidden, self.mesh, "data", _ROOT)  # [n·B, T, H] on the server, [0, T, H] on a worker
        # After the head's backward pass, all ranks do the same.
        outputs.register_hook(lambda gradient: super(ServerLoss, self).expect(self._final_comes))
        labels = {name: batch[name].new_empty(outputs.shape[0], *batch[name].shape[1:]) for name in model.labels}
        for name, everyone in labels.items():
            comm.gather(everyone, batch[name], _ROOT)
        if comm.index == _ROOT:
            return (model.loss(outputs, labels, scales),)
        return (outputs.sum(),)  # 0; its backward pass waits for the server's scatter
