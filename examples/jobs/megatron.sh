#!/bin/bash
TP=${TP:-2}
MODEL=(
    --num-layers 24 --hidden-size 1024 --num-attention-heads 16
    --seq-length 1024 --max-position-embeddings 1024 --tokenizer-type GPT2BPETokenizer
)
torchrun --nproc_per_node 8 pretrain_gpt.py ${MODEL[@]} --bf16 \
    --micro-batch-size 4 --global-batch-size 128 \
    --tensor-model-parallel-size $TP --sequence-parallel --pipeline-model-parallel-size 2 \
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
