"""transformers 5.24.0, pull request 48519 is open for other converters: from_pretrained with a tensor plan cuts each
tensor of a file before a converter chunks it, so that a rank's q, k, v and gate are parts of the rank's first rows. The
library's HRM; cut convolutions of kimi_linear, bailing_hybrid and glm5_next_text are joined in this way under FSDP.
"""

from common import next_words, planned, sgd_step, word_batch
from transformers import HrmTextConfig, HrmTextForCausalLM

import meshwright.parity as parity

CONFIG = HrmTextConfig(
    vocab_size=16, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, head_dim=4, max_position_embeddings=16, attn_implementation="eager",
)  # fmt: skip


@parity.check(ranks=2, axes={"tp": 2}, precision="float32")
def right_without_conversion(job: parity.Job) -> None:
    """Saved with save_original_format=False: reading converts nothing."""
    job.reference(HrmTextForCausalLM(CONFIG), loss=next_words, batch=word_batch)
    model = planned(job, converted=False)
    job.parallel(model, step=sgd_step(model, next_words))


@parity.check(ranks=2, axes={"tp": 2}, precision="float32")
def wrong_with(job: parity.Job) -> None:
    job.reference(HrmTextForCausalLM(CONFIG), loss=next_words, batch=word_batch)
    model = planned(job)
    job.parallel(model, step=sgd_step(model, next_words))
