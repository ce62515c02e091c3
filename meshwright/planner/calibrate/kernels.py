"""Kernels of a device, timed by one rank per device at the same time, since cores share memory and clock, and GPUs
share the host.

| points    | x                                     | seconds of                                                      |
|-----------|---------------------------------------|-----------------------------------------------------------------|
| launch    | -                                     | a kernel of a few elements, with the cost of autograd           |
| graph     | -                                     | the same without the host's time; none on a CPU                 |
| product D | the cube root of mnk                  | a product in dtype D: mean of a linear's three, of three shapes |
| attention | flops, forward and backward           | a fused causal attention forward and backward                   |
| stream    | bytes read and written                | an element-wise kernel, forward and backward                    |
| norm      | bytes; bytes; rows                    | torch's norm forward; backward; only the weights' gradients     |
|           |                                       | none on a CPU, where memory limits norms                        |
| special   | elements                              | an exponential and the like                                     |
| random    | elements                              | a draw of random numbers                                        |
| mixed     | elements; none on a CPU               | a cast                                                          |
| strided   | elements; none on a CPU               | a product with a column, cast                                   |
| sum       | elements; none on a CPU               | a sum over rows                                                 |
| host link | bytes                                 | a copy between the memories of device and host                  |
| disk      | bytes, written and read               | a file written, made durable, and read from the disk            |
| reserved  | bytes of a context; 0 on a CPU        | (none)                                                          |
| staged    | bytes added by planning of stages     | (none)                                                          |

Special and random kernels are timed outside of autograd: `tiny` is such a call with a few elements. Products are large
enough, or numerous enough in a batch, to make the launch negligible.

A kernel of a training step reads operands from memory: since a weight was last used, the whole model has passed through
the caches. So each call has its own operands (timing.cold_seconds). Repeated operands would be cached, and products of
side 256 would be a tenth faster than in a run.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from meshwright.compute.precision import DTYPES
from meshwright.config import parse_config
from meshwright.planner.calibrate.timing import CallTimer, Effort, Points
from meshwright.ranks.machine import forget_cached, peak_resident_bytes
from meshwright.training.all_stages import plan_stages
from meshwright.training.stage_costs import first_ranks

CHAIN = 64
"""Largest number of kernels in an autograd chain; the saved tensors just exceed the caches."""

_SPECIAL: tuple[Callable[[Tensor], Tensor], ...] = (
    torch.exp,
    torch.sigmoid,
    F.gelu,
    lambda x: F.log_softmax(x, -1),
)
"""Kernels of a model's activation functions, softmaxes and losses."""


def cast_call(shape: tuple[int, int], device: torch.device) -> Callable[[], object]:
    """Cast a matrix of bf16 to float32."""
    return torch.randn(shape, device=device, dtype=torch.bfloat16).float


def column_call(shape: tuple[int, int], device: torch.device) -> Callable[[], object]:
    """Multiply a matrix of float32 by a column, and cast to bf16."""
    x, column = torch.randn(shape, device=device), torch.randn(shape[0], 1, device=device)
    return partial(torch.mul, x, column, out=torch.empty_like(x, dtype=torch.bfloat16))


def sum_call(shape: tuple[int, int], device: torch.device) -> Callable[[], object]:
    """Sum the rows of a matrix of bf16."""
    return partial(torch.sum, torch.randn(shape, device=device, dtype=torch.bfloat16), 0)


CALLS = {"mixed": cast_call, "strided": column_call, "sum": sum_call}
"""For kinds of kernels that a GPU's torch does not load by vectors (plan/recorder.py): a call, of shape and device."""


def measure_device(effort: Effort, timer: CallTimer, folder: Path) -> dict[str, Points]:
    """Measure all points of this rank's device. `folder`: a folder on the disk to measure."""
    device = timer.device
    # Products of all sides are timed in the dtype that is most used on such a device.
    curve = "float32"
    if device.type == "cuda":
        curve = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    tiny = torch.ones(4, 4, device=device)
    staged = _staged_bytes() if device.type == "cpu" else 0  # first: else the peak memory of kernels would hide a part
    points: dict[str, Points] = {
        "launch": [(1, _chain_seconds(timer, 4))],
        "graph": [(1, _graph_seconds(timer))] if device.type == "cuda" else [],
        "tiny": [(1, timer.seconds(lambda: tiny + tiny))],
    }
    context = 0
    if device.type == "cuda":  # memory besides torch's segments, read after the first kernels have been loaded
        free, total = torch.cuda.mem_get_info(device)
        context = total - free - torch.cuda.memory_reserved(device)
    points |= {
        "capability": [torch.cuda.get_device_capability(device)] if device.type == "cuda" else [],
        "reserved": [(context, 0.0)],
        "staged": [(staged, 0.0)],
        f"product {curve}": [(side, _product_seconds(effort, timer, side, DTYPES[curve])) for side in effort.sides],
    }
    for name, dtype in DTYPES.items():  # all dtypes, even slow ones: else a plan would be refused
        if name != curve:
            points[f"product {name}"] = [(effort.dtype_side, _product_seconds(effort, timer, effort.dtype_side, dtype))]
    if device.type == "cuda":  # as runs multiply float32, unless precision.tf32=false
        matmul = torch.backends.cuda.matmul
        before, matmul.fp32_precision = matmul.fp32_precision, "tf32"
        seconds = _product_seconds(effort, timer, effort.dtype_side, torch.float32)
        points["product tf32"] = [(effort.dtype_side, seconds)]
        matmul.fp32_precision = before
    points["attention"] = list(_attentions(effort, timer, DTYPES[curve]))
    points["norm"] = list(_norms(effort, timer, DTYPES[curve])) if device.type == "cuda" else []
    points["stream"] = [(size, _chain_seconds(timer, size // 12)) for size in effort.stream_bytes]
    elements = effort.special_elements
    rows = elements // 256, 256

    def special_call(special: Callable[[Tensor], Tensor]) -> Callable[[], object]:
        x = torch.randn(rows, device=device)
        return lambda: special(x)

    points["special"] = [
        (elements, timer.cold_seconds(4 * elements, partial(special_call, special))) for special in _SPECIAL
    ]
    for name, call in (CALLS if device.type == "cuda" else {}).items():
        points[name] = [(elements, timer.cold_seconds(4 * elements, partial(call, rows, device)))]
    x = torch.empty(rows, device=device)
    points["random"] = [(elements, timer.seconds(lambda: torch.empty_like(x).bernoulli_(0.9)))]
    host = torch.zeros(effort.copy_bytes // 4, pin_memory=device.type == "cuda")  # pinned, as an offloaded optimizer's
    there = torch.zeros_like(host, device=device)
    copied = timer.seconds(lambda: there.copy_(host, non_blocking=True))
    points["host link"] = [(effort.copy_bytes, copied)]
    points["disk"] = [_disk(effort, timer, folder)]
    return points


def _chain_seconds(timer: CallTimer, num_elements: int) -> float:
    """Return the seconds of a kernel in a chain y = y b, forward or backward.

    A kernel reads two tensors [num_elements] and writes one. Results of the forward pass are kept to the end, like
    activations.
    """
    # Long enough to make autograd's start negligible; no longer than needed for kept tensors to exceed the caches.
    length = max(2, min(CHAIN, timer.cold_bytes // (4 * num_elements)))
    x, b, dy = (torch.ones(num_elements, device=timer.device) for _ in range(3))
    x.requires_grad_()

    def chain() -> None:
        activations = [x]
        for _ in range(length):
            activations.append(activations[-1] * b)
        torch.autograd.grad(activations[-1], x, dy)

    return timer.seconds(chain) / (2 * length)


def _graph_seconds(timer: CallTimer) -> float:
    """Return a GPU's seconds for a tiny kernel in a graph of dependent kernels, without the host's time."""
    x, graph = torch.zeros(4, device=timer.device), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CHAIN):
            x.add_(1)
    return timer.seconds(graph.replay) / CHAIN


def product_shapes(side: int) -> tuple[tuple[int, int, int], ...]:
    """Return (M, N, K) of the three products that are averaged for a side."""
    return (side, side, side), (4 * side, side // 2, side // 2), (2 * side, side // 4, 2 * side)


def _product_seconds(effort: Effort, timer: CallTimer, side: int, dtype: torch.dtype) -> float:
    """Return the mean seconds of a product with mnk = side³, over three shapes and a linear's three products each."""
    shapes, batch = product_shapes(side), max(1, effort.batch_flops // (2 * side**3))
    return sum(_linear_seconds(timer, batch, shape, dtype) for shape in shapes) / (len(shapes) * 3 * batch)


def _linear_seconds(timer: CallTimer, batch: int, shape: tuple[int, int, int], dtype: torch.dtype) -> float:
    """Return the seconds of a linear: forward product, input gradient, weight gradient, each for `batch` matrices.

    Shapes: x [M, K], w [N, K], y [M, N]. All three are timed, since in bf16 on a CPU one can take 15 times longer than
    another.
    """
    rows, columns, inner = shape
    lead = (batch,) if batch > 1 else ()
    sizes = ((rows, inner), (columns, inner), (rows, columns))
    operand_bytes = 2 * batch * sum(map(math.prod, sizes)) * dtype.itemsize  # and as many results

    def make() -> Callable[[], object]:
        x, w, dy = (torch.randn(*lead, *size, device=timer.device, dtype=dtype) for size in sizes)
        y, dw, dx = torch.zeros_like(dy), torch.zeros_like(w), torch.zeros_like(x)

        def linear() -> None:
            torch.matmul(x, w.mT, out=y)
            torch.matmul(dy, w, out=dx)
            torch.matmul(dy.mT, x, out=dw)

        return linear

    return timer.cold_seconds(operand_bytes, make)


def _attentions(effort: Effort, timer: CallTimer, dtype: torch.dtype) -> Iterator[tuple[float, float]]:
    """Yield points of a fused attention; none if torch has no fused attention for the device."""
    for length in effort.lengths:
        for width in effort.widths:
            shape = (*effort.attended, length, width)
            probe = torch.empty(shape, device=timer.device, dtype=dtype, requires_grad=True)
            if torch._fused_sdp_choice(probe, probe, probe) == SDPBackend.MATH.value:
                return

            def make(shape: tuple[int, ...] = shape) -> Callable[[], object]:
                q, k, v, dy = (torch.randn(shape, device=timer.device, dtype=dtype) for _ in range(4))
                inputs = q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
                return lambda: torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True), inputs, dy)

            products = (2 + 5) / 2  # forward 2, backward 5 (recomputes the first); half of each is masked
            elements = math.prod(shape)
            yield products * 2.0 * elements * length, timer.cold_seconds(4 * elements * dtype.itemsize, make)


def _norms(effort: Effort, timer: CallTimer, dtype: torch.dtype) -> Iterator[tuple[float, float]]:
    """Yield points of torch's layer norm with 1,024 columns: forward, input gradient, weight gradients."""
    columns = 1024
    rows = effort.special_elements // columns
    size = rows * columns * dtype.itemsize

    def make(*mask: bool) -> Callable[[], object]:
        x, dy = (torch.randn(rows, columns, device=timer.device, dtype=dtype) for _ in range(2))
        weight = torch.ones(columns, device=timer.device, dtype=dtype)
        _, mean, deviation = torch.native_layer_norm(x, [columns], weight, weight, 1e-5)
        backward = torch.ops.aten.native_layer_norm_backward
        if not mask:
            return lambda: torch.native_layer_norm(x, [columns], weight, weight, 1e-5)
        return lambda: backward(dy, x, [columns], mean, deviation, weight, weight, list(mask))

    for amount, mask in ((2 * size, ()), (3 * size, (True, False, False)), (rows, (False, True, True))):
        yield amount, timer.cold_seconds(3 * size, partial(make, *mask))


def _disk(effort: Effort, timer: CallTimer, folder: Path) -> tuple[float, float]:
    """Return (bytes, seconds) of a file written and read by all ranks at once, which share the disk's rate."""
    content = os.urandom(effort.copy_bytes)
    timer.meet()
    with TemporaryFile(dir=folder) as file:
        start = time.perf_counter()
        file.write(content)
        file.flush()
        # fsync: else the page cache would be timed.
        os.fsync(file.fileno())
        forget_cached(file.fileno())  # else the file would be read from memory
        file.seek(0)
        file.read()
        return 2 * effort.copy_bytes, time.perf_counter() - start


def _staged_bytes() -> int:
    """Return the growth of a rank's memory, in bytes, when the stages of a small pipeline are planned.

    To be called first: memory that was freed before would be used again, and the growth would not show.
    """
    sizes = {"layers": 2, "hidden": 16, "heads": 2, "positions": 16, "vocabulary": 512}
    layout = {"pipeline": {"size": 2, "partition": [1, 1]}}
    config = parse_config({"model": sizes, "data": {"sequence": 16}, "batch": {"global": 2}, "layout": layout})
    before = peak_resident_bytes()
    plan_stages(config, first_ranks(config)[0])
    return peak_resident_bytes() - before
