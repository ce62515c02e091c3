"""Record the outputs of a training script's modules while it runs: `meshwright parity record`, or two lines in the
script.

    with parity.recording("out/two", model, steps=(1, 2)):      # around the training loop
        ...

The script need not change: global hooks of torch see every module that is called, every optimizer that steps and every
loss that is differentiated. The model is the module with parameters that is called with gradients. A step ends when the
model is called again after an optimizer has stepped.

A folder holds rank-R/run.json, rank-R/first.safetensors (the weights before the first step) and, for each recorded
step, rank-R/step-N.safetensors and then step-N.json: a step without step-N.json was not finished. A run with one
rounding added (`--perturb`) is in the subfolder perturbed-SEED. If torch's functions clip gradients, `gradient` is
recorded before clipping, and the optimizer's gradients as `clipped`.
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
"""The most elements of a tensor that are recorded."""


@dataclass(frozen=True)
class RecordPlan:
    """The settings of a recording."""

    folder: Path
    steps: tuple[int, ...] = (1, 2)
    """Numbers of the recorded steps, from 1."""
    most: int = MOST
    """The most elements of a tensor that are recorded."""
    axes: tuple[tuple[str, int], ...] = ()
    """Names and sizes of the ranks' axes, outermost first."""
    seed: int | None = None
    """Seed of a run that is perturbed by one rounding; None: an unchanged run."""
    stop: bool = False
    """True: end the script after the last recorded step."""


@dataclass
class RunFacts:
    """A rank's record of the run."""

    rank: int
    world_size: int
    axes: list[tuple[str, int]]
    torch: str
    dtype: str = ""
    names: list[str] = field(default_factory=list)
    frozen: list[str] = field(default_factory=list)
    """Parameters without requires_grad."""
    classes: dict[str, str] = field(default_factory=dict)
    boxes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """By name, the offsets of this rank's part of a DTensor."""
    kept: dict[str, tuple[tuple[int, ...], Strides]] = field(default_factory=dict)
    """By name, the shape and the strides of parameters recorded as samples."""
    compiled: bool = False
    """True if a part of the model was compiled; it was recorded uncompiled."""
    dropout: bool = False
    """True if the model has dropout; it was off."""
    models: int = 0


@dataclass
class StepFacts:
    """A rank's record of a step."""

    passes: int = 0
    """Number of calls of the model."""
    losses: list[float] = field(default_factory=list)
    """All losses that were differentiated."""
    order: list[tuple[str, int]] = field(default_factory=list)
    consumers: dict[str, str] = field(default_factory=dict)
    norms: dict[str, float] = field(default_factory=dict)
    """By key, the norm of the whole tensor, for tensors recorded as samples."""
    kept: dict[str, tuple[tuple[int, ...], Strides]] = field(default_factory=dict)
    """By key, the shape and the strides of tensors recorded as samples."""
    stepped: int = 0
    """Number of steps of an optimizer."""
    rates: list[float] = field(default_factory=list)
    """The optimizers' learning rates."""
    clips: list[tuple[float, float]] = field(default_factory=list)
    """(largest allowed norm, norm) of each clipping."""
    added: int = 0
    """Number of backward passes after a clipping."""


def whole_model(module: nn.Module) -> nn.Module:
    """Return the largest module that contains `module`, since scripts also call parts of a model."""
    # Searched once per model, since torch's modules do not know their parents.
    alive = [x for x in gc.get_objects() if issubclass(type(x), nn.Module)]
    holding = [x for x in alive if any(inner is module for inner in x.modules())]
    return max(holding, key=lambda x: sum(1 for _ in x.modules()), default=module)


class Recorder:
    """Context that records this process. `models`: the models to record; by default each model that is called."""

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
                # Gradients change again, so the next clipping records them again.
                self.step.added += bool(self._unclipped)
                self._unclipped.clear()
                self._differentiated = True
                self.step.losses += [float(local_of(x)) for x in all_tensors(tensors) if x.numel() == 1]
            backward(tensors, *arguments, **keywords)

        # A compiled module calls no hooks, or is compiled again for each hook.
        self._stack.enter_context(torch.compiler.set_stance("force_eager"))
        # Only the script knows the place of the loss, but every loss passes through torch.autograd.backward.
        self._stack.enter_context(patch.object(torch.autograd, "backward", differentiated))
        for handle in (
            register_module_forward_pre_hook(self.before_module),
            register_optimizer_step_pre_hook(self.before_optimizer),
            register_optimizer_step_post_hook(self.after_optimizer),
        ):
            self._stack.callback(handle.remove)
        self._stack.callback(watch(vars(clip_grad).get("_clip_grads_with_norm_"), self.before_clipping))
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        try:
            # After an error, half a step would look like a wrong step.
            if self._stepped and (error_type is None or issubclass(error_type, SystemExit)):
                self._end_step()
        finally:
            if self._trace is not None:
                self._trace.__exit__(None, None, None)
            self._stack.close()
        if error_type is None and not self.recorded:
            raise ParityError(
                f"rank {self.run.rank} recorded nothing: in this process no model with trained parameters was called "
                f"and stepped by a torch optimizer up to step {min(self.plan.steps)}; start ranks by torchrun, or put "
                "`with parity.recording(FOLDER, model):` where they train"
            )
        if self.recorded and self.run.rank == 0:
            recorded, missed = (", ".join(map(str, each)) for each in
                            (self.plan.steps[: self.recorded], self.plan.steps[self.recorded :]))  # fmt: skip
            size = sum(file.stat().st_size for file in self.folder.iterdir()) / 1e6
            lacks = f"; the run ended before step {missed}" if missed else ""
            clips = ", with gradients before clipping" if self._clips else ""
            ranks = f"rank 0 of {self.run.world_size}" if self.run.world_size > 1 else "the one process"
            say(f"recorded steps {recorded} of {ranks} in {self.folder}: {size:.1f} MB{clips}{lacks}", file=sys.stderr)

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
        """Return the samples of a tensor; for a sampled tensor, record norm, shape and strides in the step's facts."""
        strides = strides_of(x.shape, self.plan.most)
        if max(strides, default=1) > 1:
            self.step.kept[key] = (tuple(x.shape), strides)
            wide = torch.float64 if x.dtype == torch.float64 else torch.float32
            self.step.norms[key] = float(torch.linalg.vector_norm(x, dtype=wide)) if x.is_floating_point() else 0.0
        return sampled(x, strides, offsets)

    def before_module(self, module: nn.Module, arguments: Any) -> None:
        """Handle a call of any module, before the forward pass."""
        if in_backward() or not torch.is_grad_enabled():
            return
        if id(module) in self._outside:
            return
        if id(module) not in self._inside:
            model = whole_model(module)
            if not any(p.requires_grad for p in model.parameters()):
                self._outside[id(module)] = module
                return
            # A wrapper of a recorded model replaces this model.
            self.models = [m for m in self.models if all(m is not inner for inner in model.modules())] + [model]
            self._inside |= {id(inner) for inner in model.modules()}
        if any(module is model for model in self.models):
            if self._part is not None:
                self._part, self.step.passes = None, 0
            self._whole = True
        elif self._whole or module is not (self._part or module):
            return
        else:
            # A container without calls of its forward pass, as Lightning's modules: the first part called replaces it.
            self._part = module
        if self._stepped:
            self._end_step()
            if self.number > max(self.plan.steps):
                if self.plan.stop:
                    raise SystemExit(0)
                # Drop references, so that the script can free models from here on.
                self.models, self._inside, self._outside, self._buffers = [], set(), {}, {}
                return
        if self._first:
            self._begin_run()
        if self.number not in self.plan.steps:
            return
        self.step.passes += 1
        if self._trace is None:
            is_single = len(self.models) == 1
            # Keys of the file have the call before the name.
            self._trace = Trace(
                self.models[0] if is_single else [("", model) for model in self.models],
                keep=lambda key, x: self.keep(f"{key[0]}|{key[2]}|{key[1]}", x),
            )
            self._trace.__enter__()
            for model in self.models if self._part is None else [module]:
                self._trace.handles.append(model.register_forward_hook(self.after_model, with_kwargs=True))
            # torch listed the hooks of this call before the trace existed.
            raw = {id(m): raw for model in self.models for raw, m in model.named_modules()}[id(module)]
            self._trace._before(clean_names([raw])[raw])(module, arguments, {})

    def after_model(self, module: nn.Module, arguments: Any, keywords: Any, result: Any) -> None:
        """Record a model's arguments, after the pass: only hooks after a call receive keywords."""
        if not in_backward():
            for index, x in enumerate(x for x in all_tensors((arguments, keywords)) if x.ndim):
                self.tensors[f"sample:{index}|{self.step.passes - 1}|"] = self.keep(f"sample:{index}", local_of(x))

    def _begin_run(self) -> None:
        """Begin at the first call: switch dropout off, record the first weights, and add perturbations if asked."""
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
        """Record gradients and norms, before torch clips the gradients."""
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
        """Record the optimizer's gradients, before the optimizer steps."""
        if self._trace is None:
            return
        if not self._times[id(optimizer)]:
            self._keep_gradients(optimizer)
            self.step.rates = sorted({*self.step.rates, *rates_of(optimizer)})
        self._times[id(optimizer)] += 1
        self._differentiated = False

    def _keep_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the gradients of an optimizer's parameters."""
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for name, p in self._parameters().items():
            if id(p) in stepped and (gradient := gradient_of(p)) is not None:
                key = f"{CLIPPED if name in self._unclipped else 'gradient'}|1|{name}"
                self.tensors[key] = self.keep(key, gradient, self.run.boxes.get(name, ()))

    def after_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Record the optimizer's states, after the optimizer has stepped, and end the trace."""
        self._stepped = True
        if self._trace is not None and self._differentiated and self._times[id(optimizer)] == 1:
            # A closure computed the gradients inside of the step, as in Lightning.
            self._keep_gradients(optimizer)
        for name, p in self._parameters().items() if self._trace is not None else ():
            for state, x in states_of(optimizer, p):
                key = f"{STATE}{state}|1|{name}"
                self.tensors[key] = self.keep(key, x, self.run.boxes.get(name, ()))
        # Not at the next call of the model: torch would already have listed the hooks of that call.
        if self._trace is not None:
            self._trace.__exit__(None, None, None)

    def _end_step(self) -> None:
        """End a step: record weights and buffers, and write the files."""
        if self._trace is not None:
            trace, self._trace = self._trace, None
            for name, p in self._parameters().items():
                key = f"weight|1|{name}"
                self.tensors[key] = self.keep(key, local_of(p), self.run.boxes.get(name, ()))
            for name, x in self._floating_buffers().items():
                if name not in self._buffers or not torch.equal(x, self._buffers[name]):
                    self.tensors[f"buffer|1|{name}"] = self.keep(f"buffer|1|{name}", x)
            self.tensors |= {f"{quantity}|{call}|{name}": x for (quantity, name, call), x in trace.tensors.items()}
            self._complete_clipped()
            self.step.order, self.step.consumers = trace.order, trace.consumers
            self.step.stepped = max(self._times.values(), default=0)
            with self._writing(f"step {self.number}"):
                write_tensors(self.folder / f"step-{self.number}.safetensors", self.tensors)
                # Written last, to mark the step as complete.
                self._write_json(f"step-{self.number}.json", asdict(self.step))
            self.recorded += 1
        self.step, self.tensors, self._times, self._unclipped = StepFacts(), {}, Counter(), set()
        self.number, self._stepped = self.number + 1, False
        if self.number > max(self.plan.steps):
            # The rest of the script runs unobserved: compiled, with dropout, without hooks.
            self._stack.close()

    def _complete_clipped(self) -> None:
        """In a step with clipping, give every gradient both forms; drop gradients without an optimizer."""
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
        """Return the models' parameters by name, without prefixes of wrappers."""
        named = {raw: p for model in self.models for raw, p in model.named_parameters()}
        names = clean_names(list(named))
        return {names[raw]: p for raw, p in named.items()}

    def _floating_buffers(self) -> dict[str, Tensor]:
        """Return the models' floating-point buffers by name, without prefixes of wrappers."""
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
    """Record the training inside of the context, for `meshwright parity compare`.

    Args:
        folder: the folder of the record.
        models: the trained models; by default modules with parameters that are called with gradients.
        steps: numbers of the recorded steps, from 1.
        axes: names and sizes of the ranks' axes, outermost first.
        most: the most elements of a tensor that are recorded.
        perturb: a seed; weights and activations are then changed by one rounding. A comparison derives tolerances
            from such a run.

    Raises:
        ParityError: the folder cannot be written, or nothing was recorded.
    """
    plan = RecordPlan(Path(folder), tuple(sorted(steps)), most, tuple((axes or {}).items()), perturb)
    with Recorder(plan, models):
        yield
