"""A real step of a script on CPUs, measured: python -m benchmarks.adopt_measure OUT.json SCRIPT ...

Products are counted by torch's own formulas (flop_registry) without attention, of a DTensor's local operations; bytes
are of live floating tensors. Both are of the second step: from the end of the optimizer's first step to the end of the
second.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.flop_counter import flop_registry

from meshwright.strategies.memory.recompute import LiveBytes


class Live(LiveBytes):
    """Live bytes and products of plain tensors; a DTensor's local operations are followed in its place."""

    def __init__(self) -> None:
        super().__init__()
        self.products = 0

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return op(*args, **(kwargs or {}))  # DTensor asks for shapes
        if any(kind not in (torch.Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented
        result = super().__torch_dispatch__(op, types, args, kwargs)
        packet = op._overloadpacket
        if packet in flop_registry and "attention" not in str(packet):
            self.products += flop_registry[packet](*args, **(kwargs or {}), out_val=result)
        return result

    def _follow(self, x: torch.Tensor) -> None:
        if x.is_floating_point():  # tokens are a loader's, which no plan counts
            super()._follow(x)


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
    with live:
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
