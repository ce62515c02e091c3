"""Colossal-AI's 1-D linears (shardformer) on CPU processes: Megatron's column and row cut.

Colossal-AI's CPU accelerator cannot seed torch's generator, and reads a device's state there: two lines fix both.
"""

import torch
from colossalai.accelerator.cpu_accelerator import CpuAccelerator
from colossalai.shardformer.layer import Linear1D_Col, Linear1D_Row
from model import Transformer, batch_of, loss_of

import meshwright.parity as parity

CpuAccelerator.get_rng_state = lambda self, device=None: torch.get_rng_state()
CpuAccelerator.manual_seed = lambda self, seed: torch.manual_seed(seed)


@parity.check(ranks=2, axes={"tp": 2})
def colossal_1d(job: parity.Job) -> None:
    job.reference(Transformer(), loss=loss_of, batch=batch_of)
    model, group = job.copy(), job.device_mesh["tp"].get_group()
    for block in model.blocks:
        for name in ("q", "k", "v", "up"):
            setattr(block, name, Linear1D_Col.from_native_module(getattr(block, name), process_group=group))
        for name in ("out", "down"):
            setattr(block, name, Linear1D_Row.from_native_module(getattr(block, name), process_group=group))
    job.parallel(model)
