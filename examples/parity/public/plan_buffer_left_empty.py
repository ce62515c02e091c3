"""transformers 5.24.0, no report found: fully_shard gives a model a class of torch's, which from_pretrained takes for
code from outside the library. No module without parameters and buffers is then initialised. Falcon-H1's model fills the
buffers of all layers in this way: under FSDP the buffers keep the values of fresh memory.
"""

import torch
from common import next_words, planned, word_batch
from transformers import FalconH1Config, FalconH1ForCausalLM

import meshwright.parity as parity

torch.use_deterministic_algorithms(True)  # fills fresh memory with not-a-number
CONFIG = FalconH1Config(
    vocab_size=16, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, head_dim=4,
    num_key_value_heads=2, mamba_d_ssm=16, mamba_n_heads=4, mamba_d_head=4, mamba_d_state=8, mamba_n_groups=1,
    mamba_chunk_size=8, attn_implementation="eager",
)  # fmt: skip


class OfTheLibrary(FalconH1ForCausalLM):
    @classmethod
    def is_custom_code(cls) -> bool:
        return False


def sharded(job: parity.Job, model_type: type[FalconH1ForCausalLM]) -> None:
    job.reference(model_type(CONFIG), loss=next_words, batch=word_batch)
    job.parallel(planned(job, fsdp_size=2), batch=job.rows("data"))


@parity.check(ranks=2, precision="float32")
def right_as_the_librarys(job: parity.Job) -> None:
    sharded(job, OfTheLibrary)


@parity.check(ranks=2, precision="float32")
def wrong_as_torchs(job: parity.Job) -> None:
    sharded(job, FalconH1ForCausalLM)
