"""bf16 beside float32 on a CPU: rates of products, and whole steps, serial.

    python -m benchmarks.half_products [--rounds N] [--steps N] [--json FILE]

The reference model (benchmarks/reference.py) in float32, and stored in bf16 with products in float32 or in bf16, under
O1 and O2. Steps that multiply bf16 take minutes on a processor without AVX-512-BF16 or AMX: --stored asks for them.
Targets: `auto` never slower than float32; 0.55 of the plain float32 loop where the processor has either.
"""

from __future__ import annotations

import torch

from benchmarks import ours
from benchmarks.contender import Contender, Option
from benchmarks.interleave import as_json, interleave, machine, plan_arguments, plan_of, show, write_json
from meshwright.compute.tensor.widened import product_rates

BASELINES = ("plain loop, float32", "meshwright float32")


def halves(level: str, products: str) -> Contender:
    options: dict[str, Option] = {
        "precision.level": level, "precision.dtype": "bf16", "precision.products": products,
    }  # fmt: skip
    return ours.configured(f"{level} bf16, products {products}", "torch", options)


def main() -> None:
    parser = plan_arguments("bf16 beside float32.")
    parser.add_argument("--stored", action="store_true", help="also steps that multiply what is stored")
    arguments = parser.parse_args()
    rates = product_rates("bf16")
    abilities = torch.backends.cpu.get_cpu_capability()
    print(f"{machine()}; {abilities}; bf16 {rates.half / 1e9:.3g} Gflop/s a thread: slow={rates.slow}")
    contenders = [
        Contender(BASELINES[0], "benchmarks.baselines:plain"),
        ours.configured(BASELINES[1], "torch", {}),
        *(halves(level, "auto") for level in ("O1", "O2")),
        *(halves(level, "stored") for level in ("O1", "O2") if arguments.stored),
    ]
    results = interleave(contenders, plan_of(arguments))
    show("bf16 on a CPU, one thread", results, BASELINES)
    write_json(arguments.json, {"halves": as_json(results, BASELINES)})


if __name__ == "__main__":
    main()
