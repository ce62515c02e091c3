"""A Llama under FSDP2, created on the meta device: torchrun --nproc-per-node 8 fsdp.py --size 8b"""

import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

SIZES = {  # hidden, layers, heads, key-value heads, inner, vocabulary
    "tiny": (64, 2, 4, 2, 128, 256),
    "8b": (4096, 32, 32, 8, 14336, 128256),
    "70b": (8192, 80, 64, 8, 28672, 128256),
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=SIZES, default="8b")
    parser.add_argument("--sequence", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--float32", action="store_true")
    args = parser.parse_args()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=("dp",))
    hidden, layers, heads, groups, inner, vocabulary = SIZES[args.size]
    config = LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        intermediate_size=inner,
        vocab_size=vocabulary,
        max_position_embeddings=args.sequence,
        use_cache=False,
    )
    torch.manual_seed(0)
    with torch.device("meta" if kind == "cuda" else "cpu"):
        model = LlamaForCausalLM(config)
    policy = MixedPrecisionPolicy() if args.float32 else MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in model.modules():
        if isinstance(layer, LlamaDecoderLayer):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if kind == "cuda":
        model.to_empty(device="cuda")
        model.init_weights()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    generator = torch.Generator().manual_seed(0)
    for step in range(args.steps):
        rows = torch.randint(vocabulary, (args.batch * mesh.size(), args.sequence), generator=generator)
        ids = rows[dist.get_rank() :: mesh.size()].to(kind)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
