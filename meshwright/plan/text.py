"""Layouts, memory and rates in words."""

from __future__ import annotations

from dataclasses import asdict

from meshwright.config import Config
from meshwright.config.layout import Megatron, Subgraph, TensorParallel, Tesseract, Whole
from meshwright.plan.predict import Memory


def parts_text(memory: Memory) -> str:
    """`weights 1.20 GB, gradients 1.20 GB, ...`: the parts that there are."""
    return ", ".join(f"{part} {held / 1e9:.2f} GB" for part, held in asdict(memory).items() if held)


def layout_text(config: Config) -> str:
    """`megatron, cut by sequence: data 4 (zero1), pipe 2 (1f1b), tensor 2; micro 4, recompute auto, offload host`."""
    memory, limit = config.memory, config.layout.pipeline.limit
    words = [f"micro {config.micro}"]
    words += [f"limit {limit}"] * (limit != "auto")
    words += [f"recompute {memory.recompute}"] * (memory.recompute != "none")
    words += [f"offload {memory.offload.to}"] * (memory.offload.to != "none")
    return f"{_kit_text(config.layout.tensor)}{config.layout.summary}; {', '.join(words)}"


def _kit_text(tensor: TensorParallel) -> str:
    match tensor:
        case Whole():
            return ""
        case Megatron(sequence_parallel=cut):
            return "megatron, cut by sequence: " if cut else "megatron: "
        case Tesseract():
            return "tesseract: "
        case Subgraph(common=common, branch=branch):
            return f"subgraph ({common}, {branch}): "


def seconds_text(seconds: float) -> str:
    """`12.3 s`, `4.56 ms`."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def rate_text(flops: float) -> str:
    """`41.2 T`: floating-point operations a second."""
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9)):
        if flops >= size:
            return f"{flops / size:.1f} {unit}"
    return f"{flops / 1e6:.1f} M"
