"""Records the inputs, outputs and gradients of every module of a model during one step, by forward hooks.

Both models are traced under equal names: the wrappers of DDP, FSDP, torch.compile and checkpointing add words to a
module's path, which are removed. A module that is called several times in a step (microbatches) is recorded per call.
Calls inside of the backward pass are recomputation, and are not recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.hooks import RemovableHandle

from meshwright.ranks.dtensor import local_of

WRAPPERS = ("_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module", "_forward_module")
"""Words that wrappers add to the paths of wrapped modules."""


def clean_names(names: Iterator[str] | list[str], known: frozenset[str] = frozenset()) -> dict[str, str]:
    """Return the reference's name for each name. A leading `module.` (DDP) is removed unless a known name has it."""
    wraps = not any(name.split(".")[0] == "module" for name in known)
    cleaned = {}
    for name in names:
        words = [word for word in name.split(".") if word not in WRAPPERS]
        while wraps and words and words[0] == "module":
            words = words[1:]
        cleaned[name] = ".".join(words)
    return cleaned


def path_in(prefix: str, name: str) -> str:
    """Join the path of a module and a name inside of the module."""
    return f"{prefix}.{name}" if prefix and name else prefix or name


def all_tensors(value: Any) -> list[Tensor]:
    """Return the tensors of arguments or a result in order, also inside of tuples, lists and mappings."""
    if isinstance(value, Tensor):
        return [value]
    # transformers' outputs are mappings.
    if isinstance(value, Mapping):
        return [x for inner in value.values() for x in all_tensors(inner)]
    if isinstance(value, (tuple, list)):
        return [x for inner in value for x in all_tensors(inner)]
    return []


def traced_tensor(value: Any) -> Tensor | None:
    """Return the tensor to record for an input or output: the first floating tensor with two dims or more."""
    # The first, not the largest: eager attention also returns attention weights [B, heads, T, T], which are larger.
    floats = [x for x in all_tensors(value) if x.is_floating_point()]
    return next((x for x in floats if x.ndim > 1), floats[0] if floats else None)


def in_backward() -> bool:
    """Return True during a backward pass; a call of a module is then recomputation."""
    # Not `torch.is_grad_enabled()`: reentrant checkpointing makes the only forward calls without autograd.
    return bool(torch._C._current_graph_task_id() != -1)


@dataclass
class Trace:
    """Context that records the tensors of a model's modules."""

    model: nn.Module | Sequence[tuple[str, nn.Module]]
    """A model; or (path in the whole model, module) of each stage of a rank. Stages with an empty path have no record
    of the stage itself, only of the modules inside."""
    known: frozenset[str] = frozenset()
    """Paths of the reference's modules."""
    earlier: nn.Module | None = None
    """A copy with earlier weights. The outputs of its modules for equal inputs are recorded as earlier-output."""
    tensors: dict[tuple[str, str, int], Tensor] = field(default_factory=dict)
    """(kind, module, call) -> local tensor, of the quantities input, output and output-gradient."""
    order: list[tuple[str, int]] = field(default_factory=list)
    """(module, call) in the order of ending forward passes."""
    consumers: dict[str, str] = field(default_factory=dict)
    """By module, the first module that reads the output unchanged."""
    handles: list[RemovableHandle] = field(default_factory=list)
    """Hooks that end with the trace."""
    keep: Callable[[tuple[str, str, int], Tensor], Tensor] = lambda key, x: x.clone()
    """keep(key, x): the tensor to record; by default a copy, since a module may write into x later."""
    _calls: dict[str, int] = field(default_factory=dict)
    _outputs: dict[int, tuple[str, Tensor]] = field(default_factory=dict)

    def __enter__(self) -> Self:
        models = [("", self.model)] if isinstance(self.model, nn.Module) else list(self.model)
        seen: set[str] = set() if len(models) == 1 else {""}
        for prefix, model in models:
            modules = {path_in(prefix, raw): module for raw, module in model.named_modules()}
            names = clean_names(list(modules), self.known)
            for raw, module in modules.items():
                name = names[raw]
                if name in seen:
                    continue  # the inner module of a wrapper with the same name
                seen.add(name)
                self.handles.append(module.register_forward_pre_hook(self._before(name), with_kwargs=True))
                self.handles.append(module.register_forward_hook(self._after(name), with_kwargs=True))
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self.handles:
            handle.remove()
        self._outputs.clear()

    def _before(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: Any, keywords: Any) -> None:
            if in_backward():
                return
            for x in all_tensors((arguments, keywords)):
                producer = self._outputs.get(id(x))
                if producer is not None and not name.startswith(f"{producer[0]}."):
                    self.consumers.setdefault(producer[0], name)
            taken = traced_tensor((arguments, keywords))
            if taken is not None:
                key = "input", name, self._calls.get(name, 0)
                self.tensors[key] = self.keep(key, local_of(taken))

        return hook

    def _after(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: Any, keywords: Any, result: Any) -> None:
            if in_backward():
                return
            # Counted at the end of a forward pass; the hook before a call reads the number.
            call = self._calls.get(name, 0)
            self._calls[name] = call + 1
            for x in all_tensors(result):
                self._outputs.setdefault(id(x), (name, x))  # kept alive, so that no other tensor gets the same id
            given = traced_tensor(result)
            if given is None or isinstance(given, nn.Parameter):  # parameters are compared elsewhere
                return
            self.order.append((name, call))
            key = "output", name, call
            self.tensors[key] = self.keep(key, local_of(given))
            self._keep_earlier(name, call, module, arguments, keywords)
            if given.requires_grad and not given.is_leaf:

                def keep_gradient(gradient: Tensor | None) -> None:
                    if gradient is not None:  # None for an output without effect on the loss
                        key = "output-gradient", name, call
                        self.tensors[key] = self.keep(key, local_of(gradient))

                given.register_hook(keep_gradient)

        return hook

    def _keep_earlier(self, name: str, call: int, module: nn.Module, arguments: Any, keywords: Any) -> None:
        """Record the output that a module with parameters would have with the earlier weights."""
        parameters = dict(module.named_parameters(recurse=False))
        if self.earlier is None or not parameters:
            return
        # A copy of the module, since a forward pass may change state (statistics, a loss of experts' balance).
        before = self.earlier.get_submodule(name)
        # In the module's current dtype: a reference may cast weights, as FSDP2's policies do.
        cast = {n: x.to(parameters[n].dtype) for n, x in before.named_parameters(recurse=False) if n in parameters}
        with torch.no_grad():
            given = traced_tensor(functional_call(before, cast, arguments, keywords))
        if given is not None:
            self.tensors["earlier-output", name, call] = given.clone()


class Rounding:
    """Perturbs every module's output and output gradient by about one rounding, to measure the effect of rounding.

    Each element is multiplied by 1 + eps or 1 - eps at random, eps the machine epsilon of the type.
    """

    def __init__(self, model: nn.Module, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

        def perturb(module: nn.Module, arguments: Any, result: Any) -> Any:
            if in_backward() or not isinstance(result, Tensor) or not result.is_floating_point():
                return None
            # The difference is detached, so that the gradient passes unchanged and is perturbed once, by the hook.
            moved = result + (self.rounded(result.detach()) - result.detach())
            if moved.requires_grad:
                moved.register_hook(self.rounded)
            return moved

        self.handles = [module.register_forward_hook(perturb) for module in model.modules()]

    def rounded(self, x: Tensor) -> Tensor:
        """Return x · (1 ± eps), with a random sign for each element."""
        # Random signs, since perturbations of one sign would add up to a large tolerance.
        signs = torch.randint(0, 2, x.shape, generator=self._generator).to(x.device) * 2 - 1
        return x * (1 + signs.to(x.dtype) * torch.finfo(x.dtype).eps)
