"""Compares the norm of full gradients with the norm that a training loop uses for clipping, without a reference.

    probe = parity.norm_probe(model, optimizer)     # before the loop, on every rank

At each of the first steps all ranks exchange norms of gradients, before and after clipping. Hooks on torch's clipping
functions read the norms that the loop computed. norm_rules.py compares both.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.optim import Optimizer

from meshwright.parity.norm_rules import NormFinding, judged
from meshwright.parity.norm_sums import Clip, Mark, Part, RankStep
from meshwright.parity.sampling import sampled, strides_of
from meshwright.parity.tensors import bytes_of
from meshwright.parity.trace import clean_names
from meshwright.ranks.dtensor import box_of, from_all_ranks, gradient_of, joined_place, local_of, whole_of
from meshwright.ranks.errors import ParityError
from meshwright.ranks.streams import say

HASHED = 65536
"""The most elements of a tensor that are hashed to recognise copies."""

TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Allowed relative error of a norm, by the coarsest dtype in its computation."""


class Watched:
    """Replacement of a function of torch.nn.utils.clip_grad while probes watch the calls.

    torch wraps the function once, and every imported name calls the wrapper. The wrapper's reference to the function is
    replaced here. Several probes may watch, and end in any order.
    """

    def __init__(self, wrapper: Any) -> None:
        (self.cell,) = wrapper.__closure__
        self.inner: Callable[..., Any] = self.cell.cell_contents
        self.signature = inspect.signature(self.inner)
        self.seen: list[Callable[[dict[str, Any]], None]] = []

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        bound = self.signature.bind(*arguments, **keywords)
        bound.apply_defaults()
        for name in ("parameters", "tensors"):
            if name in bound.arguments and not isinstance(bound.arguments[name], Tensor):
                bound.arguments[name] = list(bound.arguments[name])  # a generator is read once
        for tell in self.seen:
            tell(bound.arguments)
        return self.inner(*bound.args, **bound.kwargs)

    def leave(self, tell: Callable[[dict[str, Any]], None]) -> None:
        self.seen.remove(tell)
        if not self.seen:
            self.cell.cell_contents = self.inner


def watch(wrapper: Any, tell: Callable[[dict[str, Any]], None]) -> Callable[[], None]:
    """Call `tell` with the arguments of each call of a function of clip_grad. Returns a function that ends this."""
    if wrapper is None or len(wrapper.__closure__ or ()) != 1:
        raise ParityError(f"torch {torch.__version__} makes clipping functions in another form than norm_probe watches")
    (cell,) = wrapper.__closure__
    watched = cell.cell_contents
    if not isinstance(watched, Watched):
        watched = cell.cell_contents = Watched(wrapper)
    watched.seen.append(tell)
    return lambda: watched.leave(tell)


def mark_of(gradient: Tensor | None) -> Mark:
    """Return a gradient's sum and the norms of eight pieces, to distinguish copies from other values."""
    if gradient is None:
        return (0.0,)
    x = gradient.coalesce().values() if gradient.is_sparse else gradient
    flat = (torch.view_as_real(x) if x.is_complex() else x).reshape(-1)
    norms = [torch.linalg.vector_norm(piece, dtype=torch.float64) for piece in flat.chunk(8)]
    return tuple(torch.stack([flat.sum(dtype=torch.float64), *norms]).tolist())


def fingerprint_of(parameter: Tensor) -> tuple[str, bool]:
    """Return (shape, offsets and hash of this rank's part as a text, True if the part is constant)."""
    local = local_of(parameter)
    values = sampled(local, strides_of(local.shape, HASHED))
    words = hashlib.sha256(bytes_of(values.cpu())).hexdigest()
    constant = not values.numel() or bool((values == values.reshape(-1)[0]).all())
    return f"{tuple(local.shape)} {box_of(parameter)} {words}", constant


class NormProbe:
    """Probe of the first steps of an optimizer. `findings`: the mistakes, after the steps; `line`: the verdict."""

    def __init__(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], max_norm: float | None, steps: int
    ) -> None:
        self.models, self.optimizers, self.max_norm, self.num_steps = models, optimizers, max_norm, steps
        self.rank, self.world_size = joined_place() or (0, 1)
        self.findings: list[NormFinding] = []
        self.line = ""
        self._judged = False
        self._steps: list[list[RankStep]] = []
        self._fingerprints: dict[str, tuple[str, bool]] = {}
        self._clips: list[Clip] = []
        self._before: dict[str, Mark] = {}
        self._outside: dict[int, tuple[str, Tensor]] = {}
        self._order, self._tolerance = 2.0, 0.0
        self._stack = ExitStack()
        self._stack.callback(optimizers[0].register_step_pre_hook(self.before_step).remove)
        self._stack.callback(watch(vars(clip_grad).get("_get_total_norm"), self.norm_taken))
        self._stack.callback(watch(vars(clip_grad).get("_clip_grads_with_norm_"), self.clipped))

    def check(self) -> None:
        """Raise ParityError if something is wrong, or if nothing could be judged."""
        self._judge()
        if self.findings or not self._judged:
            raise ParityError(self.line)

    def _names(self) -> dict[int, tuple[str, Tensor]]:
        """Return (name, tensor) by id, of the models' parameters and of other clipped tensors."""
        found: dict[int, tuple[str, Tensor]] = {}
        for index, model in enumerate(self.models):
            cleaned = clean_names([raw for raw, _ in model.named_parameters()])
            taken = {name for name, _ in found.values()}
            for raw, parameter in model.named_parameters():
                name = cleaned[raw]
                found[id(parameter)] = (f"{index}.{name}" if name in taken else name, parameter)
        return found | self._outside

    def norm_taken(self, arguments: dict[str, Any]) -> None:
        """Keep the order of a norm, before torch computes it; the clipping function does not receive the order."""
        self._order = float(arguments["norm_type"])

    def clipped(self, arguments: dict[str, Any]) -> None:
        """Keep the gradients' norms and the total norm, before torch scales the gradients."""
        tensors = arguments["parameters"]
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        names, passed = self._names(), dict[str, Tensor]()
        for parameter in tensors:
            if parameter.grad is not None:
                if id(parameter) not in names:
                    outside = (f"(not in the model).{len(self._outside)}", parameter)
                    self._outside[id(parameter)] = names[id(parameter)] = outside
                passed[names[id(parameter)][0]] = parameter
        order, self._order = self._order, 2.0
        trained = {id(p) for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]}
        total = torch.as_tensor(whole_of(arguments["total_norm"]))
        # A generator that was read before is empty, so the norm scales nothing.
        emptied = not tensors and float(total) > 0
        if not emptied and not any(id(parameter) in trained for parameter in passed.values()):
            return  # parameters of another optimizer
        self._tolerance = max(self._tolerance, TOLERANCES.get(total.dtype, 0.0))
        # If gradients are clipped again, the last call counts.
        self._clips = [clip for clip in self._clips if not clip.names & passed.keys()]
        self._clips.append(Clip(frozenset(passed), float(arguments["max_norm"]), float(total), order))
        self._before |= {name: mark_of(gradient_of(parameter)) for name, parameter in passed.items()}

    @torch.no_grad()
    def before_step(self, *_: Any) -> None:
        """Send this rank's parts to all ranks, before the optimizer's step. Collective."""
        trained = {id(p) for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]}
        passed = {name for clip in self._clips for name in clip.names}
        parts: dict[str, Part] = {}
        for key, (name, parameter) in self._names().items():
            # Fingerprints are read at the first step, since copies without a reduction diverge later.
            if name not in self._fingerprints:
                self._fingerprints[name] = fingerprint_of(parameter)
            fingerprint, constant = self._fingerprints[name]
            if key in trained or parameter.grad is not None:
                gradient = gradient_of(parameter)
                after = mark_of(gradient)
                if gradient is not None:
                    self._tolerance = max(self._tolerance, TOLERANCES.get(gradient.dtype, 0.0))
                before = self._before[name] if name in passed else after
                parts[name] = Part(fingerprint, constant, key in trained, before, after)
        local_step = RankStep(parts, tuple(self._clips), self._tolerance)
        self._steps.append([RankStep.from_json(text) for text in from_all_ranks(local_step.as_json())])
        self._clips, self._before, self._order = [], {}, 2.0
        if len(self._steps) == self.num_steps:
            self._judge()
            if self.rank == 0:
                for line in self.line.split("\n"):
                    say(line, file=sys.stderr, flush=True)

    def _judge(self) -> None:
        """End the probe, and judge the recorded steps."""
        self._stack.close()
        if self.line:
            return
        verdict = judged(self._steps, self.max_norm)
        self.findings, self._judged = verdict.findings, verdict.judged
        self.line = "\n".join(f"norm probe: {words}" for words in verdict.sentences)
        self._steps, self._outside = [], {}


def norm_probe(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer],
    max_norm: float | None = None,
    steps: int = 3,
) -> NormProbe:
    """Compare the norm of a loop's clipping with the norm of the full gradients, for some steps.

    Call once in a script on every rank, before the loop and after the optimizer is made. Rank 0 prints the verdict
    after the last step; each rank has `probe.findings`, and `probe.check()` raises an error for mistakes. The bits of
    training do not change. After the last step the probe has no cost.

    Args:
        model: the trained module, or this rank's stages.
        optimizer: all optimizers that step after one backward pass. A step begins with the first optimizer's step,
            which every rank must reach.
        max_norm: for a loop that scales gradients by hand; without it, torch's clipping functions are watched.
        steps: number of steps.
    """
    models = [model] if isinstance(model, nn.Module) else list(model)
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    if not models or not optimizers or steps < 1 or not (max_norm is None or 0 < max_norm < math.inf):
        raise ParityError(
            f"norm_probe got {len(models)} models, {len(optimizers)} optimizers, {steps} steps and max_norm "
            f"{max_norm}: give at least one of each, and a finite max_norm above 0"
        )
    return NormProbe(models, optimizers, max_norm, steps)
