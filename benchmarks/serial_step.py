"""(a) The serial step against a plain torch loop, plain and compiled, and against Hugging Face's GPT-2.

    python -m benchmarks.serial_step [--rounds N] [--steps N] [--json FILE]

Targets: at most 0.80 of the plain loop and of Hugging Face's, at most 0.95 of the compiled plain loop. The last row is
no contender: the linear layers' products alone, the floor of every other row.
"""

from __future__ import annotations

from benchmarks import ours
from benchmarks.contender import Contender
from benchmarks.interleave import as_json, interleave, plan_arguments, plan_of, show, write_json

BASELINES = ("plain loop", "plain loop, compiled", "Hugging Face")


def main() -> None:
    arguments = plan_arguments("The serial step against a plain loop and Hugging Face's.").parse_args()
    contenders = [
        Contender("plain loop", "benchmarks.baselines:plain"),
        Contender("plain loop, fused AdamW", "benchmarks.baselines:plain", {"fused": True}),
        Contender("plain loop, compiled", "benchmarks.baselines:plain", {"fused": True, "compiled": True}),
        Contender("Hugging Face", "benchmarks.baselines:hugging_face"),
        ours.contender("allreduce", "torch", 1),
        ours.configured("meshwright serial, islands", "torch", {"compile": "islands"}),
        ours.configured("meshwright serial, blocks", "torch", {"compile": "blocks"}),
        Contender("matrix products alone", "benchmarks.baselines:products"),
    ]
    results = interleave(contenders, plan_of(arguments))
    show("(a) serial step, one thread", results, BASELINES)
    write_json(arguments.json, {"serial": as_json(results, BASELINES)})


if __name__ == "__main__":
    main()
