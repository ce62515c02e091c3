"""Batches and counts for the tests of both encoder-decoders."""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.compute.model import IGNORED, Batch, counts_of, scales_of
from meshwright.compute.models.chain import make_chain
from meshwright.compute.parameters.shard import num_parameters, shard_specs
from meshwright.compute.tensor.serial import SerialKit
from meshwright.config import Config, parse_config
from meshwright.families.seq2seq.blocks import DecoderCache
from meshwright.families.seq2seq.encoder_decoder import EncoderDecoderChain
from meshwright.ranks.mesh import Mesh
from tests.compute.models.harness import random_model

B = 3


def pair_batch(vocabulary: int, source: int, target: int, padded: bool) -> Batch:
    """Return B pairs of these lengths; `padded`: some pairs are shorter."""
    generator = torch.Generator().manual_seed(7)
    shorter = torch.tensor([[0], [3], [5]]) * padded
    tokens = torch.randint(vocabulary, (B, source + 2 * target), generator=generator)
    places = torch.arange(target)
    return {
        "source": tokens[:, :source],
        "source_mask": (torch.arange(source) < source - shorter).long(),
        "target": tokens[:, source : source + target],
        "labels": tokens[:, source + target :].masked_fill(places >= target - shorter, IGNORED),
    }


def decoded(mesh: Mesh, config: Config) -> tuple[Tensor, Tensor, Tensor]:
    """Return the hidden states [B, T, H] of padded pairs: of the trunk, and twice token by token with a cache.

    The last run reorders the rows from the fourth token on.
    """
    model = random_model(EncoderDecoderChain, mesh, config)
    batch = pair_batch(config.model.vocabulary, 8, 6, True)
    order = torch.tensor([2, 0, 1])
    with torch.no_grad():
        whole = model.hidden_states(batch)[0]
        memory = model.encode(batch["source"], batch["source_mask"])
        runs = []
        for turn in (None, 3):
            target, mask, cache, parts = batch["target"], batch["source_mask"], DecoderCache(), []
            for place in range(target.shape[1]):
                if place == turn:
                    cache.select(order)
                    target, mask, parts = target[order], mask[order], [part[order] for part in parts]
                parts.append(model.decode(target[:, place : place + 1], memory, mask, cache))
            assert cache.target.num_tokens == target.shape[1]
            runs.append(torch.cat(parts, 1))
        return whole, runs[0], runs[1][order.argsort()]


def dropout_facts(mesh: Mesh, config: Config) -> tuple[bool, bool]:
    """Return whether two passes differ, in training and in evaluation."""
    model = random_model(EncoderDecoderChain, mesh, config)
    batch = pair_batch(config.model.vocabulary, 8, 6, True)
    scales = scales_of(model.labels, counts_of(batch, model.labels), 1.0)
    with torch.no_grad():
        training = [float(model(batch, scales)[0]) for _ in range(2)]
        model.eval()
        evaluating = [float(model(batch, scales)[0]) for _ in range(2)]
    return training[0] != training[1], evaluating[0] != evaluating[1]


def counted_parameters(mesh: Mesh, name: str) -> int:
    """Return the number of a shipped model's parameters without the padding, on the meta device."""
    config = parse_config({"model": name})
    shape = config.model
    with torch.device("meta"):
        kit = SerialKit(Mesh(mesh.grid, 0, torch.device("meta"), mesh.transport))
        model = make_chain(config, kit)
    padding = (shape.padded_vocabulary - shape.vocabulary) * shape.hidden
    return num_parameters(list(shard_specs(model).values())) - padding
