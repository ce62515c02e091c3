"""A real step of a script on CPUs, measured: python -m benchmarks.adopt_measure OUT.json SCRIPT ...

Products are counted by torch's own formulas (flop_registry) without attention, of a DTensor's local operations. Bytes
are of live floating tensors and of tensors computed from these; a storage that FSDP2 frees (`resize_(0)`) has none.
Both are of the second step: from the end of the optimizer's first step to the end of the second.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.flop_counter import flop_registry

from meshwright.strategies.memory.recompute import LiveBytes


class Live(LiveBytes):
    """Live bytes and products of plain tensors; a DTensor's local operations are followed in its place."""

    def __init__(self) -> None:
        super().__init__()
        self.products = 0
        self._sizes: dict[int, int] = {}
        self._computed = False

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return op(*args, **(kwargs or {}))  # DTensor asks for shapes
        if any(each not in (torch.Tensor, torch.nn.Parameter) for each in types):
            return NotImplemented
        result = super().__torch_dispatch__(op, types, args, kwargs)
        packet = op._overloadpacket
        if packet in flop_registry and "attention" not in str(packet):
            self.products += flop_registry[packet](*args, **(kwargs or {}), out_val=result)
        return result

    def follow(self, given: list[Tensor], result: Any) -> tuple[list[Tensor], list[Tensor]]:
        # Whole numbers of a loader are not counted; a pool's indices are.
        self._computed = any(x.is_floating_point() or x.untyped_storage()._cdata in self._storages for x in given)
        return super().follow(given, result)

    def _follow(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        address = storage._cdata
        # DeepSpeed keeps shapes as tensors of the meta device.
        if not (x.is_floating_point() or self._computed) or address in self._storages or x.is_meta:
            return
        self._number += 1
        index = self._number
        self._resize(index, storage.nbytes())

        def gone(_: object) -> None:
            del self._storages[address]
            self._resize(index, 0)
            del self._sizes[index]

        self._storages[address] = index, weakref.ref(storage, gone)

    def _resize(self, index: int, size: int) -> None:
        self.live += size - self._sizes.get(index, 0)
        self._sizes[index] = size
        self.peak = max(self.peak, self.live)

    @contextmanager
    def following_storages(self) -> Iterator[None]:
        """Follow storages that are freed and filled again in a context, as FSDP2's gathered weights."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: Any, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in self._storages:
                self._resize(self._storages[storage._cdata][0], size)
            return result

        with patch.object(torch.UntypedStorage, "resize_", resized):
            yield


def main() -> None:
    out, script = Path(sys.argv[1]), sys.argv[2]
    live, steps = Live(), [0]

    def stepped(*_: Any) -> None:
        steps[0] += 1
        if steps[0] == 1:
            live.peak, live.products = live.live, 0
        elif steps[0] == 2 and os.environ.get("RANK", "0") == "0":
            out.write_text(json.dumps({"products": live.products, "peak_bytes": live.peak}))

    register_optimizer_step_post_hook(stepped)
    sys.argv = sys.argv[2:]
    sys.path.insert(0, str(Path(script).resolve().parent))
    with live.following_storages(), live:
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
