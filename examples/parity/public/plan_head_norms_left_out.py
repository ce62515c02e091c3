"""transformers 5.24.0, no report found: the tensor plans of two text models cut heads, and have no rule for the norms
of queries and keys: each rank keeps the gradients of local heads. Qwen3's plan has the rule. The library's
Qwen3-VL-MoE; types qwen3_vl_moe_text and qwen3_omni_moe_text.
"""

from common import planned, sgd_step, word_batch
from torch import Tensor, nn
from transformers import Qwen3VLMoeTextConfig, Qwen3VLMoeTextModel

import meshwright.parity as parity

CONFIG = Qwen3VLMoeTextConfig(
    vocab_size=16, hidden_size=16, intermediate_size=32, moe_intermediate_size=8, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
    rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
    attn_implementation="eager",
)  # fmt: skip
RULES = dict.fromkeys((f"layers.*.self_attn.{name}_norm" for name in "qk"), "replicated_with_grad_allreduce")


def outputs(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(input_ids=batch["ids"], use_cache=False).last_hidden_state[..., :8].square().mean()


@parity.check(ranks=2, axes={"tp": 2}, precision="float32")
def right_with_rules(job: parity.Job) -> None:
    """One pass a step: the rules are wrong with several, as plan_hook_accumulates shows."""
    job.reference(Qwen3VLMoeTextModel(CONFIG), loss=outputs, batch=word_batch)
    model = planned(job, RULES)
    job.parallel(model, step=sgd_step(model, outputs))


@parity.check(ranks=2, axes={"tp": 2}, precision="float32")
def wrong_without(job: parity.Job) -> None:
    job.reference(Qwen3VLMoeTextModel(CONFIG), loss=outputs, batch=word_batch)
    model = planned(job)
    job.parallel(model, step=sgd_step(model, outputs))
