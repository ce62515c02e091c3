"""torch's fully_shard (FSDP2) as a strategy: each block and the rest are units whose weights are gathered when needed.

A rank holds 1/n of weights, gradients and states. It sends (n-1)/n of a block's weights forward and backward (of the
rest's forward only), and (n-1)/n of the gradients in a reduce-scatter.

A rank holds rows r·c..(r+1)·c of every parameter's first dim, c = ceil(rows / n), as torch.chunk cuts. Under O2 the
sharded weights are the float32 masters, and torch casts what it gathers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from meshwright.data_parallel.strategy import Policy, Synchroniser
from meshwright.model import Batch, Hidden, Model, Scales
from meshwright.parameters.bucket import FlatWeights, Place, Slices, Slot, gradient_dtype
from meshwright.parameters.shard import Box, ShardSpec
from meshwright.ranks.agreement import make_equal
from meshwright.ranks.comm import SoloComm, size_bytes
from meshwright.ranks.grid import PIPE
from meshwright.ranks.mesh import Mesh
from meshwright.ranks.torch_comm import TorchComm


class FullySharded(Synchroniser):
    """`units`: the modules whose weights are gathered and freed together. `half`: the dtype computed in, or None."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[nn.Module],
        specs: dict[str, ShardSpec],
        mesh: Mesh,
        half: torch.dtype | None,
        *,
        widens: bool,
    ) -> None:
        """`widens`: half-precision gradients are added up and summed in float32 (bucket.gradient_dtype)."""
        super().__init__((), mesh, Policy())  # torch has buckets of its own
        comm = mesh.comm("data")
        # Compared while every rank still holds whole weights.
        self._differing = [name for name, parameter in model.named_parameters() if make_equal(parameter, comm)]
        summed = half if half is None else gradient_dtype(half, widens)
        policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=summed)
        if isinstance(comm, SoloComm):
            raise AssertionError("fully_shard needs a process group, also for one rank")
        assert isinstance(comm, TorchComm), f"fully_shard runs on torch.distributed, not on {comm}"
        device_mesh = DeviceMesh.from_group(comm.process_group, mesh.device.type, mesh_dim_names=("data",))
        for unit in units:
            fully_shard(unit, mesh=device_mesh, mp_policy=policy)
        fully_shard(model, mesh=device_mesh, mp_policy=policy)
        assert isinstance(model, FSDPModule)
        self.model = model
        # Ours are sums over the global batch: torch would divide by the number of ranks.
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # gloo knows no sum with a factor
        rest = [
            parameter
            for parameter in model.parameters()
            if not any(parameter in set(unit.parameters()) for unit in units)
        ]
        whole = [parameter for unit in units for parameter in unit.parameters()]
        # For the ledger, since torch does not report: units are gathered forward and backward, the rest forward only.
        self._gathered_bytes = 2 * self._sent_bytes(whole, half) + self._sent_bytes(rest, half)
        self._summed_bytes = self._sent_bytes([*whole, *rest], summed)
        self._sharded = [parameter for _, parameter in model.named_parameters()]
        self.slots = [self._slot(name, parameter, specs[name]) for name, parameter in model.named_parameters()]
        # This rank's rows, which no other rank holds between steps.
        self._weights = [FlatWeights(slot.parameter.detach(), slot.places, slot.copy_axes) for slot in self.slots]

    @property
    def most_bytes(self) -> tuple[int, int]:
        """Bytes of this rank's own rows; torch has a unit's whole gradients beside them."""
        own = sum(size_bytes(slot.parameter) for slot in self.slots)
        return own, own

    def forward(self, model: Model, batch: Batch, scales: Scales, incoming: Hidden) -> Hidden:
        self.mesh.ledger.record("data", "all_gather", self._gathered_bytes)
        return model(batch, scales, incoming)

    def expect(self, final: bool) -> None:
        self.model.set_requires_gradient_sync(final)
        if final:
            self.mesh.ledger.record("data", "reduce_scatter", self._summed_bytes)

    def arrivals(self) -> Iterator[int]:
        for slot, parameter in zip(self.slots, self._sharded, strict=True):
            assert isinstance(parameter.grad, DTensor), "fully_shard left no gradient"
            slot.parameter.grad = parameter.grad.to_local().reshape(-1)
        return iter(range(len(self.slots)))

    def publish(self, *, wait: bool = True) -> None:
        for slot, parameter in zip(self.slots, self._sharded, strict=True):
            slot.parameter.grad = None
            parameter.grad = None

    @contextmanager
    def whole_weights(self) -> Iterator[None]:
        self.model.unshard()  # units gather themselves when called
        yield
        self.model.reshard()

    def make_replicas_equal(self) -> list[str]:
        """Compared before the weights were cut: afterwards no two ranks hold the same."""
        return self._differing

    def _sent_bytes(self, parameters: Sequence[nn.Parameter], dtype: torch.dtype | None) -> int:
        """(n-1)/n of parameters as they travel: the first dim padded to n equal parts, in `dtype` or as stored."""
        size = self.mesh.size("data")
        return sum(
            (size - 1) * -(-parameter.shape[0] // size) * parameter[0].numel() * (dtype or parameter.dtype).itemsize
            for parameter in parameters
        )

    def _slot(self, name: str, sharded: nn.Parameter, spec: ShardSpec) -> Slot:
        assert isinstance(sharded, DTensor), f"{name} was not sharded"
        local = sharded.to_local()
        rows = -(-spec.shape[0] // self.mesh.size("data"))
        # torch.chunk leaves the last ranks without rows where n does not divide them.
        start = min(rows * self.mesh.index("data"), spec.shape[0])
        box = Box((start, *(0 for _ in spec.shape[1:])), tuple(local.shape))
        places = (Place(name, spec.shape, box, 0, local.numel()),) if local.numel() else ()
        whole = Place(name, spec.shape, Box(tuple(0 for _ in spec.shape), spec.shape), 0, math.prod(spec.shape))
        slices = Slices((whole,), ("data",), rows * math.prod(spec.shape[1:]))
        copies = tuple(axis for axis in self.mesh.grid.names if axis not in (PIPE, "data"))
        parameter = nn.Parameter(local.detach().view(-1))
        return Slot(parameter, places, spec.role.by_elements(), ("data",), (), slices, copies)
