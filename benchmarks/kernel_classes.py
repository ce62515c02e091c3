"""Kernels of a step by class, measured by a profile and planned (`python -m benchmarks.one_gpu --classes`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.table import Table

from meshwright.config import Config
from meshwright.planner.plan.predict import Planner
from meshwright.planner.plan.recorder import COMPILED, Kernel, Program

PRODUCTS, ATTENTION, NORMS, WIDTHS, GELU, ROW_SUMS, INTO_SUMS, SUMS, COPIES, LOGITS, OPTIMIZER, OTHERS = CLASSES = (
    "products", "attention", "norms", "norms' weights", "GELU", "sums of rows", "sums into float32", "other sums",
    "casts and copies", "logits", "optimizer", "others",
)  # fmt: skip
IDLE = "idle device"

MEASURED: tuple[tuple[str, tuple[str, ...]], ...] = (
    (PRODUCTS, ("nvjet", "gemm", "splitKreduce")),
    (ATTENTION, ("sdpa", "fmha", "cudnn")),
    (WIDTHS, ("GammaBeta",)),
    (NORMS, ("layer_norm",)),
    (GELU, ("Gelu", "gelu")),
    (LOGITS, ("softmax", "SoftMax", "MaxNan", "MulFunctor<float>", "gather", "_eq_exp", "triton")),
    (ROW_SUMS, ("sum_functor",)),
    (INTO_SUMS, ("unrolled_elementwise_kernel<at::native::CUDAFunctor_add<float>",)),
    (SUMS, ("Functor_add",)),
    (LOGITS, ("BinaryFunctor<float, float, float",)),
    (COPIES, ("copy", "Copy")),
    (OPTIMIZER, ("FusedOptimizer", "LpNorm", "TensorListMetadata<1>")),
)  # fmt: skip
"""Classes by substrings of a kernel's name; the first class with a matching substring counts."""

OPERATIONS: Mapping[str, str] = {
    "gelu": GELU, "gelu_backward": GELU, "sum": ROW_SUMS, "_to_copy": COPIES, "copy_": COPIES, "clone": COPIES,
    "cat": COPIES, "stack": COPIES, "add": SUMS, "mul": LOGITS, "mul_": LOGITS, "div": LOGITS, "div_": LOGITS,
    "exp": LOGITS, "exp_": LOGITS, "sub": LOGITS, "sub_": LOGITS, "amax": LOGITS, "max": LOGITS, "log": LOGITS,
    "logsumexp": LOGITS, "gather": LOGITS, "_softmax": LOGITS, "_log_softmax": LOGITS, "softmax": LOGITS,
    "scatter_add_": LOGITS, "scatter_": LOGITS, "eq": LOGITS, "where": LOGITS, COMPILED: LOGITS,
    "linalg_vector_norm": OPTIMIZER,
}  # fmt: skip
"""Classes of torch's operations without products and norms. Among islands, only the loss has compiled kernels."""


def measured_classes(told: Mapping[str, Any]) -> dict[str, float]:
    """Return seconds by class of a profile's kernels (`one_gpu.kernels_of`), with IDLE."""
    found = dict.fromkeys(CLASSES, 0.0)
    for kernel, _, seconds in told["kernels"]:
        names = (name for name, parts in MEASURED if any(piece in kernel for piece in parts))
        found[next(names, OTHERS)] += seconds
    found[OTHERS] += told["busy_seconds"] - sum(found.values())
    return {**found, IDLE: told["wall_seconds"] - told["busy_seconds"]}


def class_of(kernel: Kernel) -> str:
    """Return the class of a planned kernel."""
    if kernel.kind in ("product", "attention"):
        return PRODUCTS if kernel.kind == "product" else ATTENTION
    if kernel.operation == COMPILED:
        return LOGITS
    if kernel.kind in ("norm", "norm back"):
        return NORMS
    if kernel.operation == "add_":
        return INTO_SUMS if kernel.dtype == "float32" else SUMS
    return OPERATIONS.get(kernel.operation, OTHERS)


def planned_classes(planner: Planner, config: Config) -> dict[str, float]:
    """Return seconds by class of a step's planned kernels on one device, with IDLE: the rest of the planned step."""
    run, seconds = planner.run(config), planner.predict(config).seconds
    found = dict.fromkeys(CLASSES, 0.0)

    def add(programs: Iterable[tuple[Program, int]], times: int) -> None:
        for program, count in programs:
            for kernel in (event for event in program.events if isinstance(event, Kernel)):
                found[class_of(kernel)] += times * count * kernel.times * run.timer.kernel_seconds(kernel)

    for chunk in run.stages[0].chunks:
        for which, times in enumerate(run.counts):
            for task in run.kinds:
                for unit in chunk.units:
                    add(unit.passes(task, which), times)
    for bucket in run.buckets[0]:
        add([(bucket.reduce, 1), (bucket.publish, 1)], 1)
        found[OPTIMIZER] += run.step_seconds(bucket)
    return {**found, IDLE: seconds - sum(found.values())}


def class_table(title: str, pairs: Mapping[str, tuple[Mapping[str, float], Mapping[str, float]]]) -> Table:
    """Return a table of milliseconds.

    Args:
        title: The table's title.
        pairs: By name of a run the measured and the planned seconds by class.

    Returns:
        Columns measured, planned, off for each run; a last row with the sums; `!` marks a difference of more than 1 ms
        and more than 10 %.
    """
    table = Table("class of kernel", title=title)
    for name in pairs:
        for head in (f"{name}, ms", "planned", "off"):
            table.add_column(head, justify="right")
    every = {name: [dict(each) | {"step": sum(each.values())} for each in pair] for name, pair in pairs.items()}
    # A norm's backward pass is planned with the gradients of the norm's weights.
    for measured, planned in every.values():
        measured[NORMS] += measured.pop(WIDTHS)
        planned[NORMS] += planned.pop(WIDTHS)
    for name in [name for name in [*CLASSES, IDLE, "step"] if name != WIDTHS]:
        cells = []
        for measured, planned in every.values():
            off = planned[name] - measured[name]
            wrong = abs(off) > max(1e-3, 0.1 * measured[name])
            cells += [f"{measured[name] * 1e3:.1f}", f"{planned[name] * 1e3:.1f}", f"{'! ' * wrong}{off * 1e3:+.1f}"]
        table.add_row(name, *cells)
    return table
