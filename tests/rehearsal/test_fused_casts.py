"""Casts to FP8 on a fake GPU: Inductor lowers and schedules graphs for this GPU, and makes no code.

The bytes of the scheduled kernels' reads and writes are Inductor's own count (GraphLowering.count_bytes). A plan counts
the same bytes (tests/planner/plan/test_fp8.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import lowering
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import ExternKernelSchedulerNode
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from meshwright.compute.tensor.fp8 import Fp8Products
from meshwright.compute.tensor.products import PLAIN, Products
from meshwright.ranks.environment import fuse_multiply_adds
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from tests.workers import run_ranks

pytestmark = pytest.mark.skipif(
    not torch.__version__.startswith("2.13"), reason="asks Inductor's own classes, which other versions have otherwise"
)

HOPPER = SimpleNamespace(
    multi_processor_count=132, major=9, minor=0, regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048,
    max_threads_per_block=1024, warp_size=32,
)  # fmt: skip
N, H, INNER = 1024, 512, 2048
"""Tokens, the hidden width and the inner width of a feed-forward."""
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten._scaled_mm.default)
ONE = Grid((("data", 1),))
PassOf = Callable[[Products], Callable[..., object]]
FP8 = Fp8Products(PLAIN, emulates=False)


@contextmanager
def gpu_that_is_not_there() -> Iterator[None]:
    said = {
        "get_device_properties": HOPPER, "get_compute_capability": 90, "is_available": True, "current_device": 0,
        "raise_if_triton_unavailable": None,
    }  # fmt: skip
    with ExitStack() as stack:
        for name, value in said.items():
            stack.enter_context(patch.object(CudaInterface, name, lambda *args, value=value: value))
        stack.enter_context(patch.object(CudaInterface.Worker, "get_device_properties", lambda *args: HOPPER))
        stack.enter_context(patch.object(CudaInterface.Worker, "current_device", lambda: 0))
        stack.enter_context(patch("torch.cuda.get_device_properties", lambda *args: HOPPER))
        stack.enter_context(patch("torch.cuda.get_device_capability", lambda *args: (9, 0)))
        stack.enter_context(patch("torch.cuda.is_available", lambda: True))
        stack.enter_context(patch("torch.cuda.current_device", lambda: 0))
        stack.enter_context(patch("torch._inductor.scheduler.has_triton", lambda: True))
        # The library multiplies: to choose a kernel, Inductor would ask the GPU.
        libraries = {op: lowering.fallback_handler(op, add_to_fallback_set=False) for op in PRODUCTS}
        stack.enter_context(patch.dict(lowering.lowerings, libraries))
        stack.enter_context(patch("torch.compiler.is_compiling", lambda: True))
        yield


def bytes_of_elements(function: Callable[..., object], *shapes: tuple[int, ...]) -> int:
    """Return the bytes that all kernels of a graph except products read and write."""
    mode = FakeTensorMode()
    with gpu_that_is_not_there(), mode, V.set_fake_mode(mode), DebugContext():
        given = [torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes]
        graph = GraphLowering(make_fx(function, select_decomp_table(), tracing_mode="fake")(*given), given)
        with V.set_graph_handler(graph):
            graph.run(*given)
            graph._update_scheduler()
            nodes = graph.scheduler.nodes
            return sum(
                node.get_read_write_buffers_sizes() for node in nodes if not isinstance(node, ExternKernelSchedulerNode)
            )


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def feed_forward(products: Products) -> Callable[..., object]:
    """Return a norm and SwiGLU; x and the inner activation are kept for the backward pass."""

    def forward(x: Tensor, gain: Tensor, expand: Tensor, contract: Tensor) -> tuple[Tensor, ...]:
        x = F.rms_norm(x, (H,), gain)
        gate, up = products.multiply(x, expand).view(N, 2, INNER).unbind(1)
        inner = silu(gate) * up
        return products.multiply(inner, contract), x, inner

    return forward


def feed_forward_back(products: Products) -> Callable[..., object]:
    """Return the input gradients of both linears; the inner gradient is kept for the weight gradient."""

    def backward(dy: Tensor, inputs: Tensor, expand: Tensor, contract: Tensor) -> tuple[Tensor, ...]:
        dinner = products.multiply(dy, contract.t())
        gate, up = inputs.unbind(1)
        share = torch.sigmoid(gate)
        dgate = dinner * up * share * (1 + gate * (1 - share))
        gradient = torch.stack([dgate, dinner * silu(gate)], 1).view(N, 2 * INNER)
        return products.multiply(gradient, expand.t()), gradient

    return backward


WEIGHTS = H * 2 * INNER + INNER * H


def bytes_of_both(mesh: Mesh, pass_of: PassOf, shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the bytes in FP8 and in bf16, in a separate process, because torch remembers a GPU's properties."""
    fuse_multiply_adds()
    return tuple(bytes_of_elements(pass_of(products), *shapes) for products in (FP8, PLAIN))


@pytest.mark.parametrize(
    "pass_of, shapes, written",
    [
        # x and the inner activation are written; a weight is read once for the scales of the columns, and once for the
        # cast
        (feed_forward, [(N, H), (H,), (H, 2 * INNER), (INNER, H)], N * (H + INNER) + 5 * WEIGHTS),
        # the inner gradient is written; dy is from another graph, and read; a weight's rows are read once
        (feed_forward_back, [(N, H), (N, 2, INNER), (H, 2 * INNER), (INNER, H)], N * (2 * INNER + 3 * H) + 3 * WEIGHTS),
    ],
    ids=["forward", "backward"],
)
def test_casts_of_activations_cost_their_writes(pass_of: PassOf, shapes: list[tuple[int, ...]], written: int) -> None:
    ((low, half),) = run_ranks(bytes_of_both, ONE, pass_of, shapes, forked=True)
    assert half
    assert written <= low - half <= 1.02 * written, "scales take up to 2 %"
