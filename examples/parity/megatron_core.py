"""Megatron-Core's column and row linears and its table cut by vocabulary, on CPU processes."""

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.model_parallel_config import ModelParallelConfig
from model import Transformer, batch_of, loss_of
from torch import Tensor, nn

import meshwright.parity as parity


class Only(nn.Module):
    """Megatron's linears return their bias beside their output."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0]


def parallelize(model: nn.Module, rank: int) -> dict[str, tuple[str, tuple[slice, ...]]]:
    """Put Megatron's layers in the model's place; which slices of the reference's parameters they hold."""
    config = ModelParallelConfig(tensor_model_parallel_size=2, use_cpu_initialization=True,
                                 params_dtype=torch.get_default_dtype())  # fmt: skip
    places, own = {}, lambda n: slice(rank * n // 2, (rank + 1) * n // 2)
    common = {"config": config, "init_method": nn.init.normal_}
    for i, block in enumerate(model.blocks):
        for name in ("q", "k", "v", "up", "out", "down"):
            rows, columns = getattr(block, name).weight.shape
            path, cut = f"blocks.{i}.{name}", name not in ("out", "down")
            if cut:
                layer = tensor_parallel.ColumnParallelLinear(columns, rows, gather_output=False, **common)
            else:
                layer = tensor_parallel.RowParallelLinear(
                    columns, rows, bias=True, input_is_parallel=True, skip_bias_add=False, **common)  # fmt: skip
            setattr(block, name, Only(layer))
            every = slice(None)
            places[f"{path}.inner.weight"] = f"{path}.weight", (own(rows), every) if cut else (every, own(columns))
            places[f"{path}.inner.bias"] = f"{path}.bias", (own(rows),) if cut else (every,)
    return places


@parity.check(ranks=2, axes={"tp": 2})
def megatron_tp(job: parity.Job) -> None:
    job.reference(Transformer(), loss=loss_of, batch=batch_of)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    model = job.copy()
    places = parallelize(model, job.rank)
    whole = {name: (name, (slice(None),) * p.ndim) for name, p in model.named_parameters() if name not in places}
    job.parallel(model, part=(places | whole).__getitem__, load=True)
