"""transformers 5.24.0, no report found: the style `replicated_with_grad_allreduce` sums `.grad` over the ranks after
each backward pass, and the sums of earlier microbatches again. The library's Qwen3. The register finds the mistake in
tensor plans of beam, dots1, dots3_note_text, exaone4, exaone_moe, gemma3_text, gemma3n_text, gemma4_text, qwen3,
gemma4_unified_text, hy_v3, kolibri1, laguna, lara_mini, mellum and qwen3_moe.
"""

import torch.distributed as dist
from common import next_words, planned, word_batch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

import meshwright.parity as parity

CONFIG = Qwen3Config(
    vocab_size=16, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=4, attn_implementation="eager",
)  # fmt: skip
NORMS = ("model.layers.*.self_attn.q_norm", "model.layers.*.self_attn.k_norm")


def summed(gradient: Tensor) -> Tensor:
    dist.all_reduce(gradient)
    return gradient


@parity.check(ranks=2, axes={"tp": 2}, precision="float32")
def right_each_pass_alone(job: parity.Job) -> None:
    job.reference(Qwen3ForCausalLM(CONFIG), loss=next_words, batch=word_batch)
    model = planned(job, dict.fromkeys(NORMS, "replicate"))
    for name, p in model.named_parameters():
        if ".q_norm." in name or ".k_norm." in name:
            p.register_hook(summed)  # sees the gradient before the addition to .grad
    job.parallel(model)


@parity.check(ranks=2, axes={"tp": 2}, precision="float32")
def wrong_with_earlier_passes(job: parity.Job) -> None:
    job.reference(Qwen3ForCausalLM(CONFIG), loss=next_words, batch=word_batch)
    job.parallel(planned(job))
