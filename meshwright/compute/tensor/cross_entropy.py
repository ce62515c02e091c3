"""Head and cross entropy as one function without whole logits. The vocabulary may be sharded over ranks.

The gradient of the logits, softmax - target, depends on later operations only by a factor. So the forward pass computes
this gradient chunk by chunk, and keeps only dh [B·T, H] and dW [V, H]. Multiplying the loss later costs one pass over
both. A pipeline's last stage computes dW in the forward task under every schedule, since deferring dW would keep
logits. A chunk is large enough for efficient matmuls. Element-wise work is done in slices that fit a core's cache.

| symbol | local shape | meaning                                                             |
|--------|-------------|---------------------------------------------------------------------|
| h      | [B·T, H]    | hidden states, equal on all ranks of the vocabulary's axis           |
| W, b   | [V/p, H], [V/p] | this rank's classes; rows past the vocabulary's end are padding  |
| logits | [C, V/p]    | of a chunk of C tokens                                              |

Padding is multiplied too, and masked in the softmax: a product with 50,257 columns does not get a GPU's fast kernels,
one with 50,304 does.

Element-wise work is two passes with an exchange between. The first pass leaves each class's share among this rank's
classes (one fused softmax); the greatest share is 1 / the sum of exponentials. The second pass scales shares to
gradients. A rank with all classes exchanges nothing. The compiled loss is then one kernel (islands.py). On a CPU, in
float32 or float64 without smoothing, the loss is one softmax, compiled or not: the logarithm of the label's share. The
factors of rows then scale the [C, H] operands of dh and dW instead of the [C, V] gradients.

Each chunk ends in a collective, so all ranks derive equal chunk lengths from a common number, the V/p rows of the
table. The number of real classes differs by rank. (Agreement on a length would need a collective.)

Sent per chunk: one all-gather of [C, 3] (the greatest logit, the sum of exponentials, the label's logit). Each rank
adds up the parts. The gradient of h is one addend per rank; the caller that gathered h reduces the gradients.
(Vocabulary-parallel cross entropy: Megatron-LM, arXiv 1909.08053, section 3; there with three all-reduces.)

Label smoothing (Szegedy et al., arXiv 1512.00567, section 7) with share e of V real classes: a token's target is
(1 - e) onehot + e / V, and the loss is log-sum-exp minus the product of target and logits. This product replaces the
label's logit in the exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.compute.model import IGNORED
from meshwright.compute.parameters.bucket import VECTOR
from meshwright.compute.parameters.shard import WriteGradient
from meshwright.compute.parameters.writes import ScaledGradient
from meshwright.compute.tensor.islands import Islands
from meshwright.compute.tensor.linear import autocast_device, cast
from meshwright.compute.tensor.products import PLAIN, Products
from meshwright.ranks.agreement import all_rows
from meshwright.ranks.comm import Comm

CHUNK_BYTES = {"cpu": 8 * 2**20, "cuda": 2**30}
"""Bytes of a chunk's logits [C, V] with memory.logits=auto, in the dtype of logits; on a CPU in float32.

Each chunk reads and writes all of dW [V, H]. An H200's step of GPT-2 small, 64 x 1,024 tokens, took 160.5 ms with
128 MiB and 137.9 ms with 512 MiB (benchmarks/one_gpu.py, late). 1 GiB has 3,531 rows of 152,064 classes."""

CHUNK_ROWS = 256
"""The fewest rows of a CPU's chunk: 8 MiB at V = 8192. At V = 49152, 13 chunks of 40 rows took 1.2 times the step of 2
chunks."""

SLICE_BYTES = {"cpu": 2**19, "cuda": 256 * 2**20}
"""Bytes of a slice of element-wise work: a CPU core's cache; on a GPU up to 256 MiB."""


Objective = Callable[[Tensor], Tensor]
"""objective(sums) returns the loss, differentiable, of the summed losses [B] of each row's counted tokens."""

GiveTable = Callable[[Tensor, WriteGradient], Tensor | None]
"""give(like, write): adds the table's gradient and returns the gradient for autograd (ShardedModule.add_gradient)."""


@dataclass(frozen=True)
class Classes:
    """This rank's shard of the classes, and the form of the loss."""

    vocabulary: int
    """Number of real classes on all ranks."""
    comm: Comm
    """The ranks that shard the classes."""
    smoothing: float = 0.0
    """Share of a token's target that is spread evenly over all real classes."""
    device_type: str = "cpu"
    """The device of logits; sets the sizes of chunks and slices."""
    labelled: float = 1.0
    """Share of tokens with labels; one in seven for a masked language model."""
    islands: Islands | None = None
    """The two passes, compiled; None: torch's operations, by slices."""
    whole: bool = False
    """True: one chunk with all rows."""
    chunk_bytes: int | None = None
    """memory.logits; None: CHUNK_BYTES."""
    products: Products = PLAIN
    """The products of hidden states, table and gradients."""
    cap: float | None = None
    """The soft cap of logits; None: no cap."""

    def capped(self, logits: Tensor) -> Tensor | None:
        """Cap logits in place, s = cap · tanh(x / cap), and return ds/dx = 1 - (s / cap)²; None without a cap."""
        if self.cap is None:
            return None
        shares = logits.div_(self.cap).tanh_()
        slopes = 1 - shares.square()
        shares.mul_(self.cap)
        return slopes

    def of_rank(self, table: Tensor) -> tuple[int, int]:
        """Return (the class of the table's first row, the number of real classes in the table)."""
        first = self.comm.index * table.shape[0]
        return first, min(max(self.vocabulary - first, 0), table.shape[0])

    def alike(self, ranges: Iterable[slice], x: Tensor) -> Iterator[slice]:
        """Yield the ranges; for a meta tensor x, one range of each length, counted once for each equal range.

        A planned large vocabulary on a CPU has thousands of ranges.
        """
        if x.device.type != "meta":
            yield from ranges
            return
        kinds: dict[int, list[slice]] = {}
        for rows in ranges:
            kinds.setdefault(rows.stop - rows.start, []).append(rows)
        for same in kinds.values():
            with self.comm.ledger.repeated(len(same)):
                yield same[-1]  # not the first: the first chunk's gradient is written, later gradients are added

    def chunks(self, h: Tensor, table: Tensor, dtype: torch.dtype) -> Iterator[slice]:
        """Yield the chunks of h's rows, by the bytes of logits in `dtype`; equal on all ranks, even without classes."""
        if self.whole:
            return iter([slice(0, h.shape[0])] if h.shape[0] else [])
        on_cpu = self.device_type == "cpu"
        least = CHUNK_ROWS if on_cpu and self.chunk_bytes is None else 1  # however large the vocabulary is
        row_bytes = table.shape[0] * (4 if on_cpu else dtype.itemsize)
        return ranges(0, h.shape[0], row_bytes, self.chunk_bytes or CHUNK_BYTES[self.device_type], least)

    def exchanges(self, chunk: slice, h: Tensor, table: Tensor) -> Iterator[slice]:
        """Yield parts of a chunk for one exchange of statistics; with one rank, parts that fit the cache."""
        if self.comm.size > 1 or self.islands is not None or self.whole:
            return iter([chunk])
        return self.alike(ranges(chunk.start, chunk.stop, 4 * table.shape[0], SLICE_BYTES[self.device_type]), h)

    def at_once(self, logits: Tensor) -> bool:
        """Return True if one pass turns these logits into gradients of unscaled losses (`losses_at_once`).

        A compiled pass would read the logits three times, and take longer.
        """
        plain = self.comm.size == 1 and not self.smoothing
        return plain and self.device_type == "cpu" and logits.dtype == wide_dtype(logits)

    def slices(self, logits: Tensor) -> list[slice]:
        """Return the slices of logits' rows for element-wise work, without communication in between."""
        if self.whole:
            return [slice(0, logits.shape[0])]
        return list(ranges(0, logits.shape[0], 4 * logits.shape[1], SLICE_BYTES[self.device_type]))


class ScoresClasses:
    """A module with logits in chunks."""

    classes: Classes

    def use_chunks(self, size_bytes: int) -> None:
        """Set the most bytes of logits that exist at a time (`memory.logits`)."""
        self.classes = replace(self.classes, chunk_bytes=size_bytes)


def ranges(start: int, stop: int, row_bytes: int, most_bytes: int, least: int = 1) -> Iterator[slice]:
    """Yield start..stop in slices of at most `most_bytes`, but at least `least` rows.

    Slices of at least 128 (or 8) rows are rounded down to a multiple of 128 (or 8), the tile of a product: rows are the
    inner dim of the table's gradient.
    """
    rows = max(least, most_bytes // max(1, row_bytes))
    rows -= rows % next(tile for tile in (128, 8, 1) if tile <= rows)
    for first in range(start, stop, rows):
        yield slice(first, min(first + rows, stop))


def wide_dtype(h: Tensor) -> torch.dtype:
    """Return the dtype of the loss: the dtype of h, but at least float32."""
    return torch.promote_types(h.dtype, torch.float32)


def _logits(h: Tensor, table: Tensor, bias: Tensor | None, classes: Classes) -> Tensor:
    """Return logits [C, V/p] of h [C, H]."""
    logits = classes.products.multiply(h, table.t()).to(wide_dtype(h))
    if bias is not None:
        logits.add_(bias)
    classes.capped(logits)
    return logits


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        classes: Classes,
        scale: float | Tensor,
        give: GiveTable,
        differentiates: bool,
        by_token: bool,
    ) -> Tensor:
        counted = (labels != IGNORED).unsqueeze(1)
        (first, held), products = classes.of_rank(weight), classes.products
        targets = labels.unsqueeze(1) - first
        factors = counted.to(wide_dtype(h)) * scale  # a bool times a number would be float32
        losses = h.new_empty(h.shape[0], 1, dtype=wide_dtype(h))
        # Gradients of several chunks are added in float32 at least: half precision would lose small addends.
        adds = wide_dtype(h) if len([*islice(classes.chunks(h, weight, h.dtype), 2)]) > 1 else h.dtype
        learns = differentiates and ctx.needs_input_grad[1]
        dh = torch.empty_like(h) if differentiates else h
        dweight = torch.empty_like(weight, dtype=adds) if learns else weight[:0]
        if learns and not h.shape[0]:
            dweight.zero_()  # without rows no chunk writes dweight
        dbias = None if bias is None else torch.zeros_like(bias, dtype=adds)
        for chunk in classes.alike(classes.chunks(h, weight, h.dtype), h):
            logits = products.multiply(h[chunk], weight.t(), bias)  # [C, V/p]
            slopes = classes.capped(logits)
            rows_of_h, chunk_factors, at_once = h[chunk], factors[chunk], classes.at_once(logits)
            if at_once:
                losses[chunk] = losses_at_once(logits, rows_of_h, weight, bias, labels[chunk], classes)
            for rows in () if at_once else classes.exchanges(chunk, h, weight):
                inside = slice(rows.start - chunk.start, rows.stop - chunk.start)
                losses[rows] = _to_gradients(logits[inside], targets[rows], factors[rows], classes, held)
            if slopes is not None:
                logits.mul_(slopes)
                del slopes
            if differentiates:
                products.multiply(logits, weight, out=dh[chunk])
                if at_once:
                    dh[chunk] *= chunk_factors
                    rows_of_h = rows_of_h * chunk_factors
                if learns:
                    products.write_product(logits.t(), rows_of_h, dweight, beta=0 if chunk.start == 0 else 1)
                if dbias is not None:
                    dbias += torch.mv(logits.t(), chunk_factors.squeeze(1)) if at_once else logits.sum(0, dtype=adds)
            del logits  # else two chunks' logits would exist at the same time, and none would stay in the cache
        ctx.save_for_backward(dh, dweight, dbias)
        ctx.give = give
        losses = torch.where(counted, losses, 0)
        if by_token:
            return losses.squeeze(1)
        if isinstance(scale, Tensor):
            return (losses * scale).sum(dtype=wide_dtype(h))
        return losses.sum(dtype=wide_dtype(h)) * scale

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        dh, dweight, dbias = ctx.saved_tensors
        given = ctx.give(dweight, ScaledGradient(dweight, factor)) if ctx.needs_input_grad[1] else None
        return dh.mul_(factor), given, None if dbias is None else dbias.mul_(factor), *[None] * 6


def some(rows: Tensor) -> bool:
    """Return True if an element of `rows` is True. False for meta tensors of a plan, which have no values."""
    return not rows.is_meta and bool(rows.any())


def losses_at_once(
    logits: Tensor, h: Tensor, table: Tensor, bias: Tensor | None, labels: Tensor, classes: Classes
) -> Tensor:
    """Return the losses [C, 1] of logits [C, V] of all classes, and overwrite the logits with softmax - target.

    If a label's share underflows, the loss is computed again from the logits of `h`.
    """
    _, held = classes.of_rank(table)
    columns = labels.clamp(min=0).unsqueeze(1)
    logits[:, held:].fill_(-torch.inf)
    shares = torch.softmax(logits, 1, out=logits).gather(1, columns)
    logits.scatter_(1, columns, shares - 1)
    losses = shares.log().neg_()
    lost = (shares < torch.finfo(shares.dtype).tiny).squeeze(1)
    if some(lost):
        again = classes.products.multiply(h[lost], table.t(), bias)[:, :held]
        classes.capped(again)
        losses[lost] = again.logsumexp(1, keepdim=True) - again.gather(1, columns[lost])
    return losses


def _to_gradients(logits: Tensor, targets: Tensor, factors: Tensor, classes: Classes, held: int) -> Tensor:
    """Return the losses [C, 1], and overwrite the logits with gradients, (softmax - target) · factor.

    Half-precision logits have float32 shares, and the label's gradient, a difference of two near numbers, is rounded
    once.

    Args:
        logits: [C, V/p], of this rank's classes.
        targets: [C, 1], the labels as columns of the logits; out of range for labels of other ranks and ignored ones.
        factors: [C, 1], the scale of each counted token's loss.
        classes: the rank's classes.
        held: number of first columns that are real classes.
    """
    wide = wide_dtype(logits)
    equal = classes.smoothing / classes.vocabulary  # each class's smoothed share of a target; the label has the rest
    mine = (targets >= 0) & (targets < held)
    columns = torch.where(mine, targets, 0)
    certain = mine.to(wide).mul_(1 - classes.smoothing)
    islands, shares = classes.islands, logits
    if islands is not None and classes.comm.size == 1:
        return islands.losses(logits, columns, certain, certain.new_full((), equal), factors, held)
    if not held:
        statistics = logits.new_zeros(logits.shape[0], 3, dtype=wide)
        statistics[:, 0] = torch.finfo(wide).min
    elif islands is not None:
        statistics = islands.statistics(logits, columns, certain, certain.new_full((), equal), held)
    else:
        shares, statistics = shares_of(logits, columns, certain, classes, held)
    top, sums, _ = statistics.split(1, 1)
    tops, everyones_sums, everyones_picked = all_rows(statistics, classes.comm).split(1, 2)  # [p, C, 1] each
    highest = tops.amax(0)
    total = (everyones_sums * (tops - highest).exp_()).sum(0)
    losses = total.log().add_(highest).sub_(everyones_picked.sum(0))
    scales = (top - highest).exp_().mul_(factors).div_(total)
    if not held:
        logits.zero_()
    elif islands is not None:
        islands.gradients(logits, top, columns, certain, certain.new_full((), equal), scales, factors, held)
    else:
        scale_shares(logits, shares, columns, certain, scales.mul_(sums), factors, classes, held)
    return losses


def shares_of(logits: Tensor, columns: Tensor, certain: Tensor, classes: Classes, held: int) -> tuple[Tensor, Tensor]:
    """Run the first pass, by slices.

    Returns: each class's share among this rank's classes [C, V/p], and the statistics of islands.py [C, 3]. On a CPU
    the shares overwrite the logits if both have one dtype.
    """
    wide, equal = certain.dtype, classes.smoothing / classes.vocabulary
    in_place = logits.dtype == wide and classes.device_type == "cpu"
    shares = logits if in_place else torch.empty_like(logits, dtype=wide)
    statistics = torch.empty(logits.shape[0], 3, dtype=wide, device=logits.device)
    top, sums, picked = statistics.split(1, 1)
    logits[:, held:] = -torch.inf
    for rows in classes.alike(classes.slices(logits), logits):
        block = logits[rows]
        picked[rows] = block.gather(1, columns[rows]) * certain[rows]
        if equal:
            picked[rows] += block[:, :held].sum(1, keepdim=True, dtype=wide).mul_(equal)
        top[rows] = block.amax(1, keepdim=True)
        torch.softmax(block, 1, dtype=wide, out=shares[rows])
        sums[rows] = shares[rows].amax(1, keepdim=True).reciprocal_()  # the greatest logit's share is 1 / sum
    return shares, statistics


def scale_shares(
    logits: Tensor, shares: Tensor, columns: Tensor, certain: Tensor, scales: Tensor, factors: Tensor,
    classes: Classes, held: int,
) -> None:  # fmt: skip
    """Run the second pass, by slices: overwrite the logits with gradients."""
    equal = classes.smoothing / classes.vocabulary
    targeted = (certain + equal).mul_(factors)  # the target at `columns`
    for rows in classes.alike(classes.slices(logits), logits):
        block = shares[rows]
        labelled = block.gather(1, columns[rows]).mul_(scales[rows]).sub_(targeted[rows])
        if equal:
            block.mul_(scales[rows])[:, :held].sub_(factors[rows], alpha=equal)
            logits[rows] = block
        else:
            torch.mul(block, scales[rows], out=logits[rows])
        logits[rows].scatter_(1, columns[rows], labelled.to(logits.dtype))


def give_to_autograd(like: Tensor, write: WriteGradient) -> Tensor | None:
    """Return the gradient of a table that is not a layer's parameter, for autograd."""
    out = torch.empty_like(like)
    write(out, 0)
    return out


def chunked_loss(
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    classes: Classes,
    scale: float | Tensor,
    give: GiveTable = give_to_autograd,
    *,
    by_token: bool = False,
) -> Tensor:
    """Return `scale` times the sum of the counted tokens' cross entropy, equal on all ranks of the vocabulary's axis.

    Args:
        h: [B·T, H].
        weight: [V/p, H].
        bias: [V/p], or None.
        labels: [B·T] or [B, T]; -100 is not counted.
        classes: the rank's classes.
        scale: factor of the loss, or of each token's [B·T]. Gradients are computed with the factor, so half-precision
            gradients do not underflow.
        give: receives the table's gradient.
        by_token: return each token's cross entropy [B·T] instead, without gradients and without `scale`.
    """
    h, weight, bias = cast(h, weight, bias)
    index, labels = chosen_rows(labels, classes), labels.flatten()
    factors = scale.unsqueeze(1) if isinstance(scale, Tensor) else scale
    counted, whole = h, labels.shape
    if index is not None:
        counted, labels = h[index], labels[index]
        factors = factors[index] if isinstance(factors, Tensor) else factors
    differentiates = not by_token and torch.is_grad_enabled() and (h.requires_grad or weight.requires_grad)
    with torch.autocast(autocast_device(h.device), enabled=False):
        loss: Tensor = _ChunkedLoss.apply(
            counted, weight, bias, labels, classes, factors, give, differentiates, by_token
        )  # fmt: skip
    return loss.new_zeros(whole).index_put((index,), loss) if by_token and index is not None else loss


def objective_loss(
    h: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, classes: Classes, objective: Objective,
    give: GiveTable = give_to_autograd,
) -> Tensor:  # fmt: skip
    """Return a function of the summed losses of rows, without logits in memory; without gradients any tensor.

    The factor of a row's gradient is known after all sums. So the first pass computes the sums alone, and the second
    pass computes logits again with the factors.

    Args:
        h, weight, bias, classes, give: as in `chunked_loss`.
        labels: [B, T].
        objective: the function. Its result is equal on all ranks of the vocabulary's axis if `objective` is.
    """
    with torch.no_grad():
        tokens = chunked_loss(h, weight, bias, labels, classes, 1.0, by_token=True)
        sums = tokens.view(labels.shape).sum(1)
    if not torch.is_grad_enabled():
        return objective(sums)
    value = objective(sums.requires_grad_())
    (factors,) = torch.autograd.grad(value, sums)
    of_tokens = factors.unsqueeze(1).expand(labels.shape).flatten()
    scaled = chunked_loss(h, weight, bias, labels, classes, of_tokens, give)
    return value.detach() + (scaled - scaled.detach())


def chosen_rows(labels: Tensor, classes: Classes) -> Tensor | None:
    """Return the indices of counted tokens if these are less than half of the rows, else None (all rows).

    For meta tensors the number of indices is the expected number.
    """
    flat = labels.flatten()
    counted = flat != IGNORED
    if labels.device.type == "meta":
        if 2 * classes.labelled >= 1:
            return None
        samples, length = labels.numel() // labels.shape[-1], labels.shape[-1]
        count = samples * max(1, round(classes.labelled * length))
        return flat.new_empty(-(-count // VECTOR) * VECTOR)
    selects = 2 * classes.labelled < 1 or classes.device_type == "cpu"  # on a GPU the host would wait for the count
    if not selects or 2 * (count := int(counted.sum())) >= flat.numel():
        return None
    # Uncounted tokens fill up whole vectors: threads would split other numbers of rows unevenly, and the bits of a
    # product would depend on the number of threads.
    return torch.sort(~counted, stable=True).indices[: -(-count // VECTOR) * VECTOR]


@torch.no_grad()
def num_correct(h: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, classes: Classes) -> Tensor:
    """Count the tokens with the label as the most likely class (of equals the lowest): a scalar on the device."""
    first, held = classes.of_rank(weight)
    table, offsets = weight[:held], None if bias is None else bias[:held]
    right = torch.zeros((), dtype=torch.int64, device=h.device)
    for rows in classes.alike(classes.chunks(h, weight, wide_dtype(h)), h):
        best = h.new_full((rows.stop - rows.start, 2), torch.finfo(h.dtype).min, dtype=torch.float64)
        if held:
            values, columns = _logits(h[rows], table, offsets, classes).max(1)
            best = torch.stack([values.double(), (columns + first).double()], 1)  # [C, 2]: the logit, its class
        everyone = all_rows(best, classes.comm)  # [p, C, 2]
        winner = everyone[:, :, 0].argmax(0)
        likeliest = everyone[:, :, 1].gather(0, winner[None])[0].long()
        right += (likeliest == labels[rows]).sum()
    return right


@torch.no_grad()
def chunked_token_losses(h: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, classes: Classes) -> Tensor:
    """Return the cross entropy of every token [B·T] over a whole table, in float32 or better; 0 for a label of -100."""
    losses = h.new_zeros(h.shape[0], dtype=wide_dtype(h))
    vocabulary = classes.vocabulary
    table, offsets = weight[:vocabulary], None if bias is None else bias[:vocabulary]
    for rows in ranges(0, h.shape[0], vocabulary * wide_dtype(h).itemsize, CHUNK_BYTES[h.device.type]):
        logits = _logits(h[rows], table, offsets, classes)
        targets = labels[rows].clamp(min=0).unsqueeze(1)
        picked = logits.gather(1, targets).squeeze(1)
        losses[rows] = torch.where(labels[rows] != IGNORED, logits.logsumexp(1) - picked, 0)
    return losses
