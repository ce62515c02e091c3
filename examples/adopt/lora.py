"""LoRA on a frozen bf16 Llama by peft, with gradient checkpointing: python lora.py, or by torchrun"""

import os

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

tiny = bool(os.environ.get("TINY"))
NAMES = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size",
)  # fmt: skip
SIZES = (64, 2, 4, 2, 128, 256) if tiny else (4096, 32, 32, 8, 14336, 128256)
shape = dict(zip(NAMES, SIZES, strict=True))
BATCH, LENGTH = 2, 32 if tiny else 4096
rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(**shape, use_cache=False)).to(device, torch.float32 if tiny else torch.bfloat16)
model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
model.enable_input_require_grads()
model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"], lora_dropout=0.0))
model.print_trainable_parameters()
if world > 1:
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-4)
for step in range(4):
    ids = torch.randint(shape["vocab_size"], (BATCH * world, LENGTH))[rank::world].to(device)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
