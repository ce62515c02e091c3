"""C++ kernels of a graph, compiled as one file instead of a file each.

torch's compiler for CPUs makes a C++ file of each kernel. The compiler (g++ 12) takes 0.75 s of a core for such a file,
and 0.7 s of these do not depend on the kernel: 0.4 s to load the precompiled header, 0.3 s to link. A layer of GPT-2
has 13 kernels both ways. Here up to MOST kernels of a graph are functions of one file, behind one function of torch's
own bindings:

| in the file               | content                                                       |
|---------------------------|---------------------------------------------------------------|
| namespace joined_I        | kernel I, as torch wrote the kernel                           |
| kernel(I, a0, a1, ...)    | calls kernel I with the addresses; unused addresses are equal |

Flags, header, bindings, caches and errors are torch's. Kernels are found again by the hash of the joined file.
`python -m benchmarks.start --compiled` prints the seconds of a first step.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

MOST = 16
"""Kernels of a file. More would compile on one core for long, while others have nothing to do."""

INCLUDE = re.compile(r"^#include[^\n]*\n", re.MULTILINE)
DEFINITION = re.compile(r'extern "C"\s+void\s+kernel\(')

Kernel = Callable[..., None]


class JoinedKernels:
    """Kernels that one file will have, until the first of these is asked for."""

    def __init__(self) -> None:
        self.argument_types: list[Sequence[str]] = []
        self.sources: list[str] = []
        self._entry: Kernel | None = None

    @property
    def is_open(self) -> bool:
        """Whether another kernel may join."""
        return self._entry is None and len(self.sources) < MOST

    def add(self, argument_types: Sequence[str], source: str) -> Callable[[], Kernel]:
        """Add a kernel and return a function that returns the compiled kernel."""
        index = len(self.sources)
        self.argument_types.append(argument_types)
        self.sources.append(source)
        return lambda: self.kernel(index)

    def kernel(self, index: int) -> Kernel:
        """Return a kernel by the index of its addition; the first call compiles the file."""
        width = max(map(len, self.argument_types))
        if self._entry is None:
            from torch._inductor.codecache import CppPythonBindingsCodeCache

            types = ["int64_t", *["void*"] * width]
            self._entry = CppPythonBindingsCodeCache.load_pybinding(types, self.text(width))
        entry, unused = self._entry, width - len(self.argument_types[index])
        return lambda *tensors: entry(index, *tensors, *[tensors[0]] * unused)

    def text(self, width: int) -> str:
        """Return the file's text.

        Args:
            width: The most arguments of a kernel.
        """
        includes = dict.fromkeys(line for source in self.sources for line in INCLUDE.findall(source))
        parts = [*includes]
        for index, source in enumerate(self.sources):
            body = DEFINITION.sub("void kernel(", INCLUDE.sub("", source))
            parts.append(f"namespace joined_{index} {{\n{body}\n}}\n")
        addresses = ", ".join(f"void* a{at}" for at in range(width))
        parts.append(f'extern "C" void kernel(int64_t index, {addresses}) {{\nswitch (index) {{\n')
        for index, types in enumerate(self.argument_types):
            given = ", ".join(f"static_cast<{each}>(a{at})" for at, each in enumerate(types))
            parts.append(f"case {index}: joined_{index}::kernel({given}); break;\n")
        return "".join([*parts, "}\n}\n"])


def may_join(argument_types: Sequence[str], source: str) -> bool:
    """Return whether a kernel's arguments are addresses alone, and its text has the form that `text` changes."""
    addresses = bool(argument_types) and all(each.endswith("*") for each in argument_types)
    return addresses and len(DEFINITION.findall(source)) == 1


@cache
def join_kernels() -> None:
    """Let torch's compiler join the kernels of each graph from now on, once for this process."""
    from torch._inductor import async_compile

    original = async_compile.AsyncCompile.cpp_pybinding

    def cpp_pybinding(self: Any, argtypes: list[str], source_code: str) -> Any:
        # With one thread torch waits for no future.
        if async_compile.get_compile_threads() <= 1 or not may_join(argtypes, source_code):
            return original(self, argtypes, source_code)
        joined = vars(self).get("joined")
        if joined is None or not joined.is_open:
            joined = self.joined = JoinedKernels()
        return async_compile.LambdaFuture(joined.add(argtypes, source_code))

    async_compile.AsyncCompile.cpp_pybinding = cpp_pybinding  # type: ignore[method-assign]
