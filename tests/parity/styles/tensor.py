"""Common styles of tensor parallelism: sums outside linears, shared key-value heads, cut tables, LoRA, Muon."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.parity.job import ParityJob
from tests.parity.styles.models import (
    IGNORED,
    TOKENS,
    Llama,
    adamw,
    batch_of,
    loss_of,
    momentum,
    sum_of_losses,
    valid,
)  # fmt: skip
from tests.parity.styles.style import ALL, BOTH, TENSOR, enter, leave, style, sum_over


def cut(linear: nn.Linear, index: int, dim: int, size: int = 2) -> None:
    """Keep this rank's rows or columns of a linear."""
    linear.weight = nn.Parameter(linear.weight.detach().chunk(size, dim)[index].clone())


def cut_llama(model: Llama, index: int, group: Any, shared_kv: bool = False) -> None:
    """Cut like Megatron, with the sums in the parents' own code: `reduced(self.wo(y))`."""
    for layer in model.layers:
        attention, ffn = layer.attention, layer.feed_forward
        for linear in (attention.wq, ffn.gate, ffn.up, *(() if shared_kv else (attention.wk, attention.wv))):
            cut(linear, index, 0)
        cut(attention.wo, index, 1)
        cut(ffn.down, index, 1)
        for module in (attention, ffn):
            module.entered = lambda x: enter(x, group)
            module.reduced = lambda x: leave(x, group)


@style(
    TENSOR,
    ("late_scale", "layers.1.attention", "wrong values"),
    ("rope_shift", "layers.1.attention", "wrong values"),
    ("gelu", "layers.1.feed_forward", "wrong values"),
    ("no_sum_wo", "layers.0.attention", "missing reduction"),
    ("no_sum_down", "layers.1.feed_forward", "missing reduction"),
    ("no_enter", "layers.1.feed_forward", "missing reduction"),
    ("kv_mean", "layers.0.attention, layers.1.attention", "scaled"),
    ("kv_local", "layers.0.attention, layers.1.attention", "missing reduction"),
    ("twice", "layers.0.feed_forward", "scaled"),
    ("residual_twice", "layers.1", "wrong values, scaled"),
)
def gqa(job: ParityJob, wrong: str) -> None:
    """Two ranks share one key-value head; the gradients are added after the backward pass."""
    job.reference(Llama(kv_heads=1), loss_of, batch_of, optimizer=adamw)
    group, model = job.device_mesh.get_group("tp"), job.copy()
    cut_llama(model, job.index("tp"), group, shared_kv=True)
    first, second = model.layers
    if wrong == "late_scale":
        second.attention.scale = 1.3
    if wrong == "rope_shift":
        second.attention.shift = job.index("tp")
    if wrong == "gelu":
        second.feed_forward.activation = F.gelu
    if wrong == "no_sum_wo":
        first.attention.reduced = lambda x: x
    if wrong == "no_sum_down":
        second.feed_forward.reduced = lambda x: x
    if wrong == "no_enter":
        second.feed_forward.entered = lambda x: x
    if wrong == "twice":
        first.feed_forward.reduced = lambda x: leave(leave(x, group), group)
    if wrong == "residual_twice":
        second.register_forward_hook(lambda module, arguments, y: y + arguments[0])
    optimizer = adamw(list(model.parameters()))

    def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        loss = loss_of(model, batch)
        loss.backward()
        for layer in model.layers:
            for w in (layer.attention.wk, layer.attention.wv):
                if wrong != "kv_local":
                    dist.all_reduce(w.weight.grad, group=group)
                if wrong == "kv_mean":
                    w.weight.grad /= 2
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    job.parallel(model, step=step)


class CutTable(nn.Module):
    def __init__(self, table: Tensor, index: int, group: Any, wrong: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(table.detach().chunk(2)[index].clone())
        self.first, self.group, self.wrong = index * len(self.weight), group, wrong

    def forward(self, ids: Tensor) -> Tensor:
        last = self.first + len(self.weight)
        inside = (ids >= self.first) & (ids < last - (self.wrong == "table_range"))
        y = F.embedding((ids - self.first).clamp(0, len(self.weight) - 1), self.weight) * inside[..., None]
        return leave(y, self.group)


@style(
    TENSOR,
    ("label_range", "(loss), output", "wrong values"),
    ("table_range", "tok_embeddings", "wrong values"),
    ("no_max_sync", "(loss)", "wrong values"),
    ("head_enter", "output", "missing reduction"),
    ("pad_counted", "(loss)", "wrong values, token counts, scaled"),
)
def vocabulary(job: ParityJob, wrong: str) -> None:
    """Table, head and cross entropy cut over the vocabulary, with the backward pass of the loss by hand."""
    job.reference(Llama(), loss_of, batch_of)
    group, index, model = job.device_mesh.get_group("tp"), job.index("tp"), job.copy()
    cut_llama(model, index, group)
    model.tok_embeddings = CutTable(model.tok_embeddings.weight, index, group, wrong)
    cut(model.output, index, 0)
    if wrong != "head_enter":
        model.norm.register_forward_hook(lambda module, _, y: enter(y, group))

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits, labels = model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten()
        first = index * logits.shape[1]
        top = logits.detach().max(1).values
        if wrong != "no_max_sync":
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        total = leave((logits - top[:, None]).exp().sum(1), group)
        if wrong == "no_max_sync":
            top = sum_over(top, group) / 2
        inside = (labels >= first) & (labels < first + logits.shape[1] - (wrong == "label_range"))
        own = (logits - top[:, None]).gather(1, (labels - first).clamp(0, logits.shape[1] - 1)[:, None])[:, 0] * inside
        losses = total.log() - leave(own, group)
        kept = labels != IGNORED
        return (losses * kept).sum() / (len(kept) if wrong == "pad_counted" else kept.sum())

    job.parallel(model, loss=loss)


class Adapted(nn.Module):
    """A frozen linear and the linear's adapter."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base, self.scale = base, 2.0
        self.lora_a = nn.Linear(base.in_features, rank, bias=False)
        self.lora_b = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.lora_b.weight)
        self.middle: Any = lambda x: x

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scale * self.lora_b(self.middle(self.lora_a(x)))


def adapt(model: Llama) -> Llama:
    model.requires_grad_(False)
    for layer in model.layers:
        layer.attention.wq = Adapted(layer.attention.wq)
        layer.feed_forward.down = Adapted(layer.feed_forward.down)
    return model


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


@style(
    TENSOR,
    ("alpha", "layers.1.attention.wq, layers.1.attention", "wrong values, scaled"),
    ("a_local", "layers.0.attention.wq, layers.1.attention.wq", "missing reduction"),
    ("down_partial", "layers.0.feed_forward.down, layers.0.feed_forward", "missing reduction, scaled, wrong values"),
    ("thawed", "norm", "optimizer, stale weights"),
    ("b_frozen", "layers.0.attention.wq, layers.1.attention.wq", "no gradient"),
)
def lora(job: ParityJob, wrong: str) -> None:
    """Adapters on cut linears; all other weights are frozen. lora_a of `down` is cut by columns, lora_b of `wq` by
    rows."""
    job.reference(adapt(Llama()), loss_of, batch_of, optimizer=adamw)
    group, index, model = job.device_mesh.get_group("tp"), job.index("tp"), job.copy()
    for layer in model.layers:
        attention, ffn = layer.attention, layer.feed_forward
        for linear in (attention.wq.base, attention.wq.lora_b, attention.wk, attention.wv, ffn.gate, ffn.up):
            cut(linear, index, 0)
        for linear in (attention.wo, ffn.down.base, ffn.down.lora_a):
            cut(linear, index, 1)
        for module in (attention, ffn):
            module.entered, module.reduced = (lambda x: enter(x, group)), (lambda x: leave(x, group))
        # The adapter's middle is a partial sum under `down`, and lora_b reads a whole input: one sum covers both.
    if wrong == "alpha":
        model.layers[1].attention.wq.scale = 1.0
    if wrong == "down_partial":
        model.layers[0].feed_forward.down.middle = lambda x: leave(x, group)
    for p in model.parameters():
        p.requires_grad_(False)
    for name, p in model.named_parameters():
        p.requires_grad_("lora" in name and not (wrong == "b_frozen" and name.endswith("wq.lora_b.weight")))
    model.norm.weight.requires_grad_(wrong == "thawed")
    optimizer = adamw(trained(model))
    pairs = [(layer.attention.wq.lora_a, layer.feed_forward.down.lora_b) for layer in model.layers]

    def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        loss = loss_of(model, batch)
        loss.backward()
        for a, b in pairs:
            if wrong != "a_local":
                dist.all_reduce(a.weight.grad, group=group)
            dist.all_reduce(b.weight.grad, group=group)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    job.parallel(model, step=step)


def orthogonal(g: Tensor) -> Tensor:
    """Return Newton-Schulz of a matrix, as in Muon."""
    x = g / (g.norm() + 1e-7)
    wide = x if x.shape[0] <= x.shape[1] else x.T
    for _ in range(5):
        a = wide @ wide.T
        wide = 3.4445 * wide + (-4.775 * a + 2.0315 * a @ a) @ wide
    return wide if x.shape[0] <= x.shape[1] else wide.T


class Muon(torch.optim.Optimizer):
    """Matrices by orthogonalised momentum, all other weights by plain steps. `whole` gathers a cut gradient, or not."""

    def __init__(self, parameters: list[Tensor], whole: Any = None) -> None:
        super().__init__(parameters, {"lr": 0.02})
        self.whole = whole or (lambda p, g: (g, lambda update: update))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p)).mul_(0.9).add_(p.grad)
                if p.ndim == 2:
                    full, back = self.whole(p, buffer)
                    p.sub_(back(orthogonal(full)), alpha=group["lr"])
                else:
                    p.sub_(buffer, alpha=group["lr"])


@style(TENSOR, ("shard", "layers.0.attention, layers.1.attention, layers.0.feed_forward, layers.1.feed_forward, " + ALL,
                "cut update"))  # fmt: skip
def muon(job: ParityJob, wrong: str) -> None:
    job.reference(Llama(), loss_of, batch_of, optimizer=Muon)
    group, index, model = job.device_mesh.get_group("tp"), job.index("tp"), job.copy()
    cut_llama(model, index, group)
    dims = {p: int(n.endswith(("wo.weight", "down.weight"))) for n, p in model.layers.named_parameters() if p.ndim == 2}

    def whole(p: Tensor, g: Tensor) -> Any:
        if p not in dims or wrong == "shard":
            return g, lambda update: update
        parts = [torch.empty_like(g) for _ in range(2)]
        dist.all_gather(parts, g.contiguous(), group=group)
        return torch.cat(parts, dims[p]), lambda update: update.chunk(2, dims[p])[index]

    optimizer = Muon(list(model.parameters()), whole)

    def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    job.parallel(model, step=step)


@style(
    BOTH,
    ("seeds", "layers.0.drop, layers.0", "dropout"),
    ("clip_tp", ALL, "clipping"),
    ("clip_norms_twice", ALL, "clipping"),
    ("norm_rank_sum", ALL, "scaled, token counts"),
    ("tp_loss_data", ALL + ", (loss)", "token counts"),
)
def data_tensor(job: ParityJob, wrong: str) -> None:
    """Two data replicas of two tensor ranks, with dropout, clipping and the labels' count over both replicas."""
    job.reference(Llama(dropout=0.2), loss_of, batch_of, optimizer=momentum, clip=0.4)
    tp, data = (job.device_mesh.get_group(axis) for axis in ("tp", "data"))
    model, index = job.copy(), job.index("tp")
    cut_llama(model, index, tp)
    optimizer = momentum(list(model.parameters()))
    whole = {n for n, p in model.named_parameters() if "norm" in n or not n.startswith("layers")}
    if wrong == "seeds":
        torch.manual_seed(job.rank)
    else:
        torch.manual_seed(job.index("data"))

    def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        count = sum_over(valid(batch["labels"]), data)
        if wrong == "tp_loss_data":
            count = 2 * valid(batch["labels"])
        loss = sum_of_losses(model(batch["input_ids"]), batch["labels"]) / count
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=data)
            if wrong == "norm_rank_sum":
                p.grad /= 2
        squares = {n: p.grad.square().sum() for n, p in model.named_parameters()}
        cut_, kept = (sum(x for n, x in squares.items() if (n in whole) == w) for w in (False, True))
        if wrong != "clip_tp":
            dist.all_reduce(cut_, group=tp)
        if wrong == "clip_norms_twice":
            dist.all_reduce(kept, group=tp)
        factor = (0.4 / ((cut_ + kept).sqrt() + 1e-6)).clamp(max=1.0)
        for p in model.parameters():
            p.grad *= factor
        optimizer.step()
        optimizer.zero_grad()
        return sum_over(loss, data)

    job.parallel(model, step=step, batch=job.rows("data"))


@style(
    TENSOR,
    ("no_norms", "norm, attention_norm, ffn_norm", "missing reduction"),
    ("mean_norms", "norm, attention_norm, ffn_norm", "scaled"),
    ("gather_no_sum", "layers.1.feed_forward", "missing reduction, incomplete sum, wrong values"),
    ("positions", "layers.0.attention", "wrong values"),
)
def sequence(job: ParityJob, wrong: str) -> None:
    """Sequence parallelism: norms get half of the tokens; gathers before, scatters after each cut pair."""
    job.reference(Llama(), loss_of, batch_of, optimizer=adamw)
    group, index, model = job.device_mesh.get_group("tp"), job.index("tp"), job.copy()
    cut_llama(model, index, group)
    half = TOKENS // 2

    class Gathered(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, summed: bool) -> Tensor:
            parts = [torch.empty_like(x) for _ in range(2)]
            dist.all_gather(parts, x.contiguous(), group=group)
            ctx.summed = summed
            return torch.cat(parts, 1)

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            g = gradients[0].clone()
            if ctx.summed:
                dist.all_reduce(g, group=group)
            return g[:, index * half : (index + 1) * half].contiguous(), None

    class Scattered(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return sum_over(x, group)[:, index * half : (index + 1) * half].contiguous()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            parts = [torch.empty_like(gradients[0]) for _ in range(2)]
            dist.all_gather(parts, gradients[0].contiguous(), group=group)
            return torch.cat(parts, 1)

    model.positions = (
        torch.arange(TOKENS) + (job.index("tp") if wrong == "positions" else 0) * torch.arange(TOKENS) // 4
    )
    for i, layer in enumerate(model.layers):
        for module in (layer.attention, layer.feed_forward):
            lost = wrong == "gather_no_sum" and i == 1 and module is layer.feed_forward
            module.entered = lambda x, lost=lost: Gathered.apply(x, not lost)
            module.reduced = Scattered.apply
    optimizer = adamw(list(model.parameters()))

    def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        count = sum_over(valid(batch["labels"]), group)
        loss = sum_of_losses(model(batch["input_ids"]), batch["labels"]) / count
        loss.backward()
        for n, p in model.named_parameters():
            if "norm" in n and wrong == "no_norms":
                continue
            if "norm" in n or not n.startswith("layers"):
                dist.all_reduce(p.grad, group=group)
            if "norm" in n and wrong == "mean_norms":
                p.grad /= 2
        optimizer.step()
        optimizer.zero_grad()
        return sum_over(loss, group)

    job.parallel(model, step=step, batch=lambda b: {k: x.chunk(2, 1)[index].contiguous() for k, x in b.items()})
