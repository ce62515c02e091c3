"""FSDP2's mixed precision on one process: a reference for programs that cast by a MixedPrecisionPolicy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from meshwright.parity.batches import cast_batch

Loss = Callable[[Any, Any], Any]


class _Cast(nn.Module):
    """A model that computes with cast copies of the parameters, as FSDP2 does with gathered parameters."""

    def __init__(self, model: nn.Module, policy: Any) -> None:
        super().__init__()
        self._kept, self._policy = [model], policy  # in a list, so that it is no submodule and paths stay the same

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        (model,), policy = self._kept, self._policy
        cast: dict[str, Tensor] = dict(model.named_parameters())
        if policy.param_dtype is not None:
            cast = {name: x.to(policy.param_dtype) if x.is_floating_point() else x for name, x in cast.items()}
            if policy.cast_forward_inputs:
                arguments = tuple(cast_batch(x, policy.param_dtype) for x in arguments)
                keywords = cast_batch(keywords, policy.param_dtype)
        given = functional_call(model, cast, arguments, keywords)
        return given if policy.output_dtype is None else cast_batch(given, policy.output_dtype)


def cast_like(policy: Any, loss: Loss) -> Loss:
    """Return a loss for `job.reference` that computes like a model under `fully_shard(..., mp_policy=policy)`.

    For a check with precision="own". Parameters and floating inputs are cast to `policy.param_dtype`, the output to
    `policy.output_dtype`. Gradients have the parameters' dtype.

        job.reference(model, loss=parity.cast_like(policy, loss_of), batch=batch_of)
    """
    return lambda model, batch: loss(_Cast(model, policy), batch)
