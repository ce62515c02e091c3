"""bf16 and float32 on a CPU: rates of products, and whole steps, serial.

    python -m benchmarks.half_products [--allocators told glibc] [--rounds N] [--json FILE]

The reference model (benchmarks/reference.py) in float32, and stored in bf16 with products in float32 or as stored,
under O1 and O2. A processor without products of bf16 emulates these, in minutes a step: `stored` is then left out.
Aims: `auto` never slower than float32; 0.55 of the plain float32 loop if the processor has such products.
"""

from __future__ import annotations

import torch

from benchmarks import ours
from benchmarks.contender import Contender, Option
from benchmarks.interleave import machine, measure_both, peer_arguments, plan_of, write_json
from meshwright.compute.tensor.widened import product_rates

BASELINES = ("plain loop, float32", "meshwright float32")


def halves(level: str, products: str) -> Contender:
    options: dict[str, Option] = {
        "precision.level": level, "precision.dtype": "bf16", "precision.products": products,
    }  # fmt: skip
    return ours.configured(f"{level} bf16, products {products}", "torch", options)


def main() -> None:
    arguments = peer_arguments("bf16 beside float32.").parse_args()
    rates = product_rates("bf16")
    abilities = torch.backends.cpu.get_cpu_capability()
    print(f"{machine()}; {abilities}; bf16 {rates.half / 1e9:.3g} Gflop/s a thread: slow={rates.slow}")
    contenders = [
        Contender(BASELINES[0], "benchmarks.baselines:plain"),
        ours.configured(BASELINES[1], "torch", {}),
        *(halves(level, "auto") for level in ("O1", "O2")),
        *(halves(level, "stored") for level in ("O1", "O2") if not rates.slow),
    ]
    title = "bf16 on a CPU, one thread"
    write_json(arguments.json, measure_both(title, contenders, plan_of(arguments), BASELINES, arguments.allocators))


if __name__ == "__main__":
    main()
