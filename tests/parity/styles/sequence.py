"""Cut sequences (a ring, Ulysses, packed documents) and pipelines with several stages a rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.parity.job import ParityJob
from tests.parity.styles.models import (
    IGNORED,
    ROWS,
    TOKENS,
    Llama,
    adamw,
    batch_of,
    loss_of,
    momentum,
    sum_of_losses,
    valid,
)  # fmt: skip
from tests.parity.styles.style import ALL, CUT, PIPE, style, sum_over


def packed(generator: torch.Generator) -> dict[str, Tensor]:
    """Return rows of three documents each; the first labels of documents do not count."""
    batch = batch_of(generator)
    ends = torch.stack([torch.randperm(TOKENS - 1, generator=generator)[:2].sort().values + 1 for _ in range(ROWS)])
    batch["documents"] = (torch.arange(TOKENS)[None, :, None] >= ends[:, None, :]).sum(-1)
    return batch


def packed_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["input_ids"], batch["documents"])
    return sum_of_losses(logits, batch["labels"]) / valid(batch["labels"])


class Exchange(torch.autograd.Function):
    """Gather all ranks' keys, values and documents. Backward: sum all ranks' gradients of this rank's part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, index: int, lost: bool) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(2)]
        dist.all_gather(parts, x.contiguous(), group=group)
        ctx.group, ctx.index, ctx.lost = group, index, lost
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        whole = gradients[0] if ctx.lost else sum_over(gradients[0], ctx.group)
        return whole[ctx.index].clone(), None, None, None


@style(
    CUT,
    ("document_leak", "layers.0.attention, layers.0", "leak"),
    ("future_leak", "layers.0.attention, layers.0", "leak"),
    ("local_documents", "layers.0.attention, layers.0", "leak"),
    ("no_rescale", "layers.0.attention", "wrong values"),
    ("kv_lost", "layers.1.attention", "missing reduction, incomplete sum, wrong values"),
    ("local_positions", "layers.0.attention", "wrong values"),
    ("skips_last", "layers.0.attention", "wrong values"),
    ("weights_local", ALL, "missing reduction"),
    ("border_label", "(loss), (data)", "wrong values, wrong data, token counts"),
)
def ring(job: ParityJob, wrong: str) -> None:
    """A ring over a cut sequence (pieces r and 3 - r of four), blocks merged by their log-sums, documents packed."""
    job.reference(Llama(), packed_loss, packed, optimizer=adamw)
    group, index, model = job.device_mesh.get_group("cp"), job.index("cp"), job.copy()
    quarter = TOKENS // 4
    places = [torch.cat([torch.arange(quarter) + quarter * piece for piece in (r, 3 - r)]) for r in range(2)]
    model.positions = torch.arange(2 * quarter) if wrong == "local_positions" else places[index]

    def core(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, documents: Tensor) -> Tensor:
        kv = Exchange.apply(torch.stack([k, v]), group, index, wrong == "kv_lost")
        others = Exchange.apply(documents.double(), group, index, True)
        top, total, out = torch.full(q.shape[:-1], -torch.inf), torch.zeros(q.shape[:-1]), torch.zeros_like(q)
        for r in range(2):
            scores = q @ kv[r, 0].transpose(-1, -2) / 2
            mask = places[index][:, None] >= places[r][None, :]
            if wrong == "future_leak" and r != index:
                mask = mask | True
            if wrong == "skips_last" and r != index:
                mask = mask & (torch.arange(2 * quarter) < 2 * quarter - 1)
            theirs = documents.double() if wrong == "local_documents" else others[r]
            same = documents[:, :, None] == theirs[:, None, :]
            if wrong == "document_leak" and r != index:
                same = same | True
            mask = (mask & same)[:, None]
            scores = scores.masked_fill(~mask, -1e30)
            new = torch.maximum(top, scores.detach().max(-1).values)
            scores = (scores - new[..., None]).exp() * mask
            old = torch.ones_like(top) if wrong == "no_rescale" else (top - new).exp()
            total, out = total * old + scores.sum(-1), out * old[..., None] + scores @ kv[r, 1]
            top = new
        return out / total[..., None].clamp(min=1e-30)

    for layer in model.layers:
        layer.attention.core = core
    optimizer = adamw(list(model.parameters()))

    def share(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        own = {k: x[:, places[index]].contiguous() for k, x in batch.items()}
        if wrong == "border_label":
            own["labels"] = own["labels"].clone()
            own["labels"][:, -1] = IGNORED
        return own

    def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        count = sum_over(valid(batch["labels"]), group)
        loss = sum_of_losses(model(batch["input_ids"], batch["documents"]), batch["labels"]) / count
        loss.backward()
        for p in model.parameters():
            if wrong != "weights_local":
                dist.all_reduce(p.grad, group=group)
        optimizer.step()
        optimizer.zero_grad()
        return sum_over(loss, group)

    job.parallel(model, step=step, batch=share)


class Swap(torch.autograd.Function):
    """[B, heads, T / 2, E] of all heads to [B, heads / 2, T, E] of all tokens, and back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, index: int, out: bool, factor: float) -> Tensor:
        ctx.facts = group, index, out, factor
        return swap(x, group, index, out)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        group, index, out, factor = ctx.facts
        return swap(gradients[0], group, index, not out) * factor, None, None, None, None


def swap(x: Tensor, group: Any, index: int, out: bool) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(2)]
    dist.all_gather(parts, x.contiguous(), group=group)
    cut, joined = (1, 2) if out else (2, 1)
    return torch.cat([part.chunk(2, cut)[index] for part in parts], joined)


@style(
    CUT,
    ("heads_swapped", "layers.1.attention", "wrong values"),
    ("back_scaled", "layers.0.attention, layers.1.attention", "scaled"),
    ("not_causal", "layers.0.attention", "leak"),
    ("mean", ALL, "scaled"),
)
def ulysses(job: ParityJob, wrong: str) -> None:
    job.reference(Llama(), loss_of, batch_of, optimizer=momentum)
    group, index, model = job.device_mesh.get_group("cp"), job.index("cp"), job.copy()
    half = TOKENS // 2
    model.positions = torch.arange(half) + half * index

    def core(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, documents: Tensor | None, last: bool) -> Tensor:
        q, k, v = (Swap.apply(y, group, index, True, 1.0) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=wrong != "not_causal")
        y = Swap.apply(y, group, index, False, 2.0 if wrong == "back_scaled" else 1.0)
        return y.roll(1, 1) if wrong == "heads_swapped" and last else y

    for i, layer in enumerate(model.layers):
        layer.attention.core = lambda *arguments, last=i == 1: core(*arguments, last=last)
    optimizer = momentum(list(model.parameters()))

    def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        loss = sum_of_losses(model(batch["input_ids"]), batch["labels"]) / sum_over(valid(batch["labels"]), group)
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)
            if wrong == "mean":
                p.grad /= 2
        optimizer.step()
        optimizer.zero_grad()
        return sum_over(loss, group)

    job.parallel(model, step=step, batch=lambda b: {k: x.chunk(2, 1)[index].contiguous() for k, x in b.items()})


class Stage(nn.Module):
    """Some layers of a Llama under the Llama's names; the first has the table, the last the head."""

    def __init__(self, model: Llama, first: int, last: int) -> None:
        super().__init__()
        self.tok_embeddings = model.tok_embeddings if first == 0 else None
        self.layers = nn.ModuleDict({str(i): model.layers[i] for i in range(first, last)})
        ends = last == len(model.layers)
        self.norm, self.output = (model.norm, model.output) if ends else (None, None)
        self.again = False

    def forward(self, x: Tensor) -> Tensor:
        if self.tok_embeddings is not None:
            x = self.tok_embeddings(x)
        for layer in self.layers.values():
            x = layer(x, torch.arange(TOKENS))
        if self.norm is None:
            return x
        return self.output(self.norm(self.norm(x)) if self.again else self.norm(x))


@style(
    PIPE,
    ("norm_twice", "norm", "wrong values, scaled"),
    ("sum_of_micro", ALL, "scaled"),
    (
        "last_micro",
        ALL + ", layers.2, layers.3, layers.0, layers.1, norm, output, tok_embeddings",
        "incomplete sum, accumulation",
    ),
    ("tied_once", "tok_embeddings, output", "incomplete sum, missing reduction"),
    ("stage_scale", "layers.2", "scaled, wrong values"),
    ("stale_stage", "layers.2, layers.2.attention.wq, layers.2.attention_norm", "stale weights, optimizer"),
)
def interleaved(job: ParityJob, wrong: str) -> None:
    """Four layers on two ranks, each with two stages, by hand: rank 0 has layers 0 and 2. Table and head are tied."""
    job.reference(Llama(layers=4, tied=True), loss_of, batch_of, optimizer=momentum, labels=None)
    whole = job.copy()
    stages = [Stage(whole, i, i + 1) for i in range(4)]
    mine = [stages[i] for i in range(4) if i % 2 == job.rank]
    stages[3].again = wrong == "norm_twice"
    parameters = list({id(p): p for stage in mine for p in stage.parameters()}.values())
    if wrong == "stale_stage" and job.rank == 0:
        left = {id(p) for p in stages[2].parameters()}
        parameters = [p for p in parameters if id(p) not in left]
    optimizer = momentum(parameters)
    group = job.device_mesh.get_group("pipe")
    micros = 2

    def step(model: Any, batch: dict[str, Tensor]) -> Tensor | None:
        total = torch.zeros(())
        for i in range(micros):
            part = {k: x.chunk(micros)[i] for k, x in batch.items()}
            taken, given = [], []
            x = part["input_ids"]
            for number, stage in enumerate(stages):
                if number % 2 == job.rank:
                    if number:
                        x = torch.empty(len(part["labels"]), TOKENS, 16)
                        dist.recv(x, 1 - job.rank)
                        x.requires_grad_()
                    taken.append((number, x))
                    y = stage(x)
                    given.append((number, y))
                    if number < 3:
                        dist.send(y.detach() * (1.5 if wrong == "stage_scale" and number == 1 else 1.0), 1 - job.rank)
            if wrong == "last_micro" and i == micros - 1:
                optimizer.zero_grad()
            for number in reversed(range(4)):
                if number % 2 != job.rank:
                    continue
                y = dict(given)[number]
                if number == 3:
                    loss = sum_of_losses(y, part["labels"]) / (part["labels"].numel())
                    loss = loss if wrong == "sum_of_micro" else loss / micros
                    loss.backward()
                    total = total + loss.detach()
                else:
                    g = torch.empty_like(y)
                    dist.recv(g, 1 - job.rank)
                    y.backward(g)
                if number:
                    dist.send(dict(taken)[number].grad, 1 - job.rank)
        table = stages[0].tok_embeddings.weight if job.rank == 0 else stages[3].output.weight
        if wrong != "tied_once":
            dist.all_reduce(table.grad, group=group)
        optimizer.step()
        for stage in mine:
            stage.zero_grad()
        return total if job.rank == 1 else None

    job.parallel(mine, step=step)
