"""Meta tensors as on a device: kernels and bytes of an attention in steps, dropout and GELU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from meshwright.compute.model import SAMPLES
from meshwright.planner.plan.recorder import Kernel, Program, Recorder
from meshwright.ranks.ledger import Ledger
from meshwright.ranks.planned import planned_mesh
from meshwright.training.on_device import LOWERED, WIDENED, AsOnDevice, Attention
from meshwright.training.rank_model import build_kit, build_model, empty_batch
from tests.oracle.tensor import MODELS, config_for

B, A, T, E = 2, 3, 8, 4
SCORES = B * A * T * T
HALF = torch.float16


def programs(
    compute: Callable[[Tensor], Tensor], x: Tensor, mode: AsOnDevice, *, fuses_dropout: bool = False
) -> tuple[Program, Program]:
    recorder = Recorder(fuses_dropout=fuses_dropout)
    with mode, recorder.program(Ledger()) as recorded:
        y = compute(x)
    forward = recorded()
    gradient = torch.empty_like(y)
    with mode, recorder.program(Ledger()) as recorded:
        torch.autograd.backward(y, gradient)
    return forward, recorded()


def attended(attention: Attention, *, dropout: float = 0.1) -> tuple[Program, Program]:
    # As in the models: one linear's output in three, with heads before tokens.
    def attend(x: Tensor) -> Tensor:
        query, key, value = (part.transpose(1, 2) for part in x.unbind(2))
        return F.scaled_dot_product_attention(query, key, value, None, dropout, True)

    x = torch.empty(B, T, 3, A, E, dtype=HALF, device="meta", requires_grad=True)
    return programs(attend, x, AsOnDevice("cuda", attention))


def kernels(program: Program, kind: str) -> list[Kernel]:
    return [event for event in program.events if isinstance(event, Kernel) and event.kind == kind]


def touched_bytes(program: Program) -> int:
    return sum(event.touched_bytes for event in program.events if isinstance(event, Kernel))


def test_steps_multiply_whole_scores_in_half_precision() -> None:
    forward, backward = attended("fused-softmax")
    product = 2 * SCORES * E
    assert [kernel.flops for kernel in kernels(forward, "product")] == [product] * 2
    assert [kernel.flops for kernel in kernels(backward, "product")] == [product] * 4
    assert {kernel.dtype for kernel in kernels(forward, "product") + kernels(forward, "special")} == {"fp16"}
    assert [kernel.touched_bytes for kernel in kernels(forward, "special")] == [2 * 2 * SCORES]
    assert not kernels(forward, "element"), "heads are multiplied where they are"


def test_steps_keep_five_bytes_of_a_score() -> None:
    forward, _ = attended("fused-softmax")
    output = 2 * B * A * T * E
    assert forward.kept_bytes == 5 * SCORES + output
    assert attended("fused-softmax", dropout=0.0)[0].kept_bytes == 2 * SCORES + output


def test_steps_apart_pass_over_the_scores_twice_more() -> None:
    together, apart = attended("fused-softmax"), attended("steps")
    assert apart[0].kept_bytes - together[0].kept_bytes == 1, "the model's own mask, which stands for one of [T, S]"
    for one, other in zip(apart, together, strict=True):
        assert touched_bytes(one) - touched_bytes(other) == pytest.approx(2 * 4 * SCORES, rel=0.01)


@pytest.mark.parametrize("fuses, expected", [(False, 11), (True, 7)])
def test_dropout_and_the_sum_after_it(fuses: bool, expected: int) -> None:
    """Dropout reads, writes, and writes the mask: 5 bytes. The sum reads two and writes one: 6 bytes. Fused, without
    the tensor between both: 7 bytes."""
    x = torch.empty(64, dtype=HALF, device="meta", requires_grad=True)
    mode = AsOnDevice("cuda", "fused")
    forward, backward = programs(lambda x: x + F.dropout(x, 0.1, True), x, mode, fuses_dropout=fuses)
    assert touched_bytes(forward) == expected * x.numel()
    assert len(forward.events) == 2 - fuses
    assert kernels(backward, "element")[0].touched_bytes == 5 * x.numel()


def test_gelu_in_steps_is_eight_kernels() -> None:
    x = torch.empty(64, dtype=HALF, device="meta", requires_grad=True)
    for in_steps, count in ((False, 1), (True, 8)):
        mode = AsOnDevice("cuda", "fused", gelu_in_steps=in_steps)
        forward, _ = programs(lambda x: F.gelu(x, approximate="tanh"), x, mode)
        assert len(forward.events) == count


def cast_by_torch(device: str) -> set[str]:
    """Return the functions with an autocast kernel of the device in torch's dispatcher, also without such a device."""
    key = f"Autocast{device.upper()}"
    ops = (op for op in torch._C._dispatch_get_all_op_names() if op.startswith("aten::"))
    casting = (op for op in ops if torch._C._dispatch_has_kernel_for_dispatch_key(op, key))
    return {op.removeprefix("aten::").partition(".")[0] for op in casting}


OF_PYTHON = {
    "__matmul__": "matmul", "__rmatmul__": "matmul", "cross_entropy": "nll_loss", "__pow__": "pow", "__rpow__": "pow",
    "__rdiv__": "reciprocal",
}  # fmt: skip
"""Names in Python alone, and the names in the dispatcher."""
PROMOTED = frozenset(["cat", "stack", "addcmul", "index_put", "scatter_add"])
"""Functions with tensors that autocast widens to the widest dtype; the functions do the same without autocast."""


class Called(TorchFunctionMode):
    """A recorder of the names of called functions."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if "out" not in (kwargs or {}):
            self.names.add(function.__name__)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_autocast_knows_what_torch_casts(device: str) -> None:
    """torch casts every listed function. Every function that a family calls and torch casts is listed."""
    registered, listed = cast_by_torch(device), LOWERED | WIDENED[device]
    assert {OF_PYTHON.get(name, name) for name in listed} <= registered
    called = set()
    for family in MODELS:
        config = config_for(family, {"kind": "none"}, precision={"level": "O1", "dtype": "bf16"})
        mesh = planned_mesh(config.grid, 0, config.layout.token_axes, device)
        kit = build_kit(config, mesh)
        model = build_model(config, kit, mesh)
        batch = empty_batch(config, kit, model, mesh.device)
        with AsOnDevice(device, "fused"), torch.autocast("cpu", torch.bfloat16), Called() as calls:
            model(batch, dict.fromkeys((*model.labels, SAMPLES), 1.0), ())
        called |= calls.names
    assert {"scaled_dot_product_attention", "mm", "layer_norm", "rms_norm"} <= called
    assert called & registered <= listed | PROMOTED


def test_autocast_casts_as_the_device_does() -> None:
    x = torch.empty(4, 4, device="meta", requires_grad=True)
    for device, softmax in (("cpu", HALF), ("cuda", torch.float32)):
        with AsOnDevice(device, "fused"), torch.autocast("cpu", HALF):
            assert torch.mm(x, x).dtype == (x @ x).dtype == HALF
            assert torch.softmax(torch.mm(x, x), -1).dtype == softmax
            assert torch.softmax(torch.mm(x, x), -1, dtype=torch.float64).dtype == torch.float64
            assert torch.mm(x.double(), x.double()).dtype == torch.float64
            with torch.autocast("cpu", enabled=False):
                assert torch.mm(x, x).dtype == torch.float32
        with AsOnDevice(device, "fused"):
            assert torch.mm(x, x).dtype == torch.float32
