"""The plain Llama of `benchmarks.llama` is a baseline only if it computes the result of transformers' Llama.

The parallel forms must compute one device's result.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from benchmarks.llama_model import EPSILON, THETA, PlainLlama, Sizes, loss_of, options_of, parallel_model
from meshwright.config import parse_config
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from tests.families.llama.models import WideNorm
from tests.workers import run_ranks

SMALL = Sizes(layers=2, hidden=32, heads=4, key_value_heads=2, inner=48, vocabulary=100, rows=2, tokens=8)
THEIRS = {
    "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "wq": "self_attn.q_proj",
    "wk": "self_attn.k_proj", "wv": "self_attn.v_proj", "wo": "self_attn.o_proj", "w1": "mlp.gate_proj",
    "w3": "mlp.up_proj", "w2": "mlp.down_proj",
}  # fmt: skip


class WideRotary(nn.Module):
    """Angles in float64; transformers computes angles in float32."""

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        width = SMALL.head_width
        frequencies = THETA ** -(torch.arange(0, width, 2).double() / width)
        angles = (position_ids.double().unsqueeze(-1) * frequencies).repeat(1, 1, 2)
        return angles.cos(), angles.sin()


def hugging_face() -> Any:
    """Return transformers' model, all in float64."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=SMALL.vocabulary, hidden_size=SMALL.hidden, intermediate_size=SMALL.inner,
        num_hidden_layers=SMALL.layers, num_attention_heads=SMALL.heads, num_key_value_heads=SMALL.key_value_heads,
        rms_norm_eps=EPSILON, tie_word_embeddings=SMALL.tied, attn_implementation="sdpa",
    )  # fmt: skip
    theirs = transformers.LlamaForCausalLM(config).double()
    for path, module in list(theirs.named_modules()):
        if type(module).__name__ == "LlamaRMSNorm":
            parent, _, name = path.rpartition(".")
            setattr(theirs.get_submodule(parent), name, WideNorm(SMALL.hidden, eps=EPSILON, dtype=torch.float64))
    theirs.model.rotary_emb = WideRotary()
    return theirs


def as_plain(name: str, x: Tensor) -> Tensor:
    """Reorder the rows of transformers' tensor: transformers rotates the halves of a head, we rotate neighbours."""
    if not name.endswith(("wq", "wk")):
        return x
    return x.unflatten(0, (-1, 2, SMALL.head_width // 2)).transpose(1, 2).flatten(0, 2)


def test_it_computes_what_transformers_does() -> None:
    torch.manual_seed(0)
    plain, theirs = PlainLlama(SMALL).double(), hugging_face()
    pairs = {"tokens": "model.embed_tokens", "norm": "model.norm"}
    pairs |= {
        f"layers.{n}.{ours}": f"model.layers.{n}.{their}" for n in range(SMALL.layers) for ours, their in THEIRS.items()
    }
    names = [name.removesuffix(".weight") for name, _ in plain.named_parameters()]
    assert sorted(names) == sorted(pairs)
    with torch.no_grad():
        for name in names:
            theirs_weight = theirs.get_submodule(pairs[name]).weight
            theirs_weight.add_(torch.randn_like(theirs_weight), alpha=0.1)  # norms too
            plain.get_submodule(name).weight.copy_(as_plain(name, theirs_weight))
    tokens, labels = SMALL.batch(0)
    logits, their_logits = plain(tokens), theirs(tokens).logits
    torch.testing.assert_close(logits, their_logits, rtol=1e-11, atol=1e-12)
    loss_of(logits, labels).backward()
    loss_of(their_logits, labels).backward()
    for name in names:
        wanted = as_plain(name, theirs.get_submodule(pairs[name]).weight.grad)
        torch.testing.assert_close(plain.get_submodule(name).weight.grad, wanted, rtol=1e-10, atol=1e-13)


def distances(mesh: Mesh) -> dict[str, float]:
    """Return the errors of the cut model's loss and each gradient, in float64, relative to the largest element."""
    untied = Sizes(**{**vars(SMALL), "tied": False})
    torch.manual_seed(0)
    model = parallel_model(untied, mesh.grid.world_size).double()
    torch.manual_seed(0)
    plain = PlainLlama(untied).double()
    with torch.no_grad():
        for parameter, whole in zip(model.parameters(), plain.parameters(), strict=True):
            whole.copy_(parameter.full_tensor() if isinstance(parameter, DTensor) else parameter)
    tokens, labels = untied.batch(0)
    expected = loss_of(plain(tokens), labels)
    expected.backward()
    with loss_parallel():
        loss = loss_of(model(tokens), labels)
        loss.backward()
    apart = {"loss": abs(loss.item() / expected.item() - 1)}
    for (name, parameter), whole in zip(model.named_parameters(), plain.parameters(), strict=True):
        gradient = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        apart[name] = float((gradient - whole.grad).abs().max() / whole.grad.abs().max())
    return apart


def test_under_dtensor_it_computes_what_it_does_on_one_device() -> None:
    for apart in run_ranks(distances, Grid((("tensor", 2),)), transport="torch"):
        assert max(apart.values()) < 1e-12, apart


def test_ours_is_smollm2() -> None:
    options = options_of(Sizes())
    data = {"sequence": 8}
    ours = parse_config({"data": data}, [f"model={options['model']}"]).model
    shipped = {"base": "smollm2-135m", "positions": Sizes().tokens}
    assert ours == parse_config({"model": shipped, "data": data}).model
