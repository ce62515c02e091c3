"""Kernels that torch.compile makes for a layer on an H100, found on a machine without a GPU:

    python -m benchmarks.graph_kernels [key=value ...]        words as of `meshwright train gpt2`

Needs Triton, and neither a driver nor a CUDA build of torch: a layer is traced with fake tensors on the CPU, and
Inductor writes code for an H100. The code is counted and not run. Bytes are the inputs and outputs of each kernel, in
activations [micro, T, H] of the run's precision: a kernel that reads one activation and writes one has 2. Bytes of
products are left out. `planned`: the bytes that the planner counts.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from meshwright.compute import precision
from meshwright.compute.context.open import open_context
from meshwright.compute.model import Chunk
from meshwright.compute.models import compiled
from meshwright.compute.models.chain import make_chain
from meshwright.compute.parameters.gradients import Gradients
from meshwright.compute.tensor import graphs
from meshwright.compute.tensor.column_sums import OPERATIONS
from meshwright.compute.tensor.sums_in_graphs import REWRITES
from meshwright.config import Config, load_config
from meshwright.config.section import with_field
from meshwright.planner.plan.cluster import load_cluster
from meshwright.planner.plan.predict import Planner
from meshwright.planner.plan.recorder import Kernel
from meshwright.ranks.machine import Machine
from meshwright.ranks.mesh import solo_mesh
from meshwright.strategies.pipeline.stage import Stage
from meshwright.training.decisions import resolve
from meshwright.training.rank_model import build_kit, empty_batch

WORDS = "data.tokenizer=bytes device=cpu threads=1 compile=blocks precision=bf16 precision.products=stored"
HOST = Machine(cores=1, memory=2**37)
H100 = {
    "multi_processor_count": 132, "major": 9, "minor": 0, "total_memory": 80 * 2**30, "warp_size": 32,
    "regs_per_multiprocessor": 2**16, "max_threads_per_multi_processor": 2048, "name": "NVIDIA H100",
    "shared_memory_per_block_optin": 232448, "max_threads_per_block": 1024, "gcnArchName": "",
}  # fmt: skip


@dataclass(frozen=True)
class Found:
    """A graph's kernels without products: the operations and the bytes of each. `code`: Inductor's."""

    kernels: tuple[tuple[str, int], ...]
    code: str

    @property
    def size_bytes(self) -> int:
        return sum(size for _, size in self.kernels)


class Written(Exception):
    """The signal that Inductor has written the code, which is not compiled or run."""


@contextmanager
def an_h100() -> Iterator[None]:
    """Answer Inductor's questions about the device for an H100, on a machine without a driver."""
    from torch._inductor.runtime.hints import DeviceProperties

    known = {name: value for name, value in H100.items() if name in DeviceProperties._fields}
    shown = DeviceProperties(type="cuda", index=0, cc=90, **known)
    answers: dict[str, Callable[..., Any]] = {
        "get_device_properties": lambda *_: type("H100", (), H100),
        "get_device_capability": lambda *_: (9, 0),
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "_lazy_init": lambda: None,
        "_exchange_device": lambda _: 0,
        "_maybe_exchange_device": lambda _: 0,
        "device": lambda *_: nullcontext(),
        "synchronize": lambda *_: None,
        "get_rng_state": lambda *_: torch.zeros(1),
        "set_rng_state": lambda *_: None,
        "is_current_stream_capturing": lambda: False,
    }
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(patch(f"torch.cuda.{name}", answer))
        stack.enter_context(patch("torch.utils._triton.triton_hash_with_backend", lambda: "H100"))
        stack.enter_context(patch("torch._inductor.scheduler.has_triton", lambda: True))
        stack.enter_context(patch("torch._dynamo.utils.preserve_rng_state", nullcontext))
        stack.enter_context(patch.object(DeviceProperties, "create", lambda _: shown))
        yield


def on_gpu(value: Any) -> Any:
    """Return a fake tensor on the GPU; a number on the host stays on the host."""
    if isinstance(value, list | tuple):
        return type(value)(map(on_gpu, value))
    if not isinstance(value, FakeTensor) or value.dim() == 0:
        return value
    with value.fake_mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda:0")


def moved(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Return a copy, on the GPU, of a graph traced on the CPU."""
    graph = copy.deepcopy(module.graph)
    for node, before in zip(graph.nodes, module.graph.nodes, strict=True):
        node.meta = {name: on_gpu(value) for name, value in before.meta.items() if name != "tensor_meta"}
        node.kwargs = {
            name: torch.device("cuda:0") if isinstance(value, torch.device) else value
            for name, value in node.kwargs.items()
        }
    return torch.fx.GraphModule(module, graph)


def kernels_of(module: torch.fx.GraphModule, inputs: list[Any]) -> Found:
    """Return the kernels that Inductor makes for a graph."""
    from torch._inductor import compile_fx, config
    from torch._inductor.graph import GraphLowering

    found: list[Found] = []

    def write(lowered: GraphLowering) -> None:
        code, _ = lowered.codegen()
        kernels = []
        for node, quarter in lowered.count_bytes()[1]:
            operation = getattr(node.node, "op_overload", None) if node.is_extern() else None
            if operation in OPERATIONS:
                kernels.append((operation.name(), 4 * quarter))
            elif not node.is_extern():
                made = {str(origin.target) for each in node.get_nodes() for origin in each.node.get_origins()}
                kernels.append(
                    (", ".join(sorted(name.removeprefix("aten.").split(".")[0] for name in made)), 4 * quarter)
                )
        found.append(Found(tuple(kernels), code.value))
        raise Written

    with (
        an_h100(),
        config.patch(compile_threads=1, fx_graph_cache=False, post_grad_custom_post_pass=REWRITES),
        patch.object(GraphLowering, "compile_to_module", write),
    ):
        try:
            compile_fx.compile_fx_inner(moved(module), list(map(on_gpu, inputs)))
        except Exception as error:
            if not found:
                raise RuntimeError("Inductor has written no code") from error
    return found[0]


def layer_kernels(config: Config) -> tuple[Found, Found]:
    """Return a layer's kernels, forward and backward."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    found: list[Found] = []

    def count(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        found.append(kernels_of(module, inputs))
        return make_boxed_func(module.forward)

    backend = aot_autograd(
        fw_compiler=count, bw_compiler=count, partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )  # fmt: skip
    mesh = solo_mesh(torch.device("meta"), config.grid.names)
    kit, chunk = build_kit(config, mesh), Chunk(range(1), first=False, last=False)
    model = make_chain(config, kit, chunk)
    model.attend_in(open_context(config, mesh))
    precision.store(config, model)
    with patch.object(graphs, "BACKEND", backend):
        compiled.apply(config, model)
    batch = empty_batch(config, kit, model, torch.device("cpu"))
    dtype = torch.bfloat16 if config.precision.dtype == "bf16" else torch.float32
    with FakeTensorMode(allow_non_fake_inputs=True):
        for module in model.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None:
                    module._parameters[name] = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype))
        x = torch.empty(config.micro, config.data.sequence, config.model.hidden, dtype=dtype)
        stage = Stage(model, Gradients({}, lambda _: None))
        outgoing = stage.forward(0, (x,), batch, {})
        stage.backward(0, tuple(map(torch.empty_like, outgoing)), defers=False)
    forward, backward = found
    return forward, backward


def adds_weights(kernel: Kernel) -> bool:
    """Return whether a kernel adds a weight's gradient in bf16 to a float32 gradient, an opaque operation in graphs."""
    return kernel.dtype == "float32" and kernel.touched_bytes == 10 * kernel.elements


def planned_bytes(config: Config) -> tuple[int, int]:
    """Return the bytes of a layer's kernels as the planner records, forward and backward, without products."""
    planner = Planner(load_cluster("dgx-h100"))
    planner.predict(config)
    (layer,) = (
        each for each in planner.recordings.recorded
        if {name.name.split(".")[1] for name in each.parameters if name.name.startswith("blocks.")} == {"0"}
    )  # fmt: skip
    counted = [
        sum(
            kernel.touched_bytes * kernel.times
            for kernel in programs[-1].events
            if isinstance(kernel, Kernel) and kernel.kind not in ("product", "attention") and not adds_weights(kernel)
        )
        for programs in layer.programs.values()
    ]
    return counted[0], counted[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="key=value")
    parser.add_argument("--kernels", action="store_true", help="compile=kernels, in which a plan is that of blocks")
    parser.add_argument("--code", action="store_true", help="print Inductor's code as well")
    options = parser.parse_args()
    config = resolve(load_config("gpt2", [*WORDS.split(), *options.words]), HOST).config
    if options.kernels:  # not resolved: this machine has no GPU
        config = with_field(config, "compile", "kernels")
    activation = 2 * config.micro * config.data.sequence * config.model.hidden
    table = Table("pass", "kernel of", title="A layer's kernels but for products and attention, in activations")
    table.add_column("read and written", justify="right")
    for name, found, planned in zip(("forward", "backward"), layer_kernels(config), planned_bytes(config), strict=True):
        for operations, size in found.kernels:
            table.add_row(name, operations, f"{size / activation:.2f}")
        table.add_row(name, "all", f"{found.size_bytes / activation:.2f}", style="bold")
        table.add_row(name, "planned", f"{planned / activation:.2f}", end_section=True)
        if options.code:
            print(found.code)
    Console().print(table)


if __name__ == "__main__":
    main()
