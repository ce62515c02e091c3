"""A Qwen3 under Accelerate with gradient accumulation: accelerate launch accelerated.py"""

import os

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import Qwen3Config, Qwen3ForCausalLM

tiny = bool(os.environ.get("TINY"))
WIDTH, LAYERS, LENGTH, VOCABULARY = (64, 2, 32, 256) if tiny else (1024, 28, 2048, 151936)

precision = "no" if tiny else "bf16"
accelerator = Accelerator(cpu=tiny, gradient_accumulation_steps=4, mixed_precision=precision)
torch.manual_seed(0)
config = Qwen3Config(
    hidden_size=WIDTH,
    num_hidden_layers=LAYERS,
    num_attention_heads=WIDTH // 16,
    num_key_value_heads=WIDTH // 32,
    intermediate_size=3 * WIDTH,
    vocab_size=VOCABULARY,
    head_dim=128 if not tiny else 16,
    use_cache=False,
)
model = Qwen3ForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
rows = [{"input_ids": row, "labels": row} for row in torch.randint(VOCABULARY, (64, LENGTH))]
loader = DataLoader(rows, batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    with accelerator.accumulate(model):
        loss = model(**batch).loss
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.print(f"loss {loss.item():.4f}")
