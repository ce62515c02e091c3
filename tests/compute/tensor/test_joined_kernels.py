"""Kernels of a graph in one C++ file: results, errors and the number of files."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.codecache import CppPythonBindingsCodeCache

from meshwright.compute.tensor.compiler import start_compiler
from meshwright.compute.tensor.joined_kernels import MOST, JoinedKernels, may_join
from tests.compute.tensor.in_graphs import WARNINGS, needs_inductor

pytestmark = WARNINGS

HEADER = "#include <torch/csrc/inductor/cpp_prefix.h>\n"
ADD = HEADER + 'extern "C"  void  kernel(const float* x, float* y)\n{ y[0] = x[0] + 1; }'
SCALE = HEADER + (
    "static const float by = 3;\n"
    'extern "C"  void  kernel(const double* x, const float* z, double* y)\n{ y[0] = by * x[0] + z[0]; }'
)
FAIL = HEADER + 'extern "C"  void  kernel(float* x)\n{ throw std::runtime_error("an index is out of bounds"); }'


@needs_inductor
def test_kernels_of_one_file_keep_their_arguments_and_errors() -> None:
    joined = JoinedKernels()
    types = (["const float*", "float*"], ["const double*", "const float*", "double*"], ["float*"])
    kernels = [joined.add(each, source) for each, source in zip(types, (ADD, SCALE, FAIL), strict=True)]
    assert joined.is_open
    add, scale, fail = (kernel() for kernel in kernels)
    assert not joined.is_open, "a compiled file takes no further kernel"
    x, y, z = torch.tensor([2.0]), torch.zeros(1, dtype=torch.float64), torch.zeros(1)
    add(x, z)
    scale(torch.tensor([5.0], dtype=torch.float64), z, y)
    assert (z.item(), y.item()) == (3.0, 18.0)
    with pytest.raises(RuntimeError, match="out of bounds"):
        fail(x)


def test_kernels_with_numbers_and_other_texts_stay_alone() -> None:
    assert may_join(["float*", "const double*"], ADD)
    assert not may_join(["float*", "long"], ADD)
    assert not may_join([], ADD)
    assert not may_join(["float*"], ADD + ADD)
    joined = JoinedKernels()
    for _ in range(MOST):
        assert joined.is_open
        joined.add(["float*"], ADD)
    assert not joined.is_open


@needs_inductor
def test_a_graph_has_one_file_each_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The values and gradients are those without a graph, in float64 to 1e-12."""
    texts: list[str] = []
    load = CppPythonBindingsCodeCache.load_pybinding_async

    def counted(types: Any, text: str, *rest: Any, **more: Any) -> Any:
        texts.append(text)
        return load(types, text, *rest, **more)

    monkeypatch.setattr(CppPythonBindingsCodeCache, "load_pybinding_async", counted)
    torch.manual_seed(0)
    norm = nn.LayerNorm(24, dtype=torch.float64)
    first, second = (torch.randn(24, 24, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def layer(x: Tensor) -> Tensor:
        return torch.nn.functional.gelu(norm(torch.nn.functional.gelu(norm(x) @ first)) @ second).square().sum()

    x = torch.randn(8, 24, dtype=torch.float64)
    parameters = (first, second, *norm.parameters())
    loss = layer(x)
    wanted = torch.autograd.grad(loss, parameters)
    compiled = torch.compile(layer, backend=start_compiler("cpu"), fullgraph=True)
    found = compiled(x)
    gradients = torch.autograd.grad(found, parameters)
    for a, b in zip((found, *gradients), (loss, *wanted), strict=True):
        assert float((a - b).detach().norm() / b.detach().norm()) < 1e-12
    joined = [text for text in texts if "namespace joined_1 " in text]
    assert len(joined) == 2, "forward and backward"
    assert len(joined) == len([text for text in texts if "joined_0" in text])


def test_processes_for_triton_start_before_the_first_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[bool] = []
    monkeypatch.setattr("torch._inductor.async_compile.maybe_warm_pool", lambda: started.append(True))
    assert start_compiler("cuda") == "inductor"
    assert started == [True]
