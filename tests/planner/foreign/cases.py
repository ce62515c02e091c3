"""Public jobs: the facts of each file, in the file's form, and the run that the job is, written by hand.

The texts have the facts of the named files (as of August 2026, TOML of January) in other words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Job:
    """A job's files (the first is planned), the options of `plan`, and the fields that must be read.

    Attributes:
        files: Texts by name.
        devices: The devices of the plan.
        program: The preset of the software.
        expected: Fields of the run by dotted name.
        facts: Facts of the software in the file.
        left_out: The third column's fields.
        options: Options of `plan --from`.
        function: The function of a Python file.
    """

    files: Mapping[str, str]
    devices: int
    program: str
    expected: Mapping[str, Any]
    facts: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    function: str = ""


TITAN = """
from torchtitan.trainer import Trainer

SEQUENCE = 8192

def llama3_8b():
    return Trainer.Config(
        hf_assets_path="./assets", model_spec=model_registry("8B"), metrics=MetricsProcessor.Config(log_freq=1),
        optimizer=OptimizersContainer.Config(lr=3e-4),
        training=TrainingConfig(local_batch_size=1, seq_len=SEQUENCE, steps=1000),
        checkpoint=CheckpointManager.Config(interval=500),
        activation_checkpoint=ActivationCheckpointConfig(mode="selective"),
    )

def llama3_405b():
    return Trainer.Config(
        model_spec=model_registry("405B"),
        model_converters=ModelConvertersContainer.Config(
            converters=[Float8LinearConverter.Config(filter_fqns=["output"])],
        ),
        training=TrainingConfig(local_batch_size=2, seq_len=SEQUENCE),
        parallelism=ParallelismConfig(tensor_parallel_degree=8, enable_async_tensor_parallel=True),
        activation_checkpoint=FullAC.Config(),
        compile=CompileConfig(enable=True),
    )

def llama3_8b_tokens():
    config = llama3_8b()
    config.training = TrainingConfig(
        num_tokens_per_microbatch_per_dp_rank=2 * SEQUENCE, max_context_length=SEQUENCE,
        num_tokens_per_train_step=64 * SEQUENCE,
    )
    config.parallelism.fsdp_reshard_after_forward = "never"
    return config

default_config = JobConfig(
    model=Model(name="llama3", flavor="70B"), training=Training(local_batch_size=4, seq_len=SEQUENCE, dataset="c4"),
    activation_checkpoint=ActivationCheckpoint(mode="full", selective_ac_option="op"),
)
"""
TITAN_2024 = """
[job]
dump_folder = "./outputs"
[model]
name = "llama3"
flavor = "70B"
norm_type = "rmsnorm"
[training]
batch_size = 8
seq_len = 8192
warmup_steps = 200
data_parallel_shard_degree = -1
tensor_parallel_degree = 8
compile = true
[experimental]
context_parallel_degree = 2
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "interleaved_1f1b"
enable_async_tensor_parallel = true
[float8]
enable_float8_linear = true
enable_fsdp_float8_all_gather = true
[activation_checkpoint]
mode = "full"
"""
TITAN_RUN = """
NGPU=${NGPU:-"8"}
CONFIG_FILE=${CONFIG_FILE:-"./train_configs/debug_model.toml"}
torchrun --nproc_per_node=${NGPU} --rdzv_backend c10d --role rank --tee 3 \\
-m torchtitan.train --job.config_file ${CONFIG_FILE} "$@"
"""
BRIDGE_EXPERTS = """
from megatron.bridge.recipes.utils import CommOverlapConfig

def mixtral():
    cfg = _pretrain_common()
    cfg.model = GPTModelProvider(
        num_layers=32, hidden_size=4096, ffn_hidden_size=14336, num_attention_heads=32, num_query_groups=8,
        vocab_size=32000, seq_length=4096, gated_linear_unit=True, hidden_dropout=0.0, num_experts=8,
        moe_router_topk=2, share_embeddings_and_output_weights=False,
    )
    cfg.model.tensor_model_parallel_size = 2
    cfg.model.sequence_parallel = True
    cfg.model.expert_model_parallel_size = 8
    cfg.model.expert_tensor_parallel_size = 1
    cfg.model.moe_flex_dispatcher_backend = "hybridep"
    cfg.model.moe_token_dispatcher_type = "flex"
    cfg.train.global_batch_size = 64
    cfg.train.micro_batch_size = 1
    cfg.comm_overlap = CommOverlapConfig(tp_comm_overlap=True, overlap_moe_expert_parallel_comm=True)
    return cfg
"""
BRIDGE = """
from megatron.bridge import AutoBridge

SEQUENCE_16K: int = 16384

def _provider(*, num_layers: int, hidden_size: int, seq_length: int):
    return GPTModelProvider(
        num_layers=num_layers, hidden_size=hidden_size, ffn_hidden_size=14336, num_attention_heads=32,
        num_query_groups=8, vocab_size=128256, seq_length=seq_length, gated_linear_unit=True, hidden_dropout=0.0,
        share_embeddings_and_output_weights=False,
    )

def llama3_8b_2gpu():
    cfg = _pretrain_common()
    cfg.model = _provider(num_layers=32, hidden_size=4096, seq_length=8192)
    cfg.model.pipeline_model_parallel_size = 1
    cfg.model.virtual_pipeline_model_parallel_size = None
    cfg.model.context_parallel_size = 2
    cfg.model.sequence_parallel = False
    cfg.train.global_batch_size = 512
    cfg.train.micro_batch_size = 1
    cfg.model.fine_grained_activation_offloading = True
    cfg.ddp.use_distributed_optimizer = True
    cfg.ddp.overlap_grad_reduce = True
    return cfg

def llama3_8b_16gpu_16k():
    cfg = _pretrain_common()
    cfg.model = AutoBridge.from_hf_pretrained("meta-llama/Meta-Llama-3-8B").to_megatron_provider(load_weights=False)
    cfg.model.tensor_model_parallel_size = 4
    cfg.model.pipeline_model_parallel_size = 2
    cfg.model.virtual_pipeline_model_parallel_size = 4
    cfg.model.context_parallel_size = 2
    cfg.model.sequence_parallel = True
    cfg.model.seq_length = SEQUENCE_16K
    cfg.train.global_batch_size = 512
    cfg.train.micro_batch_size = 1
    cfg.model.recompute_granularity = "selective"
    cfg.model.recompute_modules = ["core_attn"]
    cfg.mixed_precision = "bf16_with_fp8_current_scaling_mixed"
    return cfg

def llama32_1b_1gpu():
    cfg = _pretrain_common()
    cfg.model = AutoBridge.from_hf_pretrained("meta-llama/Llama-3.2-1B").to_megatron_provider(load_weights=False)
    cfg.model.seq_length = 8192
    cfg.train.global_batch_size = 512
    cfg.train.micro_batch_size = 1
    return cfg
"""
MEGATRON_8B = """
#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
GPUS_PER_NODE=8
NUM_NODES=1
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))
TOKENIZER_ARG=${3:-"MOCK"}   # a path, or "MOCK"
TP_SIZE=1
NUM_LAYERS=32
DTYPE="fp8"
SEQ_LENGTH=8192
LAUNCH=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
)
MODEL=(
    --use-mcore-models --num-layers $NUM_LAYERS --hidden-size 4096 --ffn-hidden-size 14336
    --num-attention-heads 32 --group-query-attention --num-query-groups 8 --kv-channels 128
    --seq-length $SEQ_LENGTH --max-position-embeddings $SEQ_LENGTH --position-embedding-type rope
    --attention-dropout 0.0 --hidden-dropout 0.0 --swiglu --untie-embeddings-and-output-weights
)
TRAINING=(
    --micro-batch-size 1 --global-batch-size 128 --lr 0.00015 --bf16 --grad-reduce-in-bf16   # reduced in half precision
    --cross-entropy-loss-fusion --clip-grad 1.0
)
LOW=()
if [[ "$DTYPE" == "fp8" ]]; then
    LOW+=(
        "--fp8-format hybrid"
        "--fp8-param-gather"
    )
fi
PARALLEL=(
    --tensor-model-parallel-size $TP_SIZE
    --sequence-parallel
)
DDP=( --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather )
TRAINING+=("${DDP[@]}")
DATA=()
if [[ "$TOKENIZER_ARG" == "MOCK" ]] || [[ -z "$TOKENIZER_ARG" ]]; then
    DATA+=( "--mock-data" "--vocab-size 128256" "--split '99,1,0'" )
else
    DATA+=( "--vocab-size 32000" )
fi
if [ ! -f "$SCRIPT" ]; then
    echo "not found"
    exit 1
fi
torchrun ${LAUNCH[@]} \\
    pretrain_gpt.py \\
    ${MODEL[@]} ${TRAINING[@]} ${LOW[@]} ${PARALLEL[@]} ${DATA[@]}
"""
MEGATRON_175B = """
GPUS_PER_NODE=8
GPT_MODEL_ARGS=(--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048
    --max-position-embeddings 2048 --attention-backend auto)
TRAINING_ARGS=(--micro-batch-size 1 --global-batch-size 1536 --train-iters 500000 --fp16 --lr 6.0e-5
    --step-batch-size-schedule "0:16 5000:1536")
MODEL_PARALLEL_ARGS=(
	--tensor-model-parallel-size 8
	--pipeline-model-parallel-size 16
)
torchrun --nproc_per_node $GPUS_PER_NODE pretrain_gpt.py ${GPT_MODEL_ARGS[@]} \\
    ${TRAINING_ARGS[@]} ${MODEL_PARALLEL_ARGS[@]}
"""
MIXTRAL = """
MODEL_ARGS=(
    --use-mcore-models --disable-bias-linear --seq-length 4096 --max-position-embeddings 32768 --num-layers 32
    --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --swiglu --group-query-attention
    --num-query-groups 8 --no-position-embedding --untie-embeddings-and-output-weights --hidden-dropout 0.0
)
MOE_ARGS=(
    --num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2
    --moe-grouped-gemm --moe-token-dispatcher-type alltoall
)
torchrun pretrain_gpt.py ${MODEL_ARGS[@]} ${MOE_ARGS[@]} --tokenizer-type Llama2Tokenizer --micro-batch-size 1 \\
    --global-batch-size 256 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 \\
    --num-layers-per-virtual-pipeline-stage 8 --expert-model-parallel-size 8 --use-distributed-optimizer \\
    --sequence-parallel --bf16 --overlap-grad-reduce
"""
FLEX = """--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep --moe-hybridep-num-sms 32
    --expert-tensor-parallel-size 1 --overlap-moe-expert-parallel-comm --moe-permute-fusion"""
ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_activation_checkpointing: false
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_offload_params: false
  fsdp_reshard_after_forward: true
  fsdp_version: 2
mixed_precision: bf16
num_processes: 8
"""
TITAN_SPECS = """
from torchtitan.trainer import Trainer

def qwen3_8b():
    spec = model_registry("8B")
    return Trainer.Config(
        loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=vocabulary(spec))),
        model_spec=spec, optimizer=default_adamw(lr=8e-4),
        training=TrainingConfig(num_tokens_per_microbatch_per_dp_rank=2 * 4096, max_context_length=4096),
        parallelism=ParallelismConfig(data_parallel_shard_degree=-1),
        activation_checkpoint=SelectiveAC.Config(),
    )

def qwen3_8b_nvfp4():
    config = qwen3_8b()
    config.compile = CompileConfig(enable=True, components=["model"])
    config.model_spec = model_registry(
        "8B", attn_backend="varlen", converters=[NVFP4LinearConverter.Config(fqns=["layers"])]
    )
    return config

def qwen3_30b_a3b_deepep():
    return Trainer.Config(
        loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config()),
        model_spec=model_registry("30B-A3B", moe_comm_backend="deepep"), optimizer=default_adamw(lr=8e-4),
        training=TrainingConfig(num_tokens_per_microbatch_per_dp_rank=2 * 4096, max_context_length=4096),
        parallelism=ParallelismConfig(data_parallel_shard_degree=-1, expert_parallel_degree=4),
        activation_checkpoint=FullAC.Config(),
    )
"""
BRIDGE_KEYWORDS = """
import torch
from megatron.bridge import AutoBridge

def deepseek_v3_pretrain_config(**user_kwargs):
    recommended_kwargs = {
        "hf_path": "deepseek-ai/DeepSeek-V3", "tensor_parallelism": 2, "pipeline_parallelism": 16,
        "expert_parallelism": 64, "recompute_granularity": "selective",
    }
    combined_kwargs: Common = {**recommended_kwargs, **user_kwargs}
    return _deepseek_v3_common(**combined_kwargs)

def deepseek_v3_pretrain_config_32nodes(**user_kwargs):
    recommended_kwargs = {
        "hf_path": "deepseek-ai/DeepSeek-V3", "pipeline_parallelism": 8, "expert_parallelism": 32,
        "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1,
    }
    return deepseek_v3_pretrain_config(**{**recommended_kwargs, **user_kwargs})

def _deepseek_v3_common(
    hf_path, tensor_parallelism=2, pipeline_parallelism=16, virtual_pipeline_parallelism=None, expert_parallelism=64,
    recompute_granularity="selective", recompute_method=None, recompute_num_layers=None, global_batch_size=4096,
    layout=None,
):
    bridge = AutoBridge.from_hf_pretrained(hf_path)
    model_cfg = bridge.to_megatron_provider(load_weights=False)
    model_cfg.tensor_model_parallel_size = tensor_parallelism
    model_cfg.pipeline_model_parallel_size = pipeline_parallelism
    model_cfg.virtual_pipeline_model_parallel_size = virtual_pipeline_parallelism
    model_cfg.expert_model_parallel_size = expert_parallelism
    model_cfg.expert_tensor_parallel_size = 1
    model_cfg.sequence_parallel = True
    model_cfg.seq_length = 4096
    model_cfg.mtp_num_layers = 1
    model_cfg.recompute_granularity = recompute_granularity
    model_cfg.recompute_method = recompute_method
    model_cfg.recompute_num_layers = recompute_num_layers
    mtp_layers = getattr(model_cfg, "mtp_num_layers", 1) or 0
    last_layer = ["mtp"] * mtp_layers + ["loss"]
    layout_map = {
        (1, 1): None,
        (16, 1): [["embedding"] + ["decoder"] * 4] + [["decoder"] * 4] * 14 + [["decoder"] + last_layer],
        (8, 1): [["embedding"] + ["decoder"] * 8] + [["decoder"] * 8] * 6 + [["decoder"] * 5 + last_layer],
    }
    vp_size = virtual_pipeline_parallelism or 1
    if layout is not None:
        model_cfg.pipeline_model_parallel_layout = layout
    elif (pipeline_parallelism, vp_size) in layout_map:
        model_cfg.pipeline_model_parallel_layout = layout_map[(pipeline_parallelism, vp_size)]
    opt_config, scheduler = distributed_fused_adam_with_cosine_annealing(weight_decay=0.1)
    opt_config.use_precision_aware_optimizer = True
    opt_config.main_grads_dtype = torch.bfloat16
    opt_config.exp_avg_dtype = torch.bfloat16
    opt_config.exp_avg_sq_dtype = torch.bfloat16
    return ConfigContainer(
        model=model_cfg, optimizer=opt_config,
        train=TrainingConfig(global_batch_size=global_batch_size, micro_batch_size=1),
        ddp=DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True),
        mixed_precision=MixedPrecisionConfig(
            bf16=True, params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16, autocast_enabled=False,
            grad_reduce_in_fp32=False,
        ),
    )
"""
ONE_B = {"model": "llama-3.2-1b", "sequence": 2048, "batch": 32}
ZERO3 = """
{"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "bf16": {"enabled": true},
 "zero_optimization": {"stage": 3, "overlap_comm": true, "offload_optimizer": {"device": "cpu", "pin_memory": true}}}
"""
JOBS: Mapping[str, Job] = {
    "torchtitan llama3_8b.toml": Job(
        {"llama3_8b.toml": """
[job]
dump_folder = "./outputs"
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 1
seq_len = 8192
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
[activation_checkpoint]
mode = "selective"
[compile]
enable = false
"""},
        8, "torchtitan-eager",
        {"model.hidden": 4096, "batch.global_": 8, "micro": 1, "layout.data.size": 8, "layout.data.sync": "zero3",
         "memory.recompute": "ops"},
    ),
    "torchtitan llama3_70b.toml": Job(
        {"llama3_70b.toml": """
[model]
name = "llama3"
flavor = "70B"
[training]
local_batch_size = 8
seq_len = 8192
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 8
fsdp_reshard_after_forward = "default"
[activation_checkpoint]
mode = "full"
[quantize.linear.float8]
enable_fsdp_float8_all_gather = true
"""},
        64, "torchtitan-eager",
        {"model.hidden": 8192, "batch.global_": 64, "micro": 8, "layout.data.size": 8, "layout.tensor.size": 8,
         "layout.data.sync": "zero3", "memory.recompute": 1},
        left_out=("quantize.linear.float8.enable_fsdp_float8_all_gather",),
    ),
    "torchtitan with stages and replicas.toml": Job(
        {"hybrid.toml": """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 8
seq_len = 4096
[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = 4
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "Interleaved1F1B"
pipeline_parallel_microbatch_size = 2
[compile]
enable = true
"""},
        16, "torchtitan",
        {"batch.global_": 64, "micro": 2, "layout.data.size": 8, "layout.data.shard": 4, "layout.data.sync": "zero2",
         "layout.pipeline.size": 2, "layout.pipeline.chunks": 2, "layout.pipeline.schedule": "1f1b"},
    ),
    "torchtitan with experts over tensor ranks.toml": Job(
        {"experts.toml": """
[model]
name = "deepseek_v3"
[training]
local_batch_size = 4
seq_len = 4096
[parallelism]
tensor_parallel_degree = 2
expert_parallel_degree = 8
expert_parallel_comm_backend = "deepep"
[compile]
enable = true
"""},
        16, "torchtitan",
        {"layout.data.size": 8, "layout.data.expert": 4, "layout.tensor.size": 2},
        ("dispatch=deepep", "expert_tensor=1"), options={"model": "deepseek-v3"},
    ),
    "torchtitan registry, llama3_8b": Job(
        {"llama3/config_registry.py": TITAN}, 8, "torchtitan-eager",
        {"model.hidden": 4096, "batch.global_": 8, "micro": 1, "memory.recompute": "ops", "layout.data.sync": "zero3"},
        function="llama3_8b",
    ),
    "torchtitan registry, llama3_405b": Job(
        {"llama3/config_registry.py": TITAN}, 512, "torchtitan",
        {"model.hidden": 16384, "batch.global_": 128, "micro": 2, "memory.recompute": 1, "layout.tensor.size": 8,
         "layout.data.size": 64},
        ("products=fp8", "overlapped=sums,gathers,layers"), function="llama3_405b",
    ),
    "torchtitan registry, batches in tokens": Job(
        {"llama3/config_registry.py": TITAN}, 8, "torchtitan-eager",
        {"batch.global_": 64, "micro": 2, "data.lengths.source": 8192, "layout.data.sync": "zero2"},
        function="llama3_8b_tokens",
    ),
    "torchtitan registry, a variable": Job(
        {"llama3/train_configs.py": TITAN}, 64, "torchtitan-eager",
        {"model.hidden": 8192, "batch.global_": 256, "micro": 4, "data.lengths.source": 8192, "memory.recompute": 1},
        function="default_config",
    ),
    "torchtitan registry, experts by DeepEP": Job(
        {"qwen3/config_registry.py": TITAN_SPECS}, 8, "torchtitan-eager",
        {"model.hidden": 2048, "layout.data.size": 8, "layout.data.expert": 4, "layout.data.sync": "zero3", "micro": 2,
         "batch.global_": 16, "memory.recompute": 1},
        ("logits=slices", "dispatch=deepep"), function="qwen3_30b_a3b_deepep",
    ),
    "torchtitan registry, NVFP4": Job(
        {"qwen3/config_registry.py": TITAN_SPECS}, 8, "torchtitan",
        {"model.hidden": 4096, "layout.data.size": 8, "micro": 2, "batch.global_": 16, "memory.recompute": "ops"},
        ("logits=slices",), ("model_spec.converters",), function="qwen3_8b_nvfp4",
    ),
    "torchtitan's launch line": Job(
        {"run.sh": "NGPU=8\ntorchrun --nproc_per_node=${NGPU} -m torchtitan.train --module llama3 --config llama3_8b "
                   "--training.seq_len 4096 --training.local-batch-size=2 --parallelism.tensor_parallel_degree 2"},
        8, "torchtitan-eager",
        {"model.hidden": 4096, "data.lengths.source": 4096, "batch.global_": 8, "micro": 2, "layout.tensor.size": 2,
         "layout.data.size": 4},
    ),
    "torchtitan's TOML of 2024": Job(
        {"llama3_70b.toml": TITAN_2024}, 64, "torchtitan",
        {"model.hidden": 8192, "batch.global_": 16, "micro": 4, "layout.tensor.size": 8, "layout.pipeline.size": 2,
         "layout.pipeline.chunks": 2, "layout.context.size": 2, "layout.data.size": 2, "layout.data.sync": "zero2",
         "memory.recompute": 1},
        ("products=fp8", "overlapped=sums,gathers,layers"), ("float8.enable_fsdp_float8_all_gather",),
    ),
    "torchtitan's replicas without shards.toml": Job(
        {"ddp.toml": TITAN_2024.replace("shard_degree = -1", "shard_degree = 1\ndata_parallel_replicate_degree = 2")},
        64, "torchtitan", {"layout.data.size": 2, "layout.data.sync": "allreduce"},
        ("products=fp8", "overlapped=sums,gathers,layers"), ("float8.enable_fsdp_float8_all_gather",),
    ),
    "torchtitan's run_train.sh with a TOML": Job(
        {"job.slurm": "#SBATCH --nodes=4\nCONFIG_FILE=./mine.toml NGPU=8 ./run_train.sh --training.batch_size 16 "
                      "--experimental.context_parallel_degree=1 --experimental.pipeline_parallel_microbatches 8\n",
         "run_train.sh": TITAN_RUN, "mine.toml": TITAN_2024},
        32, "torchtitan",
        {"model.hidden": 8192, "batch.global_": 32, "micro": 2, "layout.tensor.size": 8, "layout.pipeline.size": 2,
         "layout.context.size": 1, "layout.data.size": 2},
        ("products=fp8", "overlapped=sums,gathers,layers"), ("float8.enable_fsdp_float8_all_gather",),
    ),
    "Megatron-LM train_gpt3_175b_distributed.sh": Job(
        {"train.sh": MEGATRON_175B}, 128, "megatron-core",
        {"model.family": "gpt2", "model.hidden": 12288, "model.layers": 96, "batch.global_": 1536, "micro": 1,
         "layout.tensor.size": 8, "layout.pipeline.size": 16, "layout.data.size": 1, "layout.data.sync": "allreduce",
         "precision.dtype": "fp16", "model.vocabulary": 50257},
        ("overlapped=[]",), ("step-batch-size-schedule",),
    ),
    "Megatron-LM train_llama3_8b_h100_fp8.sh": Job(
        {"train.sh": MEGATRON_8B}, 8, "megatron-core",
        {"model.family": "llama", "model.hidden": 4096, "model.feed_forward": 14336, "model.key_value_heads": 8,
         "model.vocabulary": 128256, "model.tied": False, "batch.global_": 128, "micro": 1, "layout.data.size": 8,
         "layout.data.sync": "zero1", "layout.tensor.size": 1},
        ("products=fp8", "low_weights=alone", "overlapped=sums,gathers"),
        ("cross-entropy-loss-fusion",),
    ),
    "Megatron-LM train_mixtral_8x7b_distributed.sh": Job(
        {"train.sh": MIXTRAL}, 32, "megatron-core",
        {"model.experts.count": 8, "model.experts.per_token": 2, "model.vocabulary": 32000, "layout.data.expert": 8,
         "layout.pipeline.size": 4, "layout.pipeline.chunks": 1, "batch.global_": 256, "layout.data.sync": "zero1"},
        ("overlapped=sums", "dispatch=alltoall"),
    ),
    "Megatron-LM with experts over tensor ranks": Job(
        {"train.sh": MIXTRAL.replace("--moe-token-dispatcher-type alltoall", FLEX)
         .replace("--tensor-model-parallel-size 1", "--tensor-model-parallel-size 2")},
        32, "megatron-core",
        # Eight ranks of experts are two tensor ranks of four replicas.
        {"layout.data.expert": 4, "layout.data.size": 4, "layout.tensor.size": 2, "layout.pipeline.size": 4},
        ("overlapped=sums,experts", "dispatch=hybridep", "dispatch_sms=32", "expert_tensor=1"),
    ),
    "Megatron-LM with experts over context ranks": Job(
        {"train.sh": MIXTRAL.replace("--pipeline-model-parallel-size 4", "--context-parallel-size 4")
         .replace("--num-layers-per-virtual-pipeline-stage 8", "").replace("--moe-token-dispatcher-type alltoall", "")},
        8, "megatron-core",
        # Eight ranks of experts are four context ranks of two replicas; the file names no dispatcher.
        {"layout.data.expert": 2, "layout.data.size": 2, "layout.context.size": 4},
        ("overlapped=sums", "dispatch=allgather", "expert_context=true"),
    ),
    "Megatron-LM's arguments as YAML": Job(
        {"megatron.yaml": """
model_parallel: {tensor_model_parallel_size: 2, pipeline_model_parallel_size: 2, sequence_parallel: true}
language_model: {num_layers: 24, hidden_size: 1024, num_attention_heads: 16}
micro_batch_size: 4
global_batch_size: 64
seq_length: 1024
max_position_embeddings: 1024
bf16: true
use_distributed_optimizer: true
"""},
        8, "megatron-core",
        {"model.family": "gpt2", "model.layers": 24, "layout.tensor.sequence_parallel": True, "layout.data.size": 2,
         "micro": 4},
        ("overlapped=[]",),
    ),
    "Megatron-DeepSpeed ds_pretrain_gpt.sh": Job(
        {"ds.sh": """
ZERO_STAGE=1
ds_config=ds_config_gpt.json
deepspeed --num_gpus 8 pretrain_gpt.py --tensor-model-parallel-size 2 --pipeline-model-parallel-size 1 \\
    --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024 \\
    --micro-batch-size 4 --global-batch-size 64 --bf16 --hidden-dropout 0.0 \\
    --checkpoint-activations --deepspeed-activation-checkpointing --zero-stage=${ZERO_STAGE} \\
    --deepspeed_config=$ds_config --no-pipeline-parallel --deepspeed
"""},
        8, "deepspeed",
        {"model.hidden": 1024, "layout.data.size": 4, "layout.data.sync": "zero1", "layout.tensor.size": 2,
         "memory.recompute": 1, "batch.global_": 64, "micro": 4},
        (), ("deepspeed_config",),
    ),
    "Megatron-LM of 2021, run_figure_15.sh": Job(
        {"figure.sh": "train --num-layers 32 --hidden-size 3840 --num-attention-heads 32 --seq-length 2048 "
                      "--max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 32 "
                      "--tensor-model-parallel-size 2 --fp16 --DDP-impl local --hidden-dropout 0.0 "
                      "--activations-checkpoint-method uniform --activations-checkpoint-num-layers 1"},
        64, "megatron-core",
        {"model.hidden": 3840, "memory.recompute": 1, "layout.tensor.size": 2, "layout.data.sync": "allreduce",
         "precision.dtype": "fp16"},
        ("overlapped=[]",), ("DDP-impl",),
    ),
    "Primus llama3.1_8B-pretrain.yaml": Job(
        {"llama3.1_8B.yaml": """
work_group: amd
modules:
  pre_trainer:
    framework: megatron
    config: pre_trainer.yaml
    model: llama3.1_8B.yaml
    overrides:
      train_iters: 50
      micro_batch_size: 2
      global_batch_size: 128
      seq_length: 8192
      tensor_model_parallel_size: 1
      pipeline_model_parallel_size: 1
      overlap_grad_reduce: true
      overlap_param_gather: true
      use_distributed_optimizer: true
      bf16: true
      enable_primus_turbo: true
"""},
        8, "megatron-core",
        {"model.hidden": 4096, "batch.global_": 128, "micro": 2, "layout.data.sync": "zero1"},
        ("overlapped=sums,gathers",), ("modules.pre_trainer.overrides.enable_primus_turbo",),
    ),
    "Primus qwen3_30B_A3B-BF16-pretrain.yaml": Job(
        {"qwen3.yaml": """
work_group: ${PRIMUS_TEAM:amd}
modules:
  pre_trainer:
    framework: megatron
    config: pre_trainer.yaml
    model: ${PRIMUS_MODEL:qwen3_30B_A3B}.yaml
    overrides:
      micro_batch_size: 2
      global_batch_size: 256
      seq_length: ${PRIMUS_SEQ_LENGTH:4096}
      max_position_embeddings: ${PRIMUS_MAX_POSITION_EMBEDDINGS:4096}
      tensor_model_parallel_size: ${PRIMUS_TP:1}
      expert_model_parallel_size: ${PRIMUS_EP:8}
      overlap_grad_reduce: true
      overlap_param_gather: true
      train_data_path: ${PRIMUS_TOKENIZED_DATA_PATH:null}
      use_turbo_deepep: true
      turbo_deepep_num_cu: 64
"""},
        8, "megatron-core",
        {"model.hidden": 2048, "batch.global_": 256, "micro": 2, "layout.data.expert": 8, "layout.data.sync": "zero1",
         "data.lengths.source": 4096, "precision.dtype": "bf16"},
        ("overlapped=sums,gathers", "dispatch=deepep", "streams_bytes=[0, 0]"),
        ("modules.pre_trainer.overrides.turbo_deepep_num_cu",),
    ),
    "AutoModel moonlight_16b_te_fp8.yaml": Job(
        {"moonlight.yaml": """
step_scheduler: {global_batch_size: 256, local_batch_size: 4}
distributed: {_target_: nemo_automodel.components.distributed.fsdp2.FSDP2Manager, tp_size: 1, cp_size: 1, pp_size: 1,
  dp_replicate_size: 1, ep_size: 8, sequence_parallel: false}
autopipeline: {pp_schedule: interleaved1f1b, pp_microbatch_size: 2, layers_per_stage: 2}
parallelizer: {activation_checkpointing: false, reshard_after_forward: false}
model:
  config:
    _target_: transformers.AutoConfig.from_pretrained
    pretrained_model_name_or_path: moonshotai/Moonlight-16B-A3B
  backend: {attn: te, experts: te, dispatcher: deepep, te_fp8: {_target_: TEFp8Config, recipe: current}}
dataset: {seq_len: 2048}
optimizer: {_target_: torch.optim.Adam, foreach: false}
"""},
        8, "automodel",
        {"model.hidden": 2048, "layout.data.size": 8, "layout.data.expert": 8, "layout.data.sync": "zero2", "micro": 4,
         "batch.global_": 256, "memory.recompute": "none"},
        ("products=fp8", "dispatch=deepep", "experts=apart"),
    ),
    "Megatron-Bridge, Llama 3 8B on 2": Job(
        {"llama3.py": BRIDGE}, 2, "megatron-core",
        {"model.hidden": 4096, "layout.context.size": 2, "batch.global_": 512, "layout.data.sync": "zero1", "micro": 1},
        ("overlapped=sums,gathers",), ("model.fine_grained_activation_offloading",), function="llama3_8b_2gpu",
    ),
    "Megatron-Bridge, DeepSeek-V3 by keywords": Job(
        {"deepseek_v3.py": BRIDGE_KEYWORDS}, 1024, "megatron-core",
        {"model.hidden": 7168, "layout.pipeline.size": 16, "layout.pipeline.partition": (4,) * 15 + (1,),
         "layout.data.size": 32, "layout.data.expert": 32, "layout.tensor.size": 2, "memory.recompute": "selective",
         "precision.accumulate": "stored", "optimizer.states": "bf16", "batch.global_": 4096},
        ("overlapped=sums,gathers", "dispatch=alltoall", "expert_tensor=1"), ("model.mtp_num_layers",),
        function="deepseek_v3_pretrain_config",
    ),
    "Megatron-Bridge, DeepSeek-V3 on 32 nodes by keywords": Job(
        {"deepseek_v3.py": BRIDGE_KEYWORDS}, 256, "megatron-core",
        {"layout.pipeline.size": 8, "layout.pipeline.partition": (8,) * 7 + (5,), "layout.data.size": 16,
         "layout.data.expert": 16, "memory.recompute": 1},
        ("overlapped=sums,gathers", "dispatch=alltoall", "expert_tensor=1"), ("model.mtp_num_layers",),
        function="deepseek_v3_pretrain_config_32nodes",
    ),
    "Megatron-Bridge, Llama 3 8B, 16k": Job(
        {"llama3.py": BRIDGE}, 16, "megatron-core",
        {"model.hidden": 4096, "layout.tensor.size": 4, "layout.pipeline.size": 2, "layout.pipeline.chunks": 4,
         "layout.context.size": 2, "data.lengths.source": 16384, "memory.recompute": "selective"},
        ("products=fp8", "low_weights=alone", "overlapped=sums,gathers"), function="llama3_8b_16gpu_16k",
    ),
    "Megatron-Bridge, Llama 3.2 1B": Job(
        {"llama3.py": BRIDGE}, 8, "megatron-core",
        {"model.hidden": 2048, "layout.data.size": 8, "batch.global_": 512}, ("overlapped=sums,gathers",),
        function="llama32_1b_1gpu",
    ),
    "Megatron-Bridge, Mixtral with HybridEP": Job(
        {"mixtral.py": BRIDGE_EXPERTS}, 16, "megatron-core",
        {"layout.tensor.size": 2, "layout.data.expert": 4, "layout.data.size": 8, "layout.data.sync": "zero1"},
        ("overlapped=sums,gathers,layers,experts", "dispatch=hybridep", "expert_tensor=1"), function="mixtral",
    ),
    "AutoModel llama3_70b_pretrain.yaml": Job(
        {"pretrain.yaml": """
recipe: TrainFinetuneRecipeForNextTokenPrediction
step_scheduler: {global_batch_size: 128, local_batch_size: 4, max_steps: 60}
model: {_target_: nemo_automodel.from_pretrained, pretrained_model_name_or_path: meta-llama/Llama-3.1-70B,
         torch_dtype: float32}
distributed:
  strategy: fsdp2
  dp_size: none
  tp_size: 4
  cp_size: 1
  pp_size: 4
  sequence_parallel: false
  activation_checkpointing: true
  pipeline: {pp_schedule: interleaved1f1b, pp_microbatch_size: 1, layers_per_stage: 4}
packed_sequence: {packed_sequence_size: 4096}
"""},
        64, "automodel",
        {"model.hidden": 8192, "batch.global_": 128, "micro": 1, "layout.data.size": 4, "layout.data.sync": "zero2",
         "layout.tensor.size": 4, "layout.pipeline.size": 4, "layout.pipeline.chunks": 5, "memory.recompute": 1,
         "data.lengths.source": 4096, "optimizer.masters": "float32"},
        ("slice_dtype=float32",),
    ),
    "AutoModel qwen3_moe_30b_a3b": Job(
        {"qwen3.yaml": """
step_scheduler: {global_batch_size: 1024, local_batch_size: 1}
model:
  _target_: nemo_automodel.from_config
  config: {_target_: transformers.AutoConfig.from_pretrained, pretrained_model_name_or_path: Qwen/Qwen3-30B-A3B}
  backend: {attn: te, linear: te, experts: te, dispatcher: hybridep}
distributed:
  strategy: fsdp2
  tp_size: 1
  ep_size: 16
  activation_checkpointing: false
  moe: {reshard_after_forward: false}
dataset: {seq_length: 4096}
optimizer: {_target_: torch.optim.Adam, betas: [0.9, 0.999], lr: 0.0001}
"""},
        16, "automodel",
        {"model.hidden": 2048, "batch.global_": 1024, "layout.data.expert": 16, "layout.data.sync": "zero2",
         "optimizer.masters": "bf16", "optimizer.states": "bf16", "precision.accumulate": "stored"},
        ("dispatch=hybridep", "experts=apart"),
    ),
    "AutoModel megatron_pretrain_gpt2.yaml": Job(
        {"gpt2.yaml": """
step_scheduler: {global_batch_size: 512, local_batch_size: 8}
model:
  _target_: nemo_automodel.from_config
  config: {_target_: transformers.GPT2Config, vocab_size: 50258, n_positions: 1024, n_ctx: 1024, n_embd: 768,
   n_layer: 12,
           n_head: 12, bos_token_id: 50256}
distributed: {strategy: ddp, tp_size: 1}
dataset: {seq_len: 1024}
optimizer: {_target_: transformer_engine.pytorch.optimizers.FusedAdam, exp_avg_dtype: torch.bfloat16}
"""},
        8, "automodel",
        {"model.family": "gpt2", "model.vocabulary": 50258, "batch.global_": 512, "micro": 8,
         "layout.data.sync": "allreduce", "optimizer.masters": "bf16", "optimizer.states": "bf16"},
    ),
    "Accelerate fsdp.yaml": Job(
        {"fsdp.yaml": """
distributed_type: FSDP
fsdp_config: {fsdp_sharding_strategy: 2, fsdp_activation_checkpointing: true, fsdp_backward_prefetch: BACKWARD_PRE}
num_processes: 2
mixed_precision: fp16
"""},
        2, "fsdp",
        {"layout.data.size": 2, "layout.data.sync": "zero2", "memory.recompute": 1, "precision.dtype": "fp16"},
        options=ONE_B,
    ),
    "Accelerate tp_hsdp.yaml": Job(
        {"tp_hsdp.yaml": ACCELERATE + """
parallelism_config:
  parallelism_config_cp_size: 1
  parallelism_config_dp_replicate_size: 2
  parallelism_config_dp_shard_size: 2
  parallelism_config_tp_size: 2
"""},
        8, "fsdp",
        {"layout.data.size": 4, "layout.data.shard": 2, "layout.tensor.size": 2, "layout.data.sync": "zero3"},
        options=ONE_B,
    ),
    "Accelerate nd.yaml": Job(
        {"nd.yaml": ACCELERATE + """
parallelism_config:
  parallelism_config_cp_size: 4
  parallelism_config_dp_replicate_size: 1
  parallelism_config_dp_shard_size: 2
"""},
        8, "fsdp",
        {"layout.data.size": 2, "layout.context.size": 4, "layout.context.kind": "ring", "layout.data.sync": "zero3"},
        options=ONE_B,
    ),
    "Accelerate with DeepSpeed's JSON": Job(
        {"accelerate.yaml": """
distributed_type: DEEPSPEED
deepspeed_config: {deepspeed_config_file: zero1.json, zero3_init_flag: false}
num_processes: 2
""", "zero1.json": '{"zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": 4,'
         '"fp16": {"enabled": true}}'},
        2, "deepspeed-trainer",
        {"layout.data.sync": "zero1", "micro": 4, "precision.dtype": "fp16", "batch.global_": 32}, options=ONE_B,
    ),
    "axolotl fft-8b-liger-fsdp.yaml": Job(
        {"fft.yaml": """
base_model: NousResearch/Meta-Llama-3.1-8B
plugins: [axolotl.integrations.liger.LigerPlugin]
liger_rms_norm: true
liger_fused_linear_cross_entropy: true
datasets: [{path: mlabonne/FineTome-100k}]
sequence_len: 4096
sample_packing: true
gradient_accumulation_steps: 4
micro_batch_size: 2
optimizer: adamw_torch_fused
bf16: auto
gradient_checkpointing: true
fsdp: [full_shard, auto_wrap]
fsdp_config: {fsdp_offload_params: true, fsdp_sharding_strategy: FULL_SHARD, fsdp_limit_all_gathers: true}
"""},
        8, "axolotl",
        {"model.hidden": 4096, "data.lengths.source": 4096, "batch.global_": 64, "micro": 2, "memory.recompute": 1,
         "memory.offload.to": "host", "layout.data.sync": "zero3"},
        ("logits=slices", "norms=fast"), ("sample_packing",),
    ),
    "axolotl 3b-fp8-fsdp2.yaml": Job(
        {"fp8.yaml": """
base_model: meta-llama/Llama-3.2-3B
sequence_len: 512
torch_compile: true
gradient_accumulation_steps: 1
micro_batch_size: 16
fp8: true
fp8_enable_fsdp_float8_all_gather: true
fsdp_config: {fsdp_version: 2, offload_params: false, reshard_after_forward: false, activation_checkpointing: true}
"""},
        4, "axolotl",
        {"batch.global_": 64, "micro": 16, "layout.data.sync": "zero2", "memory.recompute": 1},
        ("fuses_elements=true", "products=fp8"), ("fp8_enable_fsdp_float8_all_gather",),
        options={"model": "llama-3.2-1b"},
    ),
    "DeepSpeed's JSON beside the Trainer's line": Job(
        {"run.sh": "deepspeed --num_gpus 8 train.py --deepspeed ds.json \\\n"
                   "  --model_name_or_path meta-llama/Llama-3.1-8B --per_device_train_batch_size 2 \\\n"
                   "  --gradient_accumulation_steps 8 --max_seq_length 4096 \\\n"
                   "  --gradient_checkpointing True --learning_rate 1e-5", "ds.json": ZERO3},
        8, "deepspeed-trainer",
        {"model.hidden": 4096, "batch.global_": 128, "micro": 2, "layout.data.sync": "zero3", "memory.recompute": 1,
         "memory.offload.to": "host"},
        ("overlapped=sums,gathers",),
    ),
    "DeepSpeed's JSON alone": Job(
        {"ds.json": ZERO3}, 8, "deepspeed-trainer", {"micro": 4, "layout.data.sync": "zero3"},
        ("overlapped=sums,gathers",),
        options=ONE_B,
    ),
    "nanotron config_tiny_llama.yaml": Job(
        {"llama.yaml": """
general: {project: debug, run: tiny, seed: 42}
model:
  dtype: bfloat16
  model_config: {bos_token_id: 1, eos_token_id: 2, hidden_act: silu, hidden_size: 512, initializer_range: 0.02,
    intermediate_size: 2048, is_llama_config: true, max_position_embeddings: 256, num_attention_heads: 8,
    num_hidden_layers: 4, num_key_value_heads: 4, pretraining_tp: 1, rms_norm_eps: 1.0e-05, rope_scaling: null,
    tie_word_embeddings: true, use_cache: true, vocab_size: 256}
optimizer: {clip_grad: 1.0, zero_stage: 0, weight_decay: 0.01}
parallelism: {dp: 2, expert_parallel_size: 1, pp: 2, pp_engine: 1f1b, tp: 2, tp_linear_async_communication: true,
  tp_mode: REDUCE_SCATTER}
tokens: {batch_accumulation_per_replica: 2, micro_batch_size: 2, sequence_length: 256, train_steps: 15}
"""},
        8, "nanotron",
        {"model.hidden": 512, "model.tied": True, "layout.tensor.size": 2, "layout.tensor.sequence_parallel": True,
         "layout.pipeline.size": 2, "layout.data.size": 2, "batch.global_": 8, "micro": 2,
         "layout.data.sync": "allreduce"},
        ("overlapped=sums,gathers,layers",),
    ),
    "nanotron config_qwen.yaml": Job(
        {"qwen.yaml": """
model:
  dtype: bfloat16
  make_vocab_size_divisible_by: 1
  model_config: {_attn_implementation: flex_attention, attention_bias: false, hidden_act: silu, hidden_size: 256,
    interleaved_rotary: false, intermediate_size: 768, is_qwen2_config: true, max_position_embeddings: 256,
    moe_config: null, num_attention_heads: 4, num_hidden_layers: 12, num_key_value_heads: 4, rms_norm_eps: 1.0e-05,
    rope_scaling: null, rope_theta: 10000.0, sliding_window_size: 20, tie_word_embeddings: true, vocab_size: 49152,
    z_loss_coefficient: 0.0001, z_loss_enabled: false}
optimizer: {accumulate_grad_in_fp32: true, zero_stage: 0}
parallelism: {context_parallel_size: 1, dp: 1, pp: 1, pp_engine: 1f1b, recompute_layer: false, tp: 2,
  tp_linear_async_communication: true, tp_mode: REDUCE_SCATTER}
tokens: {batch_accumulation_per_replica: 1, micro_batch_size: 3, sequence_length: 8192}
"""},
        2, "nanotron",
        {"model.hidden": 256, "model.window": None, "layout.tensor.size": 2, "batch.global_": 3, "micro": 3},
        ("overlapped=sums,gathers,layers",),
        ("model.model_config._attn_implementation", "model.model_config.sliding_window_size"),
    ),
    "axolotl qwen3_30ba3b_ep_fsdp_fft_4gpu.yaml": Job(
        {"ep.yaml": """
base_model: Qwen/Qwen3-30B-A3B-Instruct-2507
plugins: [axolotl.integrations.expert_parallel.ExpertParallelPlugin]
expert_parallel_size: 2
dp_shard_size: 2
sequence_len: 2048
micro_batch_size: 1
gradient_accumulation_steps: 1
optimizer: adamw_torch_8bit
bf16: true
gradient_checkpointing: true
flash_attention: true
fsdp_config: {fsdp_version: 2, offload_params: false, sharding_strategy: FULL_SHARD, reshard_after_forward: true}
"""},
        4, "axolotl",
        {"model.hidden": 2048, "layout.data.size": 4, "layout.data.expert": 2, "layout.data.shard": 2,
         "layout.data.sync": "zero3", "batch.global_": 4, "micro": 1, "memory.recompute": 1},
        ("dispatch=deepep",), ("optimizer",),
    ),
    "axolotl qwen3-8b-fsdp-tp-cp.yaml": Job(
        {"cp.yaml": """
base_model: Qwen/Qwen3-8B
plugins: [axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin, mine.Plugin]
dp_shard_size: 2
context_parallel_size: 2
tensor_parallel_size: 2
fsdp_version: 2
fsdp_config: {offload_params: false, reshard_after_forward: true, transformer_layer_cls_to_wrap: Qwen3DecoderLayer}
sequence_len: 8192
attn_implementation: flash_attention_2
gradient_accumulation_steps: 1
micro_batch_size: 1
optimizer: adamw_torch_fused
bf16: true
"""},
        8, "axolotl",
        {"model.hidden": 4096, "layout.data.size": 2, "layout.context.size": 2, "layout.context.kind": "ring",
         "layout.tensor.size": 2, "batch.global_": 2, "layout.data.sync": "zero3"},
        ("logits=slices",), ("plugins",),
    ),
    "Megatron-LM (AMD's) train_deepseekv3.sh": Job(
        {"deepseek.sh": """
MODEL_SIZE=${MODEL_SIZE:-16B} # 16B, 671B.
TP=${TP:-1} EP="${EP:-1}"
GLOBAL_BATCH_SIZE=${GLOBAL_BATCH_SIZE:-}
GLOBAL_BATCH_SIZE=${GLOBAL_BATCH_SIZE:-$((16 * 8))}
GPUS=`python3 -c "import torch; print(torch.cuda.device_count())"`
if [ -z ${MP_VP} ]; then
    vp_options=""
else
    vp_options=" --num-layers-per-virtual-pipeline-stage ${MP_VP}"
fi
if [ $MODEL_SIZE = 671B ]; then
    HIDDEN_SIZE=7168
elif [ $MODEL_SIZE = 16B ]; then
    HIDDEN_SIZE=2048
    NUM_LAYERS=${NUM_LAYERS:-27}
    NUM_SHARED_EXPERTS=2
    MOE_INTERMEDIATE_SIZE=1408
    moe_options=" \\
        --moe-router-num-groups ${EP} \\
        --moe-router-group-topk 1
    "
fi
moe_options=" \\
    ${moe_options} \\
    --multi-latent-attention --qk-layernorm --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 \\
    --v-head-dim 128 --kv-channels 128 --num-experts 64 --moe-router-topk 6 --moe-layer-freq '([0]*1+[1]*26)' \\
    --moe-ffn-hidden-size ${MOE_INTERMEDIATE_SIZE} \\
    --moe-shared-expert-intermediate-size $((${NUM_SHARED_EXPERTS} * ${MOE_INTERMEDIATE_SIZE})) \\
    --moe-token-dispatcher-type alltoall --expert-model-parallel-size ${EP} --moe-grouped-gemm"
if (( TP > 1 )); then
    moe_options+=" --sequence-parallel"
fi
run="torchrun pretrain_deepseek.py --num-layers ${NUM_LAYERS} --hidden-size ${HIDDEN_SIZE} --swiglu --bf16 \\
    --num-attention-heads 16 --ffn-hidden-size 10944 --seq-length 4096 --max-position-embeddings 4096 \\
    --tokenizer-type DeepSeekV3Tokenizer --untie-embeddings-and-output-weights --disable-bias-linear \\
    --micro-batch-size 1 --global-batch-size ${GLOBAL_BATCH_SIZE} --tensor-model-parallel-size ${TP} \\
    --use-distributed-optimizer --hidden-dropout 0.0 --transformer-impl transformer_engine ${moe_options} ${vp_options}"
eval ${run}
"""},
        8, "megatron-core",
        {"model.family": "deepseek", "model.hidden": 2048, "model.layers": 27, "model.query_rank": None,
         "model.key_value_rank": 512, "model.experts.shared": 2816, "model.experts.dense_layers": 1,
         "model.vocabulary": 129280, "batch.global_": 128, "layout.data.size": 8, "layout.data.sync": "zero1"},
        ("overlapped=[]", "dispatch=alltoall"),
    ),
    "Megatron-LM (AMD's) train_llama3.sh": Job(
        {"llama3.sh": """
LIST=$(rdma link -j | python3 -c "import json; print(*names, sep=',')")
for ARGUMENT in "$@"
do
   KEY=$(echo $ARGUMENT | cut -f1 -d=)
done
GPUS_PER_NODE=`python3 -c "import torch; print(torch.cuda.device_count())"`
NNODES="${NNODES:-1}" TP="${TP:-8}" SEQ_LENGTH="${SEQ_LENGTH:-2048}" MODEL_SIZE="${MODEL_SIZE:-70}"
OPTIMIZER="${OPTIMIZER:-adam}" FSDP="${FSDP:-0}" RECOMPUTE="${RECOMPUTE:-1}"
if ! [ -d "$TOKENIZER_MODEL" ]; then
  wget --header="Authorization: $TOKEN" --output-document=tokenizer.json https://example.org/tokenizer.json
fi
if [[ $MODEL_SIZE -eq 8 ]]; then #8B
        NUM_LAYERS=32
elif [[ $MODEL_SIZE -eq 70 ]]; then
        HIDDEN_SIZE=8192 # not 5120
        NUM_LAYERS=80 NUM_HEADS=64 NUM_KV_HEADS=8
else
        exit 1
fi
GROUP_SIZE=$(( ${NUM_HEADS} / ${NUM_KV_HEADS} ))
GPT_ARGS="
    --tensor-model-parallel-size ${TP} \\
    --num-layers $NUM_LAYERS --hidden-size $HIDDEN_SIZE --ffn-hidden-size 28672 --num-attention-heads $NUM_HEADS \\
    --seq-length $SEQ_LENGTH --max-position-embeddings 131072 --untie-embeddings-and-output-weights --swiglu \\
    --disable-bias-linear --hidden-dropout 0.0 --micro-batch-size 2 --global-batch-size 8 --bf16 \\
"
if [ "$RECOMPUTE" -eq 1 ]; then
    GPT_ARGS="$GPT_ARGS --recompute-num-layers $NUM_LAYERS \\
        --recompute-granularity full --recompute-method block \\
        "
fi
DISTRIBUTED_ARGS="
    --nproc_per_node $GPUS_PER_NODE \\
    --nnodes $NNODES \\
"
EXTRA_ARGS="
    --group-query-attention --num-query-groups $(( ${NUM_HEADS} / ${GROUP_SIZE} )) \\
    --overlap-grad-reduce --optimizer $OPTIMIZER \\
"
if [ "$FSDP" -eq 1 ]; then
    EXTRA_ARGS="$EXTRA_ARGS --use-torch-fsdp2"
else
    if [ "$OPTIMIZER" == "adam" ]; then
        EXTRA_ARGS="$EXTRA_ARGS --use-distributed-optimizer --overlap-param-gather --sequence-parallel"
    fi
fi
run_cmd="
    torchrun $DISTRIBUTED_ARGS pretrain_gpt.py \\
        $GPT_ARGS \\
        $EXTRA_ARGS \\
"
eval $run_cmd
echo 'import argparse
parser.add_argument("--micro-batch-size", default=9)
print(mean)' > mean.py
"""},
        8, "megatron-core",
        {"model.hidden": 8192, "model.key_value_heads": 8, "model.layers": 80, "layout.tensor.size": 8,
         "layout.tensor.sequence_parallel": True, "batch.global_": 8, "micro": 2, "memory.recompute": 1},
        ("overlapped=sums,gathers",),
    ),
    "BigScience tr11-176B-ml.slurm": Job(
        {"tr11.slurm": """
#SBATCH --nodes=48
#SBATCH --gres=gpu:8                 # gpus
python ratios.py --dataset-ratios-path $RATIOS --split train --micro-batch-size 7
TP_SIZE=4
PP_SIZE=12
MICRO_BATCH_SIZE=2  # was 1 till 784
GLOBAL_BATCH_SIZE=2048
OPTIMIZER_ARGS=" \\
    --optimizer adam --lr 6e-5 \\
    "
# for 20 h 1190
#    --exit-duration-in-mins 1190 \\
EXIT_OPTS=" \\
    --exit-duration-in-mins 5990 \\
    "
GPT_ARGS=" \\
    --pp-partition-method 'type:transformer|embedding' --num-layers 70 --hidden-size 14336 \\
    --num-attention-heads 112 --seq-length 2048 --max-position-embeddings 2048 --hidden-dropout 0.0 \\
    --micro-batch-size $MICRO_BATCH_SIZE --rampup-batch-size 192 16 9_765_625 --global-batch-size $GLOBAL_BATCH_SIZE \\
    --embed-layernorm --bf16 --position-embedding-type alibi --checkpoint-activations --pad-vocab-size-to 250880 \\
    $OPTIMIZER_ARGS \\
    $EXIT_OPTS \\
    "
ZERO_STAGE=0 # bf16 has a stage 1 of its own
config_json="./ds_config.$SLURM_JOB_ID.json"
cat <<EOT > $config_json
{
  "train_micro_batch_size_per_gpu": $MICRO_BATCH_SIZE, "train_batch_size": $GLOBAL_BATCH_SIZE,
  "zero_optimization": {"stage": $ZERO_STAGE}, "bf16": {"enabled": true}, "steps_per_print": 2000
}
EOT
LAUNCHER="python -u -m torch.distributed.run --nproc_per_node 8 --nnodes $SLURM_NNODES --tee 3"
CMD=" \\
    `pwd`/pretrain_gpt.py --tensor-model-parallel-size $TP_SIZE --pipeline-model-parallel-size $PP_SIZE \\
    $GPT_ARGS --deepspeed --deepspeed_config ${config_json} --zero-stage ${ZERO_STAGE} \\
    "
clear; srun --wait=60 --jobid $SLURM_JOB_ID bash -c "$LAUNCHER --node_rank \\$SLURM_PROCID $CMD" 2>&1 | tee log.txt
"""},
        384, "deepspeed",
        {"model.family": "gpt2", "model.layers": 70, "model.vocabulary": 250880, "model.vocabulary_multiple": 4,
         "layout.pipeline.size": 12, "layout.pipeline.partition": (5, *[6] * 10, 5), "layout.tensor.size": 4,
         "layout.data.size": 8, "layout.data.sync": "zero1", "batch.global_": 2048, "micro": 2, "memory.recompute": 1},
        (), ("embed-layernorm", "rampup-batch-size"),
    ),
    "Megatron-DeepSpeed run-1t.sh": Job(
        {"run.sh": """
DS_CONFIG=ds_config.json
MICRO_BATCH=1 GPN=8 OFFLOAD="cpu"
GLOBAL_BATCH=$(( ${GPN} * ${MICRO_BATCH} ))
cat <<EOT > $DS_CONFIG
{"train_batch_size": $GLOBAL_BATCH, "train_micro_batch_size_per_gpu": $MICRO_BATCH, "gradient_accumulation_steps": 1,
 "zero_optimization": {"stage": 3, "stage3_max_live_parameters": 3e9, "overlap_comm": true,
   "offload_optimizer": {"device": "$OFFLOAD", "buffer_count": 4}},
 "fp16": {"enabled": true, "initial_scale_power": 15}}
EOT
ds_args=" "
ds_args=" --deepspeed ${ds_args}"
ds_args=" --deepspeed_config=$DS_CONFIG --zero-stage=3 --no-pipeline-parallel ${ds_args}"
deepspeed --force_multi --num_nodes=1 pretrain_gpt.py --tensor-model-parallel-size 1 --num-layers 128 \\
    --hidden-size 25600 --num-attention-heads 160 --seq-length 1024 --max-position-embeddings 1024 --loss-scale 15 \\
    --micro-batch-size $MICRO_BATCH --global-batch-size $GLOBAL_BATCH --fp16 --checkpoint-activations \\
    --hidden-dropout 0.0 --cpu-optimizer $ds_args --exit-interval 5000 | tee output.log
"""},
        8, "deepspeed",
        {"model.hidden": 25600, "layout.data.size": 8, "layout.data.sync": "zero3", "memory.offload.to": "host",
         "precision.dtype": "fp16", "memory.recompute": 1},
        ("overlapped=sums,gathers",),
    ),
    "swiss-ai submit-llama3-70b.sh": Job(
        {"submit.sh": """
#SBATCH --nodes=32
#SBATCH --gpus-per-node=4
#SBATCH --no-requeue	# so that no logs are lost by Slurm's own requeues
# NOTE a word's apostrophe isn't a quote
MBS=1 # micro batch
MOCK_DATA=false
ENGINE_ARGS=(
	--transformer-impl transformer_engine
	--use-precision-aware-optimizer
	--main-grads-dtype bf16
)
SIZES=(
	--num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64
	--num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192 --swiglu --disable-bias-linear
	--untie-embeddings-and-output-weights --hidden-dropout 0.0 --position-embedding-type rope --bf16
)
DISTRIBUTED_ARGS=(
	--tensor-model-parallel-size $SLURM_GPUS_PER_NODE # a node
	--sequence-parallel --pipeline-model-parallel-size 8 --num-layers-per-virtual-pipeline-stage 5
	--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
)
DATA_ARGS=(--split 100,0,0)
if [ "$MOCK_DATA" = true ]; then
  DATA_ARGS="${DATA_ARGS[@]} --mock-data"
else
  DATA_ARGS="${DATA_ARGS[@]} --data-path $(python3 tools/config.py -p $DATASETS --split 1,2) --data-cache-path /cache"
fi
TORCHRUN_ARGS=(--nproc-per-node $SLURM_GPUS_PER_NODE --nnodes $SLURM_NNODES)
TRAINING_CMD="torchrun ${TORCHRUN_ARGS[@]} $DIR/pretrain_gpt.py \\
    ${ENGINE_ARGS[@]} \\
    ${SIZES[@]} --micro-batch-size $MBS --global-batch-size 1024 \\
    ${DISTRIBUTED_ARGS[@]} \\
    $DATA_ARGS"
if [ -n "$KEY" ]; then
  TRAINING_CMD="$TRAINING_CMD --wandb-project x"
fi
srun -lu --cpus-per-task $SLURM_CPUS_PER_TASK bash -c "numactl --membind=0-3 $TRAINING_CMD"
"""},
        128, "megatron-core",
        {"model.hidden": 8192, "layout.tensor.size": 4, "layout.pipeline.size": 8, "layout.pipeline.chunks": 2,
         "layout.data.size": 4, "layout.data.sync": "zero1", "batch.global_": 1024, "micro": 1},
        ("overlapped=sums,gathers",), ("main-grads-dtype",),
    ),
    "ms-swift qwen3_moe.sh": Job(
        {"moe.sh": """
NNODES=$WORLD_SIZE \\
megatron sft \\
    --load Qwen3-30B-A3B-Base-mcore --pipeline_model_parallel_size 2 --expert_model_parallel_size 8 \\
    --moe_permute_fusion true --moe_grouped_gemm true --moe_aux_loss_coeff 1e-3 --micro_batch_size 1 \\
    --global_batch_size 16 --packing true --recompute_granularity full --recompute_method uniform \\
    --recompute_num_layers 1 --max_epochs 3 --finetune true --lr 1e-5 --max_length 8192 \\
    --sequence_parallel true --attention_backend flash
"""},
        16, "megatron-core",
        {"model.hidden": 2048, "layout.pipeline.size": 2, "layout.data.size": 8, "layout.data.expert": 8,
         "layout.data.sync": "zero1", "data.lengths.source": 8192, "batch.global_": 16, "micro": 1,
         "memory.recompute": 1, "precision.dtype": "bf16"},
        ("overlapped=[]", "dispatch=alltoall"),
    ),
    "LLaMA-Factory llama3_fp8_deepspeed_sft.yaml": Job(
        {"sft.yaml": """
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
stage: sft
finetuning_type: full
template: llama3
cutoff_len: 1024
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
bf16: true
deepspeed: ds/z3.json
fp8: true
fp8_backend: te
""", "ds/z3.json": '{"train_micro_batch_size_per_gpu": "auto", "fp16": {"enabled": false}, "bf16": {"enabled": false},'
         '"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "overlap_comm": false}}'},
        8, "deepspeed-trainer",
        {"model.hidden": 4096, "data.lengths.source": 1024, "batch.global_": 64, "micro": 1, "memory.recompute": 1,
         "memory.offload.to": "host", "layout.data.sync": "zero3", "precision.dtype": "bf16"},
        ("products=fp8",),
    ),
    "ChatAlpaca train_hf.sh": Job(
        {"train_hf.sh": """
torchrun --nproc_per_node=8 --master_port=20001 train/train_hf.py \\
    --model_name_or_path /path/to/llama-7b --bf16 True --num_train_epochs 6 --per_device_train_batch_size 16 \\
    --gradient_accumulation_steps 1 --fsdp "full_shard auto_wrap" \\
    --fsdp_transformer_layer_cls_to_wrap 'LlamaDecoderLayer' --model_max_length 2048 --gradient_checkpointing True
"""},
        8, "fsdp",
        {"layout.data.size": 8, "layout.data.sync": "zero3", "batch.global_": 128, "micro": 16, "memory.recompute": 1,
         "precision.dtype": "bf16", "data.lengths.source": 2048},
        options={"model": "llama-3.1-8b"},
    ),
    "TRL's line with multi_gpu.yaml": Job(
        {"sft.sh": "accelerate launch --config_file=multi_gpu.yaml --num_processes=4 sft.py --model_name_or_path "
                   "Qwen/Qwen2.5-0.5B --per_device_train_batch_size 2 --gradient_accumulation_steps 3 "
                   "--max_length 1024 --learning_rate 2e-4 --optim adamw_8bit --gradient_checkpointing --packing",
         "multi_gpu.yaml": "{distributed_type: MULTI_GPU, mixed_precision: bf16, num_processes: 8, gpu_ids: all}"},
        4, "fsdp",
        {"model.hidden": 896, "layout.data.size": 4, "layout.data.sync": "allreduce", "batch.global_": 24, "micro": 2,
         "memory.recompute": 1, "data.lengths.source": 1024},
        (), ("--optim", "--packing"),
    ),
    "TRL alst_ulysses_4gpu.yaml": Job(
        {"alst.yaml": """
distributed_type: DEEPSPEED
deepspeed_config: {zero_stage: 3, seq_parallel_communication_data_type: bf16, offload_optimizer_device: none}
mixed_precision: bf16
num_processes: 4
parallelism_config:
  parallelism_config_dp_replicate_size: 1
  parallelism_config_dp_shard_size: 2
  parallelism_config_cp_size: 2
  parallelism_config_cp_backend: deepspeed
  parallelism_config_cp_attn_implementation: flash_attention_2
"""},
        4, "deepspeed-trainer",
        {"layout.data.size": 2, "layout.context.size": 2, "layout.context.kind": "ulysses",
         "layout.data.sync": "zero3"},
        (), ("deepspeed.seq_parallel_communication_data_type",), options=ONE_B,
    ),
    "Accelerate's megatron_lm_config": Job(
        {"megatron.yaml": """
distributed_type: MEGATRON_LM
num_machines: 1
num_processes: 8
mixed_precision: bf16
megatron_lm_config:
  megatron_lm_gradient_clipping: 1.0
  megatron_lm_num_micro_batches: 2
  megatron_lm_pp_degree: 2
  megatron_lm_recompute_activations: true
  megatron_lm_sequence_parallelism: true
  megatron_lm_tp_degree: 2
  megatron_lm_use_distributed_optimizer: true
"""},
        8, "megatron-core",
        {"layout.tensor.size": 2, "layout.tensor.sequence_parallel": True, "layout.pipeline.size": 2,
         "layout.data.size": 2, "layout.data.sync": "zero1", "memory.recompute": "selective", "batch.global_": 4},
        ("overlapped=[]",), options={"model": "llama-3.2-1b", "sequence": 2048},
    ),
    "AutoModel moonlight_16b_ep8_cp2_flashoptim.yaml": Job(
        {"moonlight.yaml": """
step_scheduler: {global_batch_size: 128, local_batch_size: 4}
model:
  pretrained_model_name_or_path: moonshotai/Moonlight-16B-A3B
  backend: {attn: te, experts: torch_mm, enable_deepep: true}
distributed:
  {strategy: fsdp2, tp_size: 1, cp_size: 2, pp_size: 1, ep_size: 8, activation_checkpointing: true,
   pipeline: {pp_schedule: interleaved1f1b, pp_microbatch_size: 4, layers_per_stage: 2}}
dataset: {seq_length: 2048}
optimizer: {_target_: flashoptim.FlashAdamW, lr: 1.0e-5, master_weight_bits: 24}
"""},
        8, "automodel",
        {"layout.data.size": 4, "layout.context.size": 2, "layout.data.expert": 4, "layout.data.sync": "zero3",
         "micro": 4, "batch.global_": 128, "memory.recompute": 1},
        ("dispatch=deepep", "experts=together", "expert_context=true"),
        ("optimizer._target_", "optimizer.master_weight_bits"),
    ),
    "torchtitan deepseek_v3_671b.toml": Job(
        {"deepseek_v3_671b.toml": """
[model]
name = "deepseek_v3"
flavor = "671B"
[optimizer]
name = "AdamW"
[training]
local_batch_size = 4
seq_len = 4096
[parallelism]
data_parallel_shard_degree = -1
pipeline_parallel_degree = 1
pipeline_parallel_schedule = "Interleaved1F1B"
expert_parallel_degree = 1
expert_tensor_parallel_degree = 1
[activation_checkpoint]
mode = "selective"
selective_ac_option = 'op'
[compile]
enable = true
components = ["loss"]
[quantize.dense.float8]
enable_fsdp_float8_all_gather = false
filter_fqns = ["output", "router.gate"]
"""},
        256, "torchtitan-eager",
        {"model.family": "deepseek", "layout.data.size": 256, "layout.data.sync": "zero3", "batch.global_": 1024,
         "micro": 4, "memory.recompute": "ops"},
    ),
    "axolotl llama3-8b-fsdp2-alst.yaml": Job(
        {"alst.yaml": """
base_model: meta-llama/Llama-3.1-8B
sequence_len: 500_000
min_sample_len: 200_000
sample_packing: true
tiled_mlp: true
sequence_parallel_degree: 8
plugins: [axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin]
gradient_accumulation_steps: 1
micro_batch_size: 1
optimizer: adamw_torch_8bit
bf16: auto
gradient_checkpointing: true
activation_offloading: legacy
flash_attention: true
fsdp_version: 2
fsdp_config: {offload_params: false, reshard_after_forward: true}
"""},
        8, "axolotl",
        {"data.lengths.source": 500_000, "model.positions": 500_000, "layout.context.size": 8, "layout.data.size": 1,
         "layout.data.sync": "zero3", "memory.recompute": 1},
        ("logits=slices",), ("activation_offloading", "optimizer", "sample_packing", "tiled_mlp"),
    ),
}  # fmt: skip
