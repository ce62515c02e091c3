"""The cost of a step on a GPU, counted without a GPU: kernels, bytes, and waits of the host.

The cost of a layer and microbatch is the cost that two more layers and another microbatch add to a step together,
halved. torch's operations count as one kernel each, attention as FlashAttention.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from meshwright.config import Config
from meshwright.config.load import parse_run
from tests.rehearsal.fake_cuda import ATTENTION, PRODUCTS
from tests.rehearsal.layouts import runs_of
from tests.rehearsal.step import FakeGpu

LAYOUTS: dict[str, dict[str, Any]] = {
    "serial": {},
    "zero1": {"data": {"size": 2, "sync": "zero1"}},
    "megatron": {"tensor": {"kind": "megatron", "size": 2}},
    "sequence": {"tensor": {"kind": "megatron", "size": 2, "sequence_parallel": True}},
    "tesseract": {"tensor": {"kind": "tesseract", "q": 2, "d": 1}},
    "pipeline": {"pipeline": {"size": 2, "schedule": "1f1b"}},
    "experts": {"data": {"size": 2, "expert": 2}},
}
GPT2: dict[str, Any] = {"base": "gpt2-small", "dropout": 0.0}
EXPERTS: dict[str, Any] = {"base": "qwen3-30b-a3b", "vocabulary": 512}
"""The layers of 128 experts of this model, with a small table."""
LAYERS, MICROBATCHES = (2, 4), (2, 3)


@dataclass(frozen=True)
class Costs:
    """The costs of a layout.

    `kernels`, `moved_bytes`: for a layer and microbatch. `step`: the tally of the smallest step.
    """

    kernels: Counter[str]
    moved_bytes: Counter[str]
    step: dict[str, Any]

    @property
    def product_bytes(self) -> float:
        """Bytes of the matrix products and of attention."""
        return sum(self.moved_bytes[name] for name in (*PRODUCTS, *ATTENTION))

    @property
    def cast_bytes(self) -> float:
        """Bytes of copies to another dtype."""
        return sum(number for name, number in self.moved_bytes.items() if " to " in name)


def config_of(
    layout: dict[str, Any], layers: int, microbatches: int, rows: int, model: dict[str, Any] = GPT2, **changes: Any
) -> Config:  # fmt: skip
    """Return a config with `layers` layers in bf16, and `microbatches` microbatches of `rows` sequences of 1,024 a
    replica."""
    replicas = layout.get("data", {}).get("size", 1)
    if "pipeline" in layout:
        stages = layout["pipeline"]["size"]
        layout = layout | {"pipeline": layout["pipeline"] | {"partition": [layers // stages] * stages}}
    tree = {
        "model": model | {"layers": layers},
        "data": {"sequence": 1024},
        "batch": {"global": rows * microbatches * replicas, "micro": rows},
        "precision": {"level": "O2", "dtype": "bf16"},
        "layout": {"transport": "torch", **layout},
        "device": "cuda",
    }
    return parse_run(tree | changes)


def costs(gpu: FakeGpu, names: Iterable[str], rows: int, **changes: Any) -> dict[str, Costs]:
    """Return each layout's costs, from the second step of the last rank."""
    sizes = [(name, layers, micro) for name in names for layers in LAYERS for micro in MICROBATCHES]
    configs = [config_of(LAYOUTS[name], layers, micro, rows, **changes) for name, layers, micro in sizes]
    runs = [runs_of({str(size): config}, 2)[-1] for size, config in zip(sizes, configs, strict=True)]
    tallies: dict[str, dict[tuple[int, int], dict[str, Any]]] = {}
    for (name, *size), report in zip(sizes, gpu.rehearse(runs), strict=True):
        assert not report.error, report.error
        tallies.setdefault(name, {})[tuple(size)] = report.tally  # type: ignore[index]
    return {
        name: _costs(of_size, LAYOUTS[name].get("pipeline", {}).get("size", 1)) for name, of_size in tallies.items()
    }


def _costs(tallies: dict[tuple[int, int], dict[str, Any]], stages: int) -> Costs:
    def each(numbers: str) -> Counter[str]:
        added: Counter[str] = Counter()
        for (layers, micro), tally in tallies.items():
            sign = 1 if (layers == LAYERS[1]) == (micro == MICROBATCHES[1]) else -1
            for key, number in tally[numbers].items():
                added[key] += sign * number
        return Counter({key: number * stages / 2 for key, number in added.items() if number})

    smallest = tallies[LAYERS[0], MICROBATCHES[0]]
    return Costs(each("kernels"), each("moved_bytes"), smallest)
