"""Products of halves as float32 products of the same numbers, on CPUs that have no fast product of halves.

A CPU with AVX-512-BF16 or AMX multiplies bf16 faster than float32; one without takes 20 to 120 times as long
(github.com/pytorch/pytorch/issues/146508). There operands are widened, multiplied in float32 and rounded once, which
is what a bf16 product does that adds up in float32: weights, activations and gradients are stored in halves as before.

| `precision.products` | a product reads  | adds up in | gives   |
|----------------------|------------------|------------|---------|
| stored               | halves           | float32    | a half  |
| float32              | widened halves   | float32    | a half  |
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from meshwright.machine import SLOW_SHARE

if TYPE_CHECKING:
    from meshwright.config import Config

SIDE, TRIES = 128, 5
"""The side of the products that are timed, and how many are: 4 Mflop each, 6 ms at the slowest rate that was seen."""

HALVES = (torch.bfloat16, torch.float16)

_aten = torch.ops.aten
_PACKETS = (
    _aten.mm, _aten.addmm, _aten.addmm_, _aten.bmm, _aten.baddbmm, _aten.baddbmm_, _aten.addbmm, _aten.mv, _aten.dot,
    _aten.convolution, _aten.convolution_backward, _aten._scaled_dot_product_flash_attention_for_cpu_backward,
)  # fmt: skip
"""Attention has its backward kernel alone here: the one forward reads halves as fast as float32."""
_PRODUCTS = frozenset(getattr(packet, name) for packet in _PACKETS for name in packet.overloads())


class Rates(NamedTuple):
    """Flop a second of one thread's product of matrices, in float32 and in a half."""

    float32: float
    half: float

    @property
    def slow(self) -> bool:
        return self.half < SLOW_SHARE * self.float32


@cache
def product_rates(half: str) -> Rates:
    """This CPU's rates in float32 and in bf16 or fp16, the best of some tries: other processes may be at work. Timed
    once a process."""
    threads, rates = torch.get_num_threads(), []
    torch.set_num_threads(1)
    for dtype in (torch.float32, {"bf16": torch.bfloat16, "fp16": torch.float16}[half]):
        a, b = torch.ones(2, SIDE, SIDE, dtype=dtype).unbind()
        seconds = []
        for _ in range(TRIES + 1):  # the first one chooses the kernel
            began = time.perf_counter()
            a @ b
            seconds.append(time.perf_counter() - began)
        rates.append(2 * SIDE**3 / min(seconds[1:]))
    torch.set_num_threads(threads)
    return Rates(*rates)


def multiplies_in(config: Config) -> Callable[[], AbstractContextManager[object]]:
    """Return what makes the context manager in which a stage computes (precision.products)."""
    return WidenedProducts if config.precision.products == "float32" else nullcontext


class WidenedProducts(TorchDispatchMode):
    """While entered, products of halves are float32 products of the same numbers."""

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # Every operation of a pass comes through here: one look-up for most.
        if op not in _PRODUCTS or not any(isinstance(x, Tensor) and x.dtype in HALVES for x in args):
            return op(*args, **(kwargs or {}))
        kwargs = dict(kwargs or {})
        half = next(x.dtype for x in args if isinstance(x, Tensor) and x.dtype in HALVES)

        def widened(x: Any) -> Any:
            return x.float() if isinstance(x, Tensor) and x.dtype in HALVES else x

        written = kwargs.pop("out", args[0] if op._schema.is_mutable else None)
        name = op._schema.name.removesuffix("_")  # in place or out=: the plain product, then a copy
        default = getattr(_aten, name.removeprefix("aten::")).default if written is not None else op
        result = default(*tree_map(widened, args), **tree_map(widened, kwargs))
        if written is not None:
            return written.copy_(result)
        return tree_map(lambda x: x.to(half) if isinstance(x, Tensor) else x, result)
