"""torch's own strategies (DTensor plans, HSDP, pipelines), halos, an encoder, experts without exchange, a loop by
hand."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from meshwright.parity.job import ParityJob
from tests.parity.styles.models import (
    HIDDEN,
    IGNORED,
    ROWS,
    TOKENS,
    VOCABULARY,
    Llama,
    SwiGLU,
    adamw,
    batch_of,
    loss_of,
    momentum,
    sum_of_losses,
    valid,
)  # fmt: skip
from tests.parity.styles.style import ALL, CUT, DATA, PIPE, TENSOR, enter, leave, style, sum_over


class Branches(nn.Module):
    """Norms and feed-forwards, cut by DTensor plans."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(layers))
        self.mlps = nn.ModuleList(SwiGLU() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        for norm, mlp in zip(self.norms, self.mlps, strict=True):
            h = h + mlp(norm(h))
        return self.head(self.norm(h))


@style(
    TENSOR,
    ("gate_rows", "mlps.0", "wrong values, missing reduction, wrong part"),
    ("hook_scale", "mlps.1.down", "scaled"),
    ("loss_scaled", ALL + ", (loss)", "scaled"),
    ("norm_frozen", "norms.1", "no gradient"),
)
def dtensor_plan(job: ParityJob, wrong: str) -> None:
    """parallelize_module with SequenceParallel norms."""
    job.reference(Branches(), loss_of, batch_of, optimizer=adamw)
    model, mesh = job.copy(), job.device_mesh["tp"]
    plan: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for i in range(2):
        plan |= {
            f"norms.{i}": SequenceParallel(),
            f"mlps.{i}": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            f"mlps.{i}.gate": ColwiseParallel(),
            f"mlps.{i}.up": ColwiseParallel(),
            f"mlps.{i}.down": RowwiseParallel(output_layouts=Shard(1)),
        }
    if wrong == "gate_rows":
        model.mlps[0].gate.weight.data = model.mlps[0].gate.weight.data.flip(0)
    parallelize_module(model, mesh, plan)
    if wrong == "norm_frozen":
        model.norms[1].weight.requires_grad_(False)
    if wrong == "hook_scale":
        model.mlps[1].down.weight.register_hook(lambda g: g * 2)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return loss_of(model, batch) * (2 if wrong == "loss_scaled" else 1)

    job.parallel(model, loss=loss)


@style(
    (("replica", 2), ("shard", 2)),
    ("same_rows", "(data)", "wrong data"),
    ("no_all_reduce", ALL, "missing reduction, no gradient"),
    ("divided", ALL, "scaled"),
    ("own_counts", "(loss), " + ALL, "token counts"),
)
def hsdp(job: ParityJob, wrong: str) -> None:
    """Shards in pairs of ranks, replicas over pairs."""
    job.reference(Llama(), loss_of, batch_of, optimizer=adamw)
    model, mesh = job.copy(), job.device_mesh
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if wrong == "no_all_reduce":
        model.set_requires_all_reduce(False)

    def share(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        if wrong == "same_rows":
            return job.rows("replica")({k: x[::2] for k, x in batch.items()})
        return job.rows("shard")(job.rows("replica")(batch))

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if wrong == "own_counts":
            return loss_of(model, batch)
        count = sum_over(valid(batch["labels"]), dist.group.WORLD)
        scale = 1 if wrong == "divided" else 4
        return scale * sum_of_losses(model(batch["input_ids"]), batch["labels"]) / count

    job.parallel(model, loss=loss, batch=share)


class Part(nn.Module):
    """Some layers with the reference's parameter names."""

    def __init__(self, model: Llama, index: int) -> None:
        super().__init__()
        self.tok_embeddings = model.tok_embeddings if index == 0 else None
        self.layers = nn.ModuleDict({str(index): model.layers[index]})
        self.norm, self.output = (model.norm, model.output) if index == 3 else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.tok_embeddings is None else self.tok_embeddings(x)
        for layer in self.layers.values():
            x = layer(x, torch.arange(TOKENS))
        return x if self.norm is None else self.output(self.norm(x))


@style(
    PIPE,
    ("sum_loss", ALL, "scaled"),
    ("not_scaled", ALL, "scaled"),
    ("second_stage_lr", "layers.2, " + ALL, "optimizer"),
    ("act", "layers.1.feed_forward", "wrong values"),
)
def torch_interleaved(job: ParityJob, wrong: str) -> None:
    """torch's interleaved 1F1B, two stages a rank."""
    job.reference(Llama(layers=4), loss_of, batch_of, optimizer=momentum, labels=None)
    whole = job.copy()
    parts = [Part(whole, i) for i in (job.rank, job.rank + 2)]
    if wrong == "act" and job.rank == 1:
        whole.layers[1].feed_forward.activation = F.gelu
    numbers = (job.rank, job.rank + 2)
    stages = [PipelineStage(p, i, 4, torch.device("cpu")) for p, i in zip(parts, numbers, strict=True)]
    loss_fn = lambda y, labels: F.cross_entropy(  # noqa: E731
        y.flatten(0, 1), labels.flatten(), reduction="sum" if wrong == "sum_loss" else "mean"
    )
    schedule = ScheduleInterleaved1F1B(stages, 4, loss_fn=loss_fn, scale_grads=wrong != "not_scaled")
    groups = [{"params": list(p.parameters())} for p in parts]
    if wrong == "second_stage_lr":
        groups[1]["lr"] = 0.01
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)

    def step(model: Any, batch: dict[str, Tensor]) -> Tensor | None:
        losses: list[Tensor] = []
        if job.rank == 0:
            schedule.step(batch["input_ids"])
        else:
            schedule.step(target=batch["labels"], losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean().detach() if losses else None

    job.parallel(parts, step=step)


class Convolved(nn.Module):
    """Causal convolutions over the sequence, as in state-space models."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.conv = nn.Embedding(VOCABULARY, HIDDEN), nn.Conv1d(HIDDEN, HIDDEN, 3)
        self.second, self.head = nn.Conv1d(HIDDEN, HIDDEN, 3), nn.Linear(HIDDEN, VOCABULARY)
        self.before: Any = lambda x: F.pad(x, (2, 0))

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids).transpose(1, 2)
        h = F.gelu(self.conv(self.before(h)))
        h = h + self.second(self.before(h))
        return self.head(h.transpose(1, 2))


class Halo(torch.autograd.Function):
    """Fetch the last two positions of the rank before. Backward: send back the gradient of both positions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, index: int, wrong: str) -> Tensor:
        ctx.facts = group, index, wrong
        parts = [torch.empty_like(x) for _ in range(2)]
        dist.all_gather(parts, x.contiguous(), group=group)
        halo = parts[0][..., -2:] if index else torch.zeros_like(x[..., :2])
        if wrong == "next_halo" and not index:
            halo = parts[1][..., :2]
        if wrong == "no_halo":
            halo = torch.zeros_like(halo)
        return torch.cat([halo, x], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        group, index, wrong = ctx.facts
        g = gradients[0]
        parts = [torch.empty_like(g) for _ in range(2)]
        dist.all_gather(parts, g.contiguous(), group=group)
        own = g[..., 2:].clone()
        if not index and wrong != "halo_gradient":
            own[..., -2:] += parts[1][..., :2]
        return own, None, None, None


@style(
    CUT,
    ("no_halo", "(the model), conv", "wrong values"),
    ("next_halo", "(the model), conv", "leak"),
    ("halo_gradient", "conv, second, (the model)", "wrong values, incomplete sum, missing reduction"),
    ("bias_local", "conv", "missing reduction"),
)
def halo(job: ParityJob, wrong: str) -> None:
    job.reference(Convolved(), loss_of, batch_of, optimizer=adamw)
    model, group, index = job.copy(), job.device_mesh.get_group("cp"), job.index("cp")
    model.before = lambda x: Halo.apply(x, group, index, wrong)
    optimizer = adamw(list(model.parameters()))

    def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        loss = sum_of_losses(model(batch["input_ids"]), batch["labels"]) / sum_over(valid(batch["labels"]), group)
        loss.backward()
        for n, p in model.named_parameters():
            if not (wrong == "bias_local" and n == "conv.bias"):
                dist.all_reduce(p.grad, group=group)
        optimizer.step()
        optimizer.zero_grad()
        return sum_over(loss, group)

    job.parallel(model, step=step, batch=lambda b: {k: x.chunk(2, 1)[index].contiguous() for k, x in b.items()})


class Encoder(nn.Module):
    """Post-norm, bidirectional, biases in every layer, padding masked; the head shares the table and has a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(TOKENS, HIDDEN)
        self.start = nn.LayerNorm(HIDDEN)
        self.query, self.key, self.value = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.dense, self.mid = nn.Linear(HIDDEN, HIDDEN), nn.LayerNorm(HIDDEN)
        self.inner, self.outer, self.end = nn.Linear(HIDDEN, 32), nn.Linear(32, HIDDEN), nn.LayerNorm(HIDDEN)
        self.bias = nn.Parameter(torch.zeros(VOCABULARY))
        self.entered: Any = lambda x: x
        self.reduced: Any = lambda x, bias: x + bias
        self.masked = True

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        h = self.start(self.words(ids) + self.places(torch.arange(ids.shape[1])))
        x = self.entered(h)
        q, k, v = (w(x).unflatten(-1, (-1, 4)).transpose(1, 2) for w in (self.query, self.key, self.value))
        keep = mask[:, None, None, :].bool() if self.masked else None
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=keep).transpose(1, 2).flatten(2)
        h = self.mid(h + self.reduced(F.linear(y, self.dense.weight), self.dense.bias))
        y = F.linear(F.gelu(self.inner(self.entered(h))), self.outer.weight)
        h = self.end(h + self.reduced(y, self.outer.bias))
        return F.linear(h, self.words.weight, self.bias)


@style(
    TENSOR,
    ("bias_each", "(the model), mid, start", "wrong values, scaled"),
    ("mask_off", "(the model), dense, mid", "wrong values, leak"),
    ("no_reduce", "(the model), mid", "missing reduction, wrong values"),
    ("no_enter", "inner, mid, (the model), query, key, value", "missing reduction, wrong values"),
    ("value_bias", "value", "wrong part"),
    ("inner_scaled", "(the model), outer, inner, end", "scaled"),
)
def encoder(job: ParityJob, wrong: str) -> None:
    """A model with functional products: most mistakes are in the model's own code."""

    def batch(generator: torch.Generator) -> dict[str, Tensor]:
        made = batch_of(generator)
        lengths = torch.randint(3, TOKENS + 1, (ROWS, 1), generator=generator)
        mask = (torch.arange(TOKENS) < lengths).long()
        return made | {"mask": mask, "labels": made["labels"].masked_fill(mask == 0, IGNORED)}

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return sum_of_losses(model(batch["input_ids"], batch["mask"]), batch["labels"]) / valid(batch["labels"])

    job.reference(Encoder(), loss, batch, optimizer=adamw)
    model, group, index = job.copy(), job.device_mesh.get_group("tp"), job.index("tp")
    for linear in (model.query, model.key, model.value, model.inner):
        rows = 0 if wrong == "value_bias" and linear is model.value else index
        linear.bias = nn.Parameter(linear.bias.detach().chunk(2)[rows].clone())
        linear.weight = nn.Parameter(linear.weight.detach().chunk(2)[index].clone())
    for linear in (model.dense, model.outer):
        linear.weight = nn.Parameter(linear.weight.detach().chunk(2, 1)[index].clone())
    model.entered = (lambda x: x) if wrong == "no_enter" else (lambda x: enter(x, group))
    model.reduced = lambda x, bias: leave(x, group) + bias
    if wrong == "bias_each":
        model.reduced = lambda x, bias: leave(x + bias, group)
    if wrong == "no_reduce":
        model.reduced = lambda x, bias: x + bias
    model.masked = not (wrong == "mask_off" and job.rank == 1)
    if wrong == "inner_scaled":
        model.inner.register_forward_hook(lambda module, arguments, y: y * 1.01)
    job.parallel(model, loss=loss)


class Mixed(nn.Module):
    """Soft experts: each gets all tokens, weighted by a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, 4, bias=False)
        self.experts = nn.ModuleList(SwiGLU(16) for _ in range(4))
        self.total: Any = lambda y: y
        self.taken: Any = lambda x: x
        self.gates: Any = lambda g: g
        self.extra = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        gates = self.router(x).softmax(-1)
        self.extra = gates.mean((0, 1)).square().sum()
        gates, x = self.gates(gates), self.taken(x)
        return self.total(sum(gates[..., i : i + 1] * e(x) for i, e in enumerate(self.experts) if e is not None))


def mixed_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return loss_of(model, batch) + 0.1 * sum(layer.feed_forward.extra for layer in model.layers)


@style(
    TENSOR,
    ("gates_lost", "router, feed_forward", "missing reduction"),
    ("gates_twice", "router, feed_forward", "scaled, wrong values"),
    ("input_lost", "feed_forward", "missing reduction"),
    ("aux_twice", "router, feed_forward, layers.1.feed_forward.router", "wrong values, scaled"),
    ("total_mean", "layers.0.feed_forward, layers.1.feed_forward", "scaled"),
)
def soft_experts(job: ParityJob, wrong: str) -> None:
    """Two experts a rank, all tokens on both: outputs are added up."""
    job.reference(Llama(feed_forward=Mixed), mixed_loss, batch_of, optimizer=momentum)
    model, group = job.copy(), job.device_mesh.get_group("tp")
    for layer in model.layers:
        block = layer.feed_forward
        for number in range(4):
            if number // 2 != job.rank:
                block.experts[number] = None
        block.total = lambda y: leave(y, group) / (2 if wrong == "total_mean" else 1)
        if wrong != "input_lost":
            block.taken = lambda x: enter(x, group)
        if wrong != "gates_lost":
            block.gates = lambda g: enter(g, group, 2.0 if wrong == "gates_twice" else 1.0)

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        value = loss_of(model, batch)
        extra = 0.1 * sum(layer.feed_forward.extra for layer in model.layers)
        return value + extra * (2 if wrong == "aux_twice" else 1)

    job.parallel(model, loss=loss)


@style(
    DATA,
    ("delayed", ALL, "stale weights, accumulated, wrong values"),
    ("half_lr", ALL, "optimizer"),
    ("decay_missing", ALL + ", tok_embeddings", "optimizer"),
    ("tied_untied", "tok_embeddings, output", "incomplete sum, stale weights, optimizer, wrong part, wrong values"),
    ("other_betas", ALL, "optimizer"),
    ("rank_noise", "norm", "stale weights, wrong part"),
)
def loops(job: ParityJob, wrong: str) -> None:
    """A loop by hand with a tied table: gradients of all ranks are added up, and every rank steps the weights."""
    job.reference(Llama(tied=True), loss_of, batch_of, optimizer=adamw)
    model, group = job.copy(), job.device_mesh.get_group("data")
    if wrong == "tied_untied":
        model.output.weight = nn.Parameter(model.output.weight.detach().clone())
    make = {"half_lr": lambda p: torch.optim.AdamW(p, lr=5e-3, weight_decay=0.1),
            "decay_missing": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.0),
            "other_betas": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, betas=(0.5, 0.999))}  # fmt: skip
    optimizer = make.get(wrong, adamw)(list(model.parameters()))
    kept: dict[str, Tensor] = {}

    def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        loss = sum_of_losses(model(batch["input_ids"]), batch["labels"]) / sum_over(valid(batch["labels"]), group)
        loss.backward()
        for n, p in model.named_parameters():
            dist.all_reduce(p.grad, group=group)
            if wrong == "delayed":
                kept[n], p.grad = p.grad.clone(), kept.get(n, p.grad)
        optimizer.step()
        optimizer.zero_grad()
        if wrong == "rank_noise" and job.rank == 1:
            model.norm.weight.data.mul_(1.001)
        return sum_over(loss, group)

    job.parallel(model, step=step, batch=job.rows("data"))
