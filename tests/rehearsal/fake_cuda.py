"""A GPU without a device: fake tensors on `cuda:0` of a CPU's torch, and a tally of a GPU's work.

Fake tensors have shapes, dtypes and a device, and no numbers. An operation on tensors of two devices fails as on a GPU,
each operation that reaches a GPU is one kernel or a few, and each wait of the host for the device is recorded with file
and line. Not seen: time, the work of NCCL, and kernels of CUDA alone (attention takes the path of plain products).

torch must be imported after `load`, so all of this runs in a separate process (step.py).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

SOURCE = Path(__file__).with_name("fake_cuda.cpp")
PACKAGE = Path(__file__).resolve().parents[2] / "meshwright"


def compiler() -> str | None:
    """Return the C++ compiler of this machine."""
    return next((path for name in ("g++", "clang++", "c++") if (path := shutil.which(name))), None)


def torch_folder() -> Path:
    """Return torch's folder without importing torch."""
    spec = find_spec("torch")
    assert spec is not None, "torch is not installed"
    return Path(str(spec.origin)).parent


def library() -> Path:
    """Return the compiled shim, kept among temporary files under a hash of the source, of torch and of torch's
    folder."""
    found, torch = compiler(), torch_folder()
    assert found is not None, "no C++ compiler here"
    digest = hashlib.sha256(SOURCE.read_bytes() + (torch / "version.py").read_bytes() + bytes(torch)).hexdigest()[:16]
    path = Path(tempfile.gettempdir()) / f"meshwright-fake-cuda-{os.getuid()}-{digest}.so"
    if not path.exists():
        partial = path.with_suffix(f".{os.getpid()}")
        flags = ["-std=c++20", "-O0", "-shared", "-fPIC", f"-I{torch / 'include'}", f"-L{torch / 'lib'}"]
        libraries = ["-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch / 'lib'}"]
        subprocess.run([found, *flags, str(SOURCE), "-o", str(partial), *libraries], check=True)
        partial.rename(path)  # another process may compile the same file
    return path


def load(path: Path) -> None:
    """Give a CUDA device to the next import of torch."""
    assert "torch" not in sys.modules, "the shim must be there before torch"
    ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


@dataclass
class Tally:
    """The work of the device: the kernels, and the waits of the host."""

    kernels: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    """The number of the host's waits for the device, by reason and line."""
    drains: Counter[str] = field(default_factory=Counter)
    """The waits that left the device without work."""
    moved_bytes: Counter[str] = field(default_factory=Counter)
    """Bytes read and written, by kernel."""
    odd_products: Counter[str] = field(default_factory=Counter)
    """Half-precision products with a dim that is no multiple of 8, by shapes: slow kernels compute these."""

    def clear(self) -> None:
        """Begin anew."""
        vars(self).update(vars(Tally()))


PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
ATTENTION = ("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward")
FREE = ("empty", "empty_like", "empty_strided", "new_empty", "detach", "lift_fresh", "set_", "resize_", "_unsafe_view")
"""Operations without a kernel, in addition to views."""
SIZED_BY_NUMBERS = ("nonzero", "masked_select")
"""Operations with a result of a shape that only the device can tell: the host waits for the shape."""


class _Device:
    """The host's view of the device: the number of issued operations, and of operations known as done."""

    def __init__(self, tally: Tally) -> None:
        self.tally = tally
        self.given = self.done = 0

    def wait(self, why: str, until: int | None = None) -> None:
        """Wait on the host until the device has done `until` operations; operations already done cost nothing."""
        self.tally.waits[f"{why}, {_asker()}"] += 1
        self.done = max(self.done, self.given if until is None else until)
        self.tally.drains[f"{why}, {_asker()}"] += self.done == self.given

    def note(self, func: Any, inputs: list[Any], outputs: list[Any]) -> None:
        """Record an operation with a tensor on the device."""
        name, tally = func.overloadpacket.__name__, self.tally
        if func.is_view or name in FREE or func.namespace.startswith("c10d"):
            return
        self.given += 1
        label = _label(name, inputs, outputs)
        tally.kernels[label] += 1
        tally.moved_bytes[label] += sum(x.numel() * x.element_size() for x in (*inputs, *outputs))
        matrices = [x for x in inputs if x.dim() >= 2]
        odd = any(dim % 8 for x in matrices for dim in x.shape[-2:])
        if odd and name in PRODUCTS and matrices[0].element_size() == 2:
            tally.odd_products[" x ".join(str(tuple(x.shape)) for x in matrices)] += 1


@contextmanager
def fake_cuda() -> Iterator[Tally]:
    """Yield a tally of the device's work. Inside, new tensors are fake and `torch.cuda` has one device."""
    import torch
    import torch.nn.functional as F
    from torch import Tensor
    from torch._subclasses.fake_tensor import FakeTensorMode

    tally = Tally()
    device = _Device(tally)

    class Watcher(FakeTensorMode):
        """A single mode, because every operation would pass through both of two modes. `inside`: an operation is
        running, and the parts of this operation are not the run's."""

        inside = False

        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False  # no code is compiled here, and answering takes as long as watching

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.prim.device.default:  # C++ asks for a tensor's device: half of all calls
                return args[0].fake_device
            kwargs = kwargs or {}
            if self.inside or func.namespace == "prim":
                return super().__torch_dispatch__(func, types, args, kwargs)
            name = func.overloadpacket.__name__
            inputs = list(_tensors(Tensor, (*args, *kwargs.values())))
            if name == "_local_scalar_dense":
                if inputs[0].device.type == "cuda":
                    device.wait("a number")
                return _answer(inputs[0])
            if name == "_pin_memory":  # fake host memory counts as pinned
                return inputs[0]
            self.inside = True
            try:
                out = super().__torch_dispatch__(func, types, args, kwargs)
            finally:
                self.inside = False
            outputs = list(_tensors(Tensor, (out,)))
            ends = {x.device.type for x in (*inputs, *outputs)}
            if "cuda" in ends:
                copies = name in ("_to_copy", "copy_") and len(ends) > 1
                if copies and not (kwargs.get("non_blocking") or args[2:] == (True,)):  # third argument of copy_
                    device.wait("a copy")
                elif name in SIZED_BY_NUMBERS:
                    device.wait(name)
                device.note(func, inputs, outputs)
            return out

    with ExitStack() as stack:
        for target, stub in _stubs(device).items():
            stack.enter_context(patch.object(torch.cuda, target, stub))
        stack.enter_context(patch.object(F, "scaled_dot_product_attention", _attention(F.scaled_dot_product_attention)))
        stack.enter_context(patch.object(FakeTensorMode, "avoid_device_init", True))  # no device to initialise
        stack.enter_context(Watcher(allow_non_fake_inputs=True))
        yield tally


def _tensors(kind: type, values: Iterable[Any]) -> Iterator[Any]:
    """Yield the tensors among an operation's arguments or results, also inside lists."""
    for value in values:
        if isinstance(value, kind):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(kind, value)


def _attention(plain: Any) -> Any:
    """Return attention as on a GPU: FlashAttention if the arguments allow, which a CPU's torch would not choose."""

    def attend(
        query: Any, key: Any, value: Any, mask: Any = None, dropout: float = 0.0, causal: bool = False, *,
        scale: float | None = None, enable_gqa: bool = False,
    ) -> Any:  # fmt: skip
        if mask is not None or query.element_size() != 2 or query.shape[-1] % 8:
            return plain(query, key, value, mask, dropout, causal, scale=scale, enable_gqa=enable_gqa)
        import torch

        return torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, dropout, causal, False, scale=scale
        )[0]

    return attend


def _answer(x: Any) -> bool | int | float:
    """Return a number for a fake tensor without numbers. Counts are large: nothing looks rare."""
    if x.dtype.is_floating_point:
        return 1.0
    return 2**20 if x.element_size() > 1 else False


def _label(name: str, inputs: list[Any], outputs: list[Any]) -> str:
    """Return the operation's name, or both dtypes of a copy to another dtype."""
    if name == "_to_copy" and inputs and inputs[0].dtype != outputs[0].dtype:
        return f"{str(inputs[0].dtype)[6:]} to {str(outputs[0].dtype)[6:]}"
    return name


def _asker() -> str:
    """Return the innermost line of the package on the stack."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE):
            return f"{'/'.join(path.parts[-2:])} {frame.f_lineno}"
        frame = frame.f_back
    return "somewhere"


def _stubs(device: _Device) -> dict[str, Any]:
    """Return `torch.cuda` of a machine with one idle GPU of 80 GB."""

    class Event:
        def __init__(self, *arguments: Any, **options: Any) -> None:
            self.record()

        def record(self, stream: Any = None) -> None:
            self.given = device.given

        def wait(self, stream: Any = None) -> None:
            pass

        def query(self) -> bool:
            return True

        def synchronize(self) -> None:
            if self.given > device.done:
                device.wait("an event", self.given)

        def elapsed_time(self, other: Any) -> float:
            return 1.0

    class Stream:
        def __init__(self, *arguments: Any, **options: Any) -> None:
            pass

        def wait_stream(self, other: Any) -> None:
            pass

        def wait_event(self, event: Any) -> None:
            pass

        def record_event(self, event: Any = None) -> Event:
            return Event()

        def synchronize(self) -> None:
            device.wait("a stream")

    @contextmanager
    def stream(_: Any) -> Iterator[None]:
        yield

    class Runtime:
        def cudaHostRegister(self, *arguments: Any) -> int:
            return 0

        def cudaHostUnregister(self, *arguments: Any) -> int:
            return 0

    class Properties:
        name, major, minor, total_memory, multi_processor_count = "H100", 9, 0, 80 * 2**30, 132

    return {
        "Event": Event, "Stream": Stream, "stream": stream, "current_stream": lambda gpu=None: Stream(),
        "set_device": lambda gpu: None, "current_device": lambda: 0, "is_available": lambda: True,
        "device_count": lambda: 1, "mem_get_info": lambda gpu=None: (70 * 2**30, 80 * 2**30),
        "max_memory_allocated": lambda gpu=None: 2**30, "get_device_name": lambda gpu=None: "H100",
        "get_device_properties": lambda gpu=None: Properties(), "get_device_capability": lambda gpu=None: (9, 0),
        "utilization": lambda gpu=None: 50, "empty_cache": lambda: None, "_lazy_init": lambda: None,
        "synchronize": lambda gpu=None: device.wait("the device"), "cudart": Runtime, "check_error": lambda code: None,
    }  # fmt: skip
