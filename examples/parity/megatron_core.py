"""Megatron-Core's column and row linears on CPU processes; with sequence parallelism: megatron_sequence.py.

The rank's shard of a weight is read from the attributes that Megatron gives to parameters.
"""

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.model_parallel_config import ModelParallelConfig
from model import Transformer, batch_of, loss_of
from torch import Tensor, nn

import meshwright.parity as parity


class Column(tensor_parallel.ColumnParallelLinear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[0]  # the second is a bias that is not added yet


class Row(tensor_parallel.RowParallelLinear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[0]


def parallelize(model: nn.Module, sequence: bool = False) -> nn.Module:
    config = ModelParallelConfig(tensor_model_parallel_size=2, sequence_parallel=sequence,
                                 use_cpu_initialization=True, params_dtype=torch.get_default_dtype())  # fmt: skip
    common = {"config": config, "init_method": nn.init.normal_}
    for block in model.blocks:
        for name in ("q", "k", "v", "up"):
            rows, columns = getattr(block, name).weight.shape
            setattr(block, name, Column(columns, rows, gather_output=False, **common))
        for name in ("out", "down"):
            rows, columns = getattr(block, name).weight.shape
            setattr(block, name, Row(columns, rows, bias=True, input_is_parallel=True, skip_bias_add=False, **common))
    return model


@parity.check(ranks=2, axes={"tp": 2})
def megatron_tp(job: parity.Job) -> None:
    job.reference(Transformer(), loss=loss_of, batch=batch_of)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    job.parallel(parallelize(job.copy()), load=True)
