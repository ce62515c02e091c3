"""Record the outputs of a training script's modules while it runs: `meshwright parity record`, or two lines in the
script.

    with parity.recording("out/two", model, steps=(1, 2)):      # around the training loop
        ...

The script need not change: hooks of torch's own see every module that is called, every optimizer that steps and every
loss that is differentiated. The model is what is called with gradients and has parameters; a step ends where an
optimizer has stepped and the model is called again.

A folder holds rank-R/run.json, rank-R/first.safetensors (the weights before the first step) and, for each recorded
step, rank-R/step-N.safetensors and then step-N.json: a step without the latter was not finished. A run that rounding
has moved lies in perturbed-SEED beside them. Gradients are those before clipping, if torch's functions clip them; the
optimizer's are then kept as `clipped`.
"""

from __future__ import annotations

import gc
import json
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from meshwright.parity.norm import watch
from meshwright.parity.program import is_compiled
from meshwright.parity.record import CLIPPED, STATE
from meshwright.parity.reference import floating_buffers, rates_of, states_of, without_dropout
from meshwright.parity.sampling import Strides, sampled, strides_of
from meshwright.parity.tensors import write_tensors
from meshwright.parity.trace import Rounding, Trace, all_tensors, clean_names, in_backward
from meshwright.ranks.dtensor import box_of, gradient_of, joined_place, local_of, whole_of, write_local
from meshwright.ranks.environment import read_environment
from meshwright.ranks.errors import ParityError
from meshwright.ranks.streams import say

MOST = 65536
"""The most elements kept of a tensor."""


@dataclass(frozen=True)
class RecordPlan:
    """`steps`: numbers of those that are kept, from 1. `most`: elements kept of a tensor. `axes`: names and sizes of
    the ranks' axes, outermost first. `seed`: of a run that rounding moves, None for one as it is. `stop`: the script
    ends behind the last step that is kept."""

    folder: Path
    steps: tuple[int, ...] = (1, 2)
    most: int = MOST
    axes: tuple[tuple[str, int], ...] = ()
    seed: int | None = None
    stop: bool = False


@dataclass
class RunFacts:
    """A rank's record of the run. `boxes`: offsets of a DTensor's part; `kept`: the shape and strides of each
    parameter of which samples are kept; `frozen`: parameters that ask for no gradient. `compiled`: a part was compiled,
    and recorded as it is written; `dropout`: there was some, and it was off."""

    rank: int
    world_size: int
    axes: list[tuple[str, int]]
    torch: str
    dtype: str = ""
    names: list[str] = field(default_factory=list)
    frozen: list[str] = field(default_factory=list)
    classes: dict[str, str] = field(default_factory=dict)
    boxes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    kept: dict[str, tuple[tuple[int, ...], Strides]] = field(default_factory=dict)
    compiled: bool = False
    dropout: bool = False
    models: int = 0


@dataclass
class StepFacts:
    """A rank's record of a step. `norms`: of whole tensors, `kept`: the shape and strides of those of which
    samples are kept, both by key. `passes`: calls of the model. `losses`: all that were differentiated, `stepped`: how
    often an optimizer stepped, `rates`: its learning rates. `clips`: the largest norm and the norm of each clipping,
    `added`: backward passes behind one."""

    passes: int = 0
    losses: list[float] = field(default_factory=list)
    order: list[tuple[str, int]] = field(default_factory=list)
    consumers: dict[str, str] = field(default_factory=dict)
    norms: dict[str, float] = field(default_factory=dict)
    kept: dict[str, tuple[tuple[int, ...], Strides]] = field(default_factory=dict)
    stepped: int = 0
    rates: list[float] = field(default_factory=list)
    clips: list[tuple[float, float]] = field(default_factory=list)
    added: int = 0


def whole_model(module: nn.Module) -> nn.Module:
    """The largest module that holds another: scripts call parts of a model as well."""
    # Searched once a model: torch's modules do not know their parents.
    alive = [x for x in gc.get_objects() if issubclass(type(x), nn.Module)]
    holding = [x for x in alive if any(inner is module for inner in x.modules())]
    return max(holding, key=lambda x: sum(1 for _ in x.modules()), default=module)


class Recorder:
    """Watches this process, while it is entered. `models`: those to record, by default each that is called."""

    def __init__(self, plan: RecordPlan, models: Sequence[nn.Module] = ()) -> None:
        self.plan, self.models = plan, list(models)
        self._inside = {id(inner) for model in models for inner in model.modules()}
        self.number, self._stepped, self._first, self.recorded = 1, False, True, 0
        self._outside: dict[int, nn.Module] = {}
        self._part: nn.Module | None = None
        self._whole = False
        self._trace: Trace | None = None
        self.step, self.tensors = StepFacts(), dict[str, Tensor]()
        self._times: Counter[int] = Counter()
        self._buffers: dict[str, Tensor] = {}
        self._unclipped, self._clips, self._differentiated = set[str](), False, False
        environment = read_environment()
        rank, size = joined_place() or (environment.rank, environment.world_size)
        self.run = RunFacts(rank, size, list(plan.axes) or [("rank", size)], torch.__version__)
        above = plan.folder if plan.seed is None else plan.folder / f"perturbed-{plan.seed}"
        self.folder = above / f"rank-{rank}"
        self._stack = ExitStack()

    def __enter__(self) -> Recorder:
        if (self.folder / "run.json").exists():
            raise ParityError(f"{self.folder} holds a record already: give another folder")
        sizes = torch.Size(size for _, size in self.run.axes).numel()
        if sizes != self.run.world_size:
            raise ParityError(
                f"axes of {sizes} ranks for a run of {self.run.world_size}: give sizes that multiply to it"
            )
        with self._writing("the record"):
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "run.json.part").write_text("{}")
        backward = torch.autograd.backward

        def differentiated(tensors: Any, *arguments: Any, **keywords: Any) -> None:
            if self._trace is not None:
                # Gradients that are added to are clipped anew.
                self.step.added += bool(self._unclipped)
                self._unclipped.clear()
                self._differentiated = True
                self.step.losses += [float(local_of(x)) for x in all_tensors(tensors) if x.numel() == 1]
            backward(tensors, *arguments, **keywords)

        # A compiled module calls no hooks, or is compiled anew with each.
        self._stack.enter_context(torch.compiler.set_stance("force_eager"))
        # Where the loss is made nobody knows but the script; this is the one place that it goes through.
        self._stack.enter_context(patch.object(torch.autograd, "backward", differentiated))
        for handle in (
            register_module_forward_pre_hook(self.before_module),
            register_optimizer_step_pre_hook(self.before_optimizer),
            register_optimizer_step_post_hook(self.after_optimizer),
        ):
            self._stack.callback(handle.remove)
        self._stack.callback(watch(vars(clip_grad).get("_clip_grads_with_norm_"), self.before_clipping))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            # After an error, half a step would look like a wrong step.
            if self._stepped and (kind is None or issubclass(kind, SystemExit)):
                self._end_step()
        finally:
            if self._trace is not None:
                self._trace.__exit__(None, None, None)
            self._stack.close()
        if kind is None and not self.recorded:
            raise ParityError(
                f"rank {self.run.rank} recorded nothing: in this process no model with trained parameters was called "
                f"and stepped by a torch optimizer up to step {min(self.plan.steps)}; start ranks by torchrun, or put "
                "`with parity.recording(FOLDER, model):` where they train"
            )
        if self.recorded and self.run.rank == 0:
            kept, missed = (", ".join(map(str, each)) for each in
                            (self.plan.steps[: self.recorded], self.plan.steps[self.recorded :]))  # fmt: skip
            size = sum(file.stat().st_size for file in self.folder.iterdir()) / 1e6
            lacks = f"; the run ended before step {missed}" if missed else ""
            clips = ", with gradients before clipping" if self._clips else ""
            ranks = f"rank 0 of {self.run.world_size}" if self.run.world_size > 1 else "the one process"
            say(f"recorded steps {kept} of {ranks} in {self.folder}: {size:.1f} MB{clips}{lacks}", file=sys.stderr)

    @contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ParityError(
                f"{what} cannot be written to {self.folder} ({error.strerror}): give a folder on another disk, fewer "
                f"steps, or fewer elements of a tensor than {self.plan.most}"
            ) from error

    def keep(self, key: str, x: Tensor, offsets: Sequence[int] = ()) -> Tensor:
        """The samples of a tensor; the step's facts get its norm, shape and strides."""
        strides = strides_of(x.shape, self.plan.most)
        if max(strides, default=1) > 1:
            self.step.kept[key] = (tuple(x.shape), strides)
            wide = torch.float64 if x.dtype == torch.float64 else torch.float32
            self.step.norms[key] = float(torch.linalg.vector_norm(x, dtype=wide)) if x.is_floating_point() else 0.0
        return sampled(x, strides, offsets)

    def before_module(self, module: nn.Module, arguments: Any) -> None:
        """Before any module's forward pass."""
        if in_backward() or not torch.is_grad_enabled():
            return
        if id(module) in self._outside:
            return
        if id(module) not in self._inside:
            model = whole_model(module)
            if not any(p.requires_grad for p in model.parameters()):
                self._outside[id(module)] = module
                return
            # A wrapper of what was called before: the same model.
            self.models = [m for m in self.models if all(m is not inner for inner in model.modules())] + [model]
            self._inside |= {id(inner) for inner in model.modules()}
        if any(module is model for model in self.models):
            if self._part is not None:
                self._part, self.step.passes = None, 0
            self._whole = True
        elif self._whole or module is not (self._part or module):
            return
        else:
            # A container whose own forward pass nobody calls, as Lightning's modules: its first part is called for it.
            self._part = module
        if self._stepped:
            self._end_step()
            if self.number > max(self.plan.steps):
                if self.plan.stop:
                    raise SystemExit(0)
                # The script frees its models from here on.
                self.models, self._inside, self._outside, self._buffers = [], set(), {}, {}
                return
        if self._first:
            self._begin_run()
        if self.number not in self.plan.steps:
            return
        self.step.passes += 1
        if self._trace is None:
            one = len(self.models) == 1
            # Samples, and the norms of the whole tensors; a file's key has the call before the name.
            self._trace = Trace(
                self.models[0] if one else [("", model) for model in self.models],
                keep=lambda key, x: self.keep(f"{key[0]}|{key[2]}|{key[1]}", x),
            )
            self._trace.__enter__()
            for model in self.models if self._part is None else [module]:
                self._trace.handles.append(model.register_forward_hook(self.after_model, with_kwargs=True))
            # torch made its list of this call's hooks before there was a trace.
            raw = {id(m): raw for model in self.models for raw, m in model.named_modules()}[id(module)]
            self._trace._before(clean_names([raw])[raw])(module, arguments, {})

    def after_model(self, module: nn.Module, arguments: Any, keywords: Any, result: Any) -> None:
        """Keep what a model was given: behind its pass, as only then torch tells keywords of a call under way."""
        if not in_backward():
            for place, x in enumerate(x for x in all_tensors((arguments, keywords)) if x.ndim):
                self.tensors[f"sample:{place}|{self.step.passes - 1}|"] = self.keep(f"sample:{place}", local_of(x))

    def _begin_run(self) -> None:
        """At the first call: dropout off, the first weights, and what one rounding moves of them."""
        self._first, run = False, self.run
        for model in self.models:
            run.dropout |= self._stack.enter_context(without_dropout(model))
            run.compiled |= is_compiled(model)
        parameters = self._parameters()
        run.dtype = str(next(iter(parameters.values())).dtype).removeprefix("torch.")
        run.names, run.models = list(parameters), len(self.models)
        run.frozen = [name for name, p in parameters.items() if not p.requires_grad]
        modules = [(raw, m) for model in self.models for raw, m in model.named_modules()]
        names = clean_names([raw for raw, _ in modules])
        run.classes = {names[raw]: type(m).__name__ for raw, m in modules}
        first = {}
        for name, p in parameters.items():
            if (box := box_of(p)) is not None:
                run.boxes[name] = box[0]
            first[name] = self.keep(name, local_of(p), run.boxes.get(name, ()))
        run.kept, self.step = self.step.kept, StepFacts()
        with self._writing("first weights"):
            write_tensors(self.folder / "first.safetensors", first)
            self._write_json("run.json", asdict(run))
        self._buffers = {name: x.clone() for name, x in self._floating_buffers().items()}
        if self.plan.seed is None:
            return
        for model in self.models:
            hooks = Rounding(model, self.plan.seed)
            for handle in hooks.handles:
                self._stack.callback(handle.remove)
            for parameter in model.parameters():
                write_local(parameter, hooks.rounded(local_of(parameter)))

    def before_clipping(self, arguments: Mapping[str, Any]) -> None:
        """Before torch scales gradients: the gradients, and the norm that they are scaled by."""
        if self._trace is None:
            return
        given = arguments["parameters"]
        clipped = {id(p) for p in ([given] if isinstance(given, Tensor) else given)}
        for name, p in self._parameters().items():
            gradient = gradient_of(p) if id(p) in clipped and name not in self._unclipped else None
            if gradient is not None:
                key = f"gradient|1|{name}"
                self.tensors[key] = self.keep(key, gradient, self.run.boxes.get(name, ()))
                self._unclipped.add(name)
        norm = torch.as_tensor(whole_of(arguments["total_norm"]))
        self.step.clips.append((float(arguments["max_norm"]), float(norm)))

    def before_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Before an optimizer steps: the gradients that it sees."""
        if self._trace is None:
            return
        if not self._times[id(optimizer)]:
            self._keep_gradients(optimizer)
            self.step.rates = sorted({*self.step.rates, *rates_of(optimizer)})
        self._times[id(optimizer)] += 1
        self._differentiated = False

    def _keep_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """The gradients of an optimizer's parameters, which its step sees or has seen."""
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for name, p in self._parameters().items():
            if id(p) in own and (gradient := gradient_of(p)) is not None:
                key = f"{CLIPPED if name in self._unclipped else 'gradient'}|1|{name}"
                self.tensors[key] = self.keep(key, gradient, self.run.boxes.get(name, ()))

    def after_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """After an optimizer has stepped: its states; the trace sees no more calls."""
        self._stepped = True
        if self._trace is not None and self._differentiated and self._times[id(optimizer)] == 1:
            # A closure made the gradients inside of the step, as Lightning's does.
            self._keep_gradients(optimizer)
        for name, p in self._parameters().items() if self._trace is not None else ():
            for kind, x in states_of(optimizer, p):
                key = f"{STATE}{kind}|1|{name}"
                self.tensors[key] = self.keep(key, x, self.run.boxes.get(name, ()))
        # Not as the model is called: torch has then listed the hooks of that call.
        if self._trace is not None:
            self._trace.__exit__(None, None, None)

    def _end_step(self) -> None:
        """The step is over: its weights, and its files."""
        if self._trace is not None:
            trace, self._trace = self._trace, None
            for name, p in self._parameters().items():
                key = f"weight|1|{name}"
                self.tensors[key] = self.keep(key, local_of(p), self.run.boxes.get(name, ()))
            for name, x in self._floating_buffers().items():
                if name not in self._buffers or not torch.equal(x, self._buffers[name]):
                    self.tensors[f"buffer|1|{name}"] = self.keep(f"buffer|1|{name}", x)
            self.tensors |= {f"{kind}|{call}|{name}": x for (kind, name, call), x in trace.tensors.items()}
            self._complete_clipped()
            self.step.order, self.step.consumers = trace.order, trace.consumers
            self.step.stepped = max(self._times.values(), default=0)
            with self._writing(f"step {self.number}"):
                write_tensors(self.folder / f"step-{self.number}.safetensors", self.tensors)
                # Last: a step that has it is whole.
                self._write_json(f"step-{self.number}.json", asdict(self.step))
            self.recorded += 1
        self.step, self.tensors, self._times, self._unclipped = StepFacts(), {}, Counter(), set()
        self.number, self._stepped = self.number + 1, False
        if self.number > max(self.plan.steps):
            # The rest of the script runs as if nobody had watched: compiled, with dropout, without hooks.
            self._stack.close()

    def _complete_clipped(self) -> None:
        """In a step with clipping every gradient has both forms; one that no optimizer saw has none."""
        if not any(key.startswith(f"{CLIPPED}|") for key in self.tensors):
            return
        self._clips = True
        for key in [key for key in self.tensors if key.startswith("gradient|")]:
            name = key.split("|", 2)[2]
            seen = f"{CLIPPED}|1|{name}"
            if seen in self.tensors:
                continue
            if name in self._unclipped:
                del self.tensors[key]
                continue
            self.tensors[seen] = self.tensors[key]
            if key in self.step.kept:
                self.step.kept[seen], self.step.norms[seen] = self.step.kept[key], self.step.norms[key]

    def _write_json(self, name: str, tree: Mapping[str, Any]) -> None:
        unfinished = self.folder / f"{name}.part"
        unfinished.write_text(json.dumps(tree))
        unfinished.replace(self.folder / name)

    def _parameters(self) -> dict[str, Tensor]:
        """The models' parameters by their names without the words of wrappers."""
        named = {raw: p for model in self.models for raw, p in model.named_parameters()}
        names = clean_names(list(named))
        return {names[raw]: p for raw, p in named.items()}

    def _floating_buffers(self) -> dict[str, Tensor]:
        """The models' buffers of real numbers by their names without the words of wrappers."""
        named = {raw: local_of(x) for model in self.models for raw, x in floating_buffers(model).items()}
        names = clean_names(list(named))
        return {names[raw]: x for raw, x in named.items()}


@contextmanager
def recording(
    folder: str | Path,
    *models: nn.Module,
    steps: Collection[int] = (1, 2),
    axes: Mapping[str, int] | None = None,
    most: int = MOST,
    perturb: int | None = None,
) -> Iterator[None]:
    """Record the training inside, for `meshwright parity compare`.

    `models`: what is trained; by default what is called with gradients and has parameters. `steps`: numbers of the
    steps that are kept, from 1. `axes`: names and sizes of the ranks' axes, outermost first. `most`: elements that are
    kept of a tensor. `perturb`: a seed; all is then moved by one rounding, from which a comparison takes what may
    differ. Raises ParityError where the folder cannot be written, or nothing was recorded.
    """
    plan = RecordPlan(Path(folder), tuple(sorted(steps)), most, tuple((axes or {}).items()), perturb)
    with Recorder(plan, models):
        yield
