"""A model under Lightning's Trainer: two microbatches a step, clipping. Under torchrun, one process or DDP.

`--wrong rows`: no distributed sampler; `shuffle`: Lightning's sampler, which shuffles an unshuffled loader;
`rate`: a rate times the ranks; `clip`: ten times the norm; `sum`: a sum instead of a mean as the loss.
"""

import os
import sys

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

wrong, world, rank = sys.argv[-1], int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))

    def training_step(self, batch, index):
        x, y = batch
        return nn.functional.cross_entropy(self.body(x), y, reduction="sum" if wrong == "sum" else "mean")

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2 * (world if wrong == "rate" else 1))


lightning.seed_everything(1, verbose=False)
generator = torch.Generator().manual_seed(2)
rows = TensorDataset(torch.randn(32, 16, generator=generator), torch.randint(0, 8, (32,), generator=generator))
trainer = lightning.Trainer(
    accelerator="cpu", devices=world, strategy="ddp" if world > 1 else "auto", max_steps=2, accumulate_grad_batches=2,
    gradient_clip_val=1.0 if wrong == "clip" else 0.1, use_distributed_sampler=wrong == "shuffle",
    logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
sampler = DistributedSampler(rows, world, rank, shuffle=False) if wrong not in ("rows", "shuffle") else None
trainer.fit(Classifier(), DataLoader(rows, batch_size=8 // world, sampler=sampler))
