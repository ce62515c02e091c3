"""transformers 5.24.0, no report found: the tensor plan of inkling2_text and inkling2_loop_text cuts the experts' gates
and ups, joined in one tensor, as `colwise`. A rank reads half of the gates and half of the ups from a published file,
into a DTensor with a placement of consecutive rows: the forward pass is right, and experts are saved in another order.
"""

import tempfile

import torch.distributed as dist
from common import next_words, planned, word_batch
from transformers import Inkling2ForCausalLM, Inkling2TextConfig

import meshwright.parity as parity

CONFIG = Inkling2TextConfig(
    vocab_size=16, unpadded_vocab_size=16, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, head_dim=8,
    num_key_value_heads=2, swa_num_attention_heads=4, swa_num_key_value_heads=2, swa_head_dim=8, eos_token_id=2,
    moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, attn_implementation="eager",
)  # fmt: skip
RULE = {"model.layers.*.mlp.experts.gate_up_proj": "packed_colwise"}


def saved_and_read(job: parity.Job, rules: object, converted: bool) -> None:
    """Save the model under the plan, read the file without a plan, and compare."""
    job.reference(Inkling2ForCausalLM(CONFIG), loss=next_words, batch=word_batch)
    folder = [tempfile.mkdtemp() if job.rank == 0 else ""]
    dist.broadcast_object_list(folder)
    planned(job, rules, converted).save_pretrained(folder[0], save_original_format=converted)
    dist.barrier()
    job.parallel(Inkling2ForCausalLM.from_pretrained(folder[0], attn_implementation="eager").train())


@parity.check(ranks=2, axes={"tp": 2}, precision="float32")
def right_packed(job: parity.Job) -> None:
    saved_and_read(job, RULE, converted=False)


@parity.check(ranks=2, axes={"tp": 2}, precision="float32")
def wrong_as_published(job: parity.Job) -> None:
    saved_and_read(job, "auto", converted=True)
