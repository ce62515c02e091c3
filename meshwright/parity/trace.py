"""Records what every module of a model takes and gives during one step, and the gradients, by forward hooks.

Both models are traced under the same names: the wrappers of DDP, FSDP, torch.compile and checkpointing add words to a
module's path, which are left out. A module that is called several times in a step (microbatches) is kept once a call.
Calls inside of the backward pass are recomputation, and are not kept.
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
"""Words that wrappers put into the paths of what they wrap."""


def clean_names(names: Iterator[str] | list[str], known: frozenset[str] = frozenset()) -> dict[str, str]:
    """Each name as the reference calls it. A leading `module.` (DDP) goes where no name of the reference begins so."""
    wraps = not any(name.split(".")[0] == "module" for name in known)
    cleaned = {}
    for name in names:
        words = [word for word in name.split(".") if word not in WRAPPERS]
        while wraps and words and words[0] == "module":
            words = words[1:]
        cleaned[name] = ".".join(words)
    return cleaned


def path_in(prefix: str, name: str) -> str:
    """The path of something of a module that has the path `prefix` itself."""
    return f"{prefix}.{name}" if prefix and name else prefix or name


def all_tensors(value: Any) -> list[Tensor]:
    """The tensors of arguments or a result, in order: in tuples, lists and mappings alike."""
    if isinstance(value, Tensor):
        return [value]
    # transformers' outputs are mappings, too.
    if isinstance(value, Mapping):
        return [x for inner in value.values() for x in all_tensors(inner)]
    if isinstance(value, (tuple, list)):
        return [x for inner in value for x in all_tensors(inner)]
    return []


def traced_tensor(value: Any) -> Tensor | None:
    """The tensor that stands for a module's input or output: the first of floating point that is no single number."""
    # The first, not the largest: eager attention also returns its weights, [B, heads, T, T], which are larger.
    floats = [x for x in all_tensors(value) if x.is_floating_point()]
    return next((x for x in floats if x.ndim > 1), floats[0] if floats else None)


def in_backward() -> bool:
    """Whether autograd is running: a module that is called now is called by recomputation."""
    # Not `torch.is_grad_enabled()`: reentrant checkpointing makes its only forward calls without autograd.
    return bool(torch._C._current_graph_task_id() != -1)


@dataclass
class Trace:
    """`tensors`: (kind, module, call) -> local tensor, of the kinds input, output and output-gradient.

    `order`: modules and calls as their forward passes end. `consumers`: the first module that takes a module's
    output as it is. `model`: one, or several stages of a rank with the names that they have in the whole; the output
    of a stage that has none is nobody's.
    `handles`: hooks that go with the trace.
    `keep`: what stands for the tensor of a key in `tensors`; by default a copy, as its module may write into it later.
    `earlier`: a copy with earlier weights; what its modules give for the same is kept as the kind earlier-output.
    """

    model: nn.Module | Sequence[tuple[str, nn.Module]]
    known: frozenset[str] = frozenset()
    earlier: nn.Module | None = None
    tensors: dict[tuple[str, str, int], Tensor] = field(default_factory=dict)
    order: list[tuple[str, int]] = field(default_factory=list)
    consumers: dict[str, str] = field(default_factory=dict)
    handles: list[RemovableHandle] = field(default_factory=list)
    keep: Callable[[tuple[str, str, int], Tensor], Tensor] = lambda key, x: x.clone()
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
                    continue  # a wrapper of a module that has the name
                seen.add(name)
                self.handles.append(module.register_forward_pre_hook(self._before(name), with_kwargs=True))
                self.handles.append(module.register_forward_hook(self._after(name), with_kwargs=True))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
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
            # Counted here, as forward passes end, and read by the hook before: the next call has the next number.
            call = self._calls.get(name, 0)
            self._calls[name] = call + 1
            for x in all_tensors(result):
                self._outputs.setdefault(id(x), (name, x))  # held, so that no other tensor gets its id
            given = traced_tensor(result)
            if given is None or isinstance(given, nn.Parameter):  # weights are compared as such
                return
            self.order.append((name, call))
            key = "output", name, call
            self.tensors[key] = self.keep(key, local_of(given))
            self._keep_earlier(name, call, module, arguments, keywords)
            if given.requires_grad and not given.is_leaf:

                def keep_gradient(gradient: Tensor | None) -> None:
                    if gradient is not None:  # autograd may have none for an output that only looks as if it were used
                        key = "output-gradient", name, call
                        self.tensors[key] = self.keep(key, local_of(gradient))

                given.register_hook(keep_gradient)

        return hook

    def _keep_earlier(self, name: str, call: int, module: nn.Module, arguments: Any, keywords: Any) -> None:
        """Keep the output that a module with weights of its own would have with the earlier ones."""
        own = dict(module.named_parameters(recurse=False))
        if self.earlier is None or not own:
            return
        # A copy of the module, as a forward pass may leave something in it (statistics, a loss of experts' balance).
        before = self.earlier.get_submodule(name)
        # In the type that the module computes with now: a reference may cast its weights, as FSDP2's policies do.
        cast = {n: x.to(own[n].dtype) for n, x in before.named_parameters(recurse=False) if n in own}
        with torch.no_grad():
            given = traced_tensor(functional_call(before, cast, arguments, keywords))
        if given is not None:
            self.tensors["earlier-output", name, call] = given.clone()


class Rounding:
    """Perturbs every module's output, and its gradient, by about one rounding: what right programs may differ by.

    Each element is multiplied by 1 + eps or 1 - eps, eps the unit roundoff of its type, by chance.
    """

    def __init__(self, model: nn.Module, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

        def perturb(module: nn.Module, arguments: Any, result: Any) -> Any:
            if in_backward() or not isinstance(result, Tensor) or not result.is_floating_point():
                return None
            # The difference is detached, so that the gradient passes as it is and is rounded once, by its own hook.
            moved = result + (self.rounded(result.detach()) - result.detach())
            if moved.requires_grad:
                moved.register_hook(self.rounded)
            return moved

        self.handles = [module.register_forward_hook(perturb) for module in model.modules()]

    def rounded(self, x: Tensor) -> Tensor:
        """x · (1 ± eps), the sign of each element by chance."""
        # Random signs: roundings all upwards would add up, and the tolerance with them.
        signs = torch.randint(0, 2, x.shape, generator=self._generator).to(x.device) * 2 - 1
        return x * (1 + signs.to(x.dtype) * torch.finfo(x.dtype).eps)
