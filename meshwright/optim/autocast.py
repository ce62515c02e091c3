"""O1: a model whose forward passes run under torch's autocast; the backward passes follow the dtypes it chose."""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.model import Batch, Hidden, Model, Scales


class Autocast:
    """`model`, as a data-parallel strategy calls it, with per-operator casts to `dtype`."""

    def __init__(self, model: Model, device: torch.device, dtype: torch.dtype) -> None:
        self.labels = model.labels
        self.inside = model.inside
        self._model = model
        self._device = device.type
        self._dtype = dtype

    def __call__(self, batch: Batch, scales: Scales) -> Tensor:
        with torch.autocast(self._device, self._dtype):
            return self._model(batch, scales)

    def trunk(self, batch: Batch) -> Tensor:
        with torch.autocast(self._device, self._dtype):
            return self._model.trunk(batch)

    def begin(self, batch: Batch) -> Hidden:
        with torch.autocast(self._device, self._dtype):
            return self._model.begin(batch)

    def run_layers(self, hidden: Hidden, batch: Batch) -> Hidden:
        with torch.autocast(self._device, self._dtype):
            return self._model.run_layers(hidden, batch)

    def end(self, hidden: Hidden) -> Tensor:
        with torch.autocast(self._device, self._dtype):
            return self._model.end(hidden)

    def right(self, h: Tensor, batch: Batch) -> list[int]:
        with torch.autocast(self._device, self._dtype):
            return self._model.right(h, batch)

    def loss(self, h: Tensor, batch: Batch, scales: Scales) -> Tensor:
        with torch.autocast(self._device, self._dtype):
            return self._model.loss(h, batch, scales)
