"""accelerate with torch's fully_shard (accelerate's FSDP plugin, version 2), over two processes."""

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from model import Block, Transformer, adamw, batch_of, loss_of
from torch import Tensor, nn

import meshwright.parity as parity


@parity.check(ranks=2)
def accelerate_fsdp2(job: parity.Job) -> None:
    job.reference(Transformer(), loss=loss_of, batch=batch_of, optimizer=adamw, clip=0.5, labels=None)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=[Block.__name__]
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = job.copy()
    model, optimizer = accelerator.prepare(model, adamw(list(model.parameters())))

    def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        loss = loss_of(model, batch)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    job.parallel(model, step=step, batch=job.rows("data"))
