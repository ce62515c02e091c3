"""A tiny Llama under transformers' Trainer: two microbatches a step, labels with -100, clipping. Or by torchrun.

`--wrong tokens`: each rank divides by local labels; `clip`: ten times the norm; `rate`: a rate times the ranks.
"""

import os
import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

wrong, world = sys.argv[-1], int(os.environ.get("WORLD_SIZE", "1"))
torch.manual_seed(1)
model = LlamaForCausalLM(
    LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, use_cache=False)
)  # fmt: skip
tokens = torch.randint(0, 64, (16, 16), generator=torch.Generator().manual_seed(2))
labels = [row.masked_fill(torch.arange(16) < number % 7, -100) for number, row in enumerate(tokens)]
rows = [{"input_ids": x, "labels": y} for x, y in zip(tokens, labels, strict=True)]
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder, use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True, max_steps=2, seed=3,
        per_device_train_batch_size=4 // world, gradient_accumulation_steps=2, lr_scheduler_type="constant",
        learning_rate=1e-2 * (world if wrong == "rate" else 1), max_grad_norm=0.5 if wrong == "clip" else 0.05,
        average_tokens_across_devices=wrong != "tokens",
    )  # fmt: skip
    Trainer(model=model, args=arguments, train_dataset=rows).train()
