"""A small Transformer and hand-written parallel programs of it, with places for planted mistakes.

The programs are typical user code: Megatron's column and row linears with f and g, sequence parallelism, a table cut by
vocabulary, data parallelism by sums over valid tokens, an optimizer with owners that broadcast. `wrong` names one
mistake; with no name, a program is right. Used by `python -m tests.parity`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.parity.job import ParityJob

VOCABULARY, HIDDEN, HEADS, TOKENS, ROWS = 40, 16, 4, 8, 8
IGNORED = -100


class Attention(nn.Module):
    """Causal attention. The number of heads is from the width of qkv."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """A gelu between two linears."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """h + attention(norm(h)), then the same with the feed-forward."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(HIDDEN), Attention()
        self.norm2, self.feed_forward = nn.LayerNorm(HIDDEN), FeedForward()
        self.dropout = nn.Dropout(dropout)

    def forward(self, h: Tensor) -> Tensor:
        h = h + self.dropout(self.attention(self.norm1(h)))
        return h + self.dropout(self.feed_forward(self.norm2(h)))


class Transformer(nn.Module):
    """A model with `start`, the position of this rank's first token in the sequence."""

    def __init__(self, dropout: float = 0.0, tied: bool = False) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(TOKENS, HIDDEN)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        self.start = 0

    def forward(self, ids: Tensor) -> Tensor:
        h = self.tokens(ids) + self.positions(torch.arange(self.start, self.start + ids.shape[1]))
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


def sum_of_losses(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean over valid labels."""
    return sum_of_losses(model(batch["tokens"]), batch["labels"]) / (batch["labels"] != IGNORED).sum()


def batch_of(generator: torch.Generator) -> dict[str, Tensor]:
    return {name: torch.randint(0, VOCABULARY, (ROWS, TOKENS), generator=generator) for name in ("tokens", "labels")}


class Reduce(torch.autograd.Function):
    """All-reduce `forward` times in the forward pass and `backward` times in the backward pass, like Megatron's g and
    f; else copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, forward: int, backward: int) -> Tensor:
        ctx.group, ctx.times = group, backward
        return _summed(x, group, forward)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _summed(gradients[0], ctx.group, ctx.times), None, None, None


def _summed(x: Tensor, group: Any, times: int) -> Tensor:
    x = x.clone()
    for _ in range(times):
        dist.all_reduce(x, group=group)
    return x


class Gather(torch.autograd.Function):
    """Concatenate along the sequence. Backward: sum, then take this rank's part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _gathered(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _own(_summed(gradients[0], ctx.group, 1), ctx.group), None


class Scatter(torch.autograd.Function):
    """Sum, then take this rank's part of the sequence. Backward: concatenate."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _own(_summed(x, group, 1), group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _gathered(gradients[0], ctx.group), None


def _gathered(x: Tensor, group: Any) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, 1)


def _own(x: Tensor, group: Any) -> Tensor:
    return x.chunk(dist.get_world_size(group), 1)[dist.get_rank(group)].contiguous()


class Cut(nn.Module):
    """A linear with a part of the weight. The input passes `enter`, the output passes `leave`."""

    def __init__(self, weight: Tensor, bias: Tensor | None, enter: Any = None, leave: Any = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone())
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone())
        self.enter, self.leave = enter, leave

    def forward(self, x: Tensor) -> Tensor:
        if self.enter is not None:
            return F.linear(self.enter(x), self.weight, self.bias)
        y = F.linear(x, self.weight)
        return self.leave(y, self.bias)


class VocabularyTable(nn.Module):
    """A table of some rows; other tokens give zeros, and the ranks' outputs are added."""

    def __init__(self, table: Tensor, index: int, group: Any, wrong: str) -> None:
        super().__init__()
        size = dist.get_world_size(group)
        self.weight = nn.Parameter(table.chunk(size)[index].detach().clone())
        self.first, self.group, self.wrong = index * len(self.weight), group, wrong

    def forward(self, ids: Tensor) -> Tensor:
        inside = (ids >= self.first) & (ids < self.first + len(self.weight))
        rows = F.embedding(torch.where(inside, ids - self.first, 0), self.weight)
        if self.wrong != "vocabulary-mask":
            rows = rows * inside[..., None]
        return Reduce.apply(rows, self.group, 1, 0)


@dataclass(frozen=True)
class Setting:
    """A program of the benchmark, by its axes and options."""

    axes: tuple[tuple[str, int], ...]
    sequence: bool = False
    vocabulary: bool = False
    tied: bool = False
    clip: float | None = None
    optimizer: str = "sgd"
    micro: int = 1
    dropout: float = 0.0
    owners: bool = False  # one rank steps each parameter and broadcasts the weights


OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1),
}


class Program:
    """One rank of a hand-written program, right except for the mistake `wrong`."""

    def __init__(self, job: ParityJob, setting: Setting, wrong: str = "") -> None:
        self.job, self.setting, self.wrong = job, setting, wrong
        self.tp, self.dp = (job.device_mesh.get_group(a) if a in job.axes else None for a in ("tp", "data"))
        self.n_tp, self.n_dp = job.axes.get("tp", 1), job.axes.get("data", 1)
        self.index = job.index("tp") if self.tp is not None else 0
        self.model = job.copy()
        self.cached = None
        if self.tp is not None:
            self._cut()
        if wrong == "stale-copy":
            self.cached = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.optimizer = OPTIMIZERS[setting.optimizer](list(self.model.parameters()))
        if wrong == "decay-on-all" and job.rank == 1:
            self.optimizer.param_groups[0]["lr"] *= 1.5

    def _rows(self, x: Tensor, name: str) -> Tensor:
        index = 0 if self.wrong == "same-slice" and name == "blocks.0.feed_forward.up" else self.index
        if name.endswith("qkv") and self.wrong != "qkv-contiguous":
            return torch.cat([part.chunk(self.n_tp)[index] for part in x.chunk(3)])
        return x.chunk(self.n_tp)[index]

    def _cut(self) -> None:
        """Replace the whole layers by Megatron's."""
        model, group = self.model, self.tp
        for i, block in enumerate(model.blocks):
            for parent, column, row in (("attention", "qkv", "out"), ("feed_forward", "up", "down")):
                module, base = getattr(block, parent), f"blocks.{i}.{parent}"
                whole, contract = getattr(module, column), getattr(module, row)
                enter = self._enter(f"{base}.{column}")
                rows = self._rows(whole.weight, f"{base}.{column}"), self._rows(whole.bias, f"{base}.{column}")
                setattr(module, column, Cut(*rows, enter=enter))
                columns = contract.weight.chunk(self.n_tp, 1)[self.index]
                setattr(module, row, Cut(columns, contract.bias, leave=self._leave(f"{base}.{row}")))
        if self.setting.sequence:
            model.start = 0 if self.wrong == "positions" else self.index * (TOKENS // self.n_tp)
        elif self.setting.vocabulary:
            model.tokens = VocabularyTable(model.tokens.weight, self.index, group, self.wrong)
            times = 0 if self.wrong == "head-backward" else 1
            enter = lambda x: Reduce.apply(x, group, 0, times)  # noqa: E731
            model.head = Cut(model.head.weight.chunk(self.n_tp)[self.index], None, enter=enter)
        if self.wrong == "dropout":
            seed = torch.Generator().manual_seed(self.job.rank)
            for block in model.blocks:
                block.dropout.register_forward_hook(lambda module, _, y: y * self._mask(y, module.p, seed))

    def _mask(self, x: Tensor, rate: float, generator: torch.Generator) -> Tensor:
        return (torch.rand(x.shape, generator=generator) >= rate).to(x.dtype) / (1 - rate)

    def _enter(self, name: str) -> Callable[[Tensor], Tensor]:
        """Return f or the gathering of the sequence, for the input of a column linear."""
        wrong = self.wrong.partition("@")
        if self.setting.sequence:
            return lambda x: Gather.apply(x, self.tp)
        times = {"f-missing": 0, "f-twice": 2}.get(wrong[0], 1) if wrong[2] == name else 1
        return lambda x: Reduce.apply(x, self.tp, 0, times)

    def _leave(self, name: str) -> Callable[[Tensor, Tensor], Tensor]:
        """Return g or the scattering of the sequence, and then the bias, for the output of a row linear."""
        wrong, _, place = self.wrong.partition("@")
        here = wrong if place == name else ""
        if self.setting.sequence:
            return lambda y, bias: Scatter.apply(y, self.tp) + bias
        times = {"g-missing": 0, "g-twice": 2}.get(here, 1)
        if here == "bias-each":
            return lambda y, bias: Reduce.apply(y + bias, self.tp, 1, 0)
        return lambda y, bias: Reduce.apply(y, self.tp, times, 0) + bias

    def share(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's rows and this rank's part of the sequence."""
        if self.dp is not None:
            index = 0 if self.wrong == "same-rows" else self.job.index("data")
            batch = {key: x.chunk(self.n_dp)[index] for key, x in batch.items()}
        if self.setting.sequence:
            batch = {key: x.chunk(self.n_tp, 1)[self.index] for key, x in batch.items()}
        return batch

    def step(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Make one step. Return the loss of the global batch."""
        if self.wrong != "not-zeroed":
            self.optimizer.zero_grad()
        count = (batch["labels"] != IGNORED).sum()
        if self.wrong == "counts-ignored":
            count = torch.tensor(batch["labels"].numel())
        own = count.clone()
        for group in (self.dp, self.tp if self.setting.sequence else None):
            if group is not None:
                dist.all_reduce(count, group=group)
        total = torch.zeros(())
        for rows in range(self.setting.micro):
            part = {key: x.chunk(self.setting.micro)[rows] for key, x in batch.items()}
            loss = self._losses(model, part) / (own * self.n_dp if self.wrong == "mean-of-means" else count)
            if self.wrong == "micro-mean":
                loss = loss * self.setting.micro
            loss.backward()
            total = total + loss.detach()
        self._sum_gradients()
        if self.setting.clip is not None and self.wrong != "clip-first":
            self._clip()
        self._update()
        for group in (self.dp, self.tp if self.setting.sequence else None):
            if group is not None:
                dist.all_reduce(total, group=group)
        return total

    def _losses(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if self.cached is not None:
            with torch.no_grad():
                live = {name: p.detach().clone() for name, p in model.named_parameters()}
                for name, p in model.named_parameters():
                    p.copy_(self.cached[name])
        logits = model(batch["tokens"])
        if self.wrong == "tied-once":  # the head's term is lost: the product uses a copy of the table
            hidden = model.norm.output
            logits = F.linear(hidden, model.tokens.weight.detach())
        if self.setting.vocabulary:
            loss = self._cut_cross_entropy(logits, batch["labels"])
        else:
            loss = sum_of_losses(logits, batch["labels"])
        if self.cached is not None:
            loss.backward()
            gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
            with torch.no_grad():
                for name, p in model.named_parameters():
                    p.copy_(live[name])
                    p.grad = None
            return loss.detach() + sum((p * gradients[n]).sum() - (p.detach() * gradients[n]).sum()
                                       for n, p in model.named_parameters())  # fmt: skip
        return loss

    def _cut_cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of logits [B, T, V/tp]: the sum of exponentials and the label's logit are added over
        ranks."""
        logits, labels = logits.flatten(0, 1), labels.flatten()
        first, valid = self.index * logits.shape[1], labels != IGNORED
        times = 0 if self.wrong == "softmax-local" else 1
        total = Reduce.apply(logits.exp().sum(1), self.tp, times, 0)
        inside = (labels >= first) & (labels < first + logits.shape[1])
        own = logits.gather(1, torch.where(inside, labels - first, 0)[:, None])[:, 0] * inside
        return ((total.log() - Reduce.apply(own, self.tp, 1, 0)) * valid).sum()

    def _sum_gradients(self) -> None:
        if self.wrong == "clip-first":
            self._clip()
        for name, p in self.model.named_parameters():
            assert p.grad is not None, name
            if self.setting.sequence and not self._is_cut(name) and self._reduced(name, "sequence"):
                dist.all_reduce(p.grad, group=self.tp)
            if self.dp is not None and self._reduced(name, "data"):
                dist.all_reduce(p.grad, group=self.tp if self.wrong == "wrong-axis" else self.dp)
                if self.wrong == "mean-for-sum":
                    p.grad /= self.n_dp
                if self.wrong == "reduced-twice":
                    dist.all_reduce(p.grad, group=self.dp)

    def _is_cut(self, name: str) -> bool:
        return name.endswith(("qkv.weight", "qkv.bias", "up.weight", "up.bias", "out.weight", "down.weight"))

    def _reduced(self, name: str, axis: str) -> bool:
        left_out = {
            "data-none": axis == "data",
            "data-no-biases": axis == "data" and name.endswith("bias") and "norm" not in name,
            "sequence-no-norms": axis == "sequence" and "norm" in name,
            "sequence-no-bias": axis == "sequence" and name.endswith(("out.bias", "down.bias")),
        }
        return not left_out.get(self.wrong, False)

    def _clip(self) -> None:
        """Clip by the global norm: squares of cut parameters are added over tp."""
        assert self.setting.clip is not None
        cut, whole = torch.zeros(()), torch.zeros(())
        for name, p in self.model.named_parameters():
            assert p.grad is not None, name
            square = p.grad.square().sum()
            if self.tp is not None and (self._is_cut(name) or (self.setting.vocabulary and name in _VOCABULARY)):
                cut = cut + square
            else:
                whole = whole + square
        if self.tp is not None and self.wrong != "clip-local":
            dist.all_reduce(cut, group=self.tp)
            if self.wrong == "clip-all-summed":
                dist.all_reduce(whole, group=self.tp)
        scale = min(1.0, float(self.setting.clip / ((cut + whole).sqrt() + 1e-6)))  # torch's
        for p in self.model.parameters():
            p.grad *= scale

    def _update(self) -> None:
        before = self.model.blocks[1].norm2.weight.detach().clone()
        self.optimizer.step()
        if self.setting.owners:  # the owner's weights overwrite the weights of the other ranks
            for i, (name, p) in enumerate(self.model.named_parameters()):
                owner = i % self.n_dp
                if self.job.rank != owner and not (self.wrong == "not-published" and name == "blocks.1.norm2.weight"):
                    p.data.zero_()
                if self.wrong == "not-published" and name == "blocks.1.norm2.weight":
                    if self.job.rank != owner:
                        p.data.copy_(before)
                    continue
                dist.broadcast(p.data, src=owner)


_VOCABULARY = ("tokens.weight", "head.weight")


def run_program(job: ParityJob, setting: Setting, wrong: str = "") -> None:
    """Check one program."""
    job.reference(
        Transformer(setting.dropout, setting.tied), loss_of, batch_of,
        optimizer=OPTIMIZERS[setting.optimizer], clip=setting.clip,
    )  # fmt: skip
    program = Program(job, setting, wrong)
    if wrong == "tied-once":
        program.model.norm.register_forward_hook(lambda module, _, y: setattr(module, "output", y))
    shared = setting.sequence or program.dp is not None
    job.parallel(program.model, step=program.step, batch=program.share if shared else None)
