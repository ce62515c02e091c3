"""accelerate's prepare and gradient accumulation, over two processes."""

import torch
from accelerate import Accelerator
from model import Transformer, adamw, batch_of, loss_of
from torch import Tensor, nn

import meshwright.parity as parity


@parity.check(ranks=2)
def accelerate_accumulation(job: parity.Job) -> None:
    job.reference(Transformer(), loss=loss_of, batch=batch_of, optimizer=adamw, clip=0.5, labels=None)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = job.copy()
    model, optimizer = accelerator.prepare(model, adamw(list(model.parameters())))

    def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        losses = []
        for half in range(2):
            rows = {key: x.chunk(2)[half] for key, x in batch.items()}
            with accelerator.accumulate(model):
                loss = loss_of(model, rows)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    job.parallel(model, step=step, batch=job.rows("data"))
