"""Kernels of a device, timed by a rank of its own while all others of the machine do the same: cores share their
memory and their clock, GPUs their host.

| points    | x                                     | seconds of                                                      |
|-----------|---------------------------------------|-----------------------------------------------------------------|
| launch    | -                                     | a kernel of a few elements, with its part of autograd           |
| product D | the cube root of mnk                  | a product in dtype D: mean of a linear's three, of three shapes |
| attention | flops, forward and backward           | a fused causal attention forward and backward                   |
| stream    | bytes read and written                | an element-wise kernel, forward and backward                    |
| special   | elements                              | an exponential and the like                                     |
| random    | elements                              | a draw of random numbers                                        |
| host link | bytes                                 | a copy between the device's memory and the host's               |
| disk      | bytes, written and read               | a file written, made durable, and read from the disk            |
| reserved  | bytes of a context; 0 on a CPU        | (none)                                                          |
| staged    | bytes more when it has planned stages | (none)                                                          |

Special and random kernels are timed out of autograd: `tiny` is such a call of a few elements. Products are so large,
or so many in a batch, that their launch does not show.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryFile

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from meshwright.config import parse_config
from meshwright.machine import forget_cached, peak_resident_bytes
from meshwright.parts import DTYPES, plan_stages
from meshwright.stage_costs import first_ranks
from meshwright.tools.calibrate.timing import CallTimer, Effort, Points

BATCH_FLOPS = {"cpu": 2**22, "cuda": 2**32}
"""Products of less are timed in a batch of so much, beside which a launch is nothing."""

CHAIN = 64
KEPT_BYTES = 2**26
"""A chain of kernels for autograd: so many, of which so many bytes are kept; more than caches hold."""

ATTENTION_HEADS = (8, 8)
ATTENTION_WIDTHS = (32, 64)
SPECIAL_ELEMENTS = 2**18

_SPECIAL: tuple[Callable[[Tensor], Tensor], ...] = (
    torch.exp,
    torch.sigmoid,
    F.gelu,
    lambda x: F.log_softmax(x, -1),
)
"""Kernels that a model's activations, softmaxes and losses are made of."""


def measure_device(effort: Effort, timer: CallTimer, folder: Path) -> dict[str, Points]:
    """All points of this rank's device. `folder`: whose disk is measured."""
    device = timer.device
    curve = curve_dtype(device)
    tiny = torch.ones(4, 4, device=device)
    staged = _staged_bytes() if device.type == "cpu" else 0  # first: a peak of kernels would hide a part of it
    points: dict[str, Points] = {
        "launch": [(1, _chain_seconds(timer, 4))],
        "tiny": [(1, timer.seconds(lambda: tiny + tiny))],
        "reserved": [(_context_bytes(device) if device.type == "cuda" else 0, 0.0)],
        "staged": [(staged, 0.0)],
        f"product {curve}": [(side, _product_seconds(timer, side, DTYPES[curve])) for side in effort.sides],
    }
    for name, dtype in DTYPES.items():  # none is left out: a slow prediction helps more than a refusal
        if name != curve:
            points[f"product {name}"] = [(effort.dtype_side, _product_seconds(timer, effort.dtype_side, dtype))]
    if device.type == "cuda":  # as a run multiplies float32, unless it says precision.tf32=false
        matmul = torch.backends.cuda.matmul
        before, matmul.fp32_precision = matmul.fp32_precision, "tf32"
        points["product tf32"] = [(effort.dtype_side, _product_seconds(timer, effort.dtype_side, torch.float32))]
        matmul.fp32_precision = before
    points["attention"] = list(_attentions(effort, timer, DTYPES[curve]))
    points["stream"] = [(size, _chain_seconds(timer, size // 12)) for size in effort.stream_bytes]
    x = torch.randn(SPECIAL_ELEMENTS // 256, 256, device=device)
    points["special"] = [(x.numel(), timer.seconds(lambda f=f: f(x))) for f in _SPECIAL]  # type: ignore[misc]
    points["random"] = [(x.numel(), timer.seconds(lambda: torch.empty_like(x).bernoulli_(0.9)))]
    points["host link"] = [_host_copy(effort, timer)]
    points["disk"] = [_disk(effort, timer, folder)]
    return points


def curve_dtype(device: torch.device) -> str:
    """The dtype in which products of all sides are timed: the one that runs on such a device mostly compute in."""
    if device.type == "cpu":
        return "float32"
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


def _chain_seconds(timer: CallTimer, num_elements: int) -> float:
    """A kernel of a chain y = y b, forward or backward: it reads two tensors of [num_elements] and writes one. The
    results of the forward pass are kept to the end, as activations are."""
    length = max(2, min(CHAIN, KEPT_BYTES // (4 * num_elements)))
    x, b, dy = (torch.ones(num_elements, device=timer.device) for _ in range(3))
    x.requires_grad_()

    def chain() -> None:
        activations = [x]
        for _ in range(length):
            activations.append(activations[-1] * b)
        torch.autograd.grad(activations[-1], x, dy)

    return timer.seconds(chain) / (2 * length)


def _product_seconds(timer: CallTimer, side: int, dtype: torch.dtype) -> float:
    """Mean seconds of a product with mnk = side³, over three shapes and a linear's three products of each."""
    shapes = ((side, side, side), (4 * side, side // 2, side // 2), (2 * side, side // 4, 2 * side))
    batch = max(1, BATCH_FLOPS[timer.device.type] // (2 * side**3))
    return sum(_linear_seconds(timer, batch, shape, dtype) for shape in shapes) / (len(shapes) * 3 * batch)


def _linear_seconds(timer: CallTimer, batch: int, shape: tuple[int, int, int], dtype: torch.dtype) -> float:
    """A linear's product forward, its input's gradient and its weight's: `batch` times x [M, K], w [N, K], y [M, N].

    All three, since one of them in bf16 can take 15 times as long as another on a CPU.
    """
    rows, columns, inner = shape
    lead = (batch,) if batch > 1 else ()
    sizes = ((rows, inner), (columns, inner), (rows, columns))
    x, w, dy = (torch.randn(*lead, *size, device=timer.device, dtype=dtype) for size in sizes)

    def linear() -> None:
        torch.matmul(x, w.mT)
        torch.matmul(dy, w)
        torch.matmul(dy.mT, x)

    return timer.seconds(linear)


def _attentions(effort: Effort, timer: CallTimer, dtype: torch.dtype) -> Iterator[tuple[float, float]]:
    """Points of a fused attention; none where torch has no such attention for the device."""
    for length in effort.lengths:
        for width in ATTENTION_WIDTHS:
            shape = (*ATTENTION_HEADS, length, width)
            q, k, v = (torch.randn(shape, device=timer.device, dtype=dtype, requires_grad=True) for _ in range(3))
            if torch._fused_sdp_choice(q, k, v) == SDPBackend.MATH.value:
                return
            dy = torch.randn_like(q)

            def attend(q: Tensor = q, k: Tensor = k, v: Tensor = v, dy: Tensor = dy) -> None:
                torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), dy)

            products = (2 + 5) / 2  # forward, and backward, which computes the first one again; half of each is masked
            yield products * 2.0 * q.numel() * length, timer.seconds(attend)


def _host_copy(effort: Effort, timer: CallTimer) -> tuple[float, float]:
    on_gpu = timer.device.type == "cuda"
    host = torch.zeros(effort.copy_bytes // 4, pin_memory=on_gpu)
    device = torch.zeros_like(host, device=timer.device)
    return effort.copy_bytes, timer.seconds(lambda: device.copy_(host, non_blocking=True))


def _disk(effort: Effort, timer: CallTimer, folder: Path) -> tuple[float, float]:
    """A file written and read by all ranks at once: they share the disk, and each gets its part of the rate."""
    content = os.urandom(effort.copy_bytes)
    timer.meet()
    with TemporaryFile(dir=folder) as file:
        start = time.perf_counter()
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
        forget_cached(file.fileno())  # else it would be read from memory
        file.seek(0)
        file.read()
        return 2 * effort.copy_bytes, time.perf_counter() - start


def _context_bytes(device: torch.device) -> int:
    """Bytes that a process holds on a GPU beside torch's segments."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def _staged_bytes() -> int:
    """Bytes by which a rank grows when it plans the stages of a small pipeline. Before anything was freed that might
    take them in."""
    sizes = {"layers": 2, "hidden": 16, "heads": 2, "positions": 16, "vocabulary": 512}
    layout = {"pipeline": {"size": 2, "partition": [1, 1]}}
    config = parse_config({"model": sizes, "data": {"sequence": 16}, "batch": {"global": 2}, "layout": layout})
    before = peak_resident_bytes()
    plan_stages(config, first_ranks(config)[0])
    return peak_resident_bytes() - before
