"""The held-out split, as far as the run looks at it: the mean loss, and how often the likeliest answer is right."""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.batch import Batch, Samples, counts_of, to_device
from meshwright.build import Parts
from meshwright.grid import PIPE


@torch.no_grad()
def validate(parts: Parts, held_out: Samples, num_batches: int) -> dict[str, float]:
    """Over the first `num_batches` global batches of a split. The accuracy is that of the model's first label.

    A model of several losses: the sum of their means.
    """
    config, mesh = parts.config, parts.mesh
    parts.module.eval()
    sums = torch.zeros(3, len(parts.model.labels), dtype=torch.float64, device=mesh.device)  # losses, counts, right
    mine = mesh.index("data") * config.replica_batch
    with parts.strategy.whole_weights():
        for index in range(num_batches):
            rows = held_out.held_out(index * config.batch.global_ + mine, config.replica_batch)
            batches = parts.microbatches(to_device(rows, mesh.device))
            for h, batch in zip(parts.passes.hidden(batches), batches, strict=True):
                if h is not None:
                    sums += _sums(parts, h, batch)
    mesh.comm(*config.layout.batch_axes, PIPE).all_reduce(sums)
    losses, counts, right = sums
    return {"validation_loss": float((losses / counts).sum()), "validation_accuracy": float(right[0] / counts[0])}


def _sums(parts: Parts, h: Tensor, batch: Batch) -> Tensor:
    """[3, labels]: of each label the summed loss, how many elements count, how many are predicted."""
    model, names = parts.model, parts.model.labels
    losses = [float(model.loss(h, batch, {other: float(other == name) for other in names})) for name in names]
    return torch.tensor([losses, counts_of(batch, names), model.right(h, batch)], device=h.device, dtype=torch.float64)
