"""DeepSeek-V3 (arXiv 2412.19437), and decoders like it: Moonlight (arXiv 2502.16982), Kimi-K2 (arXiv 2507.20534).

Llama's chain with multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1). Queries are projected from
one latent vector a token, keys and values from another. A head's key has a part of its own and a part that all heads
share; of a key, only the shared part is rotated:

| tensor      | from                   | weight            | shape            | gradient                               |
|-------------|------------------------|-------------------|------------------|----------------------------------------|
| query latent| hidden states          | [H, r_q]          | [B, T, r_q]      | enters a pair: summed over all heads   |
| query       | rms(query latent)      | [r_q, A (E + P)]  | [B, T, A, E + P] | of its head                            |
| latent      | hidden states          | [H, r]            | [B, T, r]        | enters a pair                          |
| key, value  | rms(latent)            | [r, A (E + V)]    | [B, T, A, E + V] | of its head                            |
| shared key  | hidden states          | [H, P]            | [B, T, P]        | enters branches by `enter`, no linear  |

Queries and keys have width E + P, values V. Attention pads the narrower with zeros, which change no score and no
output, since kernels and context parallelism need equal widths.

Multi-token prediction (arXiv 2412.19437, section 2.2): in training, D further layers predict tokens after the next one.
Layer k reads the states of layer k - 1 (k = 1: the model's, normed) and the embedding of token i + k, shares the table
and the head with the model, and is scored on the labels shifted by k (equations 21 to 25):

    h^k = rms(layer_k(rms(embedding(t_{i+k})) M_k + rms(h^{k-1}) M'_k))        loss += weight / D · loss_k

The last k positions have no token i + k: these get token 0 and no label, and causality hides these from earlier
positions. Each label has the weight of one of the model's own: loss_k is a sum over T - k tokens, divided by T.

The rotary part of a head is stored as halves, not as pairs (models/rope.py); an import reorders columns (convert.py).

Shapes: B batch, T sequence, H hidden, A local heads, E head width, P rotary width, V value width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.compute.context.spec import AttentionSpec
from meshwright.compute.model import IGNORED, Batch, Chunk, Costs, Hidden, Run, Scales, at_once, to_device
from meshwright.compute.models.attention import AttentionCore
from meshwright.compute.models.decoder import KeyValueCache
from meshwright.compute.models.feed_forward import last_initial
from meshwright.compute.models.rope import Rotation, rotate
from meshwright.compute.models.rotary import RotaryBlock, RotaryDecoder, feed_forward_products
from meshwright.compute.parameters.shard import Initial
from meshwright.compute.tensor.kit import Kit
from meshwright.config import Config
from meshwright.families.deepseek.section import DeepSeek

LATENT_EPSILON = 1e-6
"""The epsilon of the latents' norms, fixed in the authors' code and in transformers, whatever model.norm_epsilon is."""


class LatentAttention(nn.Module):
    """Causal multi-head latent attention over this rank's heads."""

    def __init__(self, model: DeepSeek, kit: Kit, layer: int) -> None:
        super().__init__()
        self.layer, self.enter = layer, kit.enter
        self.all_heads, self.heads = model.heads, kit.local_heads(model.heads)
        self.head_width, self.rotary_width, self.value_width = model.head_width, model.rotary_width, model.value_width
        initial, hidden, rank = Initial(0.02), model.hidden, model.key_value_rank
        expand, query_width = kit.branches.expand, model.heads * model.query_width
        self.has_query_latent = model.query_rank is not None
        if model.query_rank is not None:
            self.query_latent = kit.linear("transform", hidden, model.query_rank, initial, bias=False)
            self.query_norm = kit.norm(model.query_rank, LATENT_EPSILON, kind="rms")
        self.query = expand(model.query_rank or hidden, query_width, initial, bias=False)
        self.latent = kit.linear("transform", hidden, rank, initial, bias=False)
        self.latent_norm = kit.norm(rank, LATENT_EPSILON, kind="rms")
        self.shared_key = kit.linear("transform", hidden, model.rotary_width, initial, bias=False)
        # Columns are ordered by head, each with key and value, so that ranks get whole heads.
        self.key_value = expand(rank, model.heads * (model.head_width + model.value_width), initial, bias=False)
        scale = model.query_width**-0.5 * model.rope.score_factor
        self.core = AttentionCore(kit, AttentionSpec(causal=True, scale=scale, dropout=model.dropout))
        self.output = kit.branches.contract(model.heads * model.value_width, hidden, last_initial(model), bias=False)
        self._run: Run = at_once

    def widen_by(self, run: Run) -> None:
        """Have the projections that widen latents run by `run`."""
        self._run = run

    def forward(self, h: Tensor, rotation: Rotation, cache: KeyValueCache | None, documents: Tensor | None) -> Tensor:
        source = self.query_norm(self.query_latent(h)) if self.has_query_latent else h
        latent, shared = self.latent_norm(self.latent(h)), self.shared_key(h)
        wide = self._run(self.widened, source, latent, shared, rotation, cache)
        attended = self.core(*wide, documents=documents)[..., : self.value_width]
        y: Tensor = self.output(attended.transpose(1, 2).flatten(2))
        return y

    def widened(
        self, source: Tensor, latent: Tensor, shared: Tensor, rotation: Rotation, cache: KeyValueCache | None
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Return queries, keys and values [B, A, T, E + P] of this rank's heads; the values with zeros behind theirs.

        Args:
            source: Latents of queries, or hidden states [B, T, ...].
            latent: Latents of keys and values [B, T, R].
            shared: The keys' part that all heads share [B, T, P], before the rotation.
        """
        query = self.query(source).unflatten(-1, (self.heads, -1))  # [B, T, A, E + P]
        plain, turned = query.split((self.head_width, self.rotary_width), -1)
        keys, value = (
            self.key_value(latent).unflatten(-1, (self.heads, -1)).split((self.head_width, self.value_width), -1)
        )
        # `enter` precedes the rotation: a kit may split the key's columns over ranks, and rotation pairs columns.
        shared = self.enter(shared, self.all_heads)  # [B, T, A, P]
        query = torch.cat([plain, rotate(turned.unsqueeze(2), rotation).squeeze(2)], -1)
        key = torch.cat([keys, rotate(shared.unsqueeze(2), rotation).squeeze(2)], -1)
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))  # [B, A, T, E + P], and [B, A, T, V]
        if cache is not None:
            key, value = cache.extend(self.layer, key, value, self.core.spec.window)
        width = max(query.shape[-1], self.value_width)
        return tuple(
            # With the strides of keys.
            x if x.shape[-1] == width else F.pad(x.transpose(1, 2), (0, width - x.shape[-1])).transpose(1, 2)
            for x in (query, key, value)
        )


class LaterToken(nn.Module):
    """A layer that predicts a token after the next one."""

    def __init__(self, model: DeepSeek, block: nn.Module, kit: Kit) -> None:
        super().__init__()
        hidden, initial = model.hidden, Initial(0.02)
        self.token_norm = kit.norm(hidden, model.norm_epsilon, kind="rms")
        self.hidden_norm = kit.norm(hidden, model.norm_epsilon, kind="rms")
        # Two linears for the paper's one of the concatenation: a kit may split the columns of each over ranks.
        self.of_token = kit.linear("transform", hidden, hidden, initial, bias=False)
        self.of_hidden = kit.linear("transform", hidden, hidden, initial, bias=False)
        self.block = block
        self.norm = kit.norm(hidden, model.norm_epsilon, kind="rms")

    def forward(self, embedded: Tensor, hidden: Hidden, batch: Batch) -> Hidden:
        """The head's input ([B, T, H],), followed by the routers' losses [B] where the block has experts."""
        h, *losses = hidden
        h = self.of_token(self.token_norm(embedded)) + self.of_hidden(self.hidden_norm(h))
        rotation = Rotation(batch["cosines"], batch["sines"])
        h, *losses = self.block((h, *losses), rotation, None, batch.get("documents"), batch["places"])
        return self.norm(h), *losses


class DeepSeekModel(RotaryDecoder):
    """Tokens to a loss."""

    def __init__(self, model: DeepSeek, kit: Kit, chunk: Chunk | None = None) -> None:

        def make_block(layer: int) -> RotaryBlock:
            return RotaryBlock(model, kit, LatentAttention(model, kit, layer), has_experts=model.has_experts(layer))

        super().__init__(model, kit, chunk, model.rotary_width, make_block)
        self.num_later = model.later_tokens
        self.later_share = model.later_weight / max(1, model.later_tokens)
        """The factor of each later token's loss."""
        if self.chunk.last and model.later_tokens:
            if not self.chunk.first and not model.tied:
                self.tokens = kit.embedding(model.padded_vocabulary, model.hidden, Initial(0.02))
            blocks = (make_block(model.layers + depth) for depth in range(model.later_tokens))
            self.later = nn.ModuleList(LaterToken(model, block, kit) for block in blocks)

    def prepared(self, batch: Batch) -> Batch:
        """The batch with tokens and labels shifted by each depth."""
        moved = dict(batch)
        for depth in range(1, self.num_later + 1):
            moved[f"tokens+{depth}"] = F.pad(batch["tokens"][:, depth:], (0, depth))
            labels = batch["labels"][:, depth:]
            if "documents" in batch:  # no label across the boundary of documents
                documents = to_device({"starts": batch["documents"]}, labels.device)["starts"]
                labels = labels.masked_fill(documents[:, depth:] != documents[:, :-depth], IGNORED)
            moved[f"labels+{depth}"] = F.pad(labels, (0, depth), value=IGNORED)
        return moved

    def loss(self, h: Tensor, batch: Batch, scales: Scales) -> Tensor:
        """The loss of the next token; in training also the losses of later tokens and of the later layers' routers."""
        loss = super().loss(h, batch, scales)
        if not self.num_later or not self.training:
            return loss
        batch = batch | self.turned(batch)
        hidden: Hidden = (h,)
        if self.loss_share:
            hidden = h, torch.zeros(h.shape[0], dtype=torch.promote_types(h.dtype, torch.float32), device=h.device)
        for depth, layer in enumerate(self.later, 1):
            hidden = layer(self.tokens(batch[f"tokens+{depth}"]), hidden, batch)
            share = scales["labels"] * self.later_share
            loss = loss + self.head(hidden[0], batch[f"labels+{depth}"], share)
        return self.with_layers_losses(loss, hidden, scales)

    @staticmethod
    def products(config: Config) -> Costs:
        """Causal attention counts as if no score were masked."""
        model, sequence = config.model, config.data.lengths.source
        assert isinstance(model, DeepSeek), model
        attention = attention_products(model) + sequence * model.heads * (model.query_width + model.value_width)
        layers = tuple(sequence * (attention + products) for products in feed_forward_products(model))
        head = sequence * model.padded_vocabulary * model.hidden
        later = layers[-1] + head + sequence * 2 * model.hidden**2
        return Costs(0, layers, head + model.later_tokens * later)


def attention_products(model: DeepSeek) -> int:
    """Multiply-adds per token with the weights of one attention layer."""
    hidden, queries, rank = model.hidden, model.heads * model.query_width, model.key_value_rank
    of_queries = hidden * queries if model.query_rank is None else model.query_rank * (hidden + queries)
    of_keys = hidden * (rank + model.rotary_width) + rank * model.heads * (model.head_width + model.value_width)
    return of_queries + of_keys + model.heads * model.value_width * hidden
