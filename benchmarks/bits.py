"""The cost of equal bits, and the proof that bits are equal.

    python -m benchmarks.bits [--rounds N] [--steps N] [--json FILE]   step time of layout-free and of the usual mode
    python -m benchmarks.bits --losses [--device cuda]     one model's third loss under 18 layouts, in both modes
    python -m benchmarks.bits --memory      bytes of weights, gradients and states that a rank holds, in both modes
    python -m benchmarks.bits --parts       processor time of a step on one device, by the grains of kernels
    python -m benchmarks.bits --where       processor time of a step on one device, by work, for grains of 1, 4 and 8
    python -m benchmarks.bits --distance    weights after 20 steps: the difference from float64's, in both modes

Grains of one sample, and of four. Targets: at most 1.1 of the usual step on the axes of data, 1.3 on the axes of
tensors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import ours
from benchmarks.contender import Option
from benchmarks.interleave import as_json, find, interleave, machine, plan_arguments, plan_of, write_json
from benchmarks.ours import reference_config
from meshwright.compute.model import Batch
from meshwright.compute.parameters.fixed import FixedPoint
from meshwright.compute.tensor.products import Products
from meshwright.config import Config, parse_config
from meshwright.ranks import launch
from meshwright.ranks.comm import size_bytes
from meshwright.ranks.launch.function import Rank
from meshwright.ranks.machine import Machine, keep_freed_memory
from meshwright.ranks.planned import planned_mesh
from meshwright.strategies.optim import optimizer as optimizer_module
from meshwright.training.decisions import resolve_layout
from meshwright.training.parts import build
from meshwright.training.step import train_step

EXPERTS: dict[str, Option] = {
    "model.family": "llama",
    "model.layers": 2,
    "model.feed_forward": 512,
    "model.experts.count": 8,
    "model.experts.per_token": 2,
}
"""A small Mixtral: 8 experts a layer, two of each token."""

LAYOUTS: dict[str, dict[str, Option]] = {
    "one device": {},
    "one device, microbatches of 4": {"batch.micro": 4},
    "allreduce, 2 ranks": {"layout.data.size": 2},
    "zero1, 2 ranks": {"layout.data.size": 2, "layout.data.sync": "zero1"},
    "zero3, 2 ranks": {"layout.data.size": 2, "layout.data.sync": "zero3"},
    "2 stages, microbatches of 4": {"layout.pipeline.size": 2, "batch.micro": 4},
    "2 stages, 1f1b, microbatches of 4": {
        "layout.pipeline.size": 2,
        "layout.pipeline.schedule": "1f1b",
        "batch.micro": 4,
    },
    "experts, one device": EXPERTS,
    "experts, 2 ranks share them": EXPERTS | {"layout.data.size": 2, "layout.data.expert": 2},
    "megatron, 2 ranks": {"layout.tensor.kind": "megatron", "layout.tensor.size": 2},
    "megatron, cut by sequence, 2 ranks": {
        "layout.tensor.kind": "megatron",
        "layout.tensor.size": 2,
        "layout.tensor.sequence_parallel": True,
    },
    "Ulysses, 2 ranks": {"layout.context.size": 2},
    "ring, 2 ranks": {"layout.context.size": 2, "layout.context.kind": "ring"},
    "sub-graphs, 2 ranks": {"layout.tensor.kind": "subgraph", "layout.tensor.size": 2, "layout.tensor.branch": "block"},
    "2-D, 4 ranks": {"layout.tensor.kind": "tesseract", "layout.tensor.q": 2},
}
MODES: dict[str, dict[str, Option]] = {
    "usual": {},
    "grains of 1": {"bits.kind": "layout-free", "bits.samples": 1},
    "grains of 4": {"bits.kind": "layout-free", "bits.samples": 4},
    "chosen": {"bits.kind": "layout-free"},
}
"""Chosen: the word alone, with parts and runs of `auto` that let every axis in."""
GRAINS: dict[str, dict[str, Option]] = {
    "megatron, 2 ranks": {"bits.tensor": 2},
    "megatron, cut by sequence, 2 ranks": {"bits.tensor": 2, "bits.sequence": 2},
    "Ulysses, 2 ranks": {"bits.sequence": 2},
    "ring, 2 ranks": {"bits.sequence": 2, "bits.attention": "runs"},
    "sub-graphs, 2 ranks": {"bits.tensor": 2},
    "2-D, 4 ranks": {"bits.tensor": 2, "bits.hidden": 2},
}
"""The fields of `bits` that a layout needs in addition to the kind, by the layout's name."""


def options_of(name: str, mode: str) -> dict[str, Option]:
    """Return a layout's words in one mode."""
    return LAYOUTS[name] | MODES[mode] | (GRAINS.get(name, {}) if "bits.samples" in MODES[mode] else {})


EIGHTEEN = (
    "", "batch.micro=1", "layout.data=2", "layout.data=8", "layout.data=2 layout.data.sync=ring",
    "layout.data=4 layout.data.sync=server-gradient", "layout.data=4 layout.data.sync=zero1",
    "layout.data=4 layout.data.sync=zero2 batch.micro=1", "layout.data=4 layout.data.sync=zero3 layout.data.shard=2",
    "layout.pipeline=2 batch.micro=2", "layout.pipeline=4 layout.pipeline.schedule=message-driven batch.micro=1",
    "layout.pipeline=2 layout.pipeline.chunks=2 batch.micro=1", "memory.recompute=1",
    "layout.tensor=megatron layout.tensor.size=4 layout.tensor.sequence_parallel=true",
    "layout.tensor=tesseract layout.tensor.q=2", "layout.tensor=subgraph layout.tensor.size=2", "layout.context=4",
    "layout.data=2 layout.data.sync=zero3 layout.pipeline=2 layout.tensor=megatron layout.tensor.size=2 batch.micro=1",
)  # fmt: skip
SMALL: Mapping[str, Any] = {
    "model": {"layers": 4, "hidden": 64, "heads": 4, "positions": 64, "vocabulary": 512, "dropout": 0.1},
    "data": {"sequence": 64},
    "batch": {"global": 8},
    "optimizer": {"lr": 1e-2},
    "device": "cpu",
    "threads": 1,
}


def random_batch(config: Config, step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    shape = (config.batch.global_, config.data.sequence)
    return {name: torch.randint(512, shape, generator=generator) for name in ("tokens", "labels")}


def run(config: Config, steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the losses of `steps` steps with ranks as threads, and one device's weights by name."""
    config = resolve_layout(config, Machine.here()).config

    def train(rank: Rank) -> tuple[list[float], dict[str, torch.Tensor]]:
        parts = build(config, rank.mesh)
        losses = [train_step(parts, random_batch(config, step), step).loss for step in range(steps)]
        alone = config.layout.world_size == 1  # slices of weights have no memory between steps
        return losses, {name: x.detach().clone() for name, x in parts.model.named_parameters() if alone}

    answer: tuple[list[float], dict[str, torch.Tensor]] = launch.run(train, config)[0]
    return answer


def small(mode: str, *words: str) -> Config:
    """Return the small run in one mode. Layout-free: kernels get quarters of inner widths and of a sequence, and halves
    of the hidden width, so that layouts may cut 4, 4 and 2 ways."""
    bits = {} if mode == "usual" else {"kind": "layout-free", "tensor": 4, "hidden": 2, "sequence": 4}
    return parse_config({**SMALL, "bits": bits}, ("layout.transport=threads", *words))


def losses(device: str = "cpu") -> None:
    """Print a table of layouts: the third step's loss in both modes."""
    table = Table(
        "layout", "usual", "layout-free", title="GPT-2 (4 layers, hidden 64, dropout 0.1), float32: loss of step 3"
    )
    for words in EIGHTEEN:
        found = [run(small(mode, f"device={device}", *words.split()), 3)[0][-1] for mode in ("usual", "layout-free")]
        table.add_row(words or "one device", *(f"{loss:.12f}" for loss in found))
    Console(width=140).print(table)


def memory() -> None:
    """Print a table of layouts: the bytes that rank 0 holds, from parts built on the meta device."""
    table = Table("layout", "mode", "precision", "weights", "gradients", "states", title="MB a rank holds")
    for name in LAYOUTS:
        for dtype, mode in product(("float32", "float64"), ("usual", "grains of 1")):
            options = options_of(name, mode) | {"precision.dtype": dtype}
            config = resolve_layout(reference_config(options), Machine.here()).config
            parts = build(config, planned_mesh(config.grid, 0, config.layout.token_axes))
            parts.optimizer.prepare_states(0)
            states = [parts.optimizer.held.tensors(index) for index in range(len(parts.optimizer.slots))]
            held = sum(size_bytes(x) for of_slot in states for state, x in of_slot.items() if state != "weight")
            sizes = *parts.strategy.most_bytes, held
            table.add_row(name, mode, dtype, *(f"{size / 1e6:.1f}" for size in sizes))
    Console(width=140).print(table)


PARTS: dict[str, tuple[str, ...]] = {
    "usual": (),
    "grains": (),
    "1-D": ("tensor=2",),
    "1-D, sequences": ("tensor=2", "sequence=2"),
    "1-D, sequences, 2-D": ("tensor=2", "sequence=2", "hidden=2"),
    "1-D, rings, 2-D": ("tensor=2", "sequence=2", "hidden=2", "attention=runs"),
    "eight ranks": ("tensor=8", "sequence=8", "hidden=2", "attention=runs"),
}
"""Fields of `bits` in addition to `samples=2`, by the axes that these fields allow."""


def parts(rounds: int = 2) -> None:
    """Print a table of grains: processor time of a step on one device, in turns with the usual mode."""
    model = {"layers": 2, "hidden": 256, "heads": 8, "positions": 128, "vocabulary": 2048, "dropout": 0.0}
    tree = {"model": model, "data": {"sequence": 128}, "batch": {"global": 16}, "device": "cpu", "threads": 1}
    free = "bits.kind=layout-free", "bits.samples=2"
    configs = {
        name: parse_config(
            tree, ("layout.transport=threads", *(free if name != "usual" else ()), *(f"bits.{word}" for word in words))
        )
        for name, words in PARTS.items()
    }
    found: dict[str, list[float]] = {name: [] for name in PARTS}

    def step(rank: Rank, config: Config) -> float:
        built = build(config, rank.mesh)
        times = []
        for turn in range(2):  # the first one allocates
            started = time.process_time()
            train_step(built, random_batch(config, turn), turn)
            times.append(time.process_time() - started)
        return times[-1]

    for _ in range(rounds):
        for name, config in configs.items():
            decided = resolve_layout(config, Machine.here()).config
            found[name].append(launch.run(partial(step, config=decided), decided)[0])
    table = Table("axes", "samples", "tensor", "hidden", "sequence", "attention", "ms of a processor", "times usual")
    for name, seconds in found.items():
        ratios = sorted(spent / usual for spent, usual in zip(seconds, found["usual"], strict=True))
        chosen = [str(value) for field, value in configs[name].bits if field != "kind"]
        table.add_row(name, *chosen, f"{1e3 * min(seconds):.0f}", f"{ratios[len(ratios) // 2]:.2f}")
    Console(width=140).print(table)


WORK: dict[str, tuple[tuple[Any, str], ...]] = {
    "products": ((Products, "multiply"), (Products, "write_product")),
    "rounding and sums of addends": ((FixedPoint, "add"), (FixedPoint, "add_to_first")),
    "sums to floats": ((FixedPoint, "to_floats"),),
    "squares, for the norm": ((optimizer_module, "squares_of"),),
}
"""Functions by work; the remaining time is one row."""


def where(rounds: int = 4) -> None:
    """A table of work: milliseconds of a processor in a step of the reference model on one device, in both modes."""
    keep_freed_memory()
    modes: dict[str, dict[str, Option]] = {"usual": {}}
    modes |= {f"grains of {count}": {"bits.kind": "layout-free", "bits.samples": count} for count in (1, 4, 8)}
    spent: dict[str, float] = {}

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            started = time.process_time()
            result = function(*arguments, **options)
            spent[name] += time.process_time() - started
            return result

        return call

    def train(rank: Rank) -> dict[str, list[dict[str, float]]]:
        configs = {
            mode: resolve_layout(reference_config(options | {"layout.transport": "threads"}), Machine.here()).config
            for mode, options in modes.items()
        }
        built = {mode: (build(config, rank.mesh), ours.RandomRows(config)) for mode, config in configs.items()}
        found: dict[str, list[dict[str, float]]] = {mode: [] for mode in modes}
        for step in range(rounds + 1):
            for mode, (parts, rows) in built.items():
                batch = rows.samples(8 * step, 8)
                spent.update(dict.fromkeys(WORK, 0.0))
                started = time.process_time()
                train_step(parts, batch, step)
                spent["the whole step"] = time.process_time() - started
                found[mode].append(dict(spent))
        return found

    with ExitStack() as stack:
        for name, functions in WORK.items():
            for owner, attribute in functions:
                stack.enter_context(patch.object(owner, attribute, timed(name, getattr(owner, attribute))))
        found = launch.run(train, reference_config({"layout.transport": "threads"}))[0]
    table = Table("work", *modes, title="milliseconds of a processor in a step")
    for name in (*WORK, "the whole step"):
        least = {mode: min(step[name] for step in steps[1:]) for mode, steps in found.items()}
        table.add_row(name, *(f"{1e3 * seconds:.0f}" for seconds in least.values()))
    Console(width=140).print(table)


OPTIMIZERS = {"SGD": ("optimizer.name=sgd", "optimizer.lr=0.1"), "Adam": ()}
"""Adam's first steps are signs: if a gradient is nearly 0, the last bit decides the direction of a weight."""


def distance(steps: int = 20, seeds: int = 8) -> None:
    """Print the weights' difference from float64's in both modes after some steps: mean and range over some seeds."""
    modes = {"usual": ("usual",), "layout-free": ("layout-free", "bits.tensor=1", "bits.sequence=1")}
    modes["layout-free, bits.tensor=4, bits.sequence=4"] = ("layout-free",)
    title = f"mean difference of weights from float64's after {steps} steps, {seeds} seeds: mean (least to most)"
    table = Table("mode", *OPTIMIZERS, title=title)
    found: dict[tuple[str, str], list[float]] = {}
    for optimizer, options in OPTIMIZERS.items():
        for seed in range(1, seeds + 1):
            words = ("model.dropout=0.0", f"seed={seed}", *options)
            exact = run(small("usual", *words, "precision=float64"), steps)[1]
            for name, (mode, *more) in modes.items():
                weights = run(small(mode, *words, *more), steps)[1]
                apart = torch.cat([(weights[key].double() - x).abs().flatten() for key, x in exact.items()])
                found.setdefault((name, optimizer), []).append(float(apart.mean()))
    for name in modes:
        rows = [found[name, optimizer] for optimizer in OPTIMIZERS]
        table.add_row(name, *(f"{sum(row) / seeds:.2e} ({min(row):.1e} to {max(row):.1e})" for row in rows))
    Console(width=140).print(table)


def main() -> None:
    parser = plan_arguments("The cost of equal bits, side by side with the usual mode.")
    for show in (losses, memory, parts, where, distance):
        parser.add_argument(f"--{show.__name__}", action="store_const", dest="other", const=show, help=show.__doc__)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), help="the rows; default: all")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES)[:3], help="beside the usual mode")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of --losses")
    arguments = parser.parse_args()
    if arguments.other is losses:
        losses(arguments.device)
        return
    if arguments.other is not None:
        arguments.other()
        return
    title = "milliseconds a step, and times the usual mode: of time | of processor time"
    modes = list(dict.fromkeys(("usual", *arguments.modes)))
    table, tables = Table("layout", *modes, title=title, caption=machine()), {}
    for name in arguments.layouts:
        contenders = [ours.configured(mode, "torch", options_of(name, mode)) for mode in modes]
        results = interleave(contenders, plan_of(arguments))
        usual = find(results, "usual")
        table.add_row(
            name,
            *(
                f"{result.milliseconds.median:.0f} ({result.ratio(usual).median:.2f} | {result.work(usual).median:.2f})"
                for result in results
            ),
        )
        tables[name] = as_json(results, ("usual",))
    Console(width=140).print(table)
    write_json(arguments.json, tables)


if __name__ == "__main__":
    main()
