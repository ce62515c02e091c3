"""torch's compiler (Inductor) in this process: caches, and an early start of the work before the first graph.

On a GPU the processes that compile Triton's kernels start with the first compiled layer or function.

On a CPU Inductor detects the vector instructions of the C++ compiler and the processor with ten C++ files and ten
processes; the processes run even if the files are on disk. Then Inductor compiles the header of all kernels. Neither
depends on a graph, so a thread does both while the model is built and the first graph is traced.

| work on a CPU                                      | is done by                                                      |
|----------------------------------------------------|-----------------------------------------------------------------|
| whether libtorch has AVX2 and AVX-512, 4 of the 10 | skipped: wheels of torch have both (tests/.../test_graphs.py)   |
| other vector instructions; the header              | a thread, from the first compiled layer or function on          |
| a graph's kernels                                  | one C++ file for up to 16 of these (joined_kernels.py)          |
| a layer's forward and backward pass                | the cache on disk, though both have autograd Functions          |

`python -m benchmarks.start --compiled` prints the seconds that a first step waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from functools import cache
from threading import Lock
from typing import Any

from torch import fx

from meshwright.compute.tensor.joined_kernels import join_kernels
from meshwright.ranks.environment import fuse_multiply_adds

EMPTY_KERNEL = '#include <torch/csrc/inductor/cpp_prefix.h>\nextern "C" void kernel(float* x) {}\n'
"""A C++ function in Inductor's form."""

_ONE_SEARCH = Lock()
"""Held by the thread that begins the search, since ranks may be threads of one process."""

Backend = str | Callable[..., Any]


def start_compiler(device: str) -> Backend:
    """Set Inductor up for this thread; on a CPU begin the work that does not depend on a graph.

    Args:
        device: cuda, or a config's other values for a CPU.

    Returns: the `backend` of torch.compile.
    """
    import torch._functorch.config
    import torch._inductor.config

    fuse_multiply_adds()
    # These settings are local to a thread, so each rank that is a thread sets them. Caching is safe: the key of a
    # cached graph contains the operations of a Function's forward and backward pass.
    torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
    if torch._inductor.config.cpp.vec_isa_ok is None:
        torch._inductor.config.cpp.vec_isa_ok = True
    if device == "cuda":
        # torch starts these processes at the first graph; they import torch while the model is built.
        from torch._inductor.async_compile import maybe_warm_pool

        maybe_warm_pool()
        return "inductor"
    with _ONE_SEARCH:
        vectors_found()
    return inductor_on_cpu


def inductor_on_cpu(graph: fx.GraphModule, inputs: Sequence[Any], options: dict[str, Any] | None = None) -> Any:
    """Compile a graph by Inductor after the search for vector instructions has ended.

    torch's search temporarily changes the compiler's flags; two searches at the same time would end with wrong flags.

    The keys of Inductor's cache do not contain the vector instructions, though the loops of a kernel are written for
    one vector length. A kernel for AVX-512 writes past the end of memory on AVX2, and the reverse leaves elements
    unset. So the length is passed as an option, which is part of the key.
    """
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    join_kernels()
    vectors_found().result()
    length = {"cpp.simdlen": pick_vec_isa().bit_width()}
    return compile_fx(graph, inputs, config_patches=length | (options or {}))


@cache
def vectors_found() -> Future[Any]:
    """Begin the search for vector instructions, once per process; the same thread then compiles the header."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache
    from torch._inductor.cpu_vec_isa import valid_vec_isa_list

    context = copy_context()
    thread = ThreadPoolExecutor(1, thread_name_prefix="compiler")
    found = thread.submit(context.run, valid_vec_isa_list)
    thread.submit(context.run, CppPythonBindingsCodeCache.load_pybinding, ["float*"], EMPTY_KERNEL)
    thread.shutdown(wait=False)
    return found
