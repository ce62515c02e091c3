"""The recorder's notes on operations on meta tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.planner.plan import recorder as recorder_module
from meshwright.planner.plan.recorder import Kernel, Program, Recorder, Start, WaitFor
from meshwright.ranks.comm import RankGroup
from meshwright.ranks.ledger import Ledger
from meshwright.ranks.planned import LedgerComm
from meshwright.training.on_device import AsOnDevice

META = torch.device("meta")


def kernels(program: Program) -> list[Kernel]:
    return [event for event in program.events if isinstance(event, Kernel)]


def test_a_product_its_flops_side_and_bytes() -> None:
    recorder, x, w = Recorder(), torch.empty(8, 16, device=META), torch.empty(16, 32, device=META)
    with recorder.program(Ledger()) as made:
        y = x @ w
    (kernel,) = kernels(made())
    assert (kernel.kind, kernel.flops, kernel.dtype) == ("product", 2 * 8 * 16 * 32, "float32")
    assert kernel.side == pytest.approx(16.0)
    assert kernel.touched_bytes == 4 * (8 * 16 + 16 * 32 + 8 * 32)
    assert made().kept_bytes == y.nbytes


def test_views_and_empty_memory_are_no_kernels_and_what_is_freed_is_gone() -> None:
    recorder = Recorder()
    with recorder.program(Ledger()) as made:
        x = torch.empty(64, device=META).view(8, 8).t()
        y = x[2:].exp()
        y += 1
        del x
        z = torch.zeros(4, device=META)
        del z
    program = made()
    assert [kernel.kind for kernel in kernels(program)] == ["special", "element", "element"]
    assert program.kept_bytes == y.nbytes == 192
    assert program.peak_bytes == 256 + 192


def test_what_is_only_written_is_not_read() -> None:
    recorder, x, y = Recorder(), torch.empty(64, device=META), torch.empty(64, device=META)
    with recorder.program(Ledger()) as made:
        torch.mul(x, 2, out=y)
        x.mul_(2)
        torch.addmm(y.view(8, 8), x.view(8, 8), x.view(8, 8), out=y.view(8, 8))
    assert [kernel.touched_bytes for kernel in kernels(made())] == [2 * 256, 2 * 256, 4 * 256]


def test_a_copy_reads_its_source_alone_and_a_function_without_tensors_is_no_kernel() -> None:
    recorder, x, y = Recorder(), torch.empty(64, device=META), torch.empty(64, device=META)
    with recorder.program(Ledger()) as made:
        x.copy_(y)
        x.zero_()
        torch.promote_types(x.dtype, y.dtype)
    assert [(kernel.operation, kernel.touched_bytes) for kernel in kernels(made())] == [("copy_", 512), ("zero_", 256)]


def test_a_loss_of_labels_reads_a_number_a_row_and_writes_a_gradient() -> None:
    rows = torch.empty(8, 1000, device=META, requires_grad=True)
    recorder, labels = Recorder(), torch.empty(8, dtype=torch.int64, device=META)
    with recorder.program(Ledger()) as made:
        F.nll_loss(rows, labels).backward()
    touched = {kernel.operation: kernel.touched_bytes for kernel in kernels(made())}
    assert touched["nll_loss_forward"] < 200
    assert rows.nbytes <= touched["nll_loss_backward"] < rows.nbytes + 200


def test_kernels_of_elements_are_of_the_kinds_that_a_gpu_has() -> None:
    x, half = torch.empty(8, 16, device=META), torch.empty(8, 16, device=META, dtype=torch.bfloat16)
    column = torch.empty(8, 1, device=META)
    recorder = Recorder()
    with recorder.program(Ledger()) as made:
        x.add_(half)  # a cast inside of the kernel
        half.float()
        torch.mul(x, column, out=half)
        x * column  # one dtype
        half.sum(0)
        half.amax(1)  # in the memory's order
        torch.cat([x, x])
    found = [kernel.kind for kernel in kernels(made())]
    assert found == ["mixed", "mixed", "strided", "element", "sum", "element", "element"]


def test_a_softmax_in_another_dtype_is_a_cast_and_a_softmax() -> None:
    recorder, half = Recorder(), torch.empty(8, 16, device=META, dtype=torch.bfloat16)
    out = torch.empty(8, 16, device=META)
    with recorder.program(Ledger()) as made:
        torch.softmax(half, 1, dtype=torch.float32, out=out)
    found = [(kernel.kind, kernel.operation, kernel.touched_bytes) for kernel in kernels(made())]
    assert found == [("mixed", "_to_copy", 8 * 16 * 6), ("special", "softmax", 8 * 16 * 8)]


def test_a_call_whose_forms_are_known_gives_back_what_it_was_given() -> None:
    recorder, x, y, z = Recorder(), *(torch.empty(8, 8, device=META) for _ in range(3))
    with recorder.program(Ledger()) as made:
        for _ in range(2):
            assert x.mul_(2) is x
            assert torch.mul(x, y, out=z) is z
            assert torch.mul(x, y, out=y) is y
            assert (x * y).untyped_storage()._cdata not in {t.untyped_storage()._cdata for t in (x, y, z)}
            whole, none, bias = torch.ops.aten.native_layer_norm_backward(
                x, x, [8], x, x, None, None, [True, False, False]
            )
            assert (whole.shape, none, bias) == (x.shape, None, None)
    first, second = kernels(made())[:5], kernels(made())[5:]
    assert first == second


def test_a_sum_that_is_written_where_it_is_read_asks_torch_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "_KNOWN", {})
    asked: list[str] = []

    class Asking(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            asked.append(str(op))
            return op(*args, **(kwargs or {}))

    recorder, sums = Recorder(), torch.empty(8, 32, device=META)
    x, y = torch.empty(8, 16, device=META), torch.empty(16, 32, device=META)
    programs = []
    for _ in range(2):
        with Asking(), recorder.program(Ledger()) as made:
            assert torch.addmm(sums, x, y, out=sums) is sums
        programs.append(made())
    assert asked == ["aten.addmm.out"]
    assert programs[0].events == programs[1].events
    assert kernels(programs[1])[0].kind == "product"


def test_a_fused_row_writes_no_storage_that_took_the_place_of_another() -> None:
    recorder, x = Recorder(fuses_elements=True), torch.empty(64, device=META)
    with recorder.program(Ledger()) as made:
        for _ in range(20):
            x.exp()  # freed at once: the next tensor at the same address is another storage
        others = [torch.empty(64, device=META) for _ in range(50)]
    (kernel,) = kernels(made())
    assert (kernel.touched_bytes, len(others)) == (256, 50)


def test_exponentials_are_dear_in_place_and_into_a_tensor_as_well() -> None:
    recorder, x = Recorder(), torch.empty(8, 8, device=META)
    with recorder.program(Ledger()) as made:
        torch.softmax(x, 1, out=x)
        F.silu(x)
        x.exp_()
        x.uniform_()
        x.neg_()
    assert [kernel.kind for kernel in kernels(made())] == ["special", "special", "special", "random", "element"]


def test_memory_of_a_step_comes_back() -> None:
    """The backward pass frees all that the forward pass keeps, except for the gradients."""
    recorder, ledger = Recorder(), Ledger()
    weight, x = torch.nn.Parameter(torch.empty(32, 32, device=META)), torch.empty(4, 32, device=META)
    with recorder.program(ledger) as made:
        loss = (x @ weight).exp().sum()
    forward = made()
    with recorder.program(ledger) as made:
        loss.backward()
        del loss
    assert forward.kept_bytes == 4 * 32 * 4 + 4  # the exponentials and the loss
    assert forward.kept_bytes + made().kept_bytes == weight.nbytes


def test_collectives_begin_and_are_waited_for() -> None:
    recorder, ledger = Recorder(), Ledger()
    comm = LedgerComm(RankGroup("row", (0, 1), 0, ledger=ledger), recorder.started)
    x, part = torch.empty(8, device=META), torch.empty(4, device=META)
    with recorder.program(ledger) as made:
        work = comm.all_gather(x, part, wait=False)
        y = x * 2
        work.wait()
        comm.broadcast(x, 1)
    assert [type(event) for event in made().events] == [Start, Kernel, WaitFor, Start, WaitFor]
    gather, broadcast = (event for event in made().events if isinstance(event, Start))
    assert (gather.axes, gather.verb, gather.payload_bytes) == ("row", "all_gather", 32)
    assert (broadcast.verb, broadcast.payload_bytes, broadcast.root) == ("broadcast", 32, 1)
    assert made().traffic["row", "all_gather"].sent_bytes == 16
    assert y.shape == x.shape


def test_what_is_repeated_is_gone_through_once() -> None:
    recorder, ledger = Recorder(), Ledger()
    comm = LedgerComm(RankGroup("row", (0, 1), 0, ledger=ledger), recorder.started)
    x = torch.empty(8, 8, device=META)
    with recorder.program(ledger) as made, ledger.repeated(5):
        x @ x
        with ledger.repeated(2):
            comm.all_reduce(x)
    program = made()
    assert program.flops == 5 * 2 * 8**3
    assert (program.traffic["row", "all_reduce"].calls, program.traffic["row", "all_reduce"].sent_bytes) == (10, 2560)
    assert [event.times for event in program.events if isinstance(event, Start)] == [10]


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_attention_is_one_kernel_where_the_device_has_one(device_type: str) -> None:
    query = torch.empty(2, 4, 16, 8, device=META, requires_grad=True)
    mask = torch.ones(2, 1, 1, 16, dtype=torch.bool, device=META)
    kinds = []
    for modes in ([], [AsOnDevice(device_type, "fused")]):
        recorder = Recorder()
        with recorder.program(Ledger()) as made:
            for mode in modes:
                mode.__enter__()
            F.scaled_dot_product_attention(query, query, query, attn_mask=mask).sum().backward()
            for mode in modes:
                mode.__exit__(None, None, None)
        kinds.append([kernel.kind for kernel in kernels(made()) if kernel.flops])
    assert kinds[0] == ["product"] * 6
    assert kinds[1] == ["attention"] * 2
