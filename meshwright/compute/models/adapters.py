"""Adapters: scale · x A B next to a frozen linear x W (LoRA), made of the kit's own linears.

So an adapter is cut as the linear is, by every kit. r: the rank.

| linear    | A                            | B                             | sent in addition, 1-D              |
|-----------|------------------------------|-------------------------------|------------------------------------|
| expand    | transform [H, r]             | expand [r, N]: columns cut    | backward: [B, T, r]                |
| contract  | contract [N, r]: rows cut    | transform [r, H]              | forward: [B, T, r]                 |
| transform | transform [I, r]             | transform [r, N]              | -                                  |
| experts   | [n, H, r] and [n, N, r] cut  | [n, r, N] cut, and [n, r, H]  | - (both gradients are summed once) |

DoRA also trains d [N], the changes of the magnitudes of W's columns, which begin as ‖W‖:

    y = (‖W‖ + d) / ‖W + scale · A B‖ · (x W + scale · x A B) + bias

The divisor is a constant in the backward pass, as in peft. peft stores ‖W‖ + d.

A linear of several parts (query, key and value; gate and up) has an adapter for each part, as the separate linears of
transformers have in peft.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from meshwright.compute.model import Chunk
from meshwright.compute.models.adapter_section import Adapter
from meshwright.compute.parameters.fixed import exact_squares, joined_squares
from meshwright.compute.parameters.shard import ZEROS, Initial
from meshwright.compute.tensor.copies import HeadGroups
from meshwright.compute.tensor.dropout import InnerDropout
from meshwright.compute.tensor.kit import ExpertsKit, Kit, LinearPair, LinearRole
from meshwright.compute.tensor.linear import sum_over_rows
from meshwright.compute.tensor.router import ExpertsShape
from meshwright.config.registry import load_entry

Multiply = Callable[[Tensor, Tensor], Tensor]
"""Multiplies A [I, r] by B [r, N]."""
Tokens = tuple[int, int]
"""B and t of activations between pairs of linears."""
Outputs = Sequence[Tensor | None]
"""Addends of y of a linear's parts, in order; None: the part has no adapter."""


class LowRank(nn.Module):
    """scale · dropout(x) A B of a linear, or of a part of one."""

    def __init__(
        self, a: nn.Module, b: nn.Module, dropout: nn.Module, scale: float, d: nn.Module | None = None
    ) -> None:  # fmt: skip
        """`d`: a linear [1, N] with the changes of the magnitudes of W's columns (DoRA); None: LoRA."""
        super().__init__()
        self.a, self.b, self.d, self.dropout, self.scale = a, b, d, dropout, scale

    def forward(self, *inputs: Any) -> Tensor:
        """Return the addend of y.

        Args:
            inputs: x; of experts also the rows of each. Nothing for a layer that returns the weight in place of a
                product (verify's reference): then so does A, and the result is an addend of the weight.
        """
        x, runs = inputs[:1], inputs[1:]
        y: Tensor = self.b(self.a(*map(self.dropout, x), *runs) * self.scale, *runs)
        return y

    def product(self, multiply: Multiply = torch.matmul) -> Tensor:
        """Return this rank's part of scale · A B, [I, ..., N]."""
        a, b = cast(Tensor, self.a.weight), cast(Tensor, self.b.weight)
        return multiply(a, b.flatten(1)).unflatten(-1, b.shape[1:]) * self.scale

    def magnitudes(self, tokens: Tokens | None = None) -> Tensor:
        """Return the changes of this rank's magnitudes, [1, 1, ..., N]; once for each token if there are `tokens`, with
        gradients that are sums by run of tokens."""
        assert self.d is not None, "magnitudes of a LoRA"
        weight = cast(Tensor, self.d.weight)
        y: Tensor = self.d(weight.new_ones(*((1, 1) if tokens is None else tokens), 1))
        return y[:, :1] if tokens is None else y  # a rank that cuts sequences has gathered one of each rank


class Parts(nn.ModuleDict):
    """Adapters of a linear's parts, by the parts' names."""

    def __init__(self, parts: Mapping[str, nn.Module | None], join: Callable[[Outputs], Tensor]) -> None:
        """`join(outputs)`: the outputs of parts in the order of the linear's columns."""
        super().__init__({name: adapter for name, adapter in parts.items() if adapter is not None})
        self.order, self.join = tuple(parts), join

    def forward(self, x: Tensor) -> Tensor:
        return self.join([self[name](x) if name in self else None for name in self.order])

    def product(self, multiply: Multiply = torch.matmul) -> Tensor:
        """Join the parts' products, [I, ..., N]."""
        return self.join([cast(LowRank, self[name]).product(multiply) if name in self else None for name in self.order])

    def magnitudes(self, tokens: Tokens | None = None) -> Tensor:
        """Join the changes of the parts' magnitudes, [1, 1, ..., N] or [B, T, ..., N]; zeros for other parts."""
        return self.join(
            [cast(LowRank, self[name]).magnitudes(tokens) if name in self else None for name in self.order]
        )


class AdaptsExperts(Protocol):
    """A mixture of experts with adapters of `expand` and `contract`."""

    def low_rank(self, name: str, rank: int, first: Initial, last: Initial) -> tuple[nn.Module, nn.Module]:
        """Make A and B of each expert's linear.

        Args:
            name: expand or contract.
            rank: columns of A.
            first: initial values of A.
            last: initial values of B.
        """


def first_of_a(inputs: int) -> Initial:
    """Return peft's initial values of A, torch's of a linear: uniform within 1 / sqrt(inputs)."""
    return Initial(1 / math.sqrt(inputs), uniform=True)


@dataclass(frozen=True)
class Made:
    """The adapter of a linear, not made yet."""

    make: Callable[..., nn.Module]
    """make(parts) returns the adapter, of the chosen parts alone if the linear has several (name: chosen)."""
    several: bool = False
    """Whether the linear's outputs are in groups, or queries, keys and values."""


@dataclass(frozen=True)
class Recorder:
    """A kit that notes how the adapter of each linear is made; all else is the kit's."""

    kit: Kit
    settings: Adapter
    pair: LinearPair
    """The kit, or the kit's branches."""
    made: dict[nn.Module, Made] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kit, name)

    @property
    def branches(self) -> Recorder:
        return replace(self, pair=self.kit.branches)

    def expand(
        self, hidden: int, inner: int, initial: Initial, *, groups: int = 1, bias: bool = True,
        heads: HeadGroups | None = None,
    ) -> nn.Module:  # fmt: skip
        layer = self.pair.expand(hidden, inner, initial, groups=groups, bias=bias, heads=heads)
        make = partial(self._of_expand, hidden, inner, groups, heads)
        self.made[layer] = Made(make, several=groups > 1 or heads is not None)
        return layer

    def contract(self, inner: int, hidden: int, initial: Initial, *, bias: bool = True) -> nn.Module:
        layer, rank = self.pair.contract(inner, hidden, initial, bias=bias), self.settings.rank
        self.made[layer] = Made(
            lambda _: LowRank(
                self.pair.contract(inner, rank, first_of_a(inner), bias=False),
                self._transform(rank, hidden, self._first_of_b),
                InnerDropout(self.kit, self.settings.dropout, self.pair),
                self.settings.scale,
                self._magnitudes(partial(self.kit.linear, "transform"), hidden),
            )
        )
        return layer

    def linear(self, role: LinearRole, inputs: int, outputs: int, initial: Initial, *, bias: bool = True) -> nn.Module:
        layer = self.kit.linear(role, inputs, outputs, initial, bias=bias)
        if role == "transform":
            make = partial(self.kit.linear, "transform")
            self.made[layer] = Made(lambda _: self._low_rank(inputs, make, outputs))
        return layer

    def experts(self, shape: ExpertsShape) -> nn.Module:
        experts, rank = cast(ExpertsKit, self.kit).experts(shape), self.settings.rank
        for name, inputs in (("expand", shape.hidden), ("contract", shape.inner)):
            low_rank = partial(cast(AdaptsExperts, experts).low_rank, name, rank, first_of_a(inputs), self._first_of_b)
            self.made[experts.get_submodule(name)] = Made(
                lambda _, both=low_rank: LowRank(
                    *cast(tuple[nn.Module, nn.Module], both()), dropout=nn.Identity(), scale=self.settings.scale
                )
            )
        return experts

    def _of_expand(
        self, hidden: int, inner: int, groups: int, heads: HeadGroups | None, parts: Mapping[str, bool]
    ) -> nn.Module:
        """Make the adapter of the first linear of a pair; arguments as in `expand`. `parts`: as in Made."""
        expand = self.pair.expand
        if not parts:
            return self._low_rank(hidden, partial(expand, groups=groups, heads=heads), inner)
        if heads is None:
            made = [self._low_rank(hidden, expand, inner // groups) if on else None for on in parts.values()]
            return Parts(dict(zip(parts, made, strict=True)), by_group)
        # The key, or the value, of each head alone: of heads of half the width, each with both and without a query.
        alone = HeadGroups(heads.count, 0, heads.width // 2)
        sizes = ((heads.queries, None), (1, alone), (1, alone))
        made = [
            self._low_rank(hidden, partial(expand, heads=each), heads.count * members * heads.width) if on else None
            for on, (members, each) in zip(parts.values(), sizes, strict=True)
        ]
        count = max(self.kit.local_heads(heads.count), self.kit.parts)
        queries = self.kit.local_heads(heads.count * heads.queries) // count
        widths = (queries * heads.width, heads.width, heads.width)
        return Parts(dict(zip(parts, made, strict=True)), partial(by_head, count, widths))

    @property
    def _first_of_b(self) -> Initial:
        """The initial values of B."""
        return ZEROS if self.settings.begin == "zero" else first_of_a(self.settings.rank)

    def _transform(self, inputs: int, outputs: int, initial: Initial) -> nn.Module:
        return self.kit.linear("transform", inputs, outputs, initial, bias=False)

    def _low_rank(self, inputs: int, make: Callable[..., nn.Module], outputs: int) -> LowRank:
        """Make A outside of pairs, and B by make(inputs, outputs, initial, bias=...)."""
        settings = self.settings
        a = self._transform(inputs, settings.rank, first_of_a(inputs))
        b = make(settings.rank, outputs, self._first_of_b, bias=False)
        return LowRank(a, b, nn.Dropout(settings.dropout), settings.scale, self._magnitudes(make, outputs))

    def _magnitudes(self, make: Callable[..., nn.Module], outputs: int) -> nn.Module | None:
        """Make the changes of magnitudes by make(1, outputs, initial, bias=...); None for LoRA."""
        return make(1, outputs, ZEROS, bias=False) if self.settings.dora else None


def by_group(outputs: Outputs) -> Tensor:
    """Join the outputs [B, T, N/G] of groups to [B, T, G, N/G]."""
    like = next(y for y in outputs if y is not None)
    return torch.stack([torch.zeros_like(like) if y is None else y for y in outputs], -2)


def by_head(count: int, widths: Sequence[int], outputs: Outputs) -> Tensor:
    """Join queries, keys and values of `count` heads, of these widths in a head, to [B, T, count · the widths' sum]."""
    like = next(y for y in outputs if y is not None)
    zeros = (like.new_zeros(*like.shape[:-1], count * width) for width in widths)
    each = (zero if y is None else y for y, zero in zip(outputs, zeros, strict=True))
    return torch.cat([y.unflatten(-1, (count, -1)) for y in each], -1).flatten(-2)


def adapt(chain: nn.Module, recorder: Recorder, parts: Mapping[str, tuple[str, ...]]) -> None:
    """Add adapters to the linears of layers that the patterns name.

    Args:
        chain: the model, built of the recorder's linears.
        recorder: the kit, with the settings.
        parts: names of the parts of linears that have several, by the linear's last name.
    """
    for path, names, made in _linears(chain, recorder, parts):
        on = {name: recorder.settings.is_on(path, f"{path}.{name}") for name in names}
        if any(on.values()) or (not names and recorder.settings.is_on(path)):
            layer = chain.get_submodule(path)
            layer.add_module("adapter", made.make(on))
            arithmetic = recorder.kit.inner  # None: the reference of `verify`
            free = arithmetic is not None and arithmetic.free_of_layout
            scale = partial(add_and_scale, free_of_layout=free)
            layer.register_forward_hook(scale if recorder.settings.dora else add_output)


def add_output(layer: nn.Module, inputs: tuple[Any, ...], y: Tensor) -> Tensor:
    """Add an adapter's output to a linear's."""
    addend: Tensor = layer.get_submodule("adapter")(*inputs)
    return y + addend


def add_and_scale(
    layer: nn.Module, inputs: tuple[Any, ...], y: Tensor, *, free_of_layout: bool = False
) -> Tensor:  # fmt: skip
    """Add an adapter's output to a linear's, and scale columns to their magnitudes (DoRA). `free_of_layout`: with equal
    bits on any ranks."""
    adapter, weight = cast(LowRank | Parts, layer.get_submodule("adapter")), cast(Tensor, layer.weight)
    # Ranks that cut sequences have fewer tokens of the input of a pair, and of its output, than inside of the pair.
    tokens = (len(y), min(inputs[0].shape[1], y.shape[1])) if free_of_layout else None
    scales = magnitude_scales(adapter, weight, partial(sum_over_rows, layer), tokens).to(y.dtype)
    bias = cast(Tensor | None, layer.bias)
    if bias is None:
        return (y + adapter(*inputs)) * scales
    return (y - bias.to(y.dtype) + adapter(*inputs)) * scales + bias.to(y.dtype)


def one_by_one(a: Tensor, b: Tensor) -> Tensor:
    """Multiply A [I, r] by B [r, N] in float64, adding r products in order: equal bits for any part of the rows and
    columns."""
    total = torch.zeros(len(a), b.shape[1], dtype=torch.float64, device=a.device)
    for column, row in zip(a.double().unbind(1), b.double(), strict=True):
        total += column.unsqueeze(1) * row  # exact, if both have 26 digits
    return total


def magnitude_scales(
    adapter: LowRank | Parts, weight: Tensor, total: Callable[[Tensor], Tensor] = torch.clone,
    tokens: Tokens | None = None,
) -> Tensor:  # fmt: skip
    """Return the factors [1, 1, ..., N] of DoRA: (‖W‖ + d) / ‖W + scale · A B‖ by columns, with d alone in the graph.

    With `tokens` the factors are [B, T, ..., N], and have equal bits on any ranks: squares are added by digits, in any
    order (parameters/fixed.py).

    Args:
        adapter: of the linear.
        weight: [I, ..., N].
        total: total(x) sums x over the ranks that have other rows of W.
        tokens: of the linear, or None.
    """
    if tokens is not None:
        with torch.no_grad():
            dtype = torch.promote_types(weight.dtype, torch.float32)
            turned = (weight.double() + adapter.product(one_by_one)).to(dtype)
            digits = total(torch.stack([exact_squares(w.to(dtype), 1.0, rows=True) for w in (weight, turned)], 1))
            first, now = joined_squares(digits, 1.0).sqrt().to(dtype)
        return (first + adapter.magnitudes(tokens).to(dtype)) / now
    with torch.no_grad():
        wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
        turned = wide + adapter.product().to(wide.dtype)
        first, now = total(torch.stack([wide.square().sum(0), turned.square().sum(0)])).sqrt()
    return (first + adapter.magnitudes().to(wide.dtype)) / now


def _linears(
    chain: nn.Module, recorder: Recorder, parts: Mapping[str, tuple[str, ...]]
) -> Iterator[tuple[str, tuple[str, ...], Made]]:
    """Yield the name of each linear of a layer, the names of the linear's parts if there are several, and the adapter
    to make."""
    for path, module in list(chain.named_modules()):
        if path.startswith("blocks.") and (made := recorder.made.get(module)) is not None:
            yield path, parts.get(path.rpartition(".")[2], ()) if made.several else (), made


def adapted_chain(
    make: Callable[..., nn.Module], model: Any, kit: Kit, chunk: Chunk | None = None
) -> nn.Module:  # fmt: skip
    """Build the chain of a model's section with adapters, by make(model, kit, chunk). Parameters have no values yet."""
    recorder = Recorder(kit, model.adapter, kit)
    chain = make(model, recorder, chunk)
    adapt(chain, recorder, model.adapter_parts)
    return chain


def linears_of(model: Any, kit: Kit) -> dict[str, tuple[str, ...]]:
    """Return the names of parts of each linear of the layers of a model's section, by the linear's name."""
    recorder = Recorder(kit, model.adapter, kit)
    chain = load_entry(model.chain)(model, recorder, None)
    return {path: names for path, names, _ in _linears(chain, recorder, model.adapter_parts)}
