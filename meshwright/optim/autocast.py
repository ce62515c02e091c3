"""O1: a model whose forward passes run under torch's autocast; the backward passes follow the dtypes it chose."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Autocast:
    """`model`, as a data-parallel strategy calls it, with per-operator casts to `dtype`."""

    def __init__(self, model: Any, device: torch.device, dtype: torch.dtype) -> None:
        self._model = model
        self._device = device.type
        self._dtype = dtype

    def __call__(self, inputs: Tensor, labels: Tensor, scale: float) -> Tensor:
        with torch.autocast(self._device, self._dtype):
            loss: Tensor = self._model(inputs, labels, scale)
        return loss

    def trunk(self, inputs: Tensor) -> Tensor:
        with torch.autocast(self._device, self._dtype):
            h: Tensor = self._model.trunk(inputs)
        return h

    def head(self, h: Tensor, labels: Tensor, scale: float) -> Tensor:
        with torch.autocast(self._device, self._dtype):
            loss: Tensor = self._model.head(h, labels, scale)
        return loss
