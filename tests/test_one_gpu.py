"""One GPU, if present: fused kernels against float64, and layouts of ranks that are threads sharing the GPU.

`pytest --device cuda tests/test_one_gpu.py tests/compute ...` runs these tests, and ranks of other tests, on the GPU.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.compute.context.context import WHOLE_SEQUENCES
from meshwright.compute.context.documents import attend_by_document, flash_takes
from meshwright.compute.context.kernels import Efficient, Flash, Kernel, kernel_of
from meshwright.compute.context.ring import RingAttention
from meshwright.compute.context.spec import AttentionSpec
from meshwright.compute.parameters.shard import Initial
from meshwright.compute.tensor import column_sums
from meshwright.compute.tensor.experts import GroupedLinear
from meshwright.compute.tensor.fp8 import CAPABILITY
from meshwright.config import parse_config
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from meshwright.tools.verify.tolerance import TOLERANCES
from meshwright.training.checkpoint.staging import Staging
from tests.compute.context.documents import LENGTHS, SOLO, starts_of
from tests.oracle.run import check, run
from tests.oracle.tensor import MODELS
from tests.workers import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device, or no --device cuda"),
]

A, K, E = 4, 2, 64
ROOT = Path(__file__).resolve().parent.parent


def operands(device: torch.device, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Return Q, K, V, with a key for every two queries, and the output's gradient, rounded to `dtype`."""
    generator = torch.Generator().manual_seed(5)
    length = sum(LENGTHS[0])
    shapes = [(len(LENGTHS), heads, length, E) for heads in (A, K, K, A)]
    *inputs, gradient = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    return inputs, gradient


def exact(inputs: list[Tensor], gradient: Tensor, *, documents: bool, window: int | None = None) -> list[Tensor]:
    """Return the output, dQ, dK, dV in float64."""
    wide = [x.double().requires_grad_() for x in inputs]

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask, 0.0, causal, scale=0.3, enable_gqa=True)

    starts = starts_of(LENGTHS)
    out = attend_by_document(attend, starts, *wide, window) if documents else attend(*wide, None, True)
    return [out.detach(), *torch.autograd.grad(out, wide, gradient.double())]


def of_ring(mesh: Mesh, dtype: torch.dtype, kernel: type[Kernel], documents: bool) -> list[float]:
    """Return the relative errors of the output, dQ, dK, dV of this rank's tokens."""
    inputs, gradient = operands(mesh.device, dtype)
    ring = RingAttention(mesh)
    assert type(kernel_of(*inputs, False, "cuda")) is kernel
    places = ring.positions(0, inputs[0].shape[2] // mesh.size("context"), mesh.device)
    mine = [x[:, :, places].clone().requires_grad_() for x in inputs]
    starts = starts_of(LENGTHS) if documents else None
    out = ring.attend(*mine, AttentionSpec(causal=True, scale=0.3, documents=starts))
    got = [out.detach(), *torch.autograd.grad(out, mine, gradient[:, :, places])]
    whole = (x[:, :, places] for x in exact(inputs, gradient, documents=documents))
    return [float((x.double() - y).norm() / y.norm()) for x, y in zip(got, whole, strict=True)]


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(
    "dtype, kernel, error",
    [(torch.bfloat16, Flash, 1e-2), (torch.float16, Flash, 2e-3), (torch.float32, Efficient, 1e-5)],
)
def test_a_ring_by_fused_kernels(
    dtype: torch.dtype, kernel: type[Kernel], error: float, ranks: int, documents: bool
) -> None:
    """The fused kernels, which CPU functions replace elsewhere, are compared with float64: bf16 rounds to 2^-9."""
    for errors in run_ranks(of_ring, Grid((("context", ranks),)), dtype, kernel, documents):
        assert max(errors) <= error, errors


def at_once(mesh: Mesh, dtype: torch.dtype, window: int | None) -> list[float]:
    inputs, gradient = operands(mesh.device, dtype)
    mine = [x.requires_grad_() for x in inputs]
    assert flash_takes(*mine, 0.0)
    spec = AttentionSpec(causal=True, window=window, scale=0.3, documents=starts_of(LENGTHS))
    out = WHOLE_SEQUENCES.attend(*mine, spec)
    got = [out.detach(), *torch.autograd.grad(out, mine, gradient)]
    expected = exact(inputs, gradient, documents=True, window=window)
    # A window of 1 has no dQ and no dK.
    return [float((x.double() - y).norm() / y.norm().clamp(min=1)) for x, y in zip(got, expected, strict=True)]


@pytest.mark.parametrize("window", [None, 1, 5, 40])
@pytest.mark.parametrize("dtype, error", [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
def test_documents_by_one_varlen_kernel(dtype: torch.dtype, error: float, window: int | None) -> None:
    [errors] = run_ranks(at_once, SOLO, dtype, window)
    assert max(errors) <= error, errors


def shaped(mesh: Mesh, dtype: torch.dtype, cap: float | None, window: int | None) -> list[float]:
    """Return the relative errors of the output, dQ, dK, dV and dsinks, of whole sequences, against float64."""
    inputs, gradient = operands(mesh.device, dtype)
    found = []
    for wide in (dtype, torch.float64):
        mine = [x.to(wide, copy=True).requires_grad_() for x in inputs]
        sinks = torch.linspace(-1, 2, A, device=mesh.device, dtype=wide).requires_grad_()
        starts = None if window is None else starts_of(LENGTHS)
        spec = AttentionSpec(True, window, 0.3, documents=starts, soft_cap=cap, sinks=sinks)
        out = WHOLE_SEQUENCES.attend(*mine, spec)
        found.append([out.detach(), *torch.autograd.grad(out, (*mine, sinks), gradient.to(wide))])
    return [float((x.double() - y).norm() / y.norm()) for x, y in zip(*found, strict=True)]


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("dtype, error", [(torch.bfloat16, 2e-2), (torch.float16, 4e-3), (torch.float32, 1e-5)])
def test_sinks_and_a_soft_cap(dtype: torch.dtype, error: float, cap: float | None, window: int | None) -> None:
    """Sinks by the fused kernels, a cap by tiles; float64 is by tiles, which CPUs compare with a softmax."""
    [errors] = run_ranks(shaped, SOLO, dtype, cap, window)
    assert max(errors) <= error, errors


LAYOUTS: dict[str, dict[str, Any]] = {
    "megatron": {"layout": {"tensor": {"kind": "megatron", "size": 2, "sequence_parallel": True}}},
    "tesseract": {"layout": {"tensor": {"kind": "tesseract", "q": 2, "d": 1}}},
    "subgraph": {"layout": {"tensor": {"kind": "subgraph", "size": 2}}},
    "zero1": {"layout": {"data": {"size": 2, "sync": "zero1"}}},
    "zero3": {"layout": {"data": {"size": 2, "sync": "zero3"}}},
    "ring": {"layout": {"context": {"kind": "ring", "size": 2}}},
    "ulysses": {"layout": {"context": {"kind": "ulysses", "size": 2}}},
    "message-driven": {"layout": {"pipeline": {"size": 2, "schedule": "message-driven"}}},
    "1f1b": {"layout": {"pipeline": {"size": 2, "schedule": "1f1b"}}},
    "v": {"layout": {"pipeline": {"size": 2, "chunks": 2, "placement": "v", "schedule": "message-driven"}}},
    "recomputed": {"memory": {"recompute": "auto"}},
    "mixed": {
        "layout": {"tensor": {"kind": "megatron", "size": 2}, "pipeline": 2, "data": {"size": 2, "sync": "zero1"}}
    },
}


def config_of(**changes: Any) -> Any:
    tree = {
        "model": MODELS["gpt2"] | {"layers": 4, "hidden": 24, "heads": 12, "vocabulary_multiple": 12, "dropout": 0.0},
        "data": {"sequence": 12}, "batch": {"global": 16, "micro": 4}, "precision": "float64",
        "optimizer": {"lr": 1e-2, "clip": 0.5, "schedule": {"warmup": 3}}, "steps": 3,
    }  # fmt: skip
    return parse_config(tree | changes)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_that_share_a_gpu_train_as_one(layout: str) -> None:
    check(run(config_of(**LAYOUTS[layout])), run(config_of())[0])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler warns in any use
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("layout", [{}, {"data": {"size": 2, "sync": "zero3"}}, {"pipeline": {"size": 2}}])
def test_layers_as_graphs_by_inductor(layout: dict[str, Any]) -> None:
    plain = config_of(batch={"global": 24, "micro": 6})
    tree = plain.model_dump(mode="json", by_alias=True) | {"compile": "blocks"}
    for axis, settings in layout.items():
        tree["layout"][axis] |= settings
    check(run(parse_config(tree)), run(plain)[0])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler warns in any use
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_fp8_in_graphs_is_within_the_bound_of_fp8_without() -> None:
    if torch.cuda.get_device_capability() < CAPABILITY:
        pytest.skip("no FP8 on this GPU")
    model = config_of().model.model_dump(mode="json") | {"hidden": 96}
    precision = {"level": "O2", "dtype": "bf16", "products": "fp8"}
    (plain, _), (graph, _) = (
        run(config_of(model=model, precision=precision, compile=compiles))[0] for compiles in ("none", "blocks")
    )
    torch.testing.assert_close(graph, plain, rtol=TOLERANCES["fp8"].loss, atol=0)


@pytest.mark.parametrize("layout", [{}, {"pipeline": 2}])
def test_states_on_the_host_step_as_on_the_gpu(layout: dict[str, Any]) -> None:
    tree = {"precision": {"level": "O2", "dtype": "bf16"}, "layout": layout}
    [losses, _], *_ = run(config_of(**tree))
    [offloaded, _], *_ = run(config_of(**tree, memory={"offload": {"to": "host", "bucket": 4096}}))
    assert offloaded == losses


def test_staged_copies_are_of_their_moment() -> None:
    """Later writes on the device do not change the copies; the second copy uses the same memory."""
    device = torch.device("cuda")
    staging = Staging(device)
    for seed in range(2):
        torch.manual_seed(seed)
        pieces = [torch.randn(3, 5, device=device), torch.randn(7, device=device).bfloat16(), torch.randn(0).cuda()]
        kept = [x.cpu() for x in pieces]
        copies, await_copies = staging.copy([*pieces, kept[0]])
        for x in pieces:
            x.zero_()
        await_copies()
        for copy, wanted in zip(copies, [*kept, kept[0]], strict=True):
            assert copy.is_pinned() or not copy.numel()
            assert torch.equal(copy, wanted)


def test_one_kernel_multiplies_the_rows_of_all_experts() -> None:
    """Both ways, in bfloat16; an expert without rows has a gradient of zeros."""
    torch.manual_seed(1)
    x, dy = torch.randn(40, 16, device="cuda").bfloat16(), torch.randn(40, 32, device="cuda").bfloat16()
    weight, rows = torch.randn(4, 16, 32, device="cuda").bfloat16(), [13, 0, 20, 7]
    (mesh_layer,) = run_ranks(grouped, SOLO, x, dy, weight, rows)
    for one, each in mesh_layer:
        assert float((one.double() - each.double()).norm()) <= 1e-2 * float(each.double().norm())
    assert not mesh_layer[2][0][1].any()


def grouped(mesh: Mesh, x: Tensor, dy: Tensor, weight: Tensor, rows: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Return y, dx and dW of one kernel, and of a product each."""
    layer = GroupedLinear(mesh, tuple(weight.shape), {}, Initial(0.5))
    ends = torch.tensor(rows, device=x.device).cumsum(0).int()
    found = []
    for runs in (ends, [rows]):
        out = torch.full(weight.shape, 9.0, device=x.device)
        for write in layer.addends(x, dy, runs):
            write(out, 0)
        found.append((layer.multiply(x, weight, runs), layer.multiply(dy, weight, runs, turned=True), out))
    return list(zip(*found, strict=True))


def test_the_command_line_proves_a_layout_of_threads_on_a_gpu() -> None:
    layout = ["layout.data.size=1", "layout.tensor.kind=megatron", "layout.tensor.size=2"]
    words = ["device=cuda", "layout.transport=threads", *layout]
    command = [sys.executable, "-m", "meshwright", "verify", "quickstart", *words]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_that_sum_columns_are_their_references(dtype: torch.dtype) -> None:
    """Float32 to 1e-5 of the largest element, bfloat16 to a unit. Ten runs have equal bits."""
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randn(2, 1100, 768, generator=generator).to("cuda", dtype) for _ in range(3)]
    weight = torch.randn(768, generator=generator).to("cuda")
    parts = [x.view(2, 1100, 12, 64).transpose(1, 2) for x in drawn]
    for name, arguments in (
        ("norm_backward", (*drawn[:2], weight, drawn[2], 1e-5, True)),
        ("norm_backward", (*drawn[:2], weight, None, 1e-5, False)),
        ("gelu_backward", (*drawn[:2], True)),
        ("join_heads", (parts,)),
    ):
        kernel, reference = (getattr(column_sums, f"{name}_{way}") for way in ("by_kernel", "reference"))
        made = kernel(*arguments)
        for own, other in zip(made, reference(*arguments), strict=True):
            close = 1e-5 if other.dtype == torch.float32 else 2**-7
            torch.testing.assert_close(
                own, other, rtol=0, atol=close * float(other.abs().max()) if other.numel() else 0
            )
        assert all(torch.equal(x, y) for _ in range(10) for x, y in zip(made, kernel(*arguments), strict=True))
