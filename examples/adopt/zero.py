"""A Llama under Accelerate with DeepSpeed's JSON: torchrun --nproc-per-node 8 zero.py --config zero.json"""

import argparse
import os
from pathlib import Path

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--config", default=str(Path(__file__).with_name("zero.json")))
parser.add_argument("--batch", type=int, default=2)
args = parser.parse_args()
tiny = bool(os.environ.get("TINY"))
NAMES = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size",
)  # fmt: skip
SIZES = (64, 2, 4, 2, 128, 256) if tiny else (4096, 32, 32, 8, 14336, 128256)
LENGTH = 32 if tiny else 4096
accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=args.config))
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(**dict(zip(NAMES, SIZES, strict=True)), use_cache=False))
if not tiny:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
rows = torch.randint(SIZES[-1], (48 if tiny else 128, LENGTH), generator=torch.Generator().manual_seed(0))
loader = DataLoader([{"input_ids": row, "labels": row} for row in rows], batch_size=args.batch)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    with accelerator.accumulate(model):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.print(f"loss {loss.item():.4f}")
