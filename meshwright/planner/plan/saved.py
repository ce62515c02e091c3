"""Tensors that autograd keeps in a recorded forward pass, as a program keeps these.

A program may keep a linear's input in the format of its products (`Software.low_inputs`). Transformer Engine casts the
input before the product, and the product's autograd function keeps the copy, in the one order that the weight's
gradient reads: 1 byte an element, and MXFP8's scales (pytorch/module/linear.py, layernorm_linear.py and
grouped_linear.py: update_usage(rowwise_usage=False, columnwise_usage=True)).

| kept in the run's format  | source                                                                                   |
|---------------------------|------------------------------------------------------------------------------------------|
| attention's result, which | core/transformer/attention.py, set_save_original_input(linear_proj), for all recipes but |
| attention keeps as well   | delayed scaling                                                                          |
| a router's input          | core/transformer/moe/moe_utils.py, RouterGatingLinearFunction                            |
| operands of norms,        | no products                                                                              |
| activations, attention    |                                                                                          |

Layers that torch's checkpoint computes again keep their tensors in the run's format while these layers are in their
backward pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from meshwright.compute.model import Run
from meshwright.compute.tensor.experts import Experts, GroupedLinear
from meshwright.compute.tensor.products import LinearLayer
from meshwright.planner.plan.dispatched import DispatchedExperts
from meshwright.planner.plan.recorder import Form, LowCopy, Recorder, form_of
from meshwright.strategies.memory.recompute import tensors_in


class Again:
    """A call whose results are computed again when the backward pass first reads one of these, instead of kept.

    The function's arguments are kept, and its own operations keep tensors as usual: Megatron-Core's
    CheckpointWithoutOutput (core/tensor_parallel/random.py) of functions whose operands are kept anyway.
    """

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._function, self._arguments = function, arguments
        self._results: list[Tensor] = []

    def result(self, index: int) -> Tensor:
        """Return a result; all are computed by the first call."""
        if not self._results:
            with torch.no_grad():
                self._results = list(tensors_in((self._function(*self._arguments),)))
        return self._results[index]


class KeptTensor:
    """A tensor that an autograd function keeps, as a copy in the products' format, or to be computed again."""

    __slots__ = ("__weakref__", "again", "changes", "copy", "form", "offset", "tensor")

    def __init__(self, tensor: Tensor, changes: int) -> None:
        self.tensor: Tensor | None = tensor
        """None if `copy` or `again` takes its place."""
        self.changes = changes
        """The recorder's allocations and frees before."""
        self.copy: LowCopy | None = None
        self.again: tuple[Again, int] | None = None
        """The call that computes the tensor's storage again, and the number of the result."""
        self.form: Form | None = None
        self.offset = 0

    def replace(self, *, copy: LowCopy | None = None, again: tuple[Again, int] | None = None) -> None:
        """Keep a copy, or a call, in place of the tensor."""
        assert self.tensor is not None, "a tensor that is kept otherwise"
        self.form, self.offset = form_of(self.tensor), int(self.tensor.storage_offset())
        self.copy, self.again, self.tensor = copy, again, None


class SavedTensors:
    """Hooks on the tensors that autograd keeps while `hooks` are entered.

    Args:
        recorder: The recorder of the passes.
        model: The part of a model that runs.
        in_host: Whether kept tensors are moved to host memory, one layer after another (Software.host_layers).
    """

    def __init__(self, recorder: Recorder, model: nn.Module, *, in_host: bool = False) -> None:
        self._recorder, self._linears, self._in_host = recorder, set[tuple[int, int]](), in_host
        self._kept: list[weakref.ref[KeptTensor]] = []
        self._moved: list[tuple[LowCopy, tuple[int, ...]]] = []
        held = (*model.parameters(), *model.buffers()) if in_host else ()
        self._parameters = {x.untyped_storage()._cdata for x in held}
        self._last: weakref.ref[KeptTensor] | None = None
        self._times: dict[int, int] = {}
        self.offsets: dict[int, set[int]] = {}
        """Offsets of the tensors kept in the run's format, by storage."""
        for module in model.modules() if recorder.low_inputs or recorder.recomputed else ():
            if recorder.low_inputs and isinstance(module, LinearLayer | GroupedLinear):
                self._linears.add((module.weight.untyped_storage()._cdata, int(module.weight.storage_offset())))
            if "moe_act" in recorder.recomputed and isinstance(module, DispatchedExperts):
                module.weigh_by(self.run_again)
            if "mla_up_proj" in recorder.recomputed and isinstance(module, WidensLatents):
                module.widen_by(self.run_again)
            for norm in norms_alone(module) if "layernorm" in recorder.recomputed else ():
                norm.register_forward_hook(self.mark)
        changes = self._linears or recorder.recomputed or in_host
        both = (self.pack, self.unpack) if changes else (self.note, lambda x: x)
        self.hooks = torch.autograd.graph.saved_tensors_hooks(*both)

    def begin(self) -> None:
        """Forget the pass before."""
        self._last = None
        self._kept.clear()
        self._times.clear()
        self.offsets.clear()

    def run_again(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return the function's results, which the backward pass computes again."""
        made = function(*arguments)
        self.mark(function, arguments, made)
        return made

    def mark(self, function: Callable[..., Any], arguments: tuple[Any, ...], made: Any) -> None:
        """Mark results of a function or of a module, which the backward pass computes again."""
        again = Again(function.forward if isinstance(function, nn.Module) else function, arguments)
        for index, x in enumerate(tensors_in((made,))):
            # As long as the storage, or a tensor kept in its place: a map would keep the arguments.
            x.untyped_storage().again = again, index  # type: ignore[attr-defined]

    def note(self, x: Tensor) -> Tensor:
        """Keep a tensor as it is."""
        with torch._C.DisableTorchFunction():  # as LiveBytes
            self.offsets.setdefault(x.untyped_storage()._cdata, set()).add(int(x.storage_offset()))
        return x

    def pack(self, x: Tensor) -> KeptTensor:
        """Keep a tensor. A linear's function keeps input and weight without an operation in between: a linear's weight
        shows that the tensor before is an input, which is kept in the products' format unless it was kept before."""
        storage, offset = x.untyped_storage(), int(x.storage_offset())
        address, now = storage._cdata, KeptTensor(x, len(self._recorder.changes))
        if self._in_host:
            self._kept.append(weakref.ref(now))
        if self._linears:
            before = self._last() if self._last is not None else None
            self._last = weakref.ref(now)
            if before is not None and before.changes == now.changes and (address, offset) in self._linears:
                self.narrow(before)
        if (again := getattr(storage, "again", None)) is not None:
            now.replace(again=again)
            return now
        self.offsets.setdefault(address, set()).add(offset)
        self._times[address] = self._times.get(address, 0) + 1
        return now

    def narrow(self, saved: KeptTensor) -> None:
        """Keep a tensor in the products' format from now on, unless another function keeps the same storage."""
        address = -1 if saved.tensor is None else saved.tensor.untyped_storage()._cdata
        if saved.tensor is not None and self._times.get(address) == 1:
            del self.offsets[address], self._times[address]
            saved.replace(copy=self._recorder.narrowed(saved.tensor))

    def leave(self) -> None:
        """Move the kept tensors to host memory at the end of a forward pass: the copy runs beside the next layer's
        pass, as Transformer Engine's (pytorch/cpu_offload.py)."""
        if not self._in_host:
            return
        copies: dict[int, LowCopy] = {}
        for saved in filter(None, (each() for each in self._kept)):
            if saved.tensor is not None and (address := saved.tensor.untyped_storage()._cdata) not in self._parameters:
                copy = copies.setdefault(address, LowCopy(saved.tensor))
                self.offsets.pop(address, None)
                saved.replace(copy=copy)
            elif saved.copy is not None:
                copies[id(saved.copy)] = saved.copy
        self._moved = [(copy, tuple(x.untyped_storage().nbytes() for x in copy.tensors)) for copy in copies.values()]
        for copy, _ in self._moved:
            copy.tensors = ()
        self._recorder.copy_beside([size for _, sizes in self._moved for size in sizes], to_host=True)

    def come(self) -> None:
        """Have the moved tensors on the device at the begin of a backward pass."""
        for copy, sizes in self._moved:
            copy.tensors = tuple(torch.empty(size, dtype=torch.uint8, device="meta") for size in sizes)

    def fetch(self) -> None:
        """Record the copies of the layer ahead, beside a backward pass that ends."""
        if self._in_host:
            self._recorder.copy_beside([size for _, sizes in self._moved for size in sizes], to_host=False)
        self._moved = []

    def unpack(self, saved: KeptTensor) -> Tensor:
        """Return a kept tensor in the run's format."""
        if saved.tensor is not None:
            return saved.tensor
        assert saved.form is not None, "a tensor that is kept in no way"
        if saved.copy is not None:
            return self._recorder.widened(saved.copy, saved.form)
        assert saved.again is not None, "a tensor that is kept in no way"
        (again, index), (sizes, strides, _) = saved.again, saved.form
        return again.result(index).as_strided(sizes, strides, saved.offset)


@runtime_checkable
class WidensLatents(Protocol):
    """Attention with projections that widen latents."""

    def widen_by(self, run: Run) -> None:
        """Have the projections run by `run`."""


def norms_alone(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the norms of a block that are modules of their own: before experts and before latent attention.

    Before other linears a norm is a part of the linear (core/models/gpt/gpt_layer_specs.py).
    """
    for name, user in (("attention_norm", "attention"), ("feed_forward_norm", "feed_forward")):
        behind = getattr(module, user, None)
        inside = behind.modules() if isinstance(behind, nn.Module) else ()
        if any(isinstance(each, Experts | WidensLatents) for each in inside):
            yield getattr(module, name)
