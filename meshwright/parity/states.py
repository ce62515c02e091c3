"""Checks that packed documents do not see each other by attention, recurrent states, convolutions or positions.

    parity.state_probe(model, {"input_ids": row}, lengths=[40, 24]).check()

The tokens of one document at a time are replaced, and nothing may change at the positions of other documents. Each
document is also computed alone. The module at fault is the first with a changed output and an unchanged input.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.parity.probes import ProbeFinding, announce, shared
from meshwright.parity.record import COARSE
from meshwright.parity.trace import Trace, all_tensors, clean_names
from meshwright.ranks.errors import ParityError

Batch = dict[str, Any]
Call = Callable[[nn.Module, Batch], Any]

KINDS = (
    ("convolution", "conv", "pass seq_idx or cu_seqlens, or pad each document by itself"),
    ("recurrent", "mamba|ssm|scan|recurr|rnn|gru|lstm|delta|rwkv|retention|retnet|gated|linear_?att",
     "set states to zero where a document starts (pass seq_idx or cu_seqlens)"),
    ("attention", "att", "pass a block-diagonal mask, or position ids or cu_seqlens that restart"),
)  # fmt: skip
"""Kind, words in a module's class or path, remedy."""


@dataclass
class Run:
    """A forward pass: inputs and outputs of modules as [positions, values], in the order of ending calls."""

    inputs: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    outputs: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    result: Tensor | None = None


@dataclass(frozen=True)
class Move:
    """A module with a changed output and an unchanged input. `size`: the change relative to the output's size."""

    module: str
    size: float


def by_position(x: Tensor, length: int) -> Tensor | None:
    """Return a tensor of one row as [positions, values]; None if no dim has the row's length."""
    if x.ndim >= 2 and x.shape[0] == 1:
        x = x[0]
    dims = [dim for dim, size in enumerate(x.shape) if size == length]
    # A causal convolution pads on both sides, and the enclosing module cuts off the end.
    if not dims and x.ndim == 2 and length < x.shape[1] <= length + 16:
        x, dims = x[:, :length], [1]
    return x.movedim(dims[0], 0).reshape(length, -1) if dims and x.numel() else None


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Restore modes, buffers and other tensors of modules, and torch's random states, after a context."""
    modules = list(model.modules())
    modes = [module.training for module in modules]
    tables = [table for module in modules for table in (module._buffers, module.__dict__)]
    saved = [({k: (v, v.clone()) for k, v in table.items() if isinstance(v, Tensor)}, set(table)) for table in tables]
    devices = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=[index for index in devices if index is not None]):
        try:
            yield
        finally:
            for module, mode in zip(modules, modes, strict=True):
                module.training = mode
            for table, (tensors, names) in zip(tables, saved, strict=True):
                for name in [n for n, v in table.items() if n not in names and isinstance(v, Tensor)]:
                    del table[name]
                for name, (tensor, values) in tensors.items():
                    table[name] = tensor
                    tensor.detach().copy_(values)


def run(model: nn.Module, batch: Batch, call: Call, length: int) -> Run:
    """Run a forward pass in eval mode; the model's state is restored."""
    with restored(model), torch.no_grad():
        model.eval()
        torch.manual_seed(0)
        with Trace(model) as trace:
            result = call(model, batch)
    found = Run()
    for (quantity, name, call_index), x in trace.tensors.items():
        rows = by_position(x, length)
        if rows is not None:
            (found.inputs if quantity == "input" else found.outputs)[name, call_index] = rows
    # In the order of ending calls: a module follows the modules inside.
    found.outputs = {key: found.outputs[key] for key in trace.order if key in found.outputs}
    floats = [x for x in all_tensors(result) if x.is_floating_point() and x.ndim > 1]
    found.result = next((rows for x in floats if (rows := by_position(x.detach(), length)) is not None), None)
    return found


def change(before: Tensor | None, after: Tensor | None, roundings: int) -> float:
    """Return the largest change relative to the size of `before`; 0 if the change is rounding."""
    if before is None or after is None or before.shape != after.shape or not before.numel():
        return 0.0
    size = float(before.double().square().mean().sqrt())
    most = float((before.double() - after.double()).abs().max())
    coarse = str(before.dtype).removeprefix("torch.") in COARSE
    allowed = (4 if coarse else roundings) * torch.finfo(before.dtype).eps if before.is_floating_point() else 0.0
    return most / (size or 1.0) if most > allowed * size else 0.0


def moves(before: Run, after: Run, span: slice, there: slice, roundings: int) -> list[Move]:
    """Return the modules at fault for a difference between `span` of one run and `there` of another.

    A module that contains a module at fault is left out.
    """
    found: list[Move] = []
    for key, output in before.outputs.items():
        if key not in after.outputs:
            continue
        size = change(output[span], after.outputs[key][there], roundings)
        ours, theirs = before.inputs.get(key), after.inputs.get(key)
        taken = 0.0 if ours is None or theirs is None else change(ours[span], theirs[there], roundings)
        inside = any(not key[0] or each.module.startswith(f"{key[0]}.") for each in found)
        if size and not taken and not inside and all(each.module != key[0] for each in found):
            found.append(Move(key[0], size))
    return found


def kind_of(model: nn.Module, name: str) -> tuple[str, str]:
    """Return (kind, remedy) of a module that mixes positions."""
    modules = dict(model.named_modules())
    words = {clean: type(modules[raw]).__name__ for raw, clean in clean_names(list(modules)).items()}
    for text in (words.get(name, ""), name.rpartition(".")[2]):
        for category, pattern, remedy in KINDS:
            if re.search(pattern, text, re.IGNORECASE):
                return category, remedy
    return "mixing", "; ".join(f"{category}: {remedy}" for category, _, remedy in KINDS)


def other_tokens(x: Tensor, span: slice) -> Tensor:
    """Return a copy of a row with other tokens in a span, all taken from the row, so that the vocabulary has them."""
    x = x.clone()
    old, generator = x[0, span], torch.Generator().manual_seed(1)
    if x.is_floating_point():
        x[0, span] = torch.randn(old.shape, generator=generator).to(old)
        return x
    known = x[0].unique()
    if len(known) < 2:
        raise ParityError("state_probe: the row has one token again and again: give a row of different tokens")
    at = torch.searchsorted(known, old.contiguous())
    steps = torch.randint(1, len(known), old.shape, generator=generator).to(at)
    x[0, span] = known[(at + steps) % len(known)]
    return x


def alone(batch: Batch, span: slice, length: int) -> Batch:
    """Return the batch of one document: dims of the row's length are cut, and positions start at 0."""
    count, cut = span.stop - span.start, Batch()
    for name, x in batch.items():
        if name.startswith("cu_seq"):
            cut[name] = torch.tensor([0, count], dtype=x.dtype, device=x.device)
        elif name.startswith("max_") and "len" in name:
            cut[name] = torch.full_like(x, count) if isinstance(x, Tensor) else count
        elif isinstance(x, Tensor):
            # Masks have [rows, heads, positions, positions], others [rows, positions, ...].
            dims = (2, 3) if x.ndim == 4 else (1,)
            segment = x
            for dim in dims:
                if x.ndim > dim and x.shape[dim] == length:
                    segment = segment.narrow(dim, span.start, count)
            cut[name] = segment - segment[:, :1] if name == "position_ids" else segment
        else:
            cut[name] = x
    return cut


def places_of(batch: Batch, tokens: str, lengths: Sequence[int] | None) -> list[slice]:
    """Return the slice of each document in the row."""
    length = batch[tokens].shape[1]
    positions = batch.get("position_ids")
    if lengths is None:
        if positions is None or positions.ndim != 2:
            raise ParityError("state_probe: give lengths=, or position_ids [rows, positions] that restart in the batch")
        starts = [0, *(int(t) + 1 for t in (positions[0].diff() != 1).nonzero().flatten())]
        lengths = [stop - start for start, stop in zip(starts, [*starts[1:], length], strict=True)]
    ends = [sum(lengths[: index + 1]) for index in range(len(lengths))]
    if len(lengths) < 2 or min(lengths) < 1 or ends[-1] > length:
        raise ParityError(f"state_probe: documents of {list(lengths)} positions in a row of {length}: give two or more")
    return [slice(end - count, end) for end, count in zip(ends, lengths, strict=True)]


class StateProbe:
    """The verdict on a packed row. `findings`: the mistakes; `line`: the verdict in sentences."""

    def __init__(self, model: nn.Module, batch: Batch, places: list[slice], tokens: str, call: Call) -> None:
        self.model, self.batch, self.places, self.tokens, self.call = model, batch, places, tokens, call
        self.length = batch[tokens].shape[1]
        base = run(model, batch, call, self.length)
        if base.result is None:
            raise ParityError(f"state_probe: the model gives no tensor of floating point with {self.length} positions")
        self.findings = shared([*self._leaks(base)])
        if not self.findings:
            self.findings = shared([*self._alone(base)])
        words = [finding.sentence for finding in self.findings]
        self.line = announce("state probe", words or [f"{len(places)} documents do not see each other in a packed row"])

    def check(self) -> None:
        """Raise ParityError if something is wrong."""
        if self.findings:
            raise ParityError(self.line)

    def _leaks(self, base: Run) -> Iterator[ProbeFinding]:
        """Yield the modules through which one document reaches another, each once per direction."""
        seen = set[tuple[str, bool]]()
        for source, span in enumerate(self.places):
            batch = self.batch | {self.tokens: other_tokens(self.batch[self.tokens], span)}
            moved = run(self.model, batch, self.call, self.length)
            for reader, reader_span in enumerate(self.places):
                if reader == source:
                    continue
                for move in moves(base, moved, reader_span, reader_span, 64):
                    if (key := (move.module, reader > source)) in seen:
                        continue
                    seen.add(key)
                    category, remedy = kind_of(self.model, move.module)
                    words = f"document {reader + 1} sees document {source + 1} at {move.module or '(the model)'}"
                    yield ProbeFinding(
                        category, move.module, f"{words} (max change {move.size:.2g} of its size); {remedy}"
                    )

    def _alone(self, base: Run) -> Iterator[ProbeFinding]:
        """Yield the first module with a different output for a packed row than for a document alone."""
        for index, span in enumerate(self.places):
            count = span.stop - span.start
            single = run(self.model, alone(self.batch, span, self.length), self.call, count)
            assert base.result is not None
            if single.result is None:
                raise ParityError(f"state_probe: alone, document {index + 1} gives no tensor of {count} positions")
            size = change(base.result[span], single.result, 4096)
            if size:
                found = moves(base, single, span, slice(0, count), 4096)
                module = found[0].module if found else ""
                yield ProbeFinding("positions", module,
                    f"document {index + 1} is not what it is alone, first at {module or '(the model)'} (max change "
                    f"{size:.2g} of the output's size); restart position_ids at 0 in each document and pass them"
                )  # fmt: skip
                return


def state_probe(
    model: nn.Module,
    batch: Mapping[str, Any] | Tensor,
    lengths: Sequence[int] | None = None,
    tokens: str = "input_ids",
    call: Call | None = None,
) -> StateProbe:
    """Show that the documents of a packed row do not see each other, by a few forward passes before a loop.

    Modes, buffers and random states are restored; no gradient is computed.

    Args:
        model: the model.
        batch: the model's keyword arguments, or only the tokens; the first row is tested.
        lengths: lengths of the row's documents; by default documents begin at restarts of position_ids.
        tokens: the key of the batch's tokens, or embeddings.
        call: call(model, batch) runs the model; by default model(**batch).
    """
    if isinstance(batch, Tensor):
        batch, call = {tokens: batch}, call or (lambda model, batch: model(batch[tokens]))
    rows = len(batch[tokens])
    single = {
        name: x[:1] if isinstance(x, Tensor) and x.ndim > 1 and len(x) == rows else x for name, x in batch.items()
    }
    return StateProbe(model, single, places_of(single, tokens, lengths), tokens, call or (lambda m, b: m(**b)))
