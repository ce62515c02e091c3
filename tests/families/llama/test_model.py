"""Llama against transformers' Llama, Qwen2, Qwen3 and Mistral with the same random weights, in float64; the cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.config import Config, parse_config
from meshwright.families.llama.model import LlamaModel
from meshwright.models.decoder import KeyValueCache
from meshwright.parameters.shard import num_parameters, shard_specs
from meshwright.precision import DTYPES
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from meshwright.tensor.serial import SerialKit
from tests.models.harness import random_model, train_both
from tests.workers import run_ranks

ONE = Grid((("data", 1),))
B, T, STEPS = 3, 24, 20
THEIRS = ("llama", "qwen2", "qwen3", "mistral")

ROPES: dict[str, dict[str, Any]] = {
    "plain": {"theta": 1e4},
    "linear": {"kind": "linear", "factor": 4.0},
    "llama3": {"kind": "llama3", "factor": 8.0, "original": 16, "low_frequency": 0.5, "theta": 100.0},
    "yarn": {"kind": "yarn", "factor": 4.0, "original": 16, "fast": 4.0, "slow": 0.25, "theta": 500.0},
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, tied": ("llama", {"tied": True, "rope": ROPES["llama3"]}),
    "llama, biased": ("llama", {"biases": ["query-key-value", "output", "feed-forward"], "rope": ROPES["linear"]}),
    "llama, one key": ("llama", {"key_value_heads": 1, "rope": ROPES["yarn"]}),
    "qwen2": ("qwen2", {"biases": ["query-key-value"], "key_value_heads": 6, "rope": ROPES["yarn"]}),
    "qwen3": ("qwen3", {"head_norms": True, "head_width": 8, "tied": True}),
    "mistral": ("mistral", {"head_width": 10}),
}


def config_of(dtype: str = "float64", length: int = T, **model: Any) -> Config:
    shape = {
        "family": "llama", "layers": 2, "hidden": 24, "heads": 6, "key_value_heads": 2, "feed_forward": 40,
        "positions": 64, "vocabulary": 300, "vocabulary_multiple": 64,
    }  # fmt: skip
    precision = {"level": "O0", "dtype": dtype}
    return parse_config({"model": shape | model, "data": {"sequence": length}, "precision": precision})


def batch(step: int = 0) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(300, (B, T + 1), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: LlamaModel, tokens: Tensor, labels: Tensor) -> Tensor:
    return model({"tokens": tokens, "labels": labels}, {"labels": 1 / labels.numel()})[0]


def losses_of(theirs: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(theirs(tokens).logits.flatten(0, 1), labels.flatten())


class WideNorm(nn.RMSNorm):
    """Theirs go through float32 whatever they are given; this one stays in float64."""


def hugging_face(kind: str, model: LlamaModel, config: Config) -> nn.Module:
    """Theirs, with our weights. In float64 their norms are replaced by ones that stay in it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = config.model
    rope = {
        "rope_type": {"plain": "default"}.get(shape.rope.kind, shape.rope.kind), "rope_theta": shape.rope.theta,
    }  # fmt: skip
    names = {
        "factor": "factor", "original": "original_max_position_embeddings", "low_frequency": "low_freq_factor",
        "high_frequency": "high_freq_factor", "slow": "beta_slow", "fast": "beta_fast",
    }  # fmt: skip
    rope |= {names[field]: value for field, value in shape.rope.model_dump().items() if field in names}
    settings: dict[str, Any] = {
        "hidden_size": shape.hidden, "intermediate_size": shape.feed_forward, "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.num_key_value_heads,
        "vocab_size": shape.vocabulary, "max_position_embeddings": shape.positions, "rms_norm_eps": shape.norm_epsilon,
        "tie_word_embeddings": shape.tied, "rope_parameters": rope, "head_dim": shape.width_of_head,
        "attention_bias": "query-key-value" in shape.biases, "mlp_bias": "feed-forward" in shape.biases,
        "sliding_window": None,
    }  # fmt: skip
    if (experts := shape.experts) is not None:
        mixtral = kind == "mixtral"
        settings |= {
            "num_local_experts" if mixtral else "num_experts": experts.count, "num_experts_per_tok": experts.per_token,
            "moe_intermediate_size": shape.feed_forward, "norm_topk_prob": experts.renormalise,
            "router_aux_loss_coef": experts.balance, "shared_expert_intermediate_size": experts.shared,
        }  # fmt: skip
    theirs: nn.Module = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **settings), attn_implementation="sdpa", experts_implementation="eager"
    ).to(DTYPES[config.precision.dtype])
    for path, module in list(theirs.named_modules()) if config.precision.dtype == "float64" else ():
        if type(module).__name__.endswith("RMSNorm"):
            parent, _, name = path.rpartition(".")
            norm = WideNorm(module.weight.shape[0], eps=module.variance_epsilon, dtype=torch.float64)
            setattr(theirs.get_submodule(parent), name, norm)
    ours = as_theirs(dict(model.named_parameters()), config)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.copy_(ours[name])
    return theirs


OUTSIDE = {
    "tokens.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
INSIDE = {
    "attention_norm": "input_layernorm", "feed_forward_norm": "post_attention_layernorm",
    "attention.output": "self_attn.o_proj", "feed_forward.contract": "mlp.down_proj",
    "attention.query_norm": "self_attn.q_norm", "attention.key_norm": "self_attn.k_norm",
    "shared_expert.contract": "mlp.shared_expert.down_proj", "shared_expert.gate": "mlp.shared_expert_gate",
}  # fmt: skip
EXPERTS = {
    "feed_forward.router": "mlp.gate.weight",
    "feed_forward.expand": "mlp.experts.gate_up_proj",
    "feed_forward.contract": "mlp.experts.down_proj",
}


def as_theirs(ours: dict[str, Tensor], config: Config) -> dict[str, Tensor]:
    """Parameters, or their gradients, under their names and in their shapes."""
    model = config.model
    theirs: dict[str, Tensor] = {}
    for name, x in ours.items():
        if name in OUTSIDE:
            theirs[OUTSIDE[name]] = x[: model.vocabulary] if x.dim() > 1 else x
            continue
        _, layer, inner = name.split(".", 2)
        place, part, kind = f"model.layers.{layer}", *inner.rsplit(".", 1)
        if model.experts is not None and part in EXPERTS:  # [n, in, ..., out]
            theirs[f"{place}.{EXPERTS[part]}"] = x.flatten(2).mT if x.dim() > 2 else x.t()
            continue
        rows = x.flatten(1).t() if kind == "weight" and x.dim() > 1 else x.flatten()
        if part == "attention.query_key_value":
            queries = model.heads // model.num_key_value_heads
            heads = rows.unflatten(0, (-1, queries + 2, model.width_of_head))
            for letter, some in zip("qkv", heads.split((queries, 1, 1), 1), strict=True):
                theirs[f"{place}.self_attn.{letter}_proj.{kind}"] = some.flatten(0, 2)
        elif part in ("feed_forward.expand", "shared_expert.expand"):
            module = "mlp.shared_expert" if part.startswith("shared") else "mlp"
            for which, half in zip(("gate", "up"), rows.chunk(2), strict=True):
                theirs[f"{place}.{module}.{which}_proj.{kind}"] = half
        else:
            theirs[f"{place}.{INSIDE[part]}.{kind}"] = rows
    return theirs


def distances(
    mesh: Mesh, kind: str, changes: dict[str, Any]
) -> tuple[float, float, dict[str, float], list[list[float]]]:
    """Relative distance of logits, the losses', each gradient's; the losses of some steps."""
    config = config_of(**changes)
    model = random_model(LlamaModel, mesh, config)
    theirs = hugging_face(kind, model, config)
    tokens, labels = batch()
    wanted = theirs(tokens).logits.detach()
    logits = model.head.logits(model.hidden(tokens)).detach()
    loss, their_loss = loss_of(model, tokens, labels), losses_of(theirs, tokens, labels)
    loss.backward()
    their_loss.backward()
    ours = as_theirs({name: p.grad for name, p in model.named_parameters() if p.grad is not None}, config)
    apart = {}
    for name, parameter in theirs.named_parameters():
        assert parameter.grad is not None
        apart[name] = float((ours.pop(name) - parameter.grad).norm() / parameter.grad.norm())
    assert ours == {}, f"not compared: {list(ours)}"

    settings: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
    optimizers = [torch.optim.AdamW(each.parameters(), **settings) for each in (model, theirs)]

    def losses_at(step: int) -> tuple[Tensor, Tensor]:
        return loss_of(model, *batch(step)), losses_of(theirs, *batch(step))

    for optimizer in optimizers:
        optimizer.zero_grad()
    both = train_both(optimizers, STEPS, losses_at)
    return float((logits - wanted).norm() / wanted.norm()), abs(float((loss - their_loss).detach())), apart, list(both)


@pytest.fixture(scope="module", autouse=True)
def transformers() -> Any:
    """Imported before the ranks are forked."""
    for kind in THEIRS:
        pytest.importorskip(f"transformers.models.{kind}.modeling_{kind}", reason="pip install transformers")


@pytest.mark.parametrize("case", CASES)
def test_logits_gradients_and_steps_equal_hugging_faces(case: str) -> None:
    ((logits, loss, gradients, (ours, theirs)),) = run_ranks(distances, ONE, *CASES[case])
    assert logits < 1e-9
    assert loss < 1e-9
    assert max(gradients.values()) < 1e-9, gradients
    assert ours == pytest.approx(theirs, rel=1e-8)
    assert len(set(ours)) == STEPS


def cached_logits(mesh: Mesh, prompt: int) -> tuple[Tensor, Tensor, int, tuple[int, ...]]:
    """The logits of the tokens from the prompt's last on: in one pass, and one token after another."""
    model = random_model(LlamaModel, mesh, config_of(rope=ROPES["yarn"], head_norms=True)).eval()
    tokens, _ = batch()
    cache = KeyValueCache()
    with torch.no_grad():
        whole = model.head.logits(model.hidden(tokens))[:, prompt - 1 :]
        steps = [model.head.logits(model.hidden(tokens[:, :prompt], cache))[:, -1:]]
        for position in range(prompt, T):
            steps.append(model.head.logits(model.hidden(tokens[:, position : position + 1], cache)))
    return whole, torch.cat(steps, 1), cache.num_tokens, tuple(cache.layers[0][0].shape)


@pytest.mark.parametrize("prompt", [1, 4])
def test_the_cache_holds_key_value_heads_and_changes_nothing(prompt: int) -> None:
    ((whole, steps, num_tokens, shape),) = run_ranks(cached_logits, ONE, prompt)
    assert num_tokens == T
    assert shape == (B, 2, T, 4)
    torch.testing.assert_close(steps, whole, rtol=1e-11, atol=1e-12)


COUNTS = {
    "smollm2-135m": 134_515_008,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "qwen2.5-0.5b": 494_032_768,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "mistral-7b": 7_248_023_552,
    "llama-mini": 9_900_000,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "mixtral-mini": 19_400_000,
}
"""Parameters of each size, as its authors publish them; those of laptops are about so many."""


def count(mesh: Mesh) -> dict[str, tuple[int, int]]:
    """Parameters of each shipped model without its table's padding: of a model on meta tensors, and of its products."""
    meta = SerialKit(Mesh(mesh.grid, 0, torch.device("meta"), mesh.transport))
    counts = {}
    for name in COUNTS:
        config = parse_config({"model": name, "data": {"sequence": 1}})
        model = config.model
        padding = (model.padded_vocabulary - model.vocabulary) * model.hidden * (1 if model.tied else 2)
        built = num_parameters(list(shard_specs(LlamaModel(model, meta)).values()))
        products = LlamaModel.products(config).total - 2 * model.layers * model.heads * model.width_of_head
        counts[name] = built - padding, round(products)
    return counts


def test_shipped_models_have_their_published_sizes() -> None:
    (counts,) = run_ranks(count, ONE)
    for name, (built, products) in counts.items():
        published = COUNTS[name]
        assert built == published if "-mini" not in name else built == pytest.approx(published, rel=0.02)
        table = 0 if parse_config({"model": name, "data": {"sequence": 1}}).model.tied else 1
        model = parse_config({"model": name, "data": {"sequence": 1}}).model
        idle = model.experts.count - model.experts.per_token if model.experts is not None else 0
        # Each weight of a matrix multiplies a token once, but for an embedding of its own and idle experts.
        unused = table * model.vocabulary + 3 * idle * model.layers * model.feed_forward
        assert products == pytest.approx(built - unused * model.hidden, rel=1e-3)
