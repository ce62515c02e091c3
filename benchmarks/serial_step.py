"""(a) The serial step against a plain torch loop, plain and compiled, and against Hugging Face's GPT-2.

    python -m benchmarks.serial_step [--allocators told glibc] [--rounds N] [--json FILE]

Aims: at most 0.93 of the plain loop and 0.95 of the compiled one. The last row is no contender: the linear layers'
products alone, the floor of every other row.
"""

from __future__ import annotations

from benchmarks import ours
from benchmarks.contender import Contender
from benchmarks.interleave import measure_both, peer_arguments, plan_of, write_json

BASELINES = ("plain loop", "plain loop, compiled", "Hugging Face")


def main() -> None:
    arguments = peer_arguments("The serial step against a plain loop and Hugging Face's.").parse_args()
    contenders = [
        Contender("plain loop", "benchmarks.baselines:plain"),
        Contender("plain loop, compiled", "benchmarks.baselines:plain", {"compiled": True}),
        Contender("Hugging Face", "benchmarks.baselines:hugging_face"),
        ours.contender("allreduce", "torch", 1),
        ours.configured("meshwright, islands", "torch", {"compile": "islands"}),
        ours.configured("meshwright, blocks", "torch", {"compile": "blocks"}),
        Contender("products alone", "benchmarks.baselines:products"),
    ]
    title = "(a) serial step, one thread"
    write_json(arguments.json, measure_both(title, contenders, plan_of(arguments), BASELINES, arguments.allocators))


if __name__ == "__main__":
    main()
