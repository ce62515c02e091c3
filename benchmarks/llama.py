"""SmolLM2-135M's shape, a model in wide use: one step of Meshwright, transformers and torch.

    python -m benchmarks.llama [--only serial bf16 zero3 tensor pipe] [--layers N] [--rows N] [--tokens N]
                               [--allocators told glibc] [--rounds N] [--json FILE]

| question     | ours                              | peers                                                             |
|--------------|-----------------------------------|-------------------------------------------------------------------|
| serial, bf16 | one device, two threads           | transformers in Trainer's loop; torchtitan's model in plain torch |
| zero3        | zero3 over 2 ranks of one thread  | FSDP2                                                             |
| tensor       | 1-D over 2 ranks                  | DTensor                                                           |
| pipe         | message-driven over 2 stages      | torch.distributed.pipelining, 1F1B                                |

torchtitan's model and FSDP2 also run with each layer compiled. Aims: at most 0.95 of the best peer in serial, 0.88 in
zero3, 0.70 in tensor, 0.85 in pipe. 9 and 3 heads are not divisible by two: `tensor` has 8 and 4, of 72. `tensor` and
`pipe` are untied, since torch's DTensor and pipelines tie no tables. Partitions of `pipe` are by products: the head
counts as eight layers. On one device all contenders clip norms; over ranks none does. bf16 is not compared on a
processor without products of bf16: torch emulates these there.
"""

from __future__ import annotations

from dataclasses import asdict, replace

from benchmarks import ours
from benchmarks.contender import Contender, Option
from benchmarks.interleave import measure_both, peer_arguments, plan_of, write_json
from benchmarks.llama_model import Sizes, options_of
from meshwright.compute.tensor.widened import product_rates
from meshwright.ranks.machine import processor_name

QUESTIONS = ("serial", "bf16", "zero3", "tensor", "pipe")
HEAD_IN_LAYERS = 8
THREADS = 2


def theirs(name: str, factory: str, sizes: Sizes, ranks: int = 1, **options: Option) -> Contender:
    return Contender(name, f"benchmarks.llama_model:{factory}", asdict(sizes) | options, ranks)


def mine(name: str, sizes: Sizes, options: dict[str, Option], transport: str = "torch") -> Contender:
    return ours.configured(f"meshwright {name}", transport, options_of(sizes) | options)


def partition_of(layers: int) -> tuple[int, int]:
    """Return the layers of two stages of about equal work, the head on the second."""
    first = min(layers - 1, (layers + HEAD_IN_LAYERS) // 2)
    return first, layers - first


def contenders(question: str, sizes: Sizes) -> tuple[list[Contender], list[Contender]]:
    """Return the peers, and Meshwright's contenders."""
    if question in ("serial", "bf16"):
        sizes, dtype = replace(sizes, clip=1.0), "bf16" if question == "bf16" else "float32"
        half: dict[str, Option] = {"precision.level": "O1", "precision.dtype": "bf16"} if question == "bf16" else {}
        others = [
            theirs("transformers, Trainer's loop", "transformers", sizes, dtype=dtype, threads=THREADS),
            theirs("torchtitan's model", "torchtitan", sizes, dtype=dtype, threads=THREADS),
            theirs("the same, compiled", "torchtitan", sizes, dtype=dtype, threads=THREADS, compiled=True),
        ]
        return others, [mine(dtype, sizes, {"threads": THREADS} | half)]
    if question == "zero3":
        options: dict[str, Option] = {"layout.data.sync": "zero3", "layout.data.size": 2}
        others = [theirs("FSDP2", "fsdp2", sizes, 2), theirs("FSDP2, compiled", "fsdp2", sizes, 2, compiled=True)]
        return others, [mine("zero3", sizes, options)]
    if question == "tensor":
        even = replace(sizes, heads=8, key_value_heads=4, tied=False)
        options = {"layout.tensor.kind": "megatron", "layout.tensor.size": 2}
        return [theirs("DTensor", "dtensor", even, 2)], [mine("1-D", even, options)]
    untied, (first, second) = replace(sizes, tied=False), partition_of(sizes.layers)
    options = {
        "layout.pipeline.size": 2, "layout.pipeline.schedule": "message-driven",
        "layout.pipeline.partition": f"[{first}, {second}]", "batch.micro": 1,
    }  # fmt: skip
    rival = theirs("torch 1F1B", "pipeline", untied, 2, partition=f"{first}+{second}", microbatches=sizes.rows)
    return [rival], [mine("message-driven", untied, options)]


def main() -> None:
    parser = peer_arguments("SmolLM2-135M's step beside transformers', torchtitan's and torch's parallelism.")
    parser.add_argument("--only", nargs="+", choices=QUESTIONS, default=list(QUESTIONS), help="which questions")
    parser.add_argument("--layers", type=int, default=Sizes.layers)
    parser.add_argument("--rows", type=int, default=Sizes.rows, help="sequences in the global batch")
    parser.add_argument("--tokens", type=int, default=Sizes.tokens, help="of a sequence")
    arguments = parser.parse_args()
    sizes = Sizes(layers=arguments.layers, rows=arguments.rows, tokens=arguments.tokens)
    tables = {}
    for question in arguments.only:
        if question == "bf16" and product_rates("bf16").slow:
            print(f"bf16 is not compared: {processor_name()} has no products of it, and emulates them")
            continue
        others, candidates = contenders(question, sizes)
        title = f"{question}: {sizes.layers} layers, {sizes.rows} x {sizes.tokens} tokens"
        names = [contender.name for contender in others]
        tables |= measure_both(title, [*others, *candidates], plan_of(arguments), names, arguments.allocators)
    write_json(arguments.json, tables)


if __name__ == "__main__":
    main()
