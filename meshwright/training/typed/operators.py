"""Typing rules of torch's operators: the shardings of results from the shardings of inputs.

| operators                   | partial inputs                            | a cut dim that is                  |
|-----------------------------|-------------------------------------------|------------------------------------|
| sums, differences           | stay partial; with a whole one: refused   | kept                               |
| products by elements        | one may be partial, two: refused          | kept                               |
| other functions of elements | refused: f(a + b) is not f(a) + f(b)      | kept                               |
| products of matrices, sums  | one may be partial, two: refused          | summed over: the result is partial |
| maxima, softmax, norms      | refused                                   | reduced over: the result varies    |
| a function's backward pass  | the incoming gradient may be partial      | as forward                         |
| look-ups with whole indices | stay partial                              | looked up in: the result is partial|
| unlisted operators          | the result varies                         | the result varies                  |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from meshwright.strategies.memory.recompute import tensors_in
from meshwright.training.typed.sharding import (
    NONE,
    Axes,
    Dim,
    Sharding,
    aligned,
    axes_of,
    broadcast,
    joined,
    length,
    reshaped,
    uncut,
)


class WrongSum(Exception):
    """A missing or repeated sum over `axis`: the symptom (`shown`) and the remedy.

    `names`: the parameters of the summed gradients. `module_path`, `since`: the modules of the symptom and of the
    operator that made the sum partial.
    """

    def __init__(self, axis: str, shown: str, remedy: str, names: Sequence[str] = ()) -> None:
        super().__init__(f"{shown} ({axis})")
        self.axis, self.shown, self.remedy, self.names = axis, shown, remedy, names
        self.module_path = self.since = ""


SUM_FIRST = "sum it over the axis first (all_reduce, or reduce_scatter where a part is enough)"


@dataclass
class Call:
    """An operator's call: arguments by name in torch's schema, results, and a look-up of tensors' shardings.

    `inputs`: the tensors among the arguments; `shardings`: the inputs' shardings; `shape`: of the first result.
    """

    name: str
    given: dict[str, Any]
    results: Sequence[Tensor]
    sharding_of: Callable[[Tensor], Sharding]
    elementwise: bool = False

    def __post_init__(self) -> None:
        self.shape = self.results[0].shape
        self.inputs = list(tensors_in(value for name, value in self.given.items() if name != "out"))
        self.shardings = [self.sharding_of(x) for x in self.inputs]

    def sharding(self, name: str) -> Sharding:
        return self.sharding_of(self.given[name])

    def integer(self, name: str, default: int = 0) -> int:
        return int(self.given.get(name, default))

    def refuse_partial(self, shardings: Iterable[Sharding]) -> None:
        """Raise WrongSum if an input of this non-linear operator is partial; integers and masks are exempt."""
        if self.results[0].is_floating_point():
            refuse_partial(shardings, self.name)


Rule = Callable[[Call], Sharding | list[Sharding]]


def shardings_of_results(call: Call) -> list[Sharding]:
    """Return the sharding of every result. Raises WrongSum."""
    if rule := RULES.get(call.name) or (function if call.elementwise else None):
        made = rule(call)
        return made if isinstance(made, list) else [made] * len(call.results)
    if all(sharding.constant for sharding in call.shardings):
        return of_numbers(call)
    return [_loose(call.shardings, x.shape) for x in call.results]


def of_numbers(call: Call) -> list[Sharding]:
    return [Sharding(uncut(x.shape), constant=True) for x in call.results]


def _loose(shardings: Sequence[Sharding], shape: Sequence[int]) -> Sharding:
    """Return the sharding of a result without a known rule: axes with cut or partial inputs become `varying`."""
    return joined(shardings, uncut(shape), NONE.union(*(sharding.cut | sharding.partial for sharding in shardings)))


def add(shardings: Sequence[Sharding], shape: Sequence[int]) -> Sharding:
    partial = NONE.union(*(sharding.partial for sharding in shardings))
    loose = NONE.union(*(sharding.varying | sharding.unknown for sharding in shardings))
    for axis in sorted(partial - loose):
        for sharding in shardings:
            if not sharding.constant and axis not in sharding.partial:
                word = sharding.word(axis)
                else_ = "a later sum counts the whole one once a rank" if word == "whole" else "parts meet addends"
                raise WrongSum(axis, f"a partial sum is added to what is {word}", f"{SUM_FIRST}; else {else_}")
    dims, lost = broadcast(shardings, shape)
    return joined(shardings, dims, lost, partial)


def multiply(shardings: Sequence[Sharding], shape: Sequence[int]) -> Sharding:
    """Type a product, which is linear in each factor."""
    partial: Axes = NONE
    loose = NONE.union(*(sharding.varying | sharding.unknown for sharding in shardings))
    for sharding in shardings:
        for axis in sorted(partial & sharding.partial - loose):
            raise WrongSum(axis, "two partial sums are multiplied", SUM_FIRST)
        partial |= sharding.partial
    dims, lost = broadcast(shardings, shape)
    cut = NONE.union(*(sharding.cut for sharding in shardings))
    return joined(shardings, dims, lost | (partial & cut), partial)


def refuse_partial(shardings: Iterable[Sharding], name: str) -> None:
    shardings = list(shardings)
    loose = NONE.union(*(sharding.varying | sharding.unknown for sharding in shardings))
    for axis in sorted(NONE.union(*(sharding.partial for sharding in shardings)) - loose):
        raise WrongSum(axis, f"{name.strip('_')}, which is not linear, is taken of a partial sum", SUM_FIRST)


def function(call: Call) -> Sharding:
    """Type a non-linear function of elements."""
    shardings = call.shardings
    call.refuse_partial(shardings)
    dims, lost = broadcast(shardings, call.shape)
    return joined(shardings, dims, lost.union(*(sharding.partial for sharding in shardings)))


def sums(call: Call) -> Sharding:
    if len(call.inputs) == 1 and call.given.get("other"):
        for axis in sorted(call.shardings[0].partial):
            raise WrongSum(axis, "a number is added to a partial sum, once on every rank", SUM_FIRST)
    return add(call.shardings, call.shape)


def filled(call: Call) -> Sharding:
    sharding, mask = call.shardings[:2]
    value = call.given["value"]
    if not isinstance(value, Tensor) and value != 0:
        refuse_partial([sharding], "a mask's value")
    return multiply([sharding, mask], call.shape)


def copied(call: Call) -> Sharding:
    """Type a copy: the last input, or a number (fill), is written over the first input."""
    if len(call.inputs) == 1:
        return Sharding(uncut(call.shape), constant=True)
    source = call.sharding_of(call.inputs[-1])
    dims, lost = broadcast([source], call.shape)
    return joined([source], dims, lost, source.partial)


def linear_in_first(call: Call) -> Sharding:
    """Type a division, or a backward pass of a function of elements or of a softmax along `dim`: both are linear in
    the first input."""
    first, *others = call.shardings
    refuse_partial(others, "division" if call.name == "div" else call.name)
    made = multiply([first, *others], call.shape)
    if "softmax" not in call.name:
        return made
    return made.loosened(axes_of(others[0].dims[call.integer("dim", -1) % len(others[0].dims)]))


def product(a: Sharding, b: Sharding, summed: Sequence[Dim], dims: Sequence[Dim]) -> Sharding:
    """Type a sum of products over the dims `summed`; `dims`: the result's."""
    over = axes_of(*summed)
    loose = a.varying | b.varying | a.unknown | b.unknown
    for axis in sorted(a.partial & b.partial - loose):
        raise WrongSum(axis, "two partial sums are multiplied", SUM_FIRST)
    partial = a.partial | b.partial
    lost, seen = partial & over, NONE
    for dim in dims:
        lost |= axes_of(dim) & (seen | partial | over)
        seen |= axes_of(dim)
    return joined([a, b], tuple(dims), lost, partial | over)


def matrices(call: Call) -> Sharding:
    """Type a @ b; for addmm, addmv and baddbmm: beta * self + a @ b."""
    *addend, a, b = call.shardings
    if len(a.dims) == 2:
        made = product(a, b, [a.dims[1], b.dims[0]], [a.dims[0], *b.dims[1:]])
    elif batch := aligned(a.dims[0], b.dims[0]):
        made = product(a, b, [a.dims[2], b.dims[1]], [batch, a.dims[1], b.dims[2]])
    else:
        made = _loose([a, b], call.shape)
    return add([*addend, made], call.shape) if addend and call.given.get("beta", 1) != 0 else made


def without(sharding: Sharding, reduced: Sequence[int], shape: Sequence[int], partial: Axes, lost: Axes) -> Sharding:
    """Return the sharding without the `reduced` dims; with keepdim (dims as in `shape`) they stay with length 1."""
    dims = [dim for position, dim in enumerate(sharding.dims) if position not in reduced]
    if len(shape) == len(sharding.dims):
        dims = [((1, NONE),) if at in reduced else dim for at, dim in enumerate(sharding.dims)]
    return joined([sharding], tuple(dims), lost, sharding.partial | partial)


def reduced(call: Call) -> list[Sharding]:
    """Type a reduction: linear (a sum, a mean) or non-linear (a maximum, a norm, a variance)."""
    sharding, dim, linear = call.shardings[0], call.given.get("dim"), call.name in ("sum", "mean")
    if not linear:
        call.refuse_partial([sharding])
    every = range(len(sharding.dims))
    dims = list(dim) if isinstance(dim, list | tuple) else [] if dim is None else [dim]
    gone = [every[at] for at in dims] or list(every)  # without a dim all of them
    over = axes_of(*(sharding.dims[at] for at in gone))
    partial, lost = (over, sharding.partial & over) if linear else (NONE, over | sharding.partial)
    return [without(sharding, gone, x.shape, partial, lost) for x in call.results]


def along(call: Call) -> list[Sharding]:
    """Type a function of rows along `dim`: softmax, sorting."""
    sharding = call.shardings[0]
    call.refuse_partial([sharding])
    at = call.integer("dim", -1) % len(sharding.dims)
    loose = sharding.loosened(axes_of(sharding.dims[at]) | sharding.partial)
    # topk shortens the row.
    return [_resized(loose, at, x.shape[at]) for x in call.results]


def _resized(sharding: Sharding, at: int, size: int) -> Sharding:
    """Return the sharding with another length of the dim `at`; the dim's factors become one."""
    dims = [*sharding.dims]
    dims[at] = ((size, axes_of(dims[at])),)
    return replace(sharding, dims=tuple(dims))


def transposed(call: Call) -> Sharding:
    sharding = call.shardings[0]
    order = list(range(len(sharding.dims)))
    if call.name == "permute":
        order = [at % len(order) for at in call.given["dims"]]
    elif len(order) > 1:
        first, second = (call.integer("dim0", 0) % len(order), call.integer("dim1", 1) % len(order))
        order[first], order[second] = order[second], order[first]
    return replace(sharding, dims=tuple(sharding.dims[at] for at in order))


def expanded(call: Call) -> Sharding:
    sharding, shape = call.shardings[0], call.shape
    dims: list[Dim] = [((size, NONE),) for size in shape[: len(shape) - len(sharding.dims)]]
    before = call.inputs[0].shape
    for dim, old, new in zip(sharding.dims, before, shape[len(dims) :], strict=True):
        dims.append(dim if old == new else ((old, axes_of(dim)), (new, NONE)) if axes_of(dim) else ((new, NONE),))
    return replace(sharding, dims=tuple(dims))


def inserted(call: Call) -> Sharding:
    """Type a new dim: unsqueeze, or the gradient of select, which is zero except at the selected index."""
    sharding = call.shardings[0]
    at = call.integer("dim") % len(call.shape)
    return replace(sharding, dims=(*sharding.dims[:at], ((call.shape[at], NONE),), *sharding.dims[at:]))


def selected(call: Call) -> Sharding:
    """Type one index of a dim (select), or each (unbind). If the dim is cut, every rank has another index."""
    sharding = call.shardings[0]
    at = call.integer("dim") % len(sharding.dims)
    loose = sharding.loosened(axes_of(sharding.dims[at]))
    return replace(loose, dims=loose.dims[:at] + loose.dims[at + 1 :])


def resized(call: Call) -> list[Sharding]:
    """Type dims shortened (slice, split) or padded with zeros."""
    made, given = [], call.shardings[0]
    for x in call.results:
        sharding = given
        for at, (old, new) in enumerate(zip(call.inputs[0].shape, x.shape, strict=True)):
            sharding = sharding if old == new else _resized(sharding, at, new)
        made.append(sharding)
    return made


def concatenated(call: Call) -> Sharding:
    """Type a concatenation; an axis with addends in some tensors and whole values in others becomes `varying`."""
    tensors = [x for x in call.inputs if x.dim() == call.inputs[-1].dim()]
    shardings = [call.sharding_of(x) for x in tensors]
    if call.name == "stack":
        at = call.integer("dim") % (len(shardings[0].dims) + 1)
        shardings = [
            replace(sharding, dims=(*sharding.dims[:at], ((1, NONE),), *sharding.dims[at:])) for sharding in shardings
        ]
    else:
        at = call.integer("dim") % len(shardings[0].dims)
    solid = [sharding for sharding in shardings if not sharding.constant] or shardings
    partial = NONE.union(*(sharding.partial for sharding in shardings))
    lost = NONE.union(*(partial - sharding.partial for sharding in solid))
    dims: list[Dim] = []
    for position in range(len(shardings[0].dims)):
        cuts = {axes_of(sharding.dims[position]) for sharding in solid}
        lost |= NONE.union(*cuts) if len(cuts) > 1 else NONE
        dims.append(((call.shape[position], NONE.union(*cuts)),) if position == at else solid[0].dims[position])
    return joined(shardings, tuple(dims), lost, partial)


def looked_up(call: Call) -> Sharding:
    """Type rows of a table, or the table's gradient. If an axis cuts the table, each rank looks up local rows and masks
    the others."""
    ids = call.sharding("indices")
    if call.name == "embedding":
        table = call.sharding("weight")
        return product(table, ids, [table.dims[0]], [*ids.dims, table.dims[1]])
    gradient = call.sharding("grad_output")
    return product(gradient, ids, [*gradient.dims[:-1], *ids.dims], [((call.shape[0], NONE),), gradient.dims[-1]])


def gathered(call: Call) -> Sharding:
    sharding, ids = call.sharding("self"), call.sharding("index")
    at = call.integer("dim") % len(sharding.dims)
    over = axes_of(sharding.dims[at])
    dims, lost = broadcast([ids], call.shape)
    others = axes_of(*sharding.dims[:at], *sharding.dims[at + 1 :])
    return joined(
        [sharding, ids],
        dims,
        lost | (others - ids.cut) | (over & (ids.cut | ids.partial | ids.varying | ids.unknown)),
        sharding.partial | over,
    )


def rows_added(call: Call) -> Sharding:
    """Type self[index] += source along `dim`: source's rows are summed."""
    source, ids = call.sharding("source"), call.sharding("index")
    at = call.integer("dim") % len(source.dims)
    dims = [*source.dims]
    over = axes_of(dims[at]) | ids.cut
    dims[at] = ((call.shape[at], NONE),)
    return add([call.sharding("self"), joined([source, ids], tuple(dims), NONE, source.partial | over)], call.shape)


def put(call: Call) -> Sharding:
    """Type self[indices] = values, or += with `accumulate`."""
    values = call.sharding("values")
    indices = [call.sharding_of(x) for x in tensors_in(call.given["indices"])]
    if not call.given.get("accumulate"):
        return _loose([call.sharding("self"), values, *indices], call.shape)
    over = values.cut.union(*(ids.cut for ids in indices))
    rows = joined([values, *indices], uncut(call.shape), NONE, values.partial | over)
    return add([call.sharding("self"), rows], call.shape)


def scattered(call: Call) -> Sharding:
    """Type values written over indices of each row along `dim`."""
    at = call.integer("dim") % len(call.shape)
    lost = NONE.union(*(axes_of(sharding.dims[at]) | sharding.partial for sharding in call.shardings))
    shardings = [_resized(sharding, at, call.shape[at]) for sharding in call.shardings]
    dims, apart = broadcast(shardings, call.shape)
    return joined(shardings, dims, lost | apart)


def norm_forward(call: Call) -> list[Sharding]:
    """Type a layer or group norm, and the statistics."""
    sharding = call.shardings[0]
    refuse_partial(call.shardings, call.name)
    cut = axes_of(sharding.dims[-1]) if call.name == "native_layer_norm" else axes_of(*sharding.dims[2:])
    dims, lost = broadcast([sharding], call.shape)
    made = joined([sharding], dims, lost | sharding.partial).loosened(cut)
    made = joined([made, *call.shardings[1:]], made.dims)
    shardings = [made]
    for x in call.results[1:]:  # statistics: the dims with another length and the same cuts; a length of 1 has none
        pairs = zip(made.dims, x.shape, strict=False)
        short = (dim if length(dim) == n else ((n, axes_of(dim) if n > 1 else NONE),) for dim, n in pairs)
        shardings.append(replace(made, dims=tuple(short)))
    return shardings


def norm_backward(call: Call) -> list[Sharding]:
    """Type the gradients of a norm's input, weight and bias."""
    gradient, x, *others = call.shardings[:2] + [sharding for sharding in call.shardings[2:] if len(sharding.dims) == 1]
    refuse_partial([x, *others], call.name)
    dx = multiply([gradient, x], call.inputs[1].shape)
    last = len(dx.dims) - 1 if call.name == "native_layer_norm_backward" else 1
    over = axes_of(*dx.dims[:last], *dx.dims[last + 1 :])
    dweight = joined([dx], (dx.dims[last],), dx.partial & over, dx.partial | over)
    dx = joined([dx, *others], dx.dims, NONE, dx.partial)
    return [dx, dweight, dweight][: len(call.results)]


def attended(call: Call) -> list[Sharding]:
    """Type softmax(q kᵀ) v, [B, A, T, E]. Under context parallelism keys and values are gathered before."""
    query, key, value = call.shardings[:3]
    refuse_partial([query, key], "attention's softmax")
    lost = _keys_apart(query, key, value)
    dims = [*query.dims[:3], value.dims[3]]
    made = joined([query, key, value], tuple(dims), lost, value.partial)
    return [made, *(replace(made, dims=made.dims[: x.dim()]) for x in call.results[1:])]


def _keys_apart(query: Sharding, key: Sharding, value: Sharding) -> Axes:
    """Return the axes that cut keys differently from queries, or inside a head."""
    apart = axes_of(query.dims[3], key.dims[3], key.dims[2], value.dims[2])
    for position in (0, 1):
        held = {axes_of(sharding.dims[position]) for sharding in (query, key, value)}
        apart |= NONE.union(*held) if len(held) > 1 else NONE
    return apart


def attended_backward(call: Call) -> list[Sharding]:
    gradient, query, key, value = call.shardings[:4]
    refuse_partial([query, key, value], "attention's softmax")
    lost, over = _keys_apart(query, key, value), axes_of(query.dims[2])
    shardings, partial = [gradient, query, key, value], gradient.partial
    dq = joined(shardings, query.dims, lost, partial)
    # Every query position adds to the gradients of all keys.
    return [dq, *(joined(shardings, sharding.dims, lost, partial | over) for sharding in (key, value))]


def convolved(call: Call) -> Sharding:
    """Type a convolution of [B, C, ...] by [O, C/groups, ...]."""
    x, weight, *bias = call.shardings
    space = axes_of(*x.dims[2:], *weight.dims[2:])
    grouped = call.integer("groups", 1) > 1
    summed_dims = [weight.dims[1], *([] if grouped else [x.dims[1]])]
    out = uncut(call.shape)
    made = product(x, weight, summed_dims, [x.dims[0], weight.dims[0], *out[2:]]).loosened(space)
    if not bias:
        return made
    return add([made, replace(bias[0], dims=(bias[0].dims[0], *(((1, NONE),) for _ in out[2:])))], call.shape)


def convolved_backward(call: Call) -> list[Sharding]:
    gradient, x, weight = call.shardings[:3]
    grouped = call.integer("groups", 1) > 1
    space = axes_of(*x.dims[2:], *weight.dims[2:], *gradient.dims[2:])
    channels = [] if grouped else [gradient.dims[1]]
    dx = product(gradient, weight, channels, x.dims).loosened(space)
    dw = product(gradient, x, [gradient.dims[0]], [gradient.dims[1], *weight.dims[1:]]).loosened(space)
    db = product(gradient, gradient.settled(gradient.partial), [gradient.dims[0]], [gradient.dims[1]]).loosened(space)
    return [sharding for sharding, asked in zip((dx, dw, db), call.given["output_mask"], strict=True) if asked]


def dropped(call: Call) -> list[Sharding]:
    """Type dropout: ranks with equal values draw equal masks, since the step seeds the generators."""
    return [call.shardings[0], Sharding(uncut(call.results[-1].shape), constant=True)][: len(call.results)]


def losses(call: Call) -> list[Sharding]:
    """Type nll_loss of log-probabilities [N, V], or the gradient."""
    sharding, labels = call.sharding("self"), call.sharding("target")
    if call.name == "nll_loss_backward":
        gradient = call.sharding("grad_output")
        return [joined([gradient, sharding, labels], sharding.dims, axes_of(sharding.dims[-1]), gradient.partial)]
    dims, over = ((sharding.dims[0],), NONE) if call.results[0].dim() else ((), axes_of(sharding.dims[0]))
    made = joined([sharding, labels], dims, axes_of(sharding.dims[-1]), sharding.partial | over)
    return [made, replace(made, dims=())]


_ROWS: dict[str, Rule] = {
    """
        zeros ones full empty empty_like zeros_like ones_like full_like new_empty new_zeros new_full new_ones zero
        new_empty_strided empty_strided empty_permuted arange scalar_tensor normal uniform bernoulli rand randn
        rand_like randn_like linspace eye
    """: of_numbers,
    "add sub rsub": sums,
    "neg clone _to_copy positive detach alias lift_fresh": lambda call: call.shardings[0],
    "copy fill": copied,
    "mul": lambda call: multiply(call.shardings, call.shape),
    "div": linear_in_first, "masked_fill": filled,
    "where": lambda call: multiply([call.shardings[0], add(call.shardings[1:], call.shape)], call.shape),
    # self + value * tensor1 * tensor2
    "addcmul": lambda call: add(
        [call.sharding("self"), multiply([call.sharding("tensor1"), call.sharding("tensor2")], call.shape)], call.shape
    ),
    "mm mv bmm addmm addmv baddbmm": matrices,
    """
        sum mean amax amin max min argmax argmin logsumexp var std var_mean linalg_vector_norm norm prod any all
    """: reduced,
    "softmax _softmax _log_softmax log_softmax _safe_softmax sort topk": along,
    "cumsum": lambda call: call.shardings[0].loosened(axes_of(call.shardings[0].dims[call.integer("dim")])),
    "view _unsafe_view squeeze": lambda call: reshaped(call.shardings[0], call.shape),
    "t transpose permute": transposed,
    "expand": expanded,
    "unsqueeze select_backward": inserted,
    "select unbind": selected,
    "slice split split_with_sizes constant_pad_nd slice_backward": resized,
    "cat stack": concatenated,
    "embedding embedding_dense_backward": looked_up, "gather": gathered,
    "scatter": scattered, "index_add": rows_added, "index_put": put,
    "native_layer_norm native_group_norm": norm_forward,
    "native_layer_norm_backward native_group_norm_backward": norm_backward,
    "_scaled_dot_product_flash_attention_for_cpu": attended,
    "_scaled_dot_product_flash_attention_for_cpu_backward": attended_backward,
    "convolution": convolved, "convolution_backward": convolved_backward,
    "native_dropout": dropped, "nll_loss_forward nll_loss_backward": losses,
    """
        threshold_backward gelu_backward silu_backward tanh_backward sigmoid_backward
        _softmax_backward_data _log_softmax_backward_data
    """: linear_in_first,
}  # fmt: skip
RULES = {name: rule for names, rule in _ROWS.items() for name in names.split()}
"""Rules by the operator's name; in-place and `out` variants share the rule."""
