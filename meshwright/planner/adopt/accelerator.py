"""An accelerator that a script believes in: `torch.cuda` answers as a cluster's GPU, tensors are on the meta device.

Streams and events have numbers, so that the recorder knows which kernels may run at once. Memory figures are the
recorder's. AsOnDevice (training/on_device.py) gives attention, dropout and autocast as a GPU has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.planner.adopt.places import Notes, Place, Places
from meshwright.ranks.dtensor import is_cut
from meshwright.training.on_device import AsOnDevice

_DEVICE, _IS_CUDA, _IS_META, _IS_CPU = (getattr(Tensor, name) for name in ("device", "is_cuda", "is_meta", "is_cpu"))
_GETTERS = {_DEVICE: "", _IS_CUDA: "cuda", _IS_META: "meta", _IS_CPU: "cpu"}
_MOVES = frozenset([Tensor.to, Tensor.cuda, Tensor.cpu])
_READS = frozenset([Tensor.tolist, Tensor.numpy, Tensor.__array__])
_UNCHANGED = frozenset([Tensor.pin_memory, Tensor.record_stream])


@dataclass(frozen=True)
class Gpu:
    """A GPU as scripts ask for it."""

    name: str
    memory_bytes: int
    capability: tuple[int, int]
    count: int
    """Devices that this process sees."""
    index: int = 0


class Watcher(Protocol):
    """The recorder, as the accelerator's streams see it."""

    live: int
    peak: int

    def use_stream(self, stream: int) -> None: ...
    def event(self, action: str, event: int) -> None: ...


class Streams:
    """The streams of a device. A recorded event and an awaited event have equal numbers."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher, self._streams, self._events = watcher, 1, 0
        self.current: Stream = Stream(self, 0)
        self.default = self.current

    def classes(self) -> tuple[type, type]:
        """Return the classes of streams and events, as `torch.cuda` has them: made without the device."""
        streams = self

        class NewStream(Stream):
            def __init__(self, *_: Any, **__: Any) -> None:
                streams._streams += 1
                super().__init__(streams, streams._streams - 1)

        class NewEvent(Event):
            def __init__(self, *_: Any, **__: Any) -> None:
                super().__init__(streams)

        return NewStream, NewEvent

    def use(self, stream: Stream | None) -> None:
        if stream is not None:
            self.current = stream
            self._watcher.use_stream(stream.index)

    @contextmanager
    def using(self, stream: Stream | None) -> Iterator[None]:
        """Issue kernels on a stream in a context."""
        before = self.current
        self.use(stream)
        try:
            yield
        finally:
            self.use(before)

    def record(self, stream: Stream) -> int:
        """Record an event on a stream and return its number."""
        self._events += 1
        with self.using(stream):
            self._watcher.event("record", self._events)
        return self._events

    def wait(self, stream: Stream, event: int) -> None:
        with self.using(stream):
            self._watcher.event("await", event)


class Stream:
    """A stream of the believed accelerator."""

    def __init__(self, streams: Streams, index: int) -> None:
        self._streams, self.index = streams, index
        self.device, self.cuda_stream, self.stream_id, self.priority = torch.device("cuda", 0), index, index, 0
        self.device_index, self.device_type = 0, 1  # as `torch.Stream`: FSDP asks for the index from torch 2.15 on

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self._streams)
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        if event.index:
            self._streams.wait(self, event.index)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        """Wait on the host. Nothing runs, so nothing is waited for."""

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def __enter__(self) -> Stream:
        self._context = self._streams.using(self)
        self._context.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._context.__exit__(*exception)


class Event:
    """An event of the believed accelerator."""

    def __init__(self, streams: Streams) -> None:
        self._streams, self.index = streams, 0

    def record(self, stream: Stream | None = None) -> None:
        self.index = self._streams.record(stream or self._streams.current)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self._streams.current).wait_event(self)

    def synchronize(self) -> None:
        """Wait on the host. Nothing runs, so nothing is waited for."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: Event) -> float:
        """Return a millisecond: no time passes."""
        return 1.0


class Pretended(AsOnDevice):
    """The function mode of a script: devices in calls and answers are those of the believed accelerator."""

    def __init__(self, places: Places, notes: Notes) -> None:
        super().__init__("cuda", "fused")
        self._places, self._notes = places, notes

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        descriptor, places = getattr(function, "__self__", None), self._places
        if descriptor in _GETTERS and (inner := _inner(args[0])) is not None:
            return places.device(inner) if descriptor is _DEVICE else places.of(inner) == _GETTERS[descriptor]
        if descriptor is not None and type(descriptor).__name__ == "getset_descriptor":
            return function(*args, **(kwargs or {}))
        keywords = dict(kwargs or {})
        if function in _UNCHANGED:
            return args[0] if function is Tensor.pin_memory else None
        if function in _READS and args[0].is_meta:
            shape, dtype = tuple(args[0].shape), args[0].dtype
            self._notes.add("value", f"{function.__name__}() of computed values: zeros of the shape {shape}")
            # numpy has no bfloat16.
            known = torch.float32 if dtype == torch.bfloat16 else dtype
            zeros: Any = np.zeros(shape, torch.empty((), dtype=known).numpy().dtype)
            return zeros.tolist() if function is Tensor.tolist else zeros
        if function in _MOVES:
            return self._move(function, args, keywords)
        if keywords.get("device") is not None:
            wanted = torch.device(keywords["device"]).type
            keywords["device"] = "meta" if wanted in ("cuda", "meta") else keywords["device"]
            if keywords["device"] == "meta":
                # Random numbers of a generator on the host are drawn nowhere.
                keywords.pop("generator", None)
                keywords.pop("pin_memory", None)
                with places.placing(wanted):  # type: ignore[arg-type]
                    return super().__torch_function__(function, types, args, keywords)
        if keywords.pop("pin_memory", None):
            dtype = keywords.get("dtype") or (args[0].dtype if isinstance(args[0], Tensor) else torch.float32)
            if dtype.is_floating_point:  # for a device's tensors, such as saved activations
                with places.placing("cpu"):
                    return super().__torch_function__(function, types, args, {**keywords, "device": "meta"})
        if function is F.dropout and (keywords.pop("inplace", False) or args[3:4] == (True,)):
            args = args[:3]
        return super().__torch_function__(function, types, args, keywords)

    def _move(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return x.to(...), x.cuda() or x.cpu(): a copy between places, and a cast."""
        keywords = dict(kwargs)
        x, *rest = args
        device = keywords.pop("device", None)
        if function is not Tensor.to:
            device, rest = ("cpu" if function is Tensor.cpu else "cuda"), []
        elif rest and isinstance(rest[0], str | torch.device | int) and not isinstance(rest[0], bool):
            device, *rest = rest
        elif rest and isinstance(rest[0], Tensor):
            device, rest = self._places.device(rest[0]), [rest[0].dtype, *rest[1:]]
        elif rest and rest[0] is None:
            rest = rest[1:]
        inner = _inner(x)
        if inner is None:  # a tensor of DTensor's search for shapes
            return function(*args, **dict(kwargs))
        if device is not None:
            target: Place = torch.device(device if not isinstance(device, int) else "cuda").type  # type: ignore[assignment]
            if target != self._places.of(inner):
                with self._places.placing(target):
                    # A DTensor's clone is a clone of its part.
                    x = x.clone() if inner.is_meta else x.to("meta") if target != "cpu" else x
        keywords.pop("non_blocking", None)
        rest = [value for value in rest if isinstance(value, torch.dtype)]
        dtype = keywords.pop("dtype", None) or (rest[0] if rest else None)
        return x if dtype is None and not keywords.get("copy") else Tensor.to(x, dtype or x.dtype, **keywords)


def _inner(x: Any) -> Tensor | None:
    """Return a plain tensor, or this rank's part of a DTensor; None for other classes of tensors."""
    if type(x) in (Tensor, nn.Parameter, nn.Buffer):
        return x
    return x._local_tensor if is_cut(x) else None


@contextmanager
def pretended_accelerator(gpu: Gpu, watcher: Watcher) -> Iterator[None]:
    """Make `torch.cuda` and `torch.accelerator` answer as a GPU in a context."""
    streams = Streams(watcher)
    properties = SimpleNamespace(
        name=gpu.name, total_memory=gpu.memory_bytes, major=gpu.capability[0], minor=gpu.capability[1],
        multi_processor_count=132, warp_size=32, is_integrated=False, regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048, gcnArchName="", uuid="",
    )  # fmt: skip
    index, (stream_class, event_class) = [gpu.index], streams.classes()

    def nothing(*_: Any, **__: Any) -> None:
        """Do nothing: the device is not there."""

    def always(value: Any) -> Callable[..., Any]:
        return lambda *_, **__: value

    def choose(device: Any) -> None:
        index[0] = device if isinstance(device, int) else torch.device(device).index or 0

    answers: dict[str, Any] = {
        "is_available": always(True), "device_count": always(gpu.count), "current_device": lambda: index[0],
        "set_device": choose, "get_device_name": always(gpu.name), "get_device_properties": always(properties),
        "get_device_capability": always(gpu.capability), "is_bf16_supported": always(True),
        "is_initialized": always(True), "init": nothing, "_lazy_init": nothing, "synchronize": nothing,
        "empty_cache": nothing, "ipc_collect": nothing, "manual_seed": nothing, "manual_seed_all": nothing,
        "seed": nothing, "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8), "set_rng_state": nothing,
        "get_rng_state_all": lambda: [torch.zeros(16, dtype=torch.uint8)], "set_rng_state_all": nothing,
        "memory_allocated": lambda *_: watcher.live, "max_memory_allocated": lambda *_: watcher.peak,
        "memory_reserved": lambda *_: watcher.live, "max_memory_reserved": lambda *_: watcher.peak,
        "reset_peak_memory_stats": nothing, "memory_stats": lambda *_: {},
        "mem_get_info": lambda *_: (gpu.memory_bytes - watcher.live, gpu.memory_bytes),
        "Stream": stream_class, "Event": event_class, "stream": streams.using,
        "current_stream": lambda *_: streams.current, "default_stream": lambda *_: streams.default,
        "set_stream": streams.use, "is_current_stream_capturing": always(False), "device": always(nullcontext()),
        "can_device_access_peer": always(True), "set_per_process_memory_fraction": nothing,
    }  # fmt: skip
    accelerators: dict[str, Any] = {
        "is_available": always(True), "current_accelerator": always(torch.device("cuda")),
        "device_count": always(gpu.count), "current_device_index": lambda: index[0], "set_device_index": choose,
        "synchronize": nothing, "current_stream": lambda *_: streams.current, "empty_cache": nothing,
        "memory_allocated": lambda *_: watcher.live, "max_memory_allocated": lambda *_: watcher.peak,
        "memory_reserved": lambda *_: watcher.live, "max_memory_reserved": lambda *_: watcher.peak,
        "reset_peak_memory_stats": nothing, "memory_stats": lambda *_: {},
    }  # fmt: skip
    with ExitStack() as stack:
        known: dict[str, Any] = {"_get_accelerator": always(torch.device("cuda"))}  # transformers' device of a mesh
        for owner, named in ((torch.cuda, answers), (torch.accelerator, accelerators), (torch._C, known)):
            for name, value in named.items():
                if name in vars(owner):
                    stack.enter_context(patch.object(owner, name, value))
        stack.enter_context(patch.object(torch.cuda, "nvtx", SimpleNamespace(
            range_push=nothing, range_pop=nothing, mark=nothing, range=always(nullcontext()))))  # fmt: skip
        stack.enter_context(_autocast_of_host())
        yield


@contextmanager
def seen_backward(mode: Pretended) -> Iterator[None]:
    """Keep the function mode active in backward passes and in `save_on_cpu` in a context.

    torch hands `backward` to the mode as a function, and a mode is off while it handles a function: recomputation
    would then differ from the first pass, and saved tensors would be saved with the meta device as their place.
    """
    saves = torch.autograd.graph.save_on_cpu.__init__

    def saved(self: Any, *args: Any, **options: Any) -> None:
        saves(self, *args, **options)
        pack = self.pack_hook

        def within(value: Tensor) -> Any:
            with torch._C._EnableTorchFunction(), mode:
                return pack(value)

        self.pack_hook = within

    engine = torch.autograd._engine_run_backward

    def run(*args: Any, **options: Any) -> Any:
        with torch._C._EnableTorchFunction():
            return engine(*args, **options)

    def unhandled(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            with torch._C.DisableTorchFunction():
                return function(*args, **options)

        return call

    with ExitStack() as stack:
        for owner, name in ((Tensor, "backward"), (torch.autograd, "backward"), (torch.autograd, "grad")):
            stack.enter_context(patch.object(owner, name, unhandled(getattr(owner, name))))
        stack.enter_context(patch.object(torch.autograd, "_engine_run_backward", run))
        stack.enter_context(patch.object(torch.autograd.graph.save_on_cpu, "__init__", saved))
        # A checkpoint compares devices read inside of the mode with devices read outside.
        forms = {"default": lambda x: {"shape": x.shape, "dtype": x.dtype}}
        stack.enter_context(patch.dict(torch.utils.checkpoint._allowed_determinism_checks_to_fns, forms))
        yield


@contextmanager
def _autocast_of_host() -> Iterator[None]:
    """Let `torch.autocast("cuda")` enable the host's autocast, whose casts AsOnDevice replaces by a GPU's."""
    begin, enabled, dtype_of = torch.autocast.__init__, torch.is_autocast_enabled, torch.get_autocast_dtype

    class Kind(type):
        """The class of generators: those of torch count as instances of ours."""

        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, base)

        def __call__(cls, device: Any = "cpu") -> torch.Generator:
            return base()

    base = torch.Generator

    class Generator(metaclass=Kind):
        """A generator of any device: one of the host."""

    def made(self: Any, device_type: str, dtype: Any = None, *rest: Any, **options: Any) -> None:
        begin(self, "cpu", dtype or (torch.float16 if device_type == "cuda" else None), *rest, **options)

    with ExitStack() as stack:
        for owner, name, value in (
            (torch.autocast, "__init__", made),
            (torch, "is_autocast_enabled", lambda device_type="cpu": enabled("cpu")),
            (torch, "get_autocast_dtype", lambda device_type="cpu": dtype_of("cpu")),
            (torch, "get_autocast_gpu_dtype", lambda: dtype_of("cpu")),
            (torch, "Generator", Generator),
        ):
            stack.enter_context(patch.object(owner, name, value))
        yield
