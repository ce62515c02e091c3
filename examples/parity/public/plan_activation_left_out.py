"""transformers 5.24.0, no report found: the tensor plan of Apertus cuts the columns that the activation xIELU sees, and
has no rule for xIELU's two parameters: each rank keeps the gradient of local columns. The library's Apertus; types
apertus and apertus1p5_text.
"""

from common import next_words, planned, sgd_step, word_batch
from transformers import ApertusConfig, ApertusForCausalLM

import meshwright.parity as parity

CONFIG = ApertusConfig(
    vocab_size=16, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, attn_implementation="eager",
)  # fmt: skip
RULE = {"model.layers.*.mlp.act_fn": "replicated_with_grad_allreduce"}


@parity.check(ranks=2, axes={"tp": 2}, precision="float32")
def right_with_a_rule(job: parity.Job) -> None:
    """One pass a step: the rule is wrong with several, as plan_hook_accumulates shows."""
    job.reference(ApertusForCausalLM(CONFIG), loss=next_words, batch=word_batch)
    model = planned(job, RULE)
    job.parallel(model, step=sgd_step(model, next_words))


@parity.check(ranks=2, axes={"tp": 2}, precision="float32")
def wrong_without(job: parity.Job) -> None:
    job.reference(ApertusForCausalLM(CONFIG), loss=next_words, batch=word_batch)
    model = planned(job)
    job.parallel(model, step=sgd_step(model, next_words))
