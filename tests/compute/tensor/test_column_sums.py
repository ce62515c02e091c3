"""Backward passes that sum columns on the way (`compile: kernels`), without a GPU.

The references against torch's own gradients; the kernels against the references under Triton's interpreter, and
compiled for an H100; the rewrites of graphs; runs in graphs against one device without.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from meshwright.compute.tensor import column_sums
from meshwright.compute.tensor.column_sums import OPERATIONS
from meshwright.compute.tensor.sums_in_graphs import REWRITES
from meshwright.config import Config, parse_config
from meshwright.ranks.errors import ConfigError
from meshwright.ranks.machine import Machine
from meshwright.training.decisions import resolve_process
from tests.compute.tensor import in_graphs as graphs
from tests.oracle.pipeline import LOOP, WHOLE, pipelined
from tests.oracle.pipeline import serial as serial_in_microbatches
from tests.oracle.run import check
from tests.oracle.tensor import MODELS, config_for, serial

pytestmark = graphs.WARNINGS
ROOT = Path(__file__).resolve().parents[3]
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
TRITON = tuple(map(int, version("triton").split(".")[:2])) if find_spec("triton") else (0, 0)

SHAPES = [(3, 5, 7), (2, 64, 96), (1100, 40)]


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def check_gradients(y: Tensor, expected: Tensor, inputs: list[Tensor]) -> None:
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    dy = torch.randn_like(y)
    for own, theirs in zip(
        torch.autograd.grad(y, inputs, dy), torch.autograd.grad(expected, inputs, dy), strict=True
    ):  # fmt: skip
        torch.testing.assert_close(own, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_are_torchs(shape: tuple[int, ...]) -> None:
    x, weight, bias = leaf(*shape), leaf(shape[-1]), leaf(shape[-1])
    layer = column_sums.fused_norm(x, weight, bias, 1e-5, True)
    check_gradients(layer, F.layer_norm(x, weight.shape, weight, bias, 1e-5), [x, weight, bias])
    root = column_sums.fused_norm(x, weight, None, 1e-5, False)
    check_gradients(root, F.rms_norm(x, weight.shape, weight, 1e-5), [x, weight])
    for tanh in (True, False):
        check_gradients(column_sums.fused_gelu(tanh, x), F.gelu(x, approximate="tanh" if tanh else "none"), [x])


def test_heads_are_joined() -> None:
    x = leaf(2, 5, 3, 8)
    for own, part in zip(column_sums.fused_heads(x, 4), x.unbind(2), strict=True):
        check_gradients(own, part.unflatten(-1, (4, 2)).transpose(1, 2), [x])


@pytest.mark.skipif(TRITON <= (3, 6), reason="Triton 3.6 interprets no scalars of numpy 2.4")
def test_kernels_are_their_references() -> None:
    """Interpreted. float32 within 2e-6 of the largest element, bfloat16 within a unit; bits of a second run equal."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.compute.tensor.interpreted_sums"], capture_output=True, text=True, check=True,
        cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "1"},
    )  # fmt: skip
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 2 * (8 * 6 + 4)
    bounds = {"torch.float32": 2e-6, "torch.bfloat16": 2**-7}
    assert {name: gap for name, (gap, _) in found.items() if gap > bounds[name.split()[1]]} == {}
    assert [name for name, (_, equal) in found.items() if not equal] == []


KERNELS: dict[str, tuple[dict[str, Any], int]] = {
    **{
        f"norm_backward {width}": (
            {"HAS_ADDEND": True, "CENTRED": True, "ROWS": 2048 // min(width, 2048), "WIDTH": width},
            warps,
        )
        for width, warps in ((1024, 8), (4096, 16))
    },
    **{
        f"gelu_backward {tanh}": (
            {name: getattr(column_sums, name) for name in ("LINEAR", "CUBIC", "CURVE", "SLOPE", "RATIO", "COLUMNS")}
            | {"TANH": tanh, "ROWS": 16},
            8,
        )
        for tanh in (True, False)
    },
    "join_heads": ({"ROWS": 16, "COLUMNS": 256, "stride": 1}, 8),
}
NUMBERS = (
    "rows", "rows_each", "width", "offset", "whole", "tokens", "head_width", "batch_stride", "head_stride",
    "token_stride", "stride",
)  # fmt: skip


@needs_triton
@pytest.mark.parametrize("half", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_compile_for_an_h100(name: str, half: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To machine code of sm_90, without a GPU: no atomic addition, no spilled register, accesses of 16 bytes."""
    import triton
    import triton.backends.nvidia
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    constants, warps = KERNELS[name]
    kernel = getattr(column_sums, f"{name.split(maxsplit=1)[0]}_kernel")
    signature = {
        argument: "constexpr" if argument in constants
        else "fp32" if argument == "epsilon"
        else "i32" if argument in NUMBERS
        else "*fp32" if argument.startswith("of_") or argument == "weight"
        else f"*{half}"
        for argument in kernel.arg_names
    }  # fmt: skip
    # Pointers and sizes are multiples of 16, as Triton finds when a model's are.
    multiples = {
        (place,): [["tt.divisibility", 16]]
        for place, (argument, kind) in enumerate(signature.items())
        if kind not in ("constexpr", "fp32") and argument != "rows_each"
    }
    made = triton.compile(
        ASTSource(kernel, signature, constants, multiples), target=GPUTarget("cuda", 90, 32),
        options={"num_warps": warps, "enable_fp_fusion": True},  # Triton 3.9 warns that the default will change
    )  # fmt: skip
    code = made.asm["ptx"]
    assert ".target sm_90" in code
    (tmp_path / "cubin").write_bytes(made.asm["cubin"])
    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    told = subprocess.run(
        [tool, "--dump-resource-usage", tmp_path / "cubin"], capture_output=True, text=True, check=True
    )
    assert re.search(r"STACK:(\d+) .*LOCAL:(\d+) ", told.stdout).groups() == ("0", "0"), told.stdout  # type: ignore[union-attr]
    assert not re.search(r"\b(atom|red)\.|\.local\b", code)
    assert code.count("ld.global.v4") == code.count("ld.global") > 0


def rewritten(function: Any, *inputs: Tensor) -> Counter[Any]:
    """Return the operations of a function's graph after the rewrites; results must equal the graph's before."""
    made = make_fx(function, tracing_mode="fake")(*inputs)
    expected = made(*inputs)
    REWRITES(made.graph)
    made.recompile()
    for own, other in zip(made(*inputs), expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-12)
    return Counter(node.target for node in made.graph.nodes)


ADD, SUM = torch.ops.aten.add.Tensor, torch.ops.aten.sum.dim_IntList


def tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def test_a_residual_and_a_bias_join_the_norms_operation() -> None:
    def backward(dy: Tensor, x: Tensor, weight: Tensor, other: Tensor) -> tuple[Tensor, ...]:
        dx, of_weight, _, _ = torch.ops.meshwright.norm_backward(dy, x, weight, None, 1e-5, True)
        dx = other + dx
        return dx, of_weight.sum(0), dx.view(-1, 24).sum(0, dtype=torch.float64)

    made = rewritten(backward, *tensors((2, 700, 24), (2, 700, 24), (24,), (2, 700, 24)))
    assert (made[ADD], made[SUM], made[OPERATIONS[0]]) == (0, 2, 1)
    graph = make_fx(backward, tracing_mode="fake")(*tensors((2, 700, 24), (2, 700, 24), (24,), (2, 700, 24))).graph
    REWRITES(graph)
    summed = [node.args[0].meta["val"].shape for node in graph.nodes if node.target is SUM]
    assert summed == [(22, 24), (22, 24)], "a sum of all rows is left"


def test_a_layers_two_residuals_join_both_norms() -> None:
    def backward(dout: Tensor, dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        one = dout + torch.ops.meshwright.norm_backward(dy, x, weight, None, 1e-5, False)[0]
        two = one + torch.ops.meshwright.norm_backward(one * dy, x, weight, None, 1e-5, False)[0]
        return (two,)

    made = rewritten(backward, *tensors(*[(6, 24)] * 3, (24,)))
    assert (made[ADD], made[OPERATIONS[0]]) == (0, 2)


@pytest.mark.parametrize("case", ["read twice", "the addend depends on the operation", "another dtype"])
def test_other_sums_are_left(case: str) -> None:
    def backward(dy: Tensor, x: Tensor, weight: Tensor, other: Tensor) -> tuple[Tensor, ...]:
        dx, of_weight, _, _ = torch.ops.meshwright.norm_backward(dy, x, weight, None, 1e-5, True)
        if case == "read twice":
            return other + dx, dx * 2
        if case == "another dtype":
            return (other.float() + dx,)
        return (other * of_weight.sum() + dx,)

    assert rewritten(backward, *tensors((6, 24), (6, 24), (24,), (6, 24)))[ADD] == 1


def with_kernels(config: Config, **changes: Any) -> Config:
    """Return the config with `compile: kernels`, which runs the references on a CPU."""
    return parse_config(
        graphs.with_blocks(config, **changes).model_dump(mode="json", by_alias=True) | {"compile": "kernels"}
    )


@pytest.mark.parametrize("model", graphs.some(MODELS, ("llama", "bert")))
def test_every_family_is_one_device_without_graphs(model: str) -> None:
    made, _ = graphs.equals(with_kernels(config_for(model, WHOLE, steps=3)), serial(model))
    assert made


@pytest.mark.parametrize("layout", graphs.some(graphs.LAYOUTS, ("zero3", "megatron")))
def test_every_way_to_cut_is_one_device_without_graphs(layout: str) -> None:
    small = config_for("gpt2", WHOLE, steps=3, batch={"global": 24, "micro": 6})
    graphs.equals(with_kernels(small, **graphs.LAYOUTS[layout]), serial("gpt2"))


def test_deferred_gradients() -> None:
    config = with_kernels(pipelined("gpt2", 2, "message-driven", WHOLE, placed=LOOP))
    graphs.equals(config, serial_in_microbatches("gpt2"))


@pytest.mark.parametrize("recompute", ["selective", pytest.param({"every": 1}, marks=pytest.mark.long)])
def test_recomputed_layers(recompute: Any) -> None:
    config = with_kernels(config_for("gpt2", WHOLE, steps=3, memory={"recompute": recompute}))
    graphs.equals(config, serial("gpt2"))


@pytest.mark.few(2)
@pytest.mark.parametrize("patterns", [["*.weight"], ["*.bias"], ["blocks.*.attention_norm.*"]])
def test_frozen_weights(patterns: list[str]) -> None:
    plain, graph = (graphs.losses({"frozen": patterns}, compile=each) for each in ("none", "kernels"))
    torch.testing.assert_close(graph, plain, rtol=1e-12, atol=0)


@graphs.needs_inductor
def test_inductor_rewrites_the_graph_of_all_layers() -> None:
    config = with_kernels(config_for("gpt2", WHOLE, steps=2, batch={"global": 24, "micro": 6}))
    ((one, made, breaks),) = graphs.run(config, "inductor")
    check([one], serial("gpt2"))
    assert (made, breaks) == (1, Counter())


def test_kernels_need_a_gpu() -> None:
    with pytest.raises(ConfigError, match=r"compile=kernels needs a GPU and Triton .*; valid: blocks, auto"):
        resolve_process(with_kernels(config_for("gpt2", WHOLE)), Machine(cores=8, memory=2**36))
