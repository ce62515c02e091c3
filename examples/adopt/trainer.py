"""GPT-2 under transformers' Trainer: python trainer.py --output_dir out --per_device_train_batch_size 8 --bf16"""

import sys
from dataclasses import dataclass

import torch
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments


@dataclass
class ModelArguments:
    width: int = 768
    layers: int = 12
    heads: int = 12
    vocabulary: int = 50257
    length: int = 1024


def main():
    model_args, args = HfArgumentParser((ModelArguments, TrainingArguments)).parse_args_into_dataclasses(sys.argv[1:])
    config = GPT2Config(
        vocab_size=model_args.vocabulary,
        n_embd=model_args.width,
        n_layer=model_args.layers,
        n_head=model_args.heads,
        n_positions=model_args.length,
        use_cache=False,
    )
    torch.manual_seed(0)
    rows = torch.randint(model_args.vocabulary, (512, model_args.length))
    data = [{"input_ids": row, "labels": row} for row in rows]
    Trainer(GPT2LMHeadModel(config), args, train_dataset=data).train()


if __name__ == "__main__":
    main()
