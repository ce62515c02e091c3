"""torch's compiler (Inductor) in this process: its caches, and a start ahead of the first graph.

Inductor asks on a CPU which vector instructions the C++ compiler and the processor have, by ten C++ files and ten
processes; by the processes also if the files are on disk. Then it compiles the header of all kernels. Neither depends
on a graph, so a thread does both while the model is built and the first graph is traced.

| work on a CPU                                      | is done by                                                      |
|----------------------------------------------------|-----------------------------------------------------------------|
| whether libtorch has AVX2 and AVX-512, 4 of the 10 | nobody: wheels of torch have them (tests/.../test_graphs.py)    |
| other vector instructions; the header              | a thread, from the first compiled layer or function on          |
| a graph's kernels, a file each                     | torch's threads, one a core                                     |
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

from meshwright.ranks.environment import fuse_multiply_adds

EMPTY_KERNEL = '#include <torch/csrc/inductor/cpp_prefix.h>\nextern "C" void kernel(float* x) {}\n'
"""A C++ function as Inductor writes them."""

_ONE_SEARCH = Lock()
"""Held by the thread that begins the search: ranks of a process may be its threads."""

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
    # These settings are of one thread alone, so each rank that is a thread makes them. A cached graph's key has the
    # operations of a Function's forward and backward pass.
    torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
    if torch._inductor.config.cpp.vec_isa_ok is None:
        torch._inductor.config.cpp.vec_isa_ok = True
    if device == "cuda":
        return "inductor"
    with _ONE_SEARCH:
        vectors_found()
    return inductor_on_cpu


def inductor_on_cpu(graph: fx.GraphModule, inputs: Sequence[Any], options: dict[str, Any] | None = None) -> Any:
    """Compile a graph by Inductor as soon as the vector instructions are known: torch's search for them changes the
    compiler's flags for a while, and two searches at a time would end with different flags.

    Keys of Inductor's cache have no vector instructions, though a kernel's loops are written for one vector length. A
    kernel that AVX-512 wrote writes behind its memory on AVX2, and the reverse leaves elements unset. The length as an
    option is in the key.
    """
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    vectors_found().result()
    length = {"cpp.simdlen": pick_vec_isa().bit_width()}
    return compile_fx(graph, inputs, config_patches=length | (options or {}))


@cache
def vectors_found() -> Future[Any]:
    """Begin to look for vector instructions, once in a process, and to compile the header behind."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache
    from torch._inductor.cpu_vec_isa import valid_vec_isa_list

    context = copy_context()
    thread = ThreadPoolExecutor(1, thread_name_prefix="compiler")
    found = thread.submit(context.run, valid_vec_isa_list)
    thread.submit(context.run, CppPythonBindingsCodeCache.load_pybinding, ["float*"], EMPTY_KERNEL)
    thread.shutdown(wait=False)
    return found
