"""A Llama in torchtitan's form, in plain torch, and transformers' Llama: the peers of `benchmarks.llama`.

Three linear layers for queries, keys and values, rotary positions as products of complex numbers, SDPA with grouped
queries, whole logits and cross entropy in float32, AdamW's fused step. bf16 is autocast on one device, as in
torchtitan. Under torch's parallelism: `fully_shard` on each block and on the root, `parallelize_module` with
`loss_parallel`, and torch.distributed.pipelining's 1F1B over chunks without the other chunks' modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

from benchmarks.baselines import fused_adamw, gloo, shard
from benchmarks.contender import Option, Place, Step

THETA, EPSILON = 100000.0, 1e-5


@dataclass(frozen=True)
class Sizes:
    """SmolLM2-135M's sizes, and a batch of `rows` x `tokens`. `clip`: the gradient's norm, 0: no clipping."""

    layers: int = 30
    hidden: int = 576
    heads: int = 9
    key_value_heads: int = 3
    inner: int = 1536
    vocabulary: int = 49152
    tied: bool = True
    rows: int = 4
    tokens: int = 256
    clip: float = 0.0

    @property
    def head_width(self) -> int:
        return self.hidden // self.heads

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Draw tokens and labels [B, T] of a step, equal on every rank."""
        generator = torch.Generator().manual_seed(step)
        text = torch.randint(self.vocabulary, (self.rows, self.tokens + 1), generator=generator)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def rotated(x: Tensor, turns: Tensor) -> Tensor:
    """Multiply x [B, T, A, E], pairs of neighbours as complex numbers, by turns [T, E/2]."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    pairs = torch.view_as_complex(wide.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns[:, None]).flatten(-2).to(x.dtype)


class Block(nn.Module):
    """h + attention(norm(h)), then h + w2(silu(w1 x) * w3 x)."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        hidden, self.width = sizes.hidden, sizes.head_width
        narrow = sizes.key_value_heads * self.width
        self.attention_norm, self.ffn_norm = (nn.RMSNorm(hidden, eps=EPSILON) for _ in range(2))
        self.wq = nn.Linear(hidden, sizes.heads * self.width, bias=False)
        self.wk, self.wv = (nn.Linear(hidden, narrow, bias=False) for _ in range(2))
        self.wo = nn.Linear(sizes.heads * self.width, hidden, bias=False)
        self.w1, self.w3 = (nn.Linear(hidden, sizes.inner, bias=False) for _ in range(2))
        self.w2 = nn.Linear(sizes.inner, hidden, bias=False)

    def forward(self, h: Tensor, turns: Tensor) -> Tensor:
        x = self.attention_norm(h)
        query, key, value = (linear(x).unflatten(-1, (-1, self.width)) for linear in (self.wq, self.wk, self.wv))
        query, key, value = (each.transpose(1, 2) for each in (rotated(query, turns), rotated(key, turns), value))
        core = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        h = h + self.wo(core.transpose(1, 2).flatten(2))
        x = self.ffn_norm(h)
        return h + self.w2(F.silu(self.w1(x)) * self.w3(x))


class PlainLlama(nn.Module):
    """Tokens [B, T] to logits [B, T, V]. `chunk`: the layers of this module. The first chunk has the embeddings, the
    last the head; hidden states [B, T, H] are sent between chunks."""

    def __init__(self, sizes: Sizes, chunk: range | None = None) -> None:
        super().__init__()
        chunk = range(sizes.layers) if chunk is None else chunk
        first, last = chunk.start == 0, chunk.stop == sizes.layers
        self.sizes = sizes
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.hidden) if first else None
        self.layers = nn.ModuleDict({str(layer): Block(sizes) for layer in chunk})
        self.norm = nn.RMSNorm(sizes.hidden, eps=EPSILON) if last else None
        self.output = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False) if last else None
        if sizes.tied and self.tokens is not None and self.output is not None:
            self.output.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.tokens(x) if self.tokens is not None else x
        frequencies = THETA ** -(torch.arange(0, self.sizes.head_width, 2).double() / self.sizes.head_width)
        angles = torch.outer(torch.arange(h.shape[1]).double(), frequencies)
        turns = torch.polar(torch.ones_like(angles), angles)
        turns = turns if h.dtype == torch.float64 else turns.to(torch.complex64)
        for layer in self.layers.values():
            h = layer(h, turns)
        if self.norm is None or self.output is None:
            return h
        logits: Tensor = self.output(self.norm(h))
        return logits


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy, in float32 or better."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide.flatten(0, 1), labels.flatten())


def _loop(sizes: Sizes, model: nn.Module, backward: Callable[[Tensor, Tensor], float], rows: slice) -> Step:
    """Return a training loop's step. `backward` returns the loss of tokens and labels, after a backward pass."""
    optimizer, count = fused_adamw(model.parameters()), 0

    def step() -> float:
        nonlocal count
        tokens, labels = sizes.batch(count)
        loss = backward(tokens[rows], labels[rows])
        if sizes.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), sizes.clip, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        count += 1
        return loss

    return step


def _autocast(dtype: str) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16) if dtype == "bf16" else nullcontext()


@contextmanager
def torchtitan(place: Place, dtype: str, threads: int, compiled: bool = False, **sizes: Any) -> Iterator[Step]:
    """Yield steps of the plain model on one device. `compiled`: compile each layer."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    shape = Sizes(**sizes)
    model = PlainLlama(shape)
    if compiled:
        for layer in model.layers.values():
            layer.compile()

    def backward(tokens: Tensor, labels: Tensor) -> float:
        with _autocast(dtype):
            logits = model(tokens)
        loss = loss_of(logits, labels)
        loss.backward()
        return loss.item()

    yield _loop(shape, model, backward, slice(None))


@contextmanager
def transformers(place: Place, dtype: str, threads: int, **sizes: Any) -> Iterator[Step]:
    """Yield steps of LlamaForCausalLM in the loop of transformers' Trainer: the model shifts labels and computes the
    loss (under autocast in bf16), norms are clipped, AdamW is fused."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    torch.set_num_threads(threads)
    logging.set_verbosity_error()
    torch.manual_seed(0)
    shape = Sizes(**sizes)
    config: Any = LlamaConfig(
        vocab_size=shape.vocabulary, hidden_size=shape.hidden, intermediate_size=shape.inner,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.key_value_heads,
        rms_norm_eps=EPSILON, tie_word_embeddings=shape.tied, use_cache=False, attn_implementation="sdpa",
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    model.train()

    def backward(tokens: Tensor, labels: Tensor) -> float:
        with _autocast(dtype):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        return float(loss.item())

    yield _loop(shape, model, backward, slice(None))


@contextmanager
def fsdp2(place: Place, compiled: bool = False, **sizes: Any) -> Iterator[Step]:
    """Yield steps of the plain model under fully_shard; the root has the table."""
    shape = Sizes(**sizes)
    with gloo(place):
        torch.manual_seed(0)
        model = PlainLlama(shape)
        shard(model, model.layers.values(), compiled)
        share = shape.rows // place.ranks

        def backward(tokens: Tensor, labels: Tensor) -> float:
            loss = loss_of(model(tokens), labels)
            loss.backward()
            return loss.item()

        yield _loop(shape, model, backward, slice(place.rank * share, (place.rank + 1) * share))


@contextmanager
def dtensor(place: Place, **sizes: Any) -> Iterator[Step]:
    """Yield steps of the plain model under parallelize_module; every rank sees the whole batch."""
    shape = Sizes(**sizes)
    with gloo(place):
        torch.manual_seed(0)
        model = parallel_model(shape, place.ranks)

        def backward(tokens: Tensor, labels: Tensor) -> float:
            with loss_parallel():
                loss = loss_of(model(tokens), labels)
                loss.backward()
            return loss.item()

        yield _loop(shape, model, backward, slice(None))


def parallel_model(sizes: Sizes, ranks: int) -> nn.Module:
    """Cut the plain model over the default process group: columns by head, rows of the tables; untied."""
    plan: Any = {
        "tokens": RowwiseParallel(input_layouts=Replicate()),
        **{f"layers.*.{name}": ColwiseParallel() for name in ("wq", "wk", "wv", "w1", "w3")},
        **{f"layers.*.{name}": RowwiseParallel() for name in ("wo", "w2")},
        "output": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    return parallelize_module(PlainLlama(sizes), init_device_mesh("cpu", (ranks,)), plan)


@contextmanager
def pipeline(place: Place, partition: str, microbatches: int, **sizes: Any) -> Iterator[Step]:
    """Yield steps of the plain model's chunks under torch's 1F1B. `partition`: layers of each stage, as in 19+11."""
    shape = Sizes(**sizes)
    counts = [int(layers) for layers in partition.split("+")]
    start = sum(counts[: place.rank])
    with gloo(place):
        torch.manual_seed(place.rank)
        chunk = PlainLlama(shape, range(start, start + counts[place.rank]))
        stage = PipelineStage(chunk, place.rank, place.ranks, torch.device("cpu"))
        schedule = Schedule1F1B(
            stage, microbatches, loss_fn=lambda x, labels: loss_of(x, labels) / microbatches, scale_grads=False
        )

        def backward(tokens: Tensor, labels: Tensor) -> float:
            losses: list[Tensor] = []
            last = place.rank == place.ranks - 1
            entering = () if place.rank else (tokens,)
            schedule.step(*entering, target=labels if last else None, losses=losses, return_outputs=False)
            return sum(loss.item() for loss in losses)

        yield _loop(shape, chunk, backward, slice(None))


def options_of(sizes: Sizes) -> dict[str, Option]:
    """Return the config fields of Meshwright for these sizes."""
    model = {
        "family": "llama", "layers": sizes.layers, "hidden": sizes.hidden, "heads": sizes.heads,
        "key_value_heads": sizes.key_value_heads, "feed_forward": sizes.inner, "positions": sizes.tokens,
        "vocabulary": sizes.vocabulary, "tied": sizes.tied, "rope": {"theta": THETA}, "norm_epsilon": EPSILON,
    }  # fmt: skip
    clip: dict[str, Option] = {"optimizer.clip": sizes.clip} if sizes.clip else {}
    return {"model": repr(model), "data.sequence": sizes.tokens, "batch.global": sizes.rows} | clip
