"""Runs a script unchanged until a step is recorded, and reads the facts of the step.

The script runs in this process as `python SCRIPT ARGS`. Hooks of torch see modules, optimizers and losses, as in
`meshwright parity record`. The first step makes the optimizer's states; the second one is recorded. A step ends when
the model is called again after each optimizer has stepped; there the script is stopped.
"""

from __future__ import annotations

import builtins
import io
import os
import runpy
import socket
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Thread
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from meshwright.parity.recorder import whole_model
from meshwright.parity.trace import all_tensors, clean_names, in_backward
from meshwright.planner.adopt.accelerator import Gpu, Pretended, pretended_accelerator, seen_backward
from meshwright.planner.adopt.places import PROCESS, THREAD, Notes, Places
from meshwright.planner.adopt.recorder import Entry, StepRecorder, local_tensors
from meshwright.planner.adopt.zero import pretended_deepspeed
from meshwright.ranks.dtensor import changed_parts, is_cut
from meshwright.ranks.environment import enter_local_rank, go_offline
from meshwright.ranks.fake_world import fake_world
from meshwright.ranks.foreign import parse_json

DEEPSPEED = frozenset(["zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"])
"""Keys of DeepSpeed's JSON; other JSON has none of them."""
MOST_CONFIG_BYTES = 2**20
"""Bytes of the largest file that may be DeepSpeed's JSON."""
WANTED = 2
"""The number of the recorded step: the first has no optimizer states at its begin."""


class Stopped(BaseException):
    """Ends the script behind the recorded step. No `except Exception` catches it."""


@dataclass(frozen=True)
class Order:
    """The script to run, and the machine that it believes in."""

    script: Path
    words: tuple[str, ...]
    gpu: Gpu
    ranks: int = 1
    rank: int = 0
    source: str | None = None
    """The script's text, if an edit changed it."""
    step: int = WANTED
    device: Literal["cuda", "cpu"] = "cuda"
    """cpu: the script finds no accelerator."""
    files: dict[str, str] = field(default_factory=dict)
    """Texts in the place of files that an edit changed, by path."""


@dataclass
class Site:
    """The line at which an optimizer was made, and the names of its model there."""

    line: int
    """0: no line of the script."""
    kind: str
    """The optimizer's class."""
    names: dict[str, int]
    """Names of the script's frame that hold a module, by the module's id."""


@dataclass
class StepFacts:
    """A recorded step, before it is written."""

    entries: list[Entry]
    changes: list[tuple[int, int]]
    """Allocations and frees since the process began."""
    begun: int
    """The place in `changes` of the step's begin."""
    peak_at: int
    parts: dict[int, str]
    """By storage number, its part: weights, buffers, gradients or states."""
    sizes: dict[int, int]
    """Bytes of each storage alive at the step's end, by number."""
    born: Mapping[int, tuple[str, int]]
    """By storage number, the phase and the module of the allocation."""
    saved_storages: Mapping[int, tuple[str, int, int]]
    """Storages alive when the backward pass began: phase, module and bytes."""
    steps: int
    """Number of the recorded step."""
    passes: int
    """Calls of the model in the step: microbatches."""
    inputs: list[tuple[str, tuple[int, ...], str]]
    """Shapes and dtypes of the model's arguments in the first call."""


class Session:
    """Hooks that follow one script. After the run: `facts`, None if no step ended."""

    def __init__(self, order: Order) -> None:
        self.order, self.notes = order, Notes(order.script)
        self.places = Places(order.gpu.index, order.device)
        self.recorder = StepRecorder(self.places, self.notes)
        self.models: list[nn.Module] = []
        self.optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self.sites: list[Site] = []
        self.stepped: dict[int, int] = {}
        self.facts: StepFacts | None = None
        self.frameworks: set[str] = set()
        self.inputs: list[tuple[str, tuple[int, ...], str]] = []
        self.gradients: dict[int, str] = {}
        self.gathered: set[int] = set()
        self.sharded = False
        """True if a parameter of the model is a DTensor: modules then compute with gathered ones."""
        self.step, self.passes = 0, 0
        self.held: dict[str, Any] = {}
        """The script's names, so that its model lives until the facts are read."""
        self.marked: dict[int, str] = {}
        """Parts of memory that an engine names, by storage number."""
        self.configs: list[str] = []
        """Paths of DeepSpeed's JSON that the script read."""
        self._outside: set[int] = set()
        self.pretended = Pretended(self.places, self.notes)

    def before_module(self, module: nn.Module, arguments: Any) -> None:
        if isinstance(module, torch.jit.ScriptModule):
            return
        if not self.recorder.depth and not in_backward() and torch.is_grad_enabled():
            self._begin_pass(module)
        self.recorder.enter_module(module)

    def bare(self, x: Any) -> Any:
        """Return a floating tensor of the host without its values; anything else as it is."""
        if type(x) not in (Tensor, nn.Parameter) or x.is_meta or not (x.is_floating_point() or x.is_complex()):
            return x
        with self.places.placing("cpu"):
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")

    def _begin_pass(self, module: nn.Module) -> None:
        """Handle the call of a model: it may begin a step."""
        if id(module) in self._outside:
            return
        if not any(module is inner for model in self.models for inner in model.modules()):
            model = whole_model(module)
            if not any(p.requires_grad for p in model.parameters()):
                self._outside.add(id(module))
                return
            self.models = [m for m in self.models if all(m is not x for x in model.modules())] + [model]
            parameters = list(model.parameters())
            self.sharded |= any(is_cut(p) for p in parameters)
            # Offloaded parameters are on the host, and their mesh is not.
            kinds = {p.device_mesh.device_type if is_cut(p) else p.device.type for p in parameters}
            if not self.step and kinds == {"cpu"}:
                self.recorder.compute_on_host([*parameters, *model.buffers()])
                self.pretended.device_type = "cpu"
        made = [optimizer for ref in self.optimizers if (optimizer := ref()) is not None]
        done = self.stepped and (
            all(id(optimizer) in self.stepped for optimizer in made) or max(self.stepped.values()) > 1
        )
        if done or not self.step:
            self.end_step()
            self.step += 1
            self.passes, self.gradients = 0, {}
            if self.step > self.order.step:
                raise Stopped
            self.recorder.restart()
        self.passes += 1

    def after_module(self, module: nn.Module, arguments: Any, keywords: Any, result: Any = None) -> None:
        """Note weights that were gathered for a module, and the shapes of the model's arguments.

        torch gives no keywords after an exception, by which recomputation ends.
        """
        self.recorder.leave_module(module)
        if self.sharded:
            parameters = [p for p in module.parameters(recurse=False) if not is_cut(p)]
            self.gathered |= {
                n for n in self._numbers(parameters) if self.recorder.born.get(n, ("other", -1))[0] != "other"
            }
        if self.passes == 1 and any(module is model for model in self.models):
            self.inputs = [
                (str(position), tuple(x.shape), str(x.dtype).removeprefix("torch."))
                for position, x in enumerate(all_tensors((arguments, keywords)))
            ]

    def before_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Begin the optimizer's phase, with its parameters' gradients."""
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self.gradients |= dict.fromkeys(self._numbers(gradients), "gradients")
        self.recorder.finish()
        self.recorder.in_optimizer = True

    def after_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """End the optimizer's phase, and count its step."""
        self.recorder.finish()
        self.recorder.in_optimizer = False
        self.stepped[id(optimizer)] = self.stepped.get(id(optimizer), 0) + 1

    def made_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Note an optimizer, and the line of the script that made it."""
        self.optimizers.append(weakref.ref(optimizer))
        frame: Any = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename != str(self.order.script.resolve()):
            frame = frame.f_back
        names = {} if frame is None else {**frame.f_globals, **frame.f_locals}
        models = {n: id(x) for n, x in names.items() if isinstance(x, nn.Module)}
        self.sites.append(Site(0 if frame is None else frame.f_lineno, type(optimizer).__name__, models))

    def end_step(self) -> None:
        """Read the facts of the step that ends."""
        if not self.stepped:
            return
        self.recorder.finish()
        parts: dict[int, str] = dict.fromkeys(self.gathered, "gathered") | self.gradients
        parts |= dict.fromkeys(self.recorder.buckets & self.recorder.sizes().keys() - parts.keys(), "buckets")
        for model in self.models:
            parts |= dict.fromkeys(self._numbers(list(model.buffers())), "buffers")
            parts |= dict.fromkeys(self._numbers(list(model.parameters())), "weights")
        for ref in self.optimizers:
            for state in optimizer.state.values() if (optimizer := ref()) is not None else ():
                tensors = [x for x in state.values() if isinstance(x, Tensor)]
                parts |= dict.fromkeys(self._numbers(tensors), "states")
        parts |= self.marked
        recorder = self.recorder
        self.facts = StepFacts(
            recorder.entries[: recorder.next_step()], recorder.changes[:], recorder.begun, recorder.peak_at, parts,
            recorder.sizes(), dict(recorder.born), recorder.saved_storages, self.step, self.passes, self.inputs,
        )  # fmt: skip
        self.stepped = {}

    def _numbers(self, values: Sequence[Any]) -> list[int]:
        with torch._C.DisableTorchFunction():
            return [n for x in local_tensors(values) if (n := self.recorder.number_of(x)) > 0]

    def mark(self, tensors: Sequence[Any], category: str) -> None:
        """Count tensors as a category of memory."""
        self.marked |= dict.fromkeys(self._numbers(tensors), category)

    @contextmanager
    def read_files(self) -> Iterator[None]:
        """Give edited texts in the place of files in a context, and note DeepSpeed's JSON among files that are read."""
        begin, files = open, self.order.files

        def opened(file: Any, mode: str = "r", *rest: Any, **options: Any) -> Any:
            if isinstance(file, str | os.PathLike) and str(file).endswith(".json") and mode in ("r", "rt", "rb"):
                path = Path(file).absolute()
                text = files.get(str(path))
                if text is not None:
                    return io.BytesIO(text.encode()) if mode == "rb" else io.StringIO(text)
                if str(path) not in self.configs and path.is_file() and path.stat().st_size < MOST_CONFIG_BYTES:
                    with begin(path, "rb") as raw, suppress(ValueError):
                        tree = parse_json(raw.read())
                        if isinstance(tree, dict) and DEEPSPEED & tree.keys():
                            self.configs.append(str(path))
            return begin(file, mode, *rest, **options)

        with patch.object(builtins, "open", opened), patch.object(io, "open", opened):
            yield

    def follow(self) -> None:
        """Run the script until its step is recorded. The script's own exceptions pass through."""
        order, recorder, notes = self.order, self.recorder, self.notes
        go_offline()
        if order.ranks > 1:
            enter_local_rank(order.rank, order.ranks, 0, 29500)
        sys.argv = [str(order.script), *order.words]
        sys.path.insert(0, str(order.script.resolve().parent))

        def begun(event: str, start: Callable[[Any], None]) -> Callable[[Any], None]:
            def begin(instance: Any) -> None:
                notes.started(event, ())
                start(instance)

            return begin

        sys.addaudithook(notes.started)
        said: Callable[[str], Any] = lambda text: notes.add("process", text)  # noqa: E731
        with ExitStack() as stack:
            stack.enter_context(_refused_network(notes))
            for base_class, event in ((BaseProcess, PROCESS), (Thread, THREAD)):
                stack.enter_context(patch.object(base_class, "start", begun(event, base_class.start)))
            if order.device == "cuda":
                stack.enter_context(pretended_accelerator(order.gpu, recorder))
            stack.enter_context(fake_world(order.rank, order.ranks, recorder.waited, said))
            for context in (_bare_parameters(self), followed_optimizers(self), followed_storages(recorder),
                            _uncompiled(self), _own_loader(notes), seen_backward(self.pretended)):  # fmt: skip
                stack.enter_context(context)
            for handle in (
                register_module_forward_pre_hook(self.before_module),
                register_module_forward_hook(self.after_module, with_kwargs=True, always_call=True),
                register_optimizer_step_pre_hook(self.before_optimizer),
                register_optimizer_step_post_hook(self.after_optimizer),
            ):
                stack.callback(handle.remove)
            stack.enter_context(self.pretended)
            stack.enter_context(recorder)
            stack.enter_context(self.read_files())
            if "deepspeed" in f"{order.source or order.script.read_text(encoding='utf-8')} {order.words}".lower():
                device = torch.device("cuda", order.gpu.index) if order.device == "cuda" else torch.device("cpu")
                engine = lambda text: notes.add("program", text)  # noqa: E731
                stack.enter_context(pretended_deepspeed(device, self.mark, engine))
            with suppress(Stopped):
                self.run_script()

    def run_script(self) -> None:
        """Run the script, or its edited text, as the main module; the last step ends with the script."""
        script = str(self.order.script.resolve())
        try:
            if self.order.source is None:
                self.held = runpy.run_path(script, run_name="__main__")
            else:
                self.held = {"__name__": "__main__", "__file__": script}
                exec(compile(self.order.source, script, "exec"), self.held)
        except SystemExit as ended:
            if ended.code not in (None, 0):
                raise
        self.end_step()

    def names(self) -> dict[int, str]:
        """Return the path of each module that was called, by number."""
        raw = {id(module): name for model in self.models for name, module in model.named_modules()}
        clean = clean_names(list(raw.values()))
        return {index: clean.get(raw.get(id(module), ""), "") for index, module in enumerate(self.recorder.modules)}


@contextmanager
def _refused_network(notes: Notes) -> Iterator[None]:
    """Refuse connections to other hosts in a context, and name the host."""

    def refuse(self: Any, address: Any, *_: Any) -> Any:
        host = address[0] if isinstance(address, tuple) else str(address)
        if isinstance(address, tuple) and host not in ("127.0.0.1", "localhost", "::1"):
            notes.add("network", f"a connection to {host}:{address[1]} is refused: nothing is downloaded")
            raise OSError(f"meshwright adopt downloads nothing: a connection to {host}:{address[1]} is refused")
        return connect(self, address)

    def unresolved(host: Any, *rest: Any, **options: Any) -> Any:
        if host not in (None, "", "127.0.0.1", "localhost", "::1", socket.gethostname()):
            notes.add("network", f"{host} is not asked: nothing is downloaded")
            raise socket.gaierror(f"meshwright adopt downloads nothing: {host} is not asked")
        return resolve(host, *rest, **options)

    connect, resolve = socket.socket.connect, socket.getaddrinfo
    with patch.object(socket.socket, "connect", refuse), patch.object(socket, "getaddrinfo", unresolved):
        yield


@contextmanager
def _bare_parameters(session: Session) -> Iterator[None]:
    """Make parameters and floating buffers without values in a context, also on the host."""
    make, register, bare = nn.Parameter.__new__, nn.Module.register_buffer, session.bare

    def made(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        with torch._C.DisableTorchFunction():
            return make(cls, data if data is None else bare(data), requires_grad)

    def registered(self: Any, name: str, tensor: Any, persistent: bool = True) -> None:
        with torch._C.DisableTorchFunction():
            tensor = bare(tensor)
        register(self, name, tensor, persistent=persistent)

    def cut(local: Any) -> Any:
        # A part that was read from a file, before a module computes.
        if session.recorder.depth:
            return local
        with torch._C.DisableTorchFunction():
            return bare(local)

    with (
        patch.object(nn.Parameter, "__new__", made),
        patch.object(nn.Module, "register_buffer", registered),
        changed_parts(cut),
    ):
        yield


@contextmanager
def followed_optimizers(session: Session) -> Iterator[None]:
    """Note each optimizer that is made in a context, with the line of the script."""
    begin = torch.optim.Optimizer.__init__

    def made(self: Any, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        session.made_optimizer(self)

    with patch.object(torch.optim.Optimizer, "__init__", made):
        yield


@contextmanager
def followed_storages(recorder: StepRecorder) -> Iterator[None]:
    """Follow storages that are freed and filled again in a context, as FSDP2's."""
    resize = torch.UntypedStorage.resize_

    def resized(self: Any, size: int) -> Any:
        result = resize(self, size)
        recorder.resized(self, size)
        return result

    with patch.object(torch.UntypedStorage, "resize_", resized):
        yield


@contextmanager
def _uncompiled(session: Session) -> Iterator[None]:
    """Run compiled functions uncompiled in a context; element kernels are then recorded as fused."""

    def compiled(model: Any = None, *_: Any, **options: Any) -> Any:
        session.recorder.compiled = True
        session.notes.add("program", "torch.compile: elementwise kernels are taken as fused, memory as uncompiled")
        return model if model is not None else lambda function: function

    def compiled_module(self: Any, *_: Any, **options: Any) -> None:
        compiled(self)

    with patch.object(torch, "compile", compiled), patch.object(nn.Module, "compile", compiled_module):
        yield


@contextmanager
def _own_loader(notes: Notes) -> Iterator[None]:
    """Let loaders read in this process in a context: workers would not see the recorder."""
    from torch.utils.data import DataLoader

    begin = DataLoader.__init__

    def made(self: Any, *args: Any, **options: Any) -> None:
        if options.get("num_workers"):
            notes.add("process", f"a loader's {options['num_workers']} workers: batches are read in this process")
            options |= {"num_workers": 0}
            for name in ("prefetch_factor", "persistent_workers", "multiprocessing_context"):
                options.pop(name, None)
        begin(self, *args, **{**options, "pin_memory": False})

    with patch.object(DataLoader, "__init__", made):
        yield
