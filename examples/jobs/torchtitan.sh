torchrun --nproc_per_node 8 -m torchtitan.train --module llama3 --config llama3_8b \
    --training.seq_len 8192 --training.local_batch_size 1 --training.global_batch_size 64 \
    --parallelism.data_parallel_shard_degree 4 --parallelism.tensor_parallel_degree 2
