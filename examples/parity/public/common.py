"""Differentiable sums over a group and a step with plain SGD, for the programs in this folder."""

import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class SumBackward(torch.autograd.Function):
    """Copy in the forward pass, sum over a group in the backward pass: in front of weights cut by columns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return summed(gradients[0], ctx.group), None


class SumForward(torch.autograd.Function):
    """Sum over a group in the forward pass, copy in the backward pass: after weights cut by rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        return summed(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


class Gathered(torch.autograd.Function):
    """All positions of a sequence cut over a group; backward: this rank's positions of the ranks' sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return gathered(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return own_positions(summed(gradients[0], ctx.group), ctx.group), None


class Scattered(torch.autograd.Function):
    """This rank's positions of the ranks' sum; backward: the gradients of all positions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return own_positions(summed(x, group), group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gathered(gradients[0], ctx.group), None


def gathered(x: Tensor, group: Any) -> Tensor:
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2)]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, 1)


def own_positions(x: Tensor, group: Any) -> Tensor:
    """Return the half of [rows, positions, ...] that belongs to this rank in a group of two."""
    return x.chunk(2, 1)[dist.get_rank(group)].contiguous()


def summed(x: Tensor, group: Any) -> Tensor:
    x = x.clone()
    dist.all_reduce(x, group=group)
    return x


def own(weight: Tensor, rank: int, dim: int = 0) -> torch.nn.Parameter:
    """Return this rank's half of a weight."""
    return torch.nn.Parameter(weight.detach().chunk(2, dim)[rank].clone())


def real_batch(generator: torch.Generator) -> Tensor:
    """Draw inputs [rows, positions, width]."""
    return torch.randn(4, 6, 16, generator=generator)


def word_batch(generator: torch.Generator) -> dict[str, Tensor]:
    """Draw words and labels below 16, [rows, positions] each."""
    return {name: torch.randint(0, 16, (4, 8), generator=generator) for name in ("ids", "labels")}


def squares(model: Any, batch: Tensor) -> Tensor:
    """Return the mean square of the output."""
    return model(batch).square().mean()


def sgd_step(model: Any, loss_of: Any, reduce: Any = lambda: None) -> Any:
    """Return a step of plain SGD that calls `reduce` between the backward pass and the update."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model: Any, batch: Any) -> Tensor:
        loss = loss_of(model, batch)
        loss.backward()
        reduce()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def clipped(parameters: Any, square: Tensor, clip: float) -> None:
    """Scale gradients down to the norm `clip`; `square` is the sum of squares."""
    scale = min(1.0, clip / (float(square.sqrt()) + 1e-6))
    for p in parameters:
        p.grad *= scale


def averaged(model: Any, group: Any) -> None:
    """Average gradients over a group of two."""
    for p in model.parameters():
        dist.all_reduce(p.grad, group=group)
        p.grad /= 2


def averaged_by_axes(model: Any, job: Any, cut: str | tuple[()] = ()) -> None:
    """Average over four ranks, two of "data" by two of "tp"; names that start with `cut`: cut over "tp"."""
    for name, p in model.named_parameters():
        dist.all_reduce(p.grad, group=job.device_mesh.get_group("data") if name.startswith(cut) else None)
        p.grad /= 4


def square_of(parameters: Any) -> Tensor:
    """Return the sum of squares of these parameters' gradients on this rank."""
    return torch.stack([p.grad.square().sum() for p in parameters]).sum()


class Routed(torch.nn.Module):
    """The sum of two experts, each times a score. Set `here` to compute one expert per rank."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.gate = torch.nn.Linear(16, 16), torch.nn.Linear(16, 2, bias=False)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(2))
        self.here: Any = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        scores = self.gate(x).softmax(-1)
        if self.here is not None:
            return self.here(x, scores)
        return sum(scores[..., [i]] * expert(x) for i, expert in enumerate(self.experts))


def on_own_rank(job: Any) -> tuple[Any, Any, Any]:
    """Copy Routed with this rank's expert alone; return the model, the expert and the ranks' group."""
    model, group = job.copy(), job.device_mesh.get_group("ep")
    mine = model.experts[job.rank]
    model.experts[1 - job.rank] = None

    def here(x: Tensor, scores: Tensor) -> Tensor:
        x, scores = SumBackward.apply(x, group), SumBackward.apply(scores, group)
        return SumForward.apply(scores[..., [job.rank]] * mine(x), group)

    model.here = here
    return model, mine, group


class Expert(torch.nn.Module):
    """Two linear layers and a bias after the second."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (torch.nn.Linear(16, 16, bias=False) for _ in range(2))
        self.bias = torch.nn.Parameter(torch.randn(16))
        self.enter: Any = lambda x: x
        self.leave: Any = lambda x, bias: x + bias

    def forward(self, x: Tensor) -> Tensor:
        return x + self.leave(self.down(self.up(self.enter(x)).relu()), self.bias)


def cut_expert(job: Any, term: Any) -> None:
    """Cut Expert over two ranks; `term(x, bias, group)` is a rank's term of the sum that leaves the expert."""
    job.reference(torch.nn.Sequential(torch.nn.Linear(16, 16), Expert()), loss=squares, batch=real_batch)
    model, group = job.copy(), job.device_mesh.get_group("tp")
    expert = model[1]
    expert.up.weight, expert.down.weight = own(expert.up.weight, job.rank), own(expert.down.weight, job.rank, 1)
    expert.enter = lambda x: SumBackward.apply(x, group)
    expert.leave = lambda x, bias: SumForward.apply(term(x, bias, group), group)
    job.parallel(model, step=sgd_step(model, squares))


def share_of(bias: Tensor) -> Tensor:
    """Return half of the bias, with the gradient of the whole bias."""
    return bias + (bias / 2 - bias).detach()


class Muon(torch.optim.Optimizer):
    """Muon: a matrix's step is the momentum with all singular values 1 (by an exact SVD); other weights: plain SGD."""

    def __init__(self, parameters: Any, lr: float = 0.02) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(self.update(p, p.grad), alpha=group["lr"])

    def update(self, p: Tensor, gradient: Tensor) -> Tensor:
        if p.dim() < 2:
            return gradient
        momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
        momentum.mul_(0.9).add_(gradient)
        return orthogonal(momentum)


def orthogonal(x: Tensor) -> Tensor:
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    return u @ v


def planned(job: Any, rules: Any = "auto", converted: bool = True, **sizes: Any) -> Any:
    """Read the reference by transformers with a tensor plan over all ranks. `rules` change, `sizes` replace the plan.
    `converted`: save in the published form of the weights, which reading converts."""
    # Imported here: most programs need no transformers.
    from transformers.distributed import DistributedConfig

    folder = [tempfile.mkdtemp() if job.rank == 0 else ""]
    dist.broadcast_object_list(folder)
    if job.rank == 0:
        job.copy().save_pretrained(folder[0], save_original_format=converted)
    dist.barrier()
    plan = DistributedConfig(**(sizes or {"tp_size": job.world_size, "tp_plan": rules}))
    return type(job.copy()).from_pretrained(folder[0], distributed_config=plan, attn_implementation="eager").train()


def next_words(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return a language model's mean cross entropy of the next words."""
    logits = model(input_ids=batch["ids"], use_cache=False).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["ids"][:, 1:].flatten())
