"""Routed experts on separate ranks: tokens are sent by top-k or with a capacity; a shared expert; balance."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.parity.job import ParityJob
from tests.parity.styles.models import HIDDEN, Llama, adamw, batch_of, momentum, sum_of_losses, valid
from tests.parity.styles.style import DATA, AllToAll, Reduce, exchange, style, sum_over

EXPERTS, TOP = 4, 2


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 24), nn.Linear(24, HIDDEN)

    def forward(self, x: Tensor, activation: Any = F.gelu) -> Tensor:
        return self.down(activation(self.up(x)))


class Routed(nn.Module):
    """Top-2 of four experts, and a shared expert for all tokens. `travel` sends tokens to experts on other ranks.

    `activation` is called once for each expert: fewer times on a rank with some of the experts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.shared, self.activation = Expert(), nn.GELU()
        self.balance = torch.zeros(())
        self.travel: Any = None
        self.mean: Any = lambda x: x.mean(0)
        self.wrong = ""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        scores = self.router(tokens).softmax(-1)
        weights, chosen = scores.topk(TOP, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        if self.wrong == "router_lost":
            weights = weights.detach()
        picked = F.one_hot(chosen, EXPERTS).sum(1).to(x.dtype)
        self.balance = EXPERTS * (self.mean(picked) * self.mean(scores)).sum() / TOP
        y = torch.zeros_like(tokens)
        if self.travel is not None:
            y = self.travel(self, tokens, weights, chosen)
        else:
            for i, expert in enumerate(self.experts):
                token, slot = (chosen == i).nonzero(as_tuple=True)
                y = y.index_add(0, token, expert(tokens[token], self.activation) * weights[token, slot, None])
        times = 2 if self.wrong == "shared_twice" else 1
        return (y + times * self.shared(tokens)).view_as(x)


def routed_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    loss = sum_of_losses(model(batch["input_ids"]), batch["labels"]) / valid(batch["labels"])
    return loss + 0.05 * sum(layer.feed_forward.balance for layer in model.layers)


@style(
    DATA,
    ("wrong_order", "layers.0.feed_forward", "wrong values"),
    ("weights_first", "layers.0.feed_forward", "wrong values"),
    ("next_expert", "layers.0.feed_forward", "wrong values, wrong part"),
    ("shared_twice", "layers.1.feed_forward", "wrong values, scaled"),
    ("router_lost", "layers.0.feed_forward, layers.1.feed_forward", "no gradient, wrong values"),
    ("router_twice", "layers.0.feed_forward.router, layers.1.feed_forward.router", "scaled"),
    ("router_local", "layers.0.feed_forward.router, layers.1.feed_forward.router", "missing reduction"),
    ("experts_scaled", "experts", "scaled"),
    ("experts_reduced", "experts", "scaled, wrong values, missing reduction, incomplete sum"),
    ("aux_local", "router, feed_forward", "missing reduction, wrong values"),
    ("aux_per_micro", "router, feed_forward", "accumulation, scaled, wrong values, token counts"),
    ("dispatch_detached", "layers.1.feed_forward", "wrong values, incomplete sum, missing reduction"),
    ("back_scaled", "layers.1.feed_forward, layers.0.feed_forward", "scaled, wrong values"),
    ("tokens_dropped", "layers.0.feed_forward", "wrong values"),
)
def experts(job: ParityJob, wrong: str) -> None:
    """Two experts a rank; tokens sorted by expert, exchanged, computed, and sent back."""
    job.reference(Llama(feed_forward=Routed), routed_loss, batch_of, optimizer=adamw)
    group, model = job.device_mesh.get_group("data"), job.copy()
    own = EXPERTS // 2

    def travel(block: Routed, tokens: Tensor, weights: Tensor, chosen: Tensor, first: bool) -> Tensor:
        to = (chosen + (1 if wrong == "next_expert" and first else 0)).remainder(EXPERTS).flatten()
        order = to.argsort(stable=True)
        sent = [int(((to // own) == r).sum()) for r in range(2)]
        counts = torch.stack([torch.tensor(sent), torch.zeros(2, dtype=torch.long)])[0]
        every = [torch.empty_like(counts) for _ in range(2)]
        dist.all_gather(every, counts, group=group)
        received = [int(c[job.rank]) for c in every]
        x = tokens.repeat_interleave(TOP, 0)[order]
        if wrong == "weights_first" and first:
            x = x * weights.flatten()[order][:, None]
        if wrong == "tokens_dropped" and first:
            x = torch.cat([x[:-3], torch.zeros_like(x[-3:])])
        here = AllToAll.apply(x.detach() if wrong == "dispatch_detached" and not first else x, sent, received, group)
        which = exchange(to[order].double(), sent, received, group).long()
        out = torch.zeros_like(here)
        for i in range(own):
            rows = (which == job.rank * own + i).nonzero()[:, 0]
            out = out.index_add(0, rows, block.experts[job.rank * own + i](here[rows], block.activation))
        if wrong == "back_scaled" and not first:
            out = out + (out - out.detach())
        back = AllToAll.apply(out, received, sent, group)
        place = order if wrong == "wrong_order" and first else order.argsort()
        y = back[place].unflatten(0, (-1, TOP))
        return y.sum(1) if wrong == "weights_first" and first else (y * weights[..., None]).sum(1)

    for i, layer in enumerate(model.layers):
        block = layer.feed_forward
        block.travel = lambda *arguments, first=i == 0: travel(*arguments, first=first)
        block.wrong = wrong if wrong == "router_lost" or (wrong == "shared_twice" and i == 1) else ""
        for number in range(EXPERTS):
            if number // own != job.rank:
                block.experts[number] = None
        if not wrong.startswith("aux"):
            block.mean = lambda x: Reduce.apply(x.mean(0) / 2, group, True, False, 1.0)
    optimizer = adamw(list(model.parameters()))
    micros = 2 if wrong == "aux_per_micro" else 1

    def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        count, total = sum_over(valid(batch["labels"]), group), torch.zeros(())
        for i in range(micros):
            part = {k: x.chunk(micros)[i] for k, x in batch.items()}
            loss = sum_of_losses(model(part["input_ids"]), part["labels"]) / count
            balance = 0.05 * sum(layer.feed_forward.balance for layer in model.layers) / micros
            (loss + (balance / 2 if wrong.startswith("aux") else balance)).backward()
            total = total + sum_over(loss, group) + balance.detach()
        for n, p in model.named_parameters():
            local = "experts" in n
            if wrong == "router_local" and "router" in n:
                continue
            if not local or wrong == "experts_reduced":
                dist.all_reduce(p.grad, group=group)
            if wrong == "router_twice" and "router" in n:
                p.grad *= 2
            if wrong == "experts_scaled" and local:
                p.grad /= 2
        optimizer.step()
        optimizer.zero_grad()
        return sum_over(total, group) / 2 if wrong.startswith("aux") else total

    job.parallel(model, step=step, batch=job.rows("data"))


class Bounded(nn.Module):
    """Each token is sent to the token's best expert, with at most `capacity` tokens of a row of the batch. All other
    tokens skip the experts."""

    def __init__(self, capacity: int = 3) -> None:
        super().__init__()
        self.router, self.capacity = nn.Linear(HIDDEN, EXPERTS, bias=False), capacity
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.travel: Any = None

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1)
        weight, chosen = scores.max(-1)
        hot = F.one_hot(chosen, EXPERTS)
        place = (hot.cumsum(1) * hot).sum(-1) - 1
        kept = place < self.capacity
        slots = F.one_hot(place.clamp(max=self.capacity - 1), self.capacity) * kept[..., None]
        plan = (hot[..., :, None] * slots[..., None, :]).to(x.dtype)  # [B, T, E, C]
        boxes = torch.einsum("btec,bth->ebch", plan, x)
        if self.travel is not None:
            out = self.travel(self, boxes)
        else:
            out = torch.stack([expert(box) for expert, box in zip(self.experts, boxes, strict=True)])
        return torch.einsum("btec,ebch->bth", plan, out) * weight[..., None]


@style(
    DATA,
    ("capacity_halved", "layers.0.feed_forward", "wrong values"),
    ("box_order", "layers.1.feed_forward", "wrong values"),
    ("gate_ignored", "layers.0.feed_forward", "wrong values, scaled"),
    ("experts_mean", "experts", "scaled"),
    ("router_term", "router", "missing reduction, incomplete sum"),
)
def capacity(job: ParityJob, wrong: str) -> None:
    """Boxes of equal size, exchanged by one all-to-all."""
    job.reference(
        Llama(feed_forward=Bounded),
        lambda model, batch: sum_of_losses(model(batch["input_ids"]), batch["labels"]) / valid(batch["labels"]),
        batch_of,
        optimizer=momentum,
    )
    group, model = job.device_mesh.get_group("data"), job.copy()
    own = EXPERTS // 2

    def travel(block: Bounded, boxes: Tensor, last: bool) -> Tensor:
        here = AllToAll.apply(boxes, [own, own], [own, own], group).unflatten(0, (2, own))
        out = torch.stack(
            [
                torch.stack([block.experts[job.rank * own + i](here[r, i]) for i in range(own)])
                for r in ((1, 0) if wrong == "box_order" and last else (0, 1))
            ]
        )
        return AllToAll.apply(out.flatten(0, 1), [own, own], [own, own], group)

    for i, layer in enumerate(model.layers):
        block = layer.feed_forward
        block.travel = lambda *arguments, last=i == 1: travel(*arguments, last=last)
        for number in range(EXPERTS):
            if number // own != job.rank:
                block.experts[number] = None
    first = model.layers[0].feed_forward
    if wrong == "capacity_halved":
        first.capacity = 1
    if wrong == "gate_ignored":
        first.register_forward_hook(
            lambda module, arguments, y: y / module.router(arguments[0]).softmax(-1).max(-1, True)[0]
        )
    optimizer = momentum(list(model.parameters()))

    def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        loss = sum_of_losses(model(batch["input_ids"]), batch["labels"]) / sum_over(valid(batch["labels"]), group)
        loss.backward()
        for n, p in model.named_parameters():
            if wrong == "router_term" and "router" in n:
                continue
            if "experts" not in n:
                dist.all_reduce(p.grad, group=group)
            elif wrong == "experts_mean":
                p.grad /= 2
        optimizer.step()
        optimizer.zero_grad()
        return sum_over(loss, group)

    job.parallel(model, step=step, batch=job.rows("data"))
