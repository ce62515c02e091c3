"""DeepSeek-V3 against transformers' with equal random weights in float64: logits, gradients, steps; the cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.compute.model import SAMPLES
from meshwright.compute.models.decoder import KeyValueCache
from meshwright.config import Config, parse_config
from meshwright.families.deepseek.model import DeepSeekModel
from meshwright.ranks.mesh import Mesh
from tests.compute.models.harness import random_model, train_both
from tests.families.deepseek.models import ROUTED, YARN
from tests.families.llama.models import ONE, T, WideNorm, batch, losses_of
from tests.workers import run_ranks

STEPS = 20
GROUPED = ROUTED | {"groups": 4, "groups_per_token": 2}
CASES: dict[str, dict[str, Any]] = {
    "dense": {"experts": None, "query_rank": None},
    "routed": {"experts": ROUTED},
    "groups": {"experts": GROUPED, "query_rank": None},
    "yarn": {"experts": GROUPED | {"renormalise": False}, "rope": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}},
    "later tokens": {"experts": ROUTED, "later_tokens": 2, "later_weight": 0.4},
    "a later token, dense": {"experts": None, "later_tokens": 1, "tied": True},
    "wide values": {"experts": None, "value_width": 14, "rope": YARN | {"mscale_all_dim": 0.5}, "tied": True},
}


def config_of(dtype: str = "float64", length: int = T, **model: Any) -> Config:
    shape = {
        "family": "deepseek", "layers": 2, "hidden": 24, "heads": 4, "query_rank": 10, "key_value_rank": 12,
        "head_width": 6, "rotary_width": 4, "value_width": 5, "feed_forward": 40, "positions": 64, "vocabulary": 300,
    }  # fmt: skip
    precision = {"level": "O0", "dtype": dtype}
    return parse_config({"model": shape | model, "data": {"sequence": length}, "precision": precision})


class WideRouter(nn.Module):
    """A router in float64, from the paper's equations 12 to 16; transformers' router rounds every input to float32."""

    def __init__(self, theirs: nn.Module) -> None:
        super().__init__()
        self.theirs = theirs
        self.weight = theirs.weight
        theirs.e_score_correction_bias = theirs.e_score_correction_bias.double()

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        theirs = self.theirs
        logits = F.linear(h.flatten(0, -2), self.weight)
        scores = logits.sigmoid()
        choice = scores + theirs.e_score_correction_bias
        groups = choice.unflatten(-1, (theirs.num_group, -1))
        kept = groups.topk(2, -1)[0].sum(-1).topk(theirs.topk_group, -1)[1]
        hidden = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter(-1, kept, False)
        ids = groups.masked_fill(hidden.unsqueeze(-1), -torch.inf).flatten(1).topk(theirs.top_k, -1)[1]
        weights = scores.gather(-1, ids)
        if theirs.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights * theirs.routed_scaling_factor, ids


def settings_of(config: Config) -> dict[str, Any]:
    """Return transformers' settings of a config's model."""
    shape, rope = config.model, config.model.rope.model_dump(exclude_none=True)
    names = {
        "factor": "factor", "original": "original_max_position_embeddings", "slow": "beta_slow", "fast": "beta_fast",
        "mscale": "mscale", "mscale_all_dim": "mscale_all_dim",
    }  # fmt: skip
    rotary = {names[field]: value for field, value in rope.items() if field in names}
    settings: dict[str, Any] = {
        "hidden_size": shape.hidden, "intermediate_size": shape.feed_forward, "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.heads, "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.positions, "rms_norm_eps": shape.norm_epsilon,
        "tie_word_embeddings": shape.tied, "q_lora_rank": shape.query_rank, "kv_lora_rank": shape.key_value_rank,
        "qk_nope_head_dim": shape.head_width, "qk_rope_head_dim": shape.rotary_width, "v_head_dim": shape.value_width,
        "rope_interleave": False, "first_k_dense_replace": shape.layers + shape.later_tokens,
        "num_mtp_layers": shape.later_tokens,
        "rope_parameters": rotary | {
            "rope_type": {"plain": "default"}.get(rope["kind"], rope["kind"]), "rope_theta": shape.rope.theta,
        },
    }  # fmt: skip
    if (experts := shape.experts) is not None:
        settings |= {
            "n_routed_experts": experts.count, "num_experts_per_tok": experts.per_token,
            "moe_intermediate_size": experts.width, "n_shared_experts": experts.shared // experts.width,
            "norm_topk_prob": experts.renormalise, "routed_scaling_factor": experts.scale, "n_group": experts.groups,
            "topk_group": experts.groups_per_token, "first_k_dense_replace": experts.dense_layers,
        }  # fmt: skip
    return settings


OUTSIDE = {
    "tokens.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
INSIDE = {
    "attention_norm": "input_layernorm", "feed_forward_norm": "post_attention_layernorm",
    "attention.query_norm": "self_attn.q_a_layernorm", "attention.latent_norm": "self_attn.kv_a_layernorm",
    "attention.query_latent": "self_attn.q_a_proj", "attention.key_value": "self_attn.kv_b_proj",
    "attention.output": "self_attn.o_proj", "feed_forward.contract": "mlp.down_proj",
    "shared_expert.contract": "mlp.shared_experts.down_proj",
}  # fmt: skip
GATED = {"feed_forward.expand": "mlp", "shared_expert.expand": "mlp.shared_experts"}
EXPERTS = {
    "feed_forward.router": "mlp.gate.weight",
    "feed_forward.expand": "mlp.experts.gate_up_proj",
    "feed_forward.contract": "mlp.experts.down_proj",
}


def layer_as_theirs(ours: dict[str, Tensor], config: Config, place: str, *, routed: bool) -> dict[str, Tensor]:
    """Rename and reshape a layer's parameters, or gradients, as transformers'."""
    theirs: dict[str, Tensor] = {}
    for name, x in ours.items():
        part, kind = name.rsplit(".", 1)
        if part == "feed_forward.router" and kind == "bias":
            theirs[f"{place}.mlp.gate.e_score_correction_bias"] = x
        elif routed and part in EXPERTS:  # [n, in, ..., out]
            theirs[f"{place}.{EXPERTS[part]}"] = x.flatten(2).mT if x.dim() > 2 else x.t()
        elif part in GATED:
            for which, half in zip(("gate", "up"), x.flatten(1).t().chunk(2), strict=True):
                theirs[f"{place}.{GATED[part]}.{which}_proj.weight"] = half
        elif part == "attention.query":
            which = "q_proj" if config.model.query_rank is None else "q_b_proj"
            theirs[f"{place}.self_attn.{which}.weight"] = x.t()
        elif part == "attention.latent":
            rows = torch.cat([x.t(), ours["attention.shared_key.weight"].t()])
            theirs[f"{place}.self_attn.kv_a_proj_with_mqa.weight"] = rows
        elif part != "attention.shared_key":
            theirs[f"{place}.{INSIDE[part]}.weight"] = x.t()
    return theirs


def as_theirs(ours: dict[str, Tensor], config: Config) -> dict[str, Tensor]:
    """Rename and reshape parameters, or gradients, as transformers'."""
    model, theirs = config.model, dict[str, Tensor]()
    layers: dict[int, dict[str, Tensor]] = {}
    for name, x in ours.items():
        if name in OUTSIDE:
            theirs[OUTSIDE[name]] = x[: model.vocabulary] if x.dim() > 1 else x
        elif name.startswith("blocks."):
            _, layer, inner = name.split(".", 2)
            layers.setdefault(int(layer), {})[inner] = x
    for depth in range(model.later_tokens):
        own = {name.split(".", 2)[2]: x for name, x in ours.items() if name.startswith(f"later.{depth}.")}
        inner = {name.removeprefix("block."): own.pop(name) for name in list(own) if name.startswith("block.")}
        place, routed = f"mtp.{depth}", model.experts is not None
        theirs |= layer_as_theirs(inner, config, f"{place}.mtp_block", routed=routed)
        both = [own.pop(f"{part}.weight").t() for part in ("of_token", "of_hidden")]
        theirs[f"{place}.eh_proj.weight"] = torch.cat(both, 1)
        named = {"token_norm": "enorm", "hidden_norm": "hnorm", "norm": "post_norm"}
        theirs |= {f"{place}.{named[name.removesuffix('.weight')]}.weight": x for name, x in own.items()}
    for layer, own in layers.items():
        theirs |= layer_as_theirs(own, config, f"model.layers.{layer}", routed=model.has_experts(layer))
    return theirs


def in_float64(theirs: nn.Module) -> None:
    """Replace norms and routers, which compute in float32 for every dtype, with modules that stay in float64."""
    for path, module in list(theirs.named_modules()):
        parent, _, name = path.rpartition(".")
        if type(module).__name__.endswith("RMSNorm"):
            norm = WideNorm(module.weight.shape[0], eps=module.variance_epsilon, dtype=torch.float64)
            setattr(theirs.get_submodule(parent), name, norm)
        if type(module).__name__.endswith("TopkRouter"):
            setattr(theirs.get_submodule(parent), name, WideRouter(module))


def put(theirs: nn.Module, values: dict[str, Tensor]) -> None:
    """Copy our values into transformers' parameters and buffers."""
    wanted = dict(theirs.named_parameters()) | {n: b for n, b in theirs.named_buffers() if n.endswith("tion_bias")}
    with torch.no_grad():
        for name, parameter in wanted.items():
            parameter.copy_(values[name.replace(".theirs.", ".")])


def mtp_layers(theirs: nn.Module, depths: int) -> nn.ModuleList:
    """Return transformers' layers of later tokens, which transformers uses to draft."""
    from transformers.modeling_layers import MtpLayer
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as library

    layer, norm, first = library.DeepseekV3DecoderLayer, library.DeepseekV3RMSNorm, theirs.config.num_hidden_layers
    return nn.ModuleList(MtpLayer(theirs.config, layer, norm, first + depth) for depth in range(depths)).double()


def their_loss_of(theirs: nn.Module, config: Config, tokens: Tensor, labels: Tensor) -> Tensor:
    """Return the mean loss of the next token, plus the losses of later tokens by equations 21 to 25.

    The loss at depth k is a sum over T - k tokens, divided by T.
    """
    loss, model = losses_of(theirs, tokens, labels), config.model
    if not model.later_tokens:
        return loss
    h = theirs.model(tokens).last_hidden_state
    for depth, layer in enumerate(theirs.mtp, 1):
        count = tokens.shape[1] - depth
        h = h[:, :count]
        places = torch.arange(count).unsqueeze(0)
        h = layer(
            theirs.model.embed_tokens(tokens[:, depth:]), h, theirs.model.rotary_emb(h, places), None, places, None
        )
        cross = F.cross_entropy(theirs.lm_head(h).flatten(0, 1), labels[:, depth:].flatten(), reduction="sum")
        loss = loss + cross * (model.later_weight / model.later_tokens / labels.numel())
    return loss


def hugging_face(model: DeepSeekModel, config: Config) -> nn.Module:
    """Return transformers' model with our weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = AutoConfig.for_model("deepseek_v3", **settings_of(config))
    theirs: nn.Module = AutoModelForCausalLM.from_config(
        settings, attn_implementation="sdpa", experts_implementation="eager"
    ).double()
    if depths := config.model.later_tokens:
        theirs.mtp = mtp_layers(theirs, depths)
    in_float64(theirs)
    put(theirs, as_theirs(dict(model.named_parameters()), config))
    return theirs


def loss_of(model: DeepSeekModel, tokens: Tensor, labels: Tensor) -> Tensor:
    scales = {"labels": 1 / labels.numel(), SAMPLES: 1 / len(tokens)}
    return model(model.prepared({"tokens": tokens, "labels": labels}), scales)[0]


def distances(mesh: Mesh, case: str) -> tuple[float, float, dict[str, float], list[list[float]]]:
    """Return the relative distances of logits, losses and each gradient, and the losses of some steps."""
    config = config_of(**CASES[case])
    model = random_model(DeepSeekModel, mesh, config)
    theirs = hugging_face(model, config)
    tokens, labels = batch()
    wanted = theirs(tokens).logits.detach()
    logits = model.head.logits(model.hidden(tokens)).detach()
    loss, their_loss = loss_of(model, tokens, labels), their_loss_of(theirs, config, tokens, labels)
    loss.backward()
    their_loss.backward()
    ours = as_theirs({name: p.grad for name, p in model.named_parameters() if p.grad is not None}, config)
    ours = {name: x for name, x in ours.items() if not name.endswith("e_score_correction_bias")}
    apart = {}
    for name, parameter in theirs.named_parameters():
        assert parameter.grad is not None
        mine = ours.pop(name.replace(".theirs.", "."))
        apart[name] = float((mine - parameter.grad).norm() / parameter.grad.norm())
    assert ours == {}, f"not compared: {list(ours)}"

    settings: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
    stepped = [p for name, p in model.named_parameters() if not name.endswith("router.bias")]
    optimizers = [torch.optim.AdamW(each, **settings) for each in (stepped, theirs.parameters())]

    def losses_at(step: int) -> tuple[Tensor, Tensor]:
        return loss_of(model, *batch(step)), their_loss_of(theirs, config, *batch(step))

    for optimizer in optimizers:
        optimizer.zero_grad()
    both = train_both(optimizers, STEPS, losses_at)
    return float((logits - wanted).norm() / wanted.norm()), abs(float((loss - their_loss).detach())), apart, list(both)


@pytest.fixture(scope="module", autouse=True)
def transformers() -> Any:
    """Import transformers before the ranks are forked."""
    return pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3", reason="needs transformers")


@pytest.mark.few(3)
@pytest.mark.parametrize("case", CASES)
def test_logits_gradients_and_steps_equal_hugging_faces(case: str) -> None:
    ((logits, loss, gradients, (ours, theirs)),) = run_ranks(distances, ONE, case)
    assert logits < 1e-9
    assert loss < 1e-9
    assert max(gradients.values()) < 1e-9, gradients
    assert ours == pytest.approx(theirs, rel=1e-8)
    assert len(set(ours)) == STEPS


def cached_logits(mesh: Mesh, prompt: int) -> tuple[Tensor, Tensor, int]:
    """Return the logits of the tokens from the prompt's last token on, in one pass and token by token."""
    model = random_model(DeepSeekModel, mesh, config_of(**CASES["yarn"])).eval()
    tokens, _ = batch()
    cache = KeyValueCache()
    with torch.no_grad():
        whole = model.head.logits(model.hidden(tokens))[:, prompt - 1 :]
        steps = [model.head.logits(model.hidden(tokens[:, :prompt], cache))[:, -1:]]
        for position in range(prompt, T):
            steps.append(model.head.logits(model.hidden(tokens[:, position : position + 1], cache)))
    return whole, torch.cat(steps, 1), cache.num_tokens


def test_the_cache_changes_nothing() -> None:
    ((whole, steps, num_tokens),) = run_ranks(cached_logits, ONE, 4)
    assert num_tokens == T
    torch.testing.assert_close(steps, whole, rtol=1e-11, atol=1e-12)
