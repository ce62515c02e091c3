"""Sums with a term lost, twice or rounded; states by owners; causes hidden by a later norm; moving buffers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from meshwright.parity.job import ParityJob
from tests.parity.styles.models import Llama, adamw, batch_of, loss_of
from tests.parity.styles.style import ALL, DATA, Reduce, enter, leave, style, sum_over

FOUR = (("tp", 4),)


def rows_of(generator: torch.Generator) -> dict[str, Tensor]:
    return {"x": torch.randn(8, 6, generator=generator), "y": torch.randn(8, 4, generator=generator)}


def square_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return (model(batch["x"]) - batch["y"]).square().mean()


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 4))


def averaged(parameters: Any, group: Any, but: Tensor | None = None) -> None:
    """Average gradients over a group, except the gradient of `but`."""
    for p in parameters:
        if p is not but and p.grad is not None:
            p.grad = sum_over(p.grad, group) / dist.get_world_size(group)


def stepping(
    optimizer: torch.optim.Optimizer, reduce: Callable[[], object], group: Any = None, loss: Any = square_loss
) -> Callable[[Any, Any], Tensor]:
    """Return a step: forward, backward, `reduce`, the optimizer. The step returns the mean of both ranks' losses."""

    def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        value = loss(model, batch)
        value.backward()
        reduce()
        optimizer.step()
        optimizer.zero_grad()
        return sum_over(value, group) / 2

    return step


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch.distributed.optim makes scripts, which torch deprecates
    from torch.distributed.optim import ZeroRedundancyOptimizer


@style(DATA, ("not_averaged", ALL, "missing reduction, stale weights"))
def owners(job: ParityJob, wrong: str) -> None:
    """torch's ZeroRedundancyOptimizer: the owner alone has the states of a parameter."""
    job.reference(network(), square_loss, rows_of, optimizer=adamw)
    model = job.copy() if wrong else DistributedDataParallel(job.copy())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
    job.parallel(model, step=stepping(optimizer, lambda: None), batch=job.rows("data"))


class Momentum(torch.optim.Optimizer):
    """Momentum of the parameters of this owner, which then sends the weights."""

    def __init__(self, parameters: Any, group: Any, wrong: str) -> None:
        super().__init__(parameters, {"lr": 0.05})
        self.group, self.wrong = group, wrong

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for number, p in enumerate(self.param_groups[0]["params"]):
            owner = number % dist.get_world_size(self.group)
            if owner == dist.get_rank(self.group):
                moment = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                moment.mul_(0.9 if self.wrong != "decay" else 0.8).add_(p.grad)
                p.add_(moment, alpha=-self.param_groups[0]["lr"])
            if self.wrong != "not_sent" or number != 2:
                dist.broadcast(p, owner, self.group)


@style(DATA, ("not_sent", "2", "stale weights"), ("decay", ALL, "optimizer"))
def momentum_by_owners(job: ParityJob, wrong: str) -> None:
    """Each parameter has one owner, which steps the parameter by hand and broadcasts the weights."""
    job.reference(network(), square_loss, rows_of, optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9))
    model, group = job.copy(), job.device_mesh.get_group("data")
    step = stepping(Momentum(list(model.parameters()), group, wrong), lambda: averaged(model.parameters(), group))
    job.parallel(model, step=step, batch=job.rows("data"))


@style(
    DATA,
    ("local", "0", "missing reduction"),
    ("scaled", "2", "scaled"),
    ("thawed", "0", "optimizer"),
    ("norm_local", ALL, "clipping"),
)
def clipped(job: ParityJob, wrong: str) -> None:
    """Clipping by the norm of all gradients, one of them wrong; the first bias is frozen."""
    model = network()
    model[0].bias.requires_grad_(False)
    job.reference(model, square_loss, rows_of, clip=0.1)
    model, group = job.copy(), job.device_mesh.get_group("data")
    if wrong == "thawed":
        model[0].bias.requires_grad_(True)

    def reduce() -> None:
        averaged(model.parameters(), group, model[0].weight if wrong == "local" else None)
        if wrong == "scaled":
            model[2].bias.grad *= 2
        counted = model[2] if wrong == "norm_local" else model
        nn.utils.clip_grad_norm_(counted.parameters(), 0.1)

    step = stepping(torch.optim.SGD(model.parameters(), lr=0.1), reduce)
    job.parallel(model, step=step, batch=job.rows("data"))


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class RowParallel(nn.Module):
    """A linear of some inputs; the product is added up over a group."""

    def __init__(self, whole: nn.Linear, own: slice, group: Any, wrong: str) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(whole.weight[:, own].clone()), nn.Parameter(whole.bias.clone())
        self.group, self.wrong = group, wrong

    def forward(self, x: Tensor) -> Tensor:
        rank, y = dist.get_rank(self.group), x @ self.weight.T
        times = {("lost", 0): 0, ("twice", 1): 2}.get((self.wrong, rank), 1)
        y = y.detach() if (self.wrong, rank) == ("detached", 2) else y * times
        y = y.bfloat16().to(y) if self.wrong == "rounded" else y
        return leave(y, self.group) + self.bias


class Pair(nn.Module):
    """A linear cut by the outputs and a linear cut by the inputs."""

    def __init__(self, whole: Named, group: Any, wrong: str) -> None:
        super().__init__()
        rank, width = dist.get_rank(group), whole.up.out_features // dist.get_world_size(group)
        own = slice(rank * width, (rank + 1) * width)
        self.up, self.act, self.group = nn.Linear(6, width), nn.GELU(), group
        self.up.weight, self.up.bias = (nn.Parameter(p[own].clone()) for p in (whole.up.weight, whole.up.bias))
        self.down = RowParallel(whole.down, own, group, wrong)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(enter(x, self.group))))


@style(
    FOUR,
    ("lost", "down", "incomplete sum"),
    ("twice", "down", "incomplete sum, scaled"),
    ("detached", "down", "incomplete sum, no gradient"),
    ("rounded", "down", "lower precision"),
)
def row_parallel(job: ParityJob, wrong: str) -> None:
    """A sum over four ranks of products of one linear's inputs."""
    job.reference(Named(), square_loss, rows_of)
    job.parallel(Pair(job.copy(), job.device_mesh.get_group("tp"), wrong))


@style(
    DATA,
    ("own_statistics", ALL + ", (loss)", "missing reduction"),
    ("own_deviation", ALL + ", (loss)", "missing reduction, wrong values"),
)
def policy(job: ParityJob, wrong: str) -> None:
    """A policy gradient with rewards relative to the rewards of all samples. There are no labels."""

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        r = batch["y"].sum(1)
        return (model(batch["x"]).sum(1) * (r - r.mean()) / r.std()).mean()

    job.reference(network(), loss, rows_of)
    model, group = job.copy(), job.device_mesh.get_group("data")

    def share_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        r, x = batch["y"].sum(1), model(batch["x"]).sum(1)
        n = 2 * len(r)
        mean = sum_over(r.sum(), group) / n
        deviation = (sum_over((r - mean).square().sum(), group) / (n - 1)).sqrt()
        if wrong == "own_statistics":
            mean = r.mean()
        if wrong:
            deviation = r.std()
        return (x * (r - mean) / deviation).mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = stepping(optimizer, lambda: averaged(model.parameters(), group), loss=share_loss)
    job.parallel(model, step=step, batch=job.rows("data"))


class Gained(nn.Module):
    """A model with a parameter at the top level."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gain = nn.Linear(6, 4), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.gain


@style(DATA, ("local", "(the model)", "missing reduction"), ("twice", "(the model)", "scaled"))
def top_level(job: ParityJob, wrong: str) -> None:
    job.reference(Gained(), square_loss, rows_of)
    model, group = job.copy(), job.device_mesh.get_group("data")

    def reduce() -> None:
        averaged(model.parameters(), group, model.gain if wrong == "local" else None)
        if wrong == "twice":
            model.gain.grad *= 2

    job.parallel(model, step=stepping(torch.optim.SGD(model.parameters(), lr=0.1), reduce), batch=job.rows("data"))


class Routed(nn.Module):
    """Two experts and a bias of the router. Counts move the bias in each pass; no gradient does."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 2, bias=False)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.register_buffer("bias", torch.zeros(2))
        self.group: Any = None

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x)
        chosen = F.one_hot((scores + self.bias).argmax(-1), 2).to(x)
        counts = chosen.detach().flatten(0, -2).sum(0)
        if self.group is not None:
            counts = sum_over(counts, self.group)
        self.bias += 5.0 * (counts.mean() - counts).sign()
        mixed = chosen * scores.sigmoid()
        return sum(expert(x) * mixed[..., e : e + 1] for e, expert in enumerate(self.experts))  # type: ignore[return-value]


@style(DATA, ("gates", "layers.0.feed_forward", "wrong values, scaled"))
def moving_bias(job: ParityJob, wrong: str) -> None:
    """A router's bias that each pass moves; the planted mistake is not reported as a leak."""
    job.reference(Llama(feed_forward=Routed), loss_of, batch_of)
    model, group = job.copy(), job.device_mesh.get_group("data")
    for layer in model.layers:
        layer.feed_forward.group = group
    if wrong == "gates":
        moe = model.layers[0].feed_forward
        moe.router.register_forward_hook(lambda m, a, y: y + 0.3 * y.sin())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        count = sum_over((batch["labels"] != -100).sum(), group)
        loss = loss_of(model, batch) * (batch["labels"] != -100).sum() / count
        loss.backward()
        for p in model.parameters():
            p.grad = sum_over(torch.zeros_like(p) if p.grad is None else p.grad, group)
        optimizer.step()
        optimizer.zero_grad()
        return sum_over(loss, group)

    job.parallel(model, step=step, batch=job.rows("data"))


class Cut(torch.autograd.Function):
    """Copy forward, and lose the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return torch.zeros_like(gradients[0])


class Once(nn.Linear):
    """A linear with a weight that may get no gradient in a pass."""

    lost = False

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, Cut.apply(self.weight) if self.lost else self.weight, self.bias)


class Positions(nn.Module):
    """A linear over the positions of a sequence, in a network."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.last = nn.Linear(6, 10), nn.GELU(), Once(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.act(self.first(x)))


def sequence_of(generator: torch.Generator) -> dict[str, Tensor]:
    return {"x": torch.randn(4, 8, 6, generator=generator), "y": torch.randn(4, 8, 4, generator=generator)}


@style((("cp", 2),), ("piece", "first, last", "incomplete sum"), ("piece_lost", ALL + ", (loss)", "incomplete sum"))
def pieces(job: ParityJob, wrong: str) -> None:
    """A sequence over two ranks, each in two pieces one after the other."""
    job.reference(Positions(), square_loss, sequence_of)
    model, group = job.copy(), job.device_mesh.get_group("cp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def share(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {key: x.chunk(2, 1)[job.index("cp")] for key, x in batch.items()}

    def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        total = torch.zeros(())
        for i in range(2):
            x, y = (batch[key].chunk(2, 1)[i] for key in ("x", "y"))
            model.last.lost = wrong == "piece" and i == 1 and job.rank == 1
            loss = (model(x) - y).square().mean() / 4
            if wrong == "piece_lost" and i == 1 and job.rank == 1:
                loss = loss * 0
            loss.backward()
            total += loss.detach()
        for p in model.parameters():
            p.grad = sum_over(torch.zeros_like(p) if p.grad is None else p.grad, group)
        optimizer.step()
        optimizer.zero_grad()
        return sum_over(total, group)

    job.parallel(model, step=step, batch=share)


class Thrice(nn.Module):
    """A table with one look-up and two products."""

    def __init__(self, lost: int = -1) -> None:
        super().__init__()
        self.table, self.mix = nn.Embedding(12, 8), nn.Linear(8, 8)
        self.lost = lost

    def forward(self, ids: Tensor) -> Tensor:
        uses = [Cut.apply(self.table.weight) if i == self.lost else self.table.weight for i in range(3)]
        h = self.mix(F.embedding(ids, uses[0])).tanh()
        h = F.linear(F.linear(h, uses[1]).softmax(-1), uses[1].T)
        return F.linear(h, uses[2])


def ids_and_labels(generator: torch.Generator) -> dict[str, Tensor]:
    draw = lambda: torch.randint(0, 12, (4, 6), generator=generator)  # noqa: E731
    return {"input_ids": draw(), "labels": draw()}


@style(DATA, ("first", "table", "incomplete sum"), ("third", "table", "incomplete sum"))
def used_thrice(job: ParityJob, wrong: str) -> None:
    """One weight in several functional uses, one of them without a gradient."""

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())

    job.reference(Thrice(), loss, ids_and_labels, labels=None)
    model, group = job.copy(), job.device_mesh.get_group("data")
    model.lost = {"first": 0, "third": 2}.get(wrong, -1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = stepping(optimizer, lambda: averaged(model.parameters(), group), loss=loss)
    job.parallel(model, step=step, batch=job.rows("data"))


@style(DATA, ("lost", "2", "incomplete sum, missing reduction"), ("bf16", ALL, "lower precision"))
def sums_in_transit(job: ParityJob, wrong: str) -> None:
    """Gradients that are rounded before the sum, or a sum without one rank's term."""
    job.reference(network(), square_loss, rows_of)
    model, group = job.copy(), job.device_mesh.get_group("data")

    def reduce() -> None:
        for p in model.parameters():
            own = p.grad.bfloat16().to(p) if wrong == "bf16" else p.grad
            if wrong == "lost" and p is model[2].weight and job.rank == 1:
                own = torch.zeros_like(own)
            p.grad = sum_over(own, group) / 2

    job.parallel(model, step=stepping(torch.optim.SGD(model.parameters(), lr=0.1), reduce), batch=job.rows("data"))


@style(
    DATA,
    ("rounded", "projection, (the model), (loss)", "lower precision"),
    ("own_features", ALL + ", (loss), (the model), projection", "missing reduction, wrong values"),
)
def contrastive(job: ParityJob, wrong: str) -> None:
    """Features of all ranks are gathered, and each is compared with all others."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.projection = nn.Linear(6, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.projection(self.body(x).tanh())

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        a, b = model(batch["x"]), batch["y"]
        return F.cross_entropy(a @ b.T, torch.arange(len(a)))

    job.reference(Encoder(), loss, rows_of, labels=None)
    model, group = job.copy(), job.device_mesh.get_group("data")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def gathered(x: Tensor) -> Tensor:
        whole = torch.zeros(2, *x.shape, dtype=x.dtype)
        whole[job.rank] = 1
        return Reduce.apply(whole * x, group, True, True, 1.0).flatten(0, 1)

    def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        features = model(batch["x"])
        if wrong == "rounded":
            features = features + (features.bfloat16().to(features) - features).detach()
        a, b = (x if wrong == "own_features" else gathered(x) for x in (features, batch["y"]))
        value = F.cross_entropy(a @ b.T, torch.arange(len(a)))
        (value / 2).backward()
        for p in model.parameters():
            p.grad = sum_over(p.grad, group)
        optimizer.step()
        optimizer.zero_grad()
        return value

    job.parallel(model, step=step, batch=job.rows("data"))
