"""Common styles of data parallelism: DDP with accumulation, hooks, ZeRO by hand, FSDP2, batch norm, schedulers."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from meshwright import parity
from meshwright.parity.job import ParityJob
from tests.parity.styles.models import IGNORED, Llama, adamw, batch_of, loss_of, momentum, sum_of_losses, valid
from tests.parity.styles.style import ALL, DATA, style, sum_over


@style(
    DATA,
    ("report_means", "(loss)", "token counts, scaled"),
    ("last_microbatch", ALL, "incomplete sum, accumulation"),
    ("two_steps", ALL, "optimizer"),
    ("labels_rolled", "(data)", "wrong data"),
    ("inputs_rolled", "(data)", "wrong data"),
    ("micro_scale", ALL, "scaled"),
    ("sync_first", ALL, "missing reduction"),
    ("mean_of_micro", "(loss), " + ALL, "token counts, accumulation"),
)
def ddp_accumulate(job: ParityJob, wrong: str) -> None:
    """Four microbatches, three under no_sync; the loss is over all ranks' labels."""
    job.reference(Llama(), loss_of, batch_of, optimizer=adamw)
    model = DistributedDataParallel(job.copy())
    optimizer = adamw(list(model.parameters()))
    group = job.device_mesh.get_group("data")

    def share(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        batch = dict(job.rows("data")(batch))
        if wrong in ("labels_rolled", "inputs_rolled"):
            key = "labels" if wrong == "labels_rolled" else "input_ids"
            batch[key] = batch[key].roll(1, 0).roll(1, 1)
        return batch

    def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        count = sum_over(valid(batch["labels"]), group)
        total, own = torch.zeros(()), torch.zeros(())
        for i in range(4):
            part = {k: x.chunk(4)[i] for k, x in batch.items()}
            synced = i == (0 if wrong == "sync_first" else 3)
            with nullcontext() if synced else model.no_sync():
                value = sum_of_losses(model(part["input_ids"]), part["labels"])
                scale = 2 / count * (4 if wrong == "micro_scale" else 1)
                if wrong == "mean_of_micro":
                    scale = 1 / (4 * valid(part["labels"]).clamp(min=1))
                (value * scale).backward()
            total, own = total + value.detach() / count, own + value.detach()
            if wrong == "last_microbatch" and i < 3:
                optimizer.zero_grad()
            if wrong == "two_steps" and i == 1:
                for p in model.parameters():
                    dist.all_reduce(p.grad)
                    p.grad /= 2
                optimizer.step()
        optimizer.step()
        optimizer.zero_grad()
        if wrong == "report_means":
            return sum_over(own / valid(batch["labels"]), group) / 2
        return sum_over(total, group)

    job.parallel(model, step=step, batch=share)


@style(
    DATA,
    ("fp16", ALL, "lower precision"),
    ("bf16", ALL, "lower precision"),
    ("float32", ALL, "lower precision"),
    ("bf16_one", "output", "lower precision"),
    ("own_mean", "(loss)", "token counts"),
)
def ddp_hook(job: ParityJob, wrong: str) -> None:
    """DDP's communication hooks, and gradients that are sent in a narrower dtype."""
    job.reference(Llama(), loss_of, batch_of, optimizer=momentum)
    model, group = DistributedDataParallel(job.copy()), job.device_mesh.get_group("data")

    def narrow(dtype, bucket):  # torch reads the annotations of hooks, and accepts torch's own alone
        x = (bucket.buffer() / 2).to(dtype)
        future = dist.all_reduce(x, group=group, async_op=True).get_future()
        return future.then(lambda f: bucket.buffer().copy_(f.value()[0]))

    if wrong == "fp16":
        model.register_comm_hook(group, default_hooks.fp16_compress_hook)
    if wrong in ("bf16", "float32"):
        model.register_comm_hook(torch.bfloat16 if wrong == "bf16" else torch.float32, narrow)
    if wrong == "bf16_one":
        model.module.output.weight.register_hook(lambda g: g.to(torch.bfloat16).to(g.dtype))

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if wrong == "own_mean":
            return loss_of(model, batch)
        count = sum_over(valid(batch["labels"]), group)
        return 2 * sum_of_losses(model(batch["input_ids"]), batch["labels"]) / count

    job.parallel(model, loss=loss, batch=job.rows("data"))


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 6, 3, padding=1), Norm(6)
        self.second, self.norm2, self.head = nn.Conv2d(6, 6, 3), Norm(6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(x)))
        return self.head(F.relu(self.norm2(self.second(x))).mean((2, 3)))


class Norm(nn.Module):
    """Batch norm with sums through `total`; the running statistics cover the whole batch."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))
        self.total: Any = lambda x: x
        self.kept: Any = lambda own, whole: whole
        self.ranks = 1

    def forward(self, x: Tensor) -> Tensor:
        n = x.numel() // x.shape[1] * self.ranks
        mean = self.total(x.sum((0, 2, 3))) / n
        var = self.total((x - mean[:, None, None]).square().sum((0, 2, 3))) / n
        with torch.no_grad():
            self.running_mean.lerp_(self.kept(x.mean((0, 2, 3)), mean.detach()), 0.1)
            self.running_var.lerp_(self.kept(x.var((0, 2, 3)), var.detach() * n / (n - 1)), 0.1)
        y = (x - mean[:, None, None]) * torch.rsqrt(var + 1e-5)[:, None, None]
        return y * self.weight[:, None, None] + self.bias[:, None, None]


@style(
    DATA,
    ("running", "norm, norm2", "wrong buffer"),
    ("local_statistics", "norm", "wrong values"),
    ("not_differentiable", "norm2", "wrong values, missing reduction"),
)
def batch_norm(job: ParityJob, wrong: str) -> None:
    def images(generator: torch.Generator) -> dict[str, Tensor]:
        return {"images": torch.randn(8, 3, 6, 6, generator=generator),
                "labels": torch.randint(0, 5, (8,), generator=generator)}  # fmt: skip

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["images"]), batch["labels"], ignore_index=IGNORED)

    job.reference(Images(), loss, images, optimizer=momentum)
    model, group = job.copy(), job.device_mesh.get_group("data")

    class Total(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return sum_over(x, group)

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            return gradients[0] if wrong == "not_differentiable" else sum_over(gradients[0], group)

    for norm in (model.norm, model.norm2):
        if wrong != "local_statistics":
            norm.total, norm.ranks = Total.apply, 2
        if wrong == "running":
            norm.kept = lambda own, whole: own

    def summed(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        count = sum_over(valid(batch["labels"]), group)
        value = F.cross_entropy(model(batch["images"]), batch["labels"], ignore_index=IGNORED, reduction="sum")
        return value * 2 / count

    optimizer = momentum(list(model.parameters()))

    def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        value = summed(model, batch)
        value.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)
            p.grad /= 2
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    job.parallel(model, step=step, batch=job.rows("data"))


@style(
    DATA,
    ("divided_before_clip", ALL, "clipping"),
    ("no_clip", ALL, "clipping"),
    ("first_only", ALL, "incomplete sum, accumulation"),
    ("not_zeroed", ALL, "accumulated"),
)
def fsdp_accumulate(job: ParityJob, wrong: str) -> None:
    """FSDP2, two microbatches, clipping by torch."""
    job.reference(Llama(), loss_of, batch_of, optimizer=adamw, clip=0.1)
    model, mesh = job.copy(), job.device_mesh
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = adamw(list(model.parameters()))

    def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        count = sum_over(valid(batch["labels"]), mesh.get_group())
        total = torch.zeros(())
        for i in range(2):
            part = {k: x.chunk(2)[i] for k, x in batch.items()}
            loss = 2 * sum_of_losses(model(part["input_ids"]), part["labels"]) / count
            (loss / 16 if wrong == "divided_before_clip" else loss).backward()
            total = total + loss.detach() / 2
            if wrong == "first_only" and i == 0:
                kept = [p.grad.clone() for p in model.parameters()]
        if wrong == "first_only":
            for p, g in zip(model.parameters(), kept, strict=True):
                p.grad = g
        if wrong != "no_clip":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        if wrong != "not_zeroed":
            optimizer.zero_grad()
        return sum_over(total, mesh.get_group())

    job.parallel(model, step=step, batch=job.rows("data"))


POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@style(
    DATA,
    ("labels_shift", "(data)", "wrong data"),
    ("sum_for_mean", ALL, "scaled"),
    ("no_reduce", ALL, "missing reduction, no gradient"),
    precision="own",
)
def fsdp_policy(job: ParityJob, wrong: str) -> None:
    """FSDP2's mixed precision, unchanged."""
    job.reference(Llama(), parity.cast_like(POLICY, loss_of), batch_of, optimizer=momentum)
    model, mesh = job.copy(), job.device_mesh
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=POLICY)
    fully_shard(model, mesh=mesh, mp_policy=POLICY)
    if wrong == "no_reduce":
        model.set_requires_gradient_sync(False)

    def share(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        batch = dict(job.rows("data")(batch))
        return batch | ({"labels": batch["labels"].roll(1, 1)} if wrong == "labels_shift" else {})

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        count = sum_over(valid(batch["labels"]), mesh.get_group())
        factor = 4 if wrong == "sum_for_mean" else 2
        return factor * sum_of_losses(model(batch["input_ids"]), batch["labels"]) / count

    job.parallel(model, loss=loss, batch=share)


def warm(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


@style(
    DATA,
    ("scheduler_per_microbatch", ALL, "optimizer"),
    ("scheduler_never", ALL, "optimizer"),
    ("scheduler_one_rank", ALL + ", tok_embeddings", "optimizer, stale weights"),
)
def scheduled(job: ParityJob, wrong: str) -> None:
    """A learning rate that falls with each step; the table is frozen."""
    whole = Llama()
    whole.tok_embeddings.requires_grad_(False)
    job.reference(whole, loss_of, batch_of, optimizer=momentum, scheduler=warm)
    model, group = job.copy(), job.device_mesh.get_group("data")
    optimizer = momentum([p for p in model.parameters() if p.requires_grad])
    scheduler = warm(optimizer)

    def step(model: nn.Module, batch: dict[str, Tensor], job: ParityJob) -> Tensor:
        count = sum_over(valid(batch["labels"]), group)
        total = torch.zeros(())
        for i in range(2):
            part = {k: x.chunk(2)[i] for k, x in batch.items()}
            loss = sum_of_losses(model(part["input_ids"]), part["labels"]) / count
            loss.backward()
            total = total + loss.detach()
        for p in model.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad, group=group)
        optimizer.step()
        optimizer.zero_grad()
        times = {"scheduler_per_microbatch": 2, "scheduler_never": 0}.get(wrong, 1)
        for _ in range(2 if wrong == "scheduler_one_rank" and job.rank == 1 else times):
            scheduler.step()
        return sum_over(total, group)

    job.parallel(model, step=step, batch=job.rows("data"))


@style(
    DATA,
    ("gather_before", ALL + ", layers.0.attention.wq", "stale weights"),
    ("slice_lost", "layers.1", "optimizer, stale weights"),
    ("own_term", ALL, "incomplete sum, missing reduction"),
    ("states_local", ALL, "optimizer, stale weights"),
)
def zero1(job: ParityJob, wrong: str) -> None:
    """One flat buffer. Each rank steps a half with Adam by hand, and gathers."""
    job.reference(Llama(), loss_of, batch_of, optimizer=lambda p: torch.optim.Adam(p, lr=1e-2))
    model, group = job.copy(), job.device_mesh.get_group("data")
    parameters = list(model.parameters())
    size = sum(p.numel() for p in parameters)
    half = -(-size // 2)
    state = [torch.zeros(half), torch.zeros(half)]
    number = 0

    @torch.no_grad()
    def update() -> None:
        nonlocal number
        number += 1
        pad = torch.zeros(2 * half - size)
        grad = torch.cat([*(p.grad.flatten() for p in parameters), pad])
        if wrong != "own_term":
            dist.all_reduce(grad, group=group)
        flat = torch.cat([*(p.flatten() for p in parameters), pad])
        own = slice(job.rank * half, (job.rank + 1) * half)
        g = grad[own]
        state[0].lerp_(g, 0.1)
        state[1].mul_(0.999).addcmul_(g, g, value=0.001)
        m, v = state[0] / (1 - 0.9**number), state[1] / (1 - 0.999**number)
        if wrong == "states_local":
            v = v.mean().expand_as(v)
        piece = flat[own].clone()
        stepped = piece - 1e-2 * m / (v.sqrt() + 1e-8)
        if wrong == "slice_lost" and job.rank == 1:
            stepped[:300] = piece[:300]
        parts = [torch.empty_like(piece) for _ in range(2)]
        dist.all_gather(parts, piece if wrong == "gather_before" else stepped, group=group)
        flat, at = torch.cat(parts), 0
        for p in parameters:
            p.copy_(flat[at : at + p.numel()].view_as(p))
            at += p.numel()

    def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        count = sum_over(valid(batch["labels"]), group)
        loss = sum_of_losses(model(batch["input_ids"]), batch["labels"]) / count
        loss.backward()
        full = {n: p.grad if wrong == "own_term" else sum_over(p.grad, group) for n, p in model.named_parameters()}
        job.keep_gradients(full)
        update()
        model.zero_grad()
        return sum_over(loss, group)

    job.parallel(model, step=step, batch=job.rows("data"), gradients=False)


class Coarse(Llama):
    """A Llama with logits in float32, like the losses of transformers."""

    def forward(self, ids: Tensor, documents: Tensor | None = None) -> Tensor:
        return super().forward(ids, documents).float()


@style(DATA, ("no_reduce", ALL, "missing reduction"), ("scaled", ALL, "scaled"))
def float32_inside(job: ParityJob, wrong: str) -> None:
    """Both programs round to float32 inside a float64 check."""
    job.reference(Coarse(), loss_of, batch_of, optimizer=momentum)
    model, group = job.copy(), job.device_mesh.get_group("data")
    optimizer = momentum(list(model.parameters()))

    def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        loss = sum_of_losses(model(batch["input_ids"]), batch["labels"]) / sum_over(valid(batch["labels"]), group)
        loss.backward()
        for p in model.parameters():
            if wrong != "no_reduce":
                dist.all_reduce(p.grad, group=group)
            if wrong == "scaled":
                p.grad /= 2
        optimizer.step()
        optimizer.zero_grad()
        return sum_over(loss, group)

    job.parallel(model, step=step, batch=job.rows("data"))
