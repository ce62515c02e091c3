"""An owner is told of gradients until the owner is dropped."""

from __future__ import annotations

import gc
from weakref import ref

import torch
from torch import Tensor, nn

from meshwright.compute.parameters.gradients import Gradients


class Owner:
    """A strategy that holds gradients, and is told of each gradient."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.heard: list[Tensor] = []
        self.gradients = Gradients({parameter: torch.zeros_like(parameter)}, self.heard.append)
        self.gradients.on_gradient = self.hear

    def hear(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        self.heard.append(parameter.grad)


def test_a_model_that_is_dropped_leaves_no_memory() -> None:
    parameter = nn.Parameter(torch.ones(4))
    owner = Owner(parameter)
    (2 * parameter).sum().backward()
    assert [gradient.tolist() for gradient in owner.heard] == [[2.0] * 4]
    gone = ref(owner)
    del owner, parameter
    gc.collect()
    assert gone() is None
