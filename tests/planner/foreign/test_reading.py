"""Jobs of other programs: every field is read or listed as left out, and answers are read back."""

from __future__ import annotations

import subprocess
from fnmatch import fnmatchcase
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from meshwright.config import Config, parse_config
from meshwright.config.load import ELSEWHERE, parse_run
from meshwright.planner.foreign import automodel, huggingface, megatron, nanotron, titan, trainer, zero
from meshwright.planner.foreign.job import Asked, ForeignJob, known_name
from meshwright.planner.foreign.literals import fields_of_function
from meshwright.planner.foreign.reading import read_foreign
from meshwright.planner.foreign.shell import read_script
from meshwright.planner.foreign.words import foreign_words, megatron_words
from meshwright.planner.plan.cluster import load_cluster
from meshwright.planner.plan.question import NamedRun, asked_run
from meshwright.planner.plan.software import load_program
from meshwright.ranks.errors import ConfigError
from tests.planner.foreign.cases import JOBS, Job

H100 = load_cluster("dgx-h100")


def written(folder: Path, job: Job) -> Path:
    """Write a job's files into a folder; return the first file's path, with the job's function."""
    for name, text in job.files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    first = folder / next(iter(job.files))
    return first.with_name(f"{first.name}:{job.function}") if job.function else first


def read(folder: Path, job: Job) -> tuple[ForeignJob, Config]:
    found = read_foreign(written(folder, job), Asked(devices=job.devices, **job.options))
    layout = found.run["layout"] | {"ranks_per_node": min(8, job.devices)}
    return found, parse_run(found.run | {"layout": layout}, [], unread=ELSEWHERE)


def value_of(config: Config, name: str) -> Any:
    if name == "layout.tensor.size":
        return dict(config.layout.axes).get("tensor", 1)
    return reduce(getattr, name.split("."), config)


@pytest.mark.parametrize("name", JOBS)
def test_a_public_job_is_the_run_that_a_person_reads(name: str, tmp_path: Path) -> None:
    job = JOBS[name]
    found, config = read(tmp_path, job)
    assert {field: value_of(config, field) for field in job.expected} == job.expected
    assert (found.program, found.facts) == (job.program, job.facts)
    assert sorted(found.account.left_out) == sorted(job.left_out)
    assert config.layout.world_size == job.devices
    load_program(found.program, found.facts)


LAYOUT_FIELDS = (
    "layout.data.size", "layout.data.sync", "layout.data.expert", "layout.tensor.size", "layout.pipeline.size",
    "layout.pipeline.chunks", "layout.context.size", "batch.global_", "micro", "memory.offload.to",
)  # fmt: skip


@pytest.mark.parametrize("name", JOBS)
def test_the_answer_is_read_back_to_the_same_layout(name: str, tmp_path: Path) -> None:
    job = JOBS[name]
    found, config = read(tmp_path, job)
    form = found.form
    words = str(foreign_words(load_program(found.program, found.facts), config, form))
    ending = {"toml": ".toml", "deepspeed": ".json", "flags": ".sh", "arguments": ".sh"}.get(str(form), ".yaml")
    model = job.options.get("model", found.run["model"])
    named = model if isinstance(model, str) else "llama-3.1-8b"
    path = tmp_path / f"answer{ending}"
    options = {"model": named, "sequence": found.run["data"]["sequence"], "batch": config.batch.global_}
    if form == "arguments":
        words = f"--{config.precision.dtype} {words}"
        if isinstance(model, dict) and not config.model.routing.num_experts:
            del options["model"]
            sizes = ("num-layers", model["layers"]), ("hidden-size", model["hidden"]), ("num-attention-heads", 128)
            words = " ".join(f"--{name} {size}" for name, size in sizes) + f" {words}"
    path.write_text(words)
    again = read_foreign(path, Asked(devices=job.devices, **options))
    run = again.run | {"model": found.run["model"]}
    # Accelerate's file has the Trainer's arguments in a comment; Bridge has Megatron-LM's words.
    run["batch"] = run["batch"] | ({"micro": config.micro} if form == "accelerate" else {})
    run["layout"] = run["layout"] | {"ranks_per_node": min(8, job.devices)}
    second = parse_run(run, [], unread=ELSEWHERE)
    assert {field: value_of(second, field) for field in LAYOUT_FIELDS} == {
        field: value_of(config, field) for field in LAYOUT_FIELDS
    }
    assert second.layout.context.kind == config.layout.context.kind or config.layout.context.size == 1
    assert second.layout.data.shard == config.layout.data.shard
    first, third = (load_program(job.program, job.facts).software for job in (found, again))
    if form not in ("flags", "deepspeed"):  # torchtitan's Python config has the converter; DeepSpeed's JSON has no FP8
        assert first.products == third.products
    if form == "arguments":
        assert first.low_weights == third.low_weights
    if config.model.routing.num_experts:
        assert first.expert_ranks == third.expert_ranks
        assert first.dispatch_sms == third.dispatch_sms
        assert ("experts" in first.overlapped) == ("experts" in third.overlapped)


def test_equal_experts_on_tensor_ranks_are_told(tmp_path: Path) -> None:
    """Two ranks of experts are half of four tensor ranks: the other half would have the same experts."""
    path = tmp_path / "job.sh"
    flags = "--tensor-model-parallel-size 4 --sequence-parallel --num-experts 4 --disable-bias-linear --swiglu"
    words = f"{flags} --expert-model-parallel-size 2 --expert-tensor-parallel-size 1"
    path.write_text(MEGATRON.replace("--pipeline-model-parallel-size 4", words))
    with pytest.raises(ConfigError, match="leaves equal experts on some of 4 tensor ranks"):
        read_foreign(path, Asked(devices=8))


def test_a_dispatcher_that_is_not_known_is_told(tmp_path: Path) -> None:
    path = tmp_path / "job.sh"
    path.write_text(f"{MEGATRON} --num-experts 4 --disable-bias-linear --moe-token-dispatcher-type pigeons")
    with pytest.raises(ConfigError, match="has no word of ours; valid: alltoall, alltoall_seq, allgather, flex"):
        read_foreign(path, Asked(devices=8))


def test_accelerate_reads_our_words(tmp_path: Path) -> None:
    """Accelerate's parser reads the file, and `ParallelismConfig` has the axes."""
    pytest.importorskip("accelerate")
    from accelerate.commands.config.config_args import load_config_from_file

    found, config = read(tmp_path, JOBS["Accelerate tp_hsdp.yaml"])
    path = tmp_path / "answer.yaml"
    path.write_text(str(foreign_words(load_program("fsdp"), config, found.form)))
    told = load_config_from_file(str(path))
    assert (told.num_processes, told.mixed_precision, str(told.distributed_type.value)) == (8, "bf16", "FSDP")
    assert told.fsdp_config["fsdp_reshard_after_forward"] is True
    prefix = "parallelism_config_"
    sizes = {name.removeprefix(prefix): size for name, size in told.parallelism_config.items()}
    assert sizes == {"dp_replicate_size": 2, "dp_shard_size": 2, "tp_size": 2}


def test_a_strict_plan_refuses_fields_that_it_leaves_out(tmp_path: Path) -> None:
    path = written(tmp_path, JOBS["torchtitan llama3_70b.toml"])
    with pytest.raises(ConfigError, match=r"leaves out: quantize\.linear\.float8.enable_fsdp_float8_all_gather=True"):
        asked_run(path, None, NamedRun(), [], H100, 64, strict=True)
    assert asked_run(path, None, NamedRun(), [], H100, 64)[2] is not None
    with pytest.raises(ConfigError, match="--strict=given has no effect without --from"):
        asked_run(None, None, NamedRun(), [], H100, strict=True)


def test_every_column_says_where_a_value_is_from(tmp_path: Path) -> None:
    found, _ = read(tmp_path, JOBS["axolotl fft-8b-liger-fsdp.yaml"])
    assert found.account.read["gradient_checkpointing"] is True
    assert found.account.assumed["batch.global"] == (64, "8 replicas x 2 samples x 4 microbatches")
    assert "datasets" not in found.account.left_out, "data change no second of a step"


@pytest.mark.parametrize(
    "name, text, words",
    [
        ("other.yaml", "a: 1", "has no field that a known program's file has"),
        ("line", "python train.py --layers 3", "has no --num-layers and --hidden-size"),
        ("job.toml", "[model", "cannot be read"),
        ("list.json", "[1]", "holds no fields"),
        ("litgpt.sh", "cd /work\nlitgpt pretrain pythia-14m", "is a job of LitGPT, which is not read"),
        ("yaml.sh", "llamafactory-cli train a/b.yaml", "names a/b.yaml, which is not here"),
        ("titan.sh", "torchrun train.py --job.config_file a/b.toml", "names a/b.toml, which is not here"),
        ("plain.py", "x = 1", "is Python of neither torchtitan nor Megatron-Bridge"),
        ("tune.yaml", "model: {_component_: torchtune.models.llama3_1.llama3_1_70b}", "is a job of torchtune, which"),
        ("mpt.yaml", "fsdp_config: {}\ndevice_train_microbatch_size: 8", "is a job of Composer, llm-foundry or OLMo"),
        ("levanter.yaml", "trainer: {mp: 'p=f32,c=bfloat16'}", "is a job of Levanter, which is not read"),
        ("olmo.py", "from olmo_core.nn import x\n", "is a job of OLMo-core, which is not read"),
        ("nemo.py", "import nemo_run as run\nfrom megatron.core import x\n", "is a job of NeMo 2.0, which is not"),
        ("verl.sh", "python3 -m verl.trainer.main_ppo --config-name=ppo actor_rollout_ref.model.path=x",
         "is a job of verl, which is not read"),
        ("neox.yml", "pipe-parallel-size: 1\nnum-layers: 12\nhidden-size: 64", "is a job of GPT-NeoX, which is"),
        ("none.sh", "accelerate launch --config_file conf/sft.yaml sft.py --max_length 8",
         "names conf/sft.yaml, which is not here"),
        ("zero.sh", "deepspeed train.py --deepspeed z.conf --model_name_or_path a/b", "names z.conf, which is not"),
        ("lora.sh", "torchrun sft.py --model_name_or_path meta-llama/Llama-3.1-8B --use_peft --max_length 8",
         "use_peft=True trains no whole weights"),
        ("lora.yaml", "model_name_or_path: meta-llama/Llama-3.1-8B\nfinetuning_type: lora\ncutoff_len: 8",
         "finetuning_type=lora trains no whole weights"),
        ("swift.sh", "megatron sft --load Qwen3-8B-mcore --train_type lora --tensor_model_parallel_size 1",
         "train_type=lora trains no whole weights"),
        ("tpu.yaml", "distributed_type: TPU", "distributed_type=TPU has no word of ours; valid: fsdp, no, multi"),
        ("interval.sh", "x --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 8 --num-experts 8 "
         "--deepspeed", "--expert-interval=2 is no list of 0s and then 1s"),
        ("pyramid.sh", "x --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 8 --deepspeed "
         "--num-experts 8 8 16 16", "--num-experts=8 8 16 16 is no whole number"),
        ("stage.sh", 'cat > d.json <<E\n{"zero_optimization": {"stage": 2}}\nE\nx --num-layers 4 --hidden-size 64 '
         "--num-attention-heads 4 --seq-length 8 --deepspeed --deepspeed_config d.json --zero-stage 1",
         "--zero-stage=1 differs from the stage 2 of d.json"),
        ("titan.py", "import torchtitan\ndef a(): pass\nb = JobConfig(steps=1)\nc = 3\n",
         r"names no function; valid: .*titan.py:a or .*titan.py:b$"),
        ("a.sh", "train --num-layers $LAYERS --hidden-size 64", r"--num-layers=\$LAYERS is a variable that the script"),
        ("peft.yaml", "base_model: a/b\nadapter: qlora", "adapter=qlora trains no whole weights"),
        ("tp.sh", "x --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 8 "
         "--tensor-model-parallel-size 3", "--devices=8 does not hold the file's tensor 3"),
        ("alst.yaml", "base_model: meta-llama/Llama-3.1-8B\nsequence_len: 64_000\nsequence_parallel_degree: 8\n"
         "deepspeed: ds.json", "=8 cuts sequences in a ring, which no plan of DeepSpeed has"),
        ("freq.sh", "x --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 8 --num-experts 4 --swiglu "
         "--moe-layer-freq 2", "is no list of 0s and then 1s for 4 layers"),
        ("moe.yaml", "parallelism: {tp: 1}\ntokens: {sequence_length: 8}\nmodel: {model_config: {hidden_size: 64, "
         "num_hidden_layers: 2, num_attention_heads: 4, vocab_size: 64, moe_config: {num_experts: 4, top_k: 1}}}",
         "has experts, whose sizes are read of a known model"),
        ("zb.toml", "[model]\nname='llama3'\nflavor='8B'\n[parallelism]\npipeline_parallel_degree=2\n"
         "pipeline_parallel_schedule='ZBVZeroBubble'",
         "pipeline_parallel_schedule=ZBVZeroBubble has no schedule of ours"),
        ("budget.toml", "[model]\nname='llama3'\nflavor='8B'\n[training]\nseq_len=64\n[activation_checkpoint]\n"
         "mode='memory_budget'", "activation_checkpoint.mode=memory_budget has no word of ours; valid: none, full"),
        ("reshard.toml", "[model]\nname='llama3'\nflavor='8B'\n[parallelism]\nfsdp_reshard_after_forward='soon'",
         "fsdp_reshard_after_forward=soon has no word of ours"),
        ("cp.sh", "x --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 8 --cp-comm-type allgather",
         "cp-comm-type=allgather has no word of ours"),
        ("again.sh", "x --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 8 "
         "--recompute-granularity half", "recompute-granularity=half has no word of ours"),
        ("mode.yaml", "parallelism: {tp: 2, tp_mode: RING}\ntokens: {sequence_length: 8}",
         "parallelism.tp_mode=RING has no word of ours"),
        ("mixed.yaml", "base_model: NousResearch/Meta-Llama-3.1-8B\nsequence_len: 8\nload_in_8bit: true",
         "load_in_8bit=True has weights of a format"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_planned_is_told(name: str, text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_foreign(tmp_path / name, Asked(devices=8))
    with pytest.raises(ConfigError, match="is no file"):
        read_foreign(tmp_path / "none", Asked())


SMALL = "x --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 8 --bf16 --hidden-dropout 0.0"
TOML = "[model]\nname='llama3'\nflavor='8B'\n[training]\nseq_len=64\n"
AUTO = "step_scheduler: {local_batch_size: 1}\ndistributed: {dp_size: 8}\ndataset: {seq_len: 64}\n"
AUTO += "model: {pretrained_model_name_or_path: meta-llama/Llama-3.1-8B}\n"
SINGLE: dict[str, Any] = {"level": "O0", "dtype": "float32", "tf32": False}
AXOLOTL = "base_model: meta-llama/Llama-3.1-8B\nsequence_len: 64\n"
NANOTRON = "parallelism: {tp: 1}\ntokens: {sequence_length: 64}\n"


@pytest.mark.parametrize(
    "name, text, left_out",
    [
        ("a.toml", f"{TOML}[optimizer]\nname='AdamW'", []),
        ("b.toml", f"{TOML}[optimizer]\nname='Muon'", ["optimizer.name"]),
        ("a.yaml", AUTO + "optimizer: {_target_: torch.optim.AdamW}", []),
        ("b.yaml", AUTO + "optimizer: {_target_: dion.Muon}", ["optimizer._target_"]),
        ("c.yaml", f"{NANOTRON}optimizer: {{optimizer_factory: {{name: adamW, adam_eps: 1.0e-8}}}}", []),
        ("d.yaml", f"{NANOTRON}optimizer: {{optimizer_factory: {{name: sgd}}}}", ["optimizer.optimizer_factory.name"]),
        ("a.json", '{"optimizer": {"type": "AdamW", "params": {"lr": 1}}}', []),
        ("b.json", '{"optimizer": {"type": "OneBitAdam"}}', ["deepspeed.optimizer.type"]),
        ("a.sh", f"{SMALL} --optimizer adam", []),
        ("b.sh", f"{SMALL} --optimizer muon", ["optimizer"]),
        ("c.sh", "torchrun t.py --per_device_train_batch_size 1 --optim adamw_torch_fused", []),
        ("d.sh", "torchrun t.py --per_device_train_batch_size 1 --optim lion_32bit", ["optim"]),
        ("e.yaml", f"{AXOLOTL}optimizer: adamw_torch_fused", []),
        ("f.yaml", f"{AXOLOTL}optimizer: muon", ["optimizer"]),
    ],
)  # fmt: skip
def test_an_optimizer_that_a_plan_lacks_is_left_out(name: str, text: str, left_out: list[str], tmp_path: Path) -> None:
    """In every program a job with another optimizer than AdamW says so; one with AdamW passes --strict."""
    (tmp_path / name).write_text(text)
    job = read_foreign(tmp_path / name, Asked(None if "--num-layers" in text else "llama-3.2-1b", 64, 8, 8))
    assert sorted(job.account.left_out) == left_out


@pytest.mark.parametrize(
    "name, text, fields",
    [
        ("a.toml", f"{TOML}[compile]\nenable=true\ncomponents=['loss']", {"program": "torchtitan-eager"}),
        ("b.toml", f"{TOML}[compile]\nenable=true", {"program": "torchtitan"}),
        ("c.toml", f"{TOML}[activation_checkpoint]\nmode='selective'\nselective_ac_option='1'", {"recompute": 1}),
        ("d.toml", f"{TOML}[activation_checkpoint]\nmode='selective'\nselective_ac_option='2'",
         {"recompute": "ops", "left_out": ["activation_checkpoint.selective_ac_option"]}),
        ("e.toml", f"{TOML}[float8]\nenable_fsdp_float8_all_gather=true",
         {"left_out": ["float8.enable_fsdp_float8_all_gather"]}),
        ("a.yaml", "{distributed_type: MULTI_GPU, num_processes: 8}", {"sync": "allreduce"}),
        ("b.yaml", "{distributed_type: FSDP, num_processes: 8}", {"sync": "zero3"}),
        ("a.sh", "accelerate launch --num_processes 8 --use_deepspeed --deepspeed_config_file z2.conf t.py "
                 "--per-device-train-batch-size 1 --bf16 true", {"sync": "zero2", "precision": "bf16"}),
        ("b.sh", "deepspeed t.py --deepspeed z2.conf --per_device_train_batch_size 1 --fp16 True",
         {"sync": "zero2", "precision": "fp16"}),
        ("c.sh", "torchrun t.py --per_device_train_batch_size 1 --fsdp 'shard_grad_op auto_wrap offload' --fp16",
         {"sync": "zero2", "offload": "host", "precision": "fp16"}),
        ("d.sh", "torchrun t.py --per_device_train_batch_size 1", {"sync": "allreduce", "precision": SINGLE}),
        ("l.sh", "torchrun t.py --per_device_train_batch_size 1 --tf32 True", {"precision": SINGLE | {"tf32": True}}),
        ("f.yaml", "{distributed_type: FSDP, num_processes: 8, mixed_precision: 'no'}", {"precision": SINGLE}),
        ("n.sh", "torchrun t.py --per_device_train_batch_size 1 --tf32 True --bf16", {"precision": "bf16"}),
        ("e.yaml", f"{AXOLOTL}bf16: false\ntf32: true\nfsdp_config: {{offload_params: true}}",
         {"precision": SINGLE | {"tf32": True}}),
        ("e.sh", "swift sft --model Qwen/Qwen3-8B --train_type full --deepspeed zero3_offload --torch_dtype bfloat16",
         {"sync": "zero3", "offload": "host", "left_out": []}),
        ("f.sh", f"{SMALL} --recompute-granularity full --recompute-method block --recompute-num-layers 4",
         {"recompute": 1}),
        ("g.sh", f"{SMALL} --recompute-granularity full --recompute-method block --recompute-num-layers 3",
         {"recompute": 1, "left_out": ["recompute-num-layers"]}),
        ("h.sh", f"{SMALL} --deepspeed --zero-stage 0 --ds-sequence-parallel-size 2 --num-experts 1",
         {"sync": "zero1", "context": {"size": 2, "kind": "ulysses"}, "program": "deepspeed"}),
        ("i.sh", f"{SMALL} --nnodes $NODES --nproc_per_node `nvidia-smi -L | wc -l` --num-experts 4",
         {"sync": "allreduce", "biases": ["query-key-value", "output"]}),
        ("j.sh", "x --model-parallel-size 2 --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 8 "
                 "--batch-size 2 --fp16", {"tensor": 2, "micro": 2}),
        ("k.sh", f"{SMALL} --position-embedding-type alibi", {"assumed": "model.positions"}),
        ("d.yaml", "MODEL_ARGS: {--num-layers: 4, --hidden-size: 64, --num-attention-heads: 4, --seq-length: 8, "
                   "--bf16: true, --tensor-model-parallel-size: 2, --hidden-dropout: 0.0, "
                   "--use-distributed-optimizer: true}",
         {"tensor": 2, "sync": "zero1", "precision": "bf16"}),
        ("c.yaml", f"{AXOLOTL}bf16: true\nfsdp_config: {{offload_params: true}}", {"offload": "host", "sync": "zero3"}),
    ],
)  # fmt: skip
def test_fields_that_change_a_step_are_read(name: str, text: str, fields: dict[str, Any], tmp_path: Path) -> None:
    """Fields that were misread, or read by no reader, in public jobs."""
    (tmp_path / name).write_text(text)
    (tmp_path / "z2.conf").write_text('{"zero_optimization": {"stage": 2}}')
    job = read_foreign(tmp_path / name, Asked(None if "--num-layers" in text else "llama-3.2-1b", 64, 8, 8))
    run, layout = job.run, job.run["layout"]
    found = {
        "program": job.program, "recompute": run["memory"]["recompute"], "offload": run["memory"]["offload"],
        "sync": layout["data"].get("sync"), "precision": run["precision"], "micro": run["batch"]["micro"],
        "context": layout.get("context"), "tensor": layout.get("tensor", {}).get("size"),
        "biases": dict(run["model"] if isinstance(run["model"], dict) else {}).get("biases"),
        "assumed": next((each for each in job.account.assumed if each == fields.get("assumed")), None),
    }  # fmt: skip
    assert {field: found[field] for field in fields.keys() - {"left_out"}} == {
        field: value for field, value in fields.items() if field != "left_out"
    }
    assert sorted(job.account.left_out) == fields.get("left_out", [])


def test_a_packed_sequence_of_automodel_has_priority(tmp_path: Path) -> None:
    """Samples are packed to the given size; 0 packs none."""
    for size, tokens in ((4096, 4096), (0, 64)):
        (tmp_path / "a.yaml").write_text(f"{AUTO}packed_sequence: {{packed_sequence_size: {size}}}")
        assert read_foreign(tmp_path / "a.yaml", Asked(devices=8)).run["data"]["sequence"] == tokens


def test_a_line_of_accelerate_has_no_flag_outside_of_the_columns(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("{distributed_type: FSDP, num_processes: 8, mixed_precision: bf16}")
    line = "accelerate launch --config_file c.yaml --mixed_precision fp16 t.py --max_seq_length 32 --new_attention 4"
    (tmp_path / "a.sh").write_text(f"{line} --model_name_or_path meta-llama/Llama-3.2-1B --attn_implementation eager")
    job = read_foreign(tmp_path / "a.sh", Asked(devices=8))
    assert sorted(job.account.left_out) == ["--attn_implementation", "--new_attention"]
    assert (job.run["model"], job.run["precision"], job.run["data"]["sequence"]) == ("llama-3.2-1b", "fp16", 32)


def test_memory_that_a_job_spares_is_read_and_written(tmp_path: Path) -> None:
    """Recomputed results, layers in host memory and weights in FP8 are read as facts and written as words again."""
    line = "x --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 8 --bf16 --fp8-format hybrid"
    spared = "--recompute-granularity selective --recompute-modules layernorm moe_act --cpu-offloading-num-layers 3"
    (tmp_path / "a.sh").write_text(f"{line} {spared}")
    (tmp_path / "b.sh").write_text(f"{line} --fp8-param-gather --recompute-modules moe_act")
    job, other = (read_foreign(tmp_path / name, Asked(devices=8, batch=8)) for name in ("a.sh", "b.sh"))
    facts = {"products=fp8", "low_weights=copies", "recomputed=layernorm,moe_act", "host_layers=3"}
    assert facts <= set(job.facts)
    assert {"recompute-modules", "cpu-offloading-num-layers"} <= set(job.account.read)
    assert not job.account.left_out
    assert job.run["memory"]["recompute"] == "none"
    assert "low_weights=alone" in other.facts
    assert not any(fact.startswith("recomputed") for fact in other.facts)  # no granularity, so nothing is recomputed
    program = load_program("megatron-core", job.facts)
    config = parse_run(job.run, [], unread=ELSEWHERE)
    assert spared in " ".join(megatron_words(config, program))
    scaled = load_program("megatron-core", ["products=mxfp8", "low_weights=alone"])
    (tmp_path / "c.sh").write_text(
        f"{line.replace(' --fp8-format hybrid', '')} {' '.join(megatron_words(config, scaled))}"
    )
    again = read_foreign(tmp_path / "c.sh", Asked(devices=8))
    assert {"products=mxfp8", "low_weights=alone"} <= set(again.facts)


@pytest.mark.parametrize("devices, words", [(1, ""), (8, "--tensor-model-parallel-size 8 --use-distributed-optimizer")])
def test_a_job_without_replicas_is_a_run(devices: int, words: str, tmp_path: Path) -> None:
    line = "x --num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 8 --global-batch-size 8"
    (tmp_path / "a.sh").write_text(f"{line} {words}")
    job = read_foreign(tmp_path / "a.sh", Asked(devices=devices))
    layout = job.run["layout"] | {"ranks_per_node": devices}
    assert parse_run(job.run | {"layout": layout}, [], unread=ELSEWHERE).layout.world_size == devices


@pytest.mark.parametrize(
    "words, fields, left_out",
    [
        ("--grad-reduce-in-bf16", ("stored", "float32"), []),
        ("--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16", ("float32", "bf16"), []),
        ("--use-precision-aware-optimizer --exp-avg-dtype fp32 --main-grads-dtype fp32", ("float32", "float32"), []),
        ("--use-precision-aware-optimizer --exp-avg-dtype bf16 --main-params-dtype fp16", ("float32", "float32"),
         ["exp-avg-dtype", "main-params-dtype"]),
    ],
)  # fmt: skip
def test_formats_of_gradients_and_moments_are_read_and_written(
    words: str, fields: tuple[str, str], left_out: list[str], tmp_path: Path
) -> None:
    line = "x --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 8 --bf16 --hidden-dropout 0.0"

    def formats(text: str) -> tuple[tuple[str, str], list[str], Config]:
        (tmp_path / "a.sh").write_text(text)
        job = read_foreign(tmp_path / "a.sh", Asked(batch=8, devices=2))
        config = parse_run(job.run, [], unread=ELSEWHERE)
        return (config.precision.accumulate, config.optimizer.states), sorted(job.account.left_out), config

    found, unread, config = formats(f"{line} {words}")
    assert (found, unread) == (fields, left_out)
    answer = " ".join(megatron_words(config, load_program("megatron-core")))
    assert formats(f"{line} {answer}")[0] == fields


def test_a_word_that_changes_memory_and_is_not_said_is_left_out(tmp_path: Path) -> None:
    """Three programs' words that change memory and are not planned are listed as left out."""
    line = "x --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 8 --recompute-granularity selective"
    (tmp_path / "a.sh").write_text(f"{line} --recompute-modules core_attn moe")
    (tmp_path / "b.sh").write_text(f"{line} --recompute-modules mlp")
    (tmp_path / "c.yaml").write_text(
        "base_model: NousResearch/Meta-Llama-3.1-8B\nsequence_len: 8\noptimizer: adamw_bnb_8bit"
    )
    (tmp_path / "d.json").write_text(
        '{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.3}}}'
    )
    options = Asked("llama-3.2-1b", 64, 8, 8)
    left_out = {name: read_foreign(tmp_path / name, options).account.left_out for name in ("a.sh", "b.sh", "c.yaml")}
    assert left_out["a.sh"] == {"recompute-modules": "core_attn moe"}
    assert left_out["b.sh"] == {"recompute-modules": "mlp"}
    assert left_out["c.yaml"] == {"optimizer": "adamw_bnb_8bit"}
    assert list(read_foreign(tmp_path / "d.json", options).account.left_out) == [
        "deepspeed.zero_optimization.offload_optimizer.ratio"
    ]


def test_the_file_and_a_run_file_are_one_question(tmp_path: Path) -> None:
    path = written(tmp_path, JOBS["torchtitan llama3_8b.toml"])
    with pytest.raises(ConfigError, match=r"--from=.* has no effect beside the run file run.yaml"):
        asked_run(path, Path("run.yaml"), NamedRun(), [], H100)
    config, words, job = asked_run(path, Path("layout.data.sync=zero2"), NamedRun(), [], H100, 8)
    assert job is not None
    assert (config.layout.data.sync, words) == ("zero2", ["layout.data.sync=zero2"])


MEGATRON = """python pretrain_gpt.py --num-layers 14 --hidden-size 256 --num-attention-heads 4 --seq-length 128 \\
  --pipeline-model-parallel-size 4 --micro-batch-size 1 --global-batch-size 8 --bf16 """


@pytest.mark.parametrize(
    "words, partition",
    [
        ("--decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 3", (3, 4, 4, 3)),
        ("--decoder-last-pipeline-num-layers 2", (4, 4, 4, 2)),
        ("--decoder-last-pipeline-num-layers 2 --num-virtual-stages-per-pipeline-rank 2", (2, 2, 2, 1) * 2),
        ("--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split", (3, 4, 4, 3)),
        (
            "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split "
            "--num-layers-per-virtual-pipeline-stage 2",
            (1, 2, 2, 2, 2, 2, 2, 1),
        ),
        ("--pipeline-model-parallel-layout 'Et*3|t*4|(tt|)*1t*5L'", (3, 4, 2, 5)),
        ("--pipeline-model-parallel-layout 'Et*2|(t*2|)*6,L'", (2, 2, 2, 2, 2, 2, 2, 0)),
    ],
)
def test_stages_are_cut_as_megatron_writes_them(words: str, partition: tuple[int, ...], tmp_path: Path) -> None:
    path = tmp_path / "job.sh"
    path.write_text(MEGATRON + words)
    job = read_foreign(path, Asked(devices=8))
    config = parse_run(job.run, [], unread=ELSEWHERE)
    assert tuple(config.layout.pipeline.partition) == partition
    assert not any("decoder" in name for name in job.account.left_out)


@pytest.mark.parametrize(
    "words, rule",
    [
        ("--decoder-last-pipeline-num-layers 3", "leaves 11 of 14 layers to 3 stages"),
        ("", "leaves 14 of 14 layers to 4 stages"),
        ("--account-for-loss-in-pipeline-split", "leaves 15 of 14 layers to 4 stages"),
        ("--pipeline-model-parallel-layout 'Et*3|t*4|t*3|t*3L'", "has 13 layers in 4 parts, of a model of 14"),
        ("--pipeline-model-parallel-layout 'Et*14|L'", "has 14 layers in 2 parts"),
        ("--pipeline-model-parallel-layout 't*14|L'", "is no layout"),
        ("--pipeline-model-parallel-layout 'Et*99999999999|L'", "is no layout"),
        ("--pipeline-model-parallel-layout 'E((t*9999)*9999)*9999L'", "is no layout"),
    ],
)
def test_stages_that_megatron_cannot_cut_are_told(words: str, rule: str, tmp_path: Path) -> None:
    path = tmp_path / "job.sh"
    path.write_text(MEGATRON + words)
    with pytest.raises(ConfigError, match=rule):
        read_foreign(path, Asked(devices=8))


@pytest.mark.parametrize("partition", [(4, 4, 4, 2), (4, 4, 4, 4), (2, 2, 2, 2, 2, 2, 2, 0), (5, 3, 3, 3)])
def test_megatrons_words_say_every_cut_of_ours(partition: tuple[int, ...], tmp_path: Path) -> None:
    """Megatron's words give the partition that a search predicted: even stages by number, uneven stages as a written
    layout."""
    path, layers = tmp_path / "job.sh", sum(partition)
    pipeline = {"size": 4, "chunks": len(partition) // 4, "schedule": "1f1b", "partition": partition}
    model = {"family": "gpt2", "layers": layers, "hidden": 256, "heads": 4}
    config = parse_config(
        {"model": model, "data": {"sequence": 128}, "batch": {"global": 8, "micro": 1},
         "layout": {"data": {"size": 2}, "pipeline": pipeline}}
    )  # fmt: skip
    words = str(foreign_words(load_program("megatron-core"), config))
    path.write_text(MEGATRON.replace("14", str(layers)) + words.replace("\n", " "))
    again = read_foreign(path, Asked(devices=8)).run["layout"]["pipeline"]
    even = len(set(partition)) == 1
    assert ("--pipeline-model-parallel-layout" in words) != even
    assert (again["size"], again["chunks"]) == (4, len(partition) // 4)
    assert again.get("partition") == (None if even else list(partition))


def test_a_python_file_is_read_and_not_run(tmp_path: Path) -> None:
    text = (
        "import torchtitan\nopen('/nowhere', 'w')\ndef f(n=2 ** 3, *, m=1):\n    c = Config(a=-1, b=n * 2, d=1 // 0)\n"
    )
    text += "    c.e.f = [g(1), 'x']\n    return c\n"
    told = fields_of_function(text, "f")
    assert (told["a"], told["d"], told["e"]["f"][1]) == (-1, 0, "x")
    with pytest.raises(KeyError):
        fields_of_function(text, "none")
    loop = "def f():\n    return g()\ndef g():\n    return f()\n"
    assert fields_of_function(loop, "f"), "functions that call each other end"


@pytest.mark.parametrize(
    "body, value",
    [
        ("if size is None:\n  c.a = 1\nelif size == 2:\n  c.a = 2\nelse:\n  c.a = 3", 2),
        ("if not flag:\n  c.a = 1\nelse:\n  c.a = 2", 1),
        ("if unknown:\n  c.a = 1", None),
        ("if size > 1:\n  c.a = 1", 1),
        ("if name.lower() == 'full':\n  c.a = 1\nelif name.upper() == 'LORA':\n  c.a = 2", 2),
        ("if size is None or size == 2:\n  c.a = 1", 1),
        ("if unknown and size == 3:\n  c.a = 1\nelse:\n  c.a = 2", 2),
        ("if not (unknown or size == 2):\n  c.a = 1\nelse:\n  c.a = 2", 2),
        ("if g(1) == 'x':\n  c.a = 1\nelse:\n  c.a = 2", None),
        ("if os.name != 'x':\n  c.a = 1\nelse:\n  c.a = 2", None),
        ("c.a = {(1, 2): 5}[(1, size)]", 5),
        ("c.a = flag or size", 2),
        ("c.a = getattr(c, 'b', 4)", 4),
        ("c.a = [1] * 10**9", "[1] * 10 ** 9"),
        ("n = 1000000\nc.a = len(str([1] * n))", {"()": "len", "0": {"()": "str", "0": "[1] * n"}}),
        ("first, second = g(a=3)\nc.a = first.a", 3),
        ("more = {'a': 6, **{'a': 7}}\nc = h(**more)", 7),
    ],
)  # fmt: skip
def test_values_of_a_python_file_are_known_without_running_it(body: str, value: Any) -> None:
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    text = (
        f"def f(size=2, flag=False, name='LoRA'):\n    c = g()\n{lines}\n    return c\n\n"
        "def h(**rest):\n    return g(a=rest['a'])\n"
    )
    assert fields_of_function(text, "f").get("a") == value


def test_unknown_conditions_of_a_python_file_are_assumed(tmp_path: Path) -> None:
    """A branch that sets fields, and hangs on the caller, is listed; a branch that raises alone is not."""
    body = "    if devices() == 16:\n        config.parallelism.tensor_parallel_degree = 4\n"
    body += "    if devices() == 0:\n        raise ValueError\n    return config\n"
    text = TITAN_8B.replace("    return config\n", body)
    path = tmp_path / "llama3.py"
    path.write_text(text)
    job = read_foreign(path.with_name("llama3.py:llama3_8b"), Asked(model="llama-3.1-8b", devices=8))
    assert job.account.assumed["if devices() == 16"][0] == "neither branch"
    assert "if devices() == 0" not in job.account.assumed
    assert "tensor" not in job.run["layout"]


TITAN_8B = """
import torchtitan

def llama3_8b():
    config = Trainer.Config(training=TrainingConfig(local_batch_size=1, seq_len=8192))
    return config
"""


def test_a_shell_script_is_read_as_bash_does() -> None:
    script = read_script(
        'A=${A:-4}\nB=$((A * 2 + 1))\nX=(--n $B "--flag two words")\nif [ $A -gt 3 ]; then X+=(--big); fi\n'
        "if [[ $Z == 1 ]]; then X+=(--maybe 1); else X+=(--maybe 2); fi # a comment (\n"
        "for i in 1 2; do echo $i; done\nrun ${X[@]} --last='a b' \\\n  --end\n"
    )
    assert script.flags == {"n": "9", "flag": "two words", "big": "", "maybe": "2", "last": "a b", "end": ""}
    assert script.undecided == ["[[ $Z == 1 ]]"]


@pytest.mark.parametrize(
    "script, value",
    [
        ("A=${A:-}\nB=2\nA=${A:-$((B * 4))}", "8"),
        ("A=${A-}\nA=${A-9}", ""),
        ("A=${B:=3}", "3"),
        ("A=1 B=2\nA=$((A + B))", "3"),
        ("if [ -z ${MISSING} ]; then\nA=1\nelse\nA=2\nfi", "1"),
        ('if [ -n "$MISSING" ]; then\nA=1\nelse\nA=2\nfi', "2"),
        ("B=4\nif (( B * 2 >= 8 )); then\nA=1\nelse\nA=2\nfi", "1"),
        ('B=(1 2)\nA="${B[@]} 3"', "1 2 3"),
        ('A="1 \\\n  2\n"\nA="$A 3 \\\n"', "1 2 3"),
        ("# it's no quote \\\nA=5", "5"),
        ("cat > /dev/null <<EOF\nA=2\nEOF\nA=${A:-7}", "7"),
        ("A='# 6' # 7", "# 6"),
        ("S=70B\ncase $S in\n  7B|8B) A=1;;\n  70B)\n    A=2\n    ;;\n  *) A=3;;\nesac", "2"),
        ('A=1\nwhile [[ $# -gt 0 ]]; do\ncase $1 in\n--a) A="$2"; shift; shift;;\n*) shift;;\nesac\ndone', "1"),
        ("case x in y) A=1;; x) A=2;; esac\nif [ $A -eq 2 ]; then\nA=4\nfi", "4"),
        ("B=$(echo \"a b\" | cut -d ' ' -f1)\nA=3", "3"),
        ('A=`python3 -c "print(1 + 2)"` B=1\nA=$B', "1"),
    ],
)
def test_values_of_a_script_are_those_of_bash(script: str, value: str) -> None:
    words = read_script(f'{script}\ntrain --value "$A" --end').words
    told = " ".join(" ".join(words).split())
    assert told.removeprefix("train --value ").removesuffix("--end").strip() == value
    bash = subprocess.run(["bash", "-c", f'{script}\necho "$A"'], capture_output=True, text=True, check=True).stdout
    assert value == " ".join(bash.split()) or "`" in script


def test_an_unknown_word_of_case_is_listed_if_arms_change_the_job(tmp_path: Path) -> None:
    """Not for arms that change nothing, and not inside of a branch that is not taken."""
    arms = "case $1 in 8B) N=32;; *) N=40;; esac"
    assert read_script(f"{arms}\ntrain --n $N").unmatched == ["$1"]
    assert read_script("case $1 in 8B) echo small;; esac").unmatched == []
    assert read_script(f"M=1\nif [ $M -eq 2 ]; then\n{arms}\nfi").unmatched == []
    assert read_script(f"set 8B\nS=8B\n{arms.replace('$1', '$S')}").unmatched == []
    (tmp_path / "a.sh").write_text(f"{arms}\n{SMALL}")
    assert "case $1" in read_foreign(tmp_path / "a.sh", Asked(None, 64, 8, 8)).account.assumed


def test_a_script_writes_files_and_has_the_variables_of_slurm() -> None:
    script = read_script(
        "#SBATCH --nodes=4\n#SBATCH --gpus-per-node=h100:8\nN=3\ncat <<'E' > out/$N.json\n{\"a\": 1}\nE\n"
        "python - <<E\nprint('--other 1 --flags 2 --than 3 --the 4 --jobs 5')\nE\n"
        'srun --wait=9 bash -c "train --nodes $SLURM_NNODES --gpus $SLURM_GPUS_PER_NODE"\nwget --header=a x\n'
    )
    assert script.files == {"3.json": '{"a": 1}\n'}
    assert script.flags == {"wait": "9", "nodes": "4", "gpus": "8"}


@pytest.mark.parametrize(
    "told, ours",
    [
        ("NousResearch/Meta-Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("meta-llama/Llama-3.3-70B-Instruct", "llama-3.1-70b"),
        ("Qwen/Qwen3-30B-A3B-Thinking-2507", "qwen3-30b-a3b"), ("Qwen/Qwen3-8B-FP8", "qwen3-8b"),
        ("mistralai/Mistral-7B-v0.1", "mistral-7b-0.1"), ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b"),
        ("deepseek-ai/DeepSeek-V3-0324", "deepseek-v3"), ("moonshotai/Kimi-K2-Instruct-0905", "kimi-k2"),
        ("google-bert/bert-base-uncased", "bert-base"), ("google/gemma-3-1b-it", "gemma-3-1b"),
        ("allenai/OLMo-2-1124-7B-Instruct", "olmo-2-7b"), ("google/vit-base-patch16-224-in21k", "vit-base"),
        ("unsloth/gpt-oss-20b-BF16", "gpt-oss-20b"), ("openai-community/gpt2", "gpt2-small"),
        ("llama3_8b", "llama-3.1-8b"), ("HuggingFaceTB/SmolLM3-3B-checkpoints", "smollm3-3b"),
        ("/hub/models--moonshotai--Moonlight-16B-A3B/snapshots/ce8bc1/", "moonlight-16b-a3b"),
        ("/hub/Llama-3___2-1B-Instruct", "llama-3.2-1b"),
        ("/models/Qwen3-8B/", "qwen3-8b"), ("Qwen3MoEModelProvider30B_A3B", "qwen3-30b-a3b"),
        ("Llama3ModelProvider8B", "llama-3.1-8b"), ("Llama31ModelProvider405B", "llama-3.1-405b"),
        ("DeepSeekV3ModelProvider", "deepseek-v3"), ("MixtralModelProvider8x7B", "mixtral-8x7b"),
        ("GPTOSSProvider20B", "gpt-oss-20b"), ("LlamaModelProvider", None),
        ("Llama2ModelProvider7B", "llama-2-7b"), ("Qwen25ModelProvider14B", "qwen2.5-14b"),
        ("Qwen3ModelProvider1P7B", "qwen3-1.7b"), ("gemma2_9b", "gemma-2-9b"), ("Qwen/QwQ-32B", "qwen2.5-32b"),
        ("Qwen2.5-7B-Instruct-1M", "qwen2.5-7b"),
        ("mistralai/Mistral-7B-Instruct-v0.2", "mistral-7b-0.2"), ("Qwen2-57B-A14B", None), ("Llama-2-7b-p2", None),
        ("Qwen3MoEModelProvider235B_A22B", "qwen3-235b-a22b"), ("Llama4ModelProvider", None),
        ("NousResearch/Llama-2-7b-hf", "llama-2-7b"), ("huggyllama/llama-7b", "llama-2-7b"),
        ("lmsys/vicuna-13b-v1.5", "llama-2-13b"), ("codellama/CodeLlama-7b-hf", None),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"), ("Qwen/Qwen2.5-Coder-32B", "qwen2.5-32b"),
        ("Qwen/Qwen2-72B", "qwen2.5-72b"), ("Qwen/Qwen2.5-Math-7B", "qwen2.5-7b"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-14B", "qwen2.5-14b"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", None), ("Qwen/Qwen2.5-VL-7B-Instruct", None),
        ("Qwen/Qwen3-4B-Instruct-2507", "qwen3-4b"), ("Qwen/Qwen3-235B-A22B-Thinking-2507", "qwen3-235b-a22b"),
        ("mistralai/Mistral-Nemo-Base-2407", "mistral-nemo-12b"), ("google/gemma-2-27b-it", "gemma-2-27b"),
        ("mistralai/Mistral-Small-24B-Instruct-2501", "mistral-small-24b"), ("microsoft/phi-4", "phi-4"),
        ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "tinyllama-1.1b"), ("allenai/OLMo-2-0325-32B", "olmo-2-32b"),
        ("mistralai/Mixtral-8x22B-v0.1", "mixtral-8x22b"), ("a/base", None),
        ("meta-llama/Llama-3.1-8B-Instruct-1B", None),
    ],
)  # fmt: skip
def test_names_of_releases_are_the_sizes_of_one_model(told: str, ours: str | None) -> None:
    assert known_name(told) == ours


@pytest.mark.parametrize(
    "harmless, fields",
    [
        (megatron.HARMLESS,
         "deepspeed_config zero-stage recompute-modules main-grads-dtype exp-avg-dtype moe-layer-freq optimizer "
         "optimizer.main_grads_dtype grad-reduce-in-bf16 cross-entropy-loss-fusion fp8-param-gather mtp-num-layers "
         "dataset.packed_sequence_specs.packed_sequence_size "
         "use-precision-aware-optimizer window-size overlap-grad-reduce cpu-offloading-num-layers "
         "reuse-grad-buf-for-mxfp8-param-ag moe-expert-capacity-factor"),
        (titan.HARMLESS, "model_spec.converters model_spec.moe_comm_backend model_spec.attn_backend "
         "parallelism.module_fqns_per_model_part training.mixed_precision_reduce training.enable_cpu_offload "
         "parallelism.expert_parallel_degree compile.enable activation_checkpoint.mode training.tensor_parallel_degree "
         "experimental.pipeline_parallel_degree experimental.enable_async_tensor_parallel training.fp8_linear"),
        (huggingface.AXOLOTL, "overrides_of_model_config.num_hidden_layers s2_attention plugins optimizer adapter "
         "expert_parallel_size flash_attention liger_rms_norm sequence_len sample_packing unfrozen_parameters bf16"),
        (zero.HARMLESS, "zero_optimization.stage zero_optimization.cpu_offload bf16.enabled "
         "zero_optimization.offload_param.device tensor_parallel.autotp_size zero_quantized_weights optimizer.type"),
        (trainer.HARMLESS, "optim gradient_checkpointing per_device_train_batch_size bf16 fp16 fsdp deepspeed packing "
         "attn_implementation torch_compile use_liger_kernel pure_bf16 fsdp_config.fsdp_offload_params fp8"),
        (huggingface.HARMLESS, "distributed_type mixed_precision dynamo_config.dynamo_backend "
         "fsdp_config.fsdp_reshard_after_forward parallelism_config.parallelism_config_tp_size"),
        (automodel.HARMLESS, "loss_fn._target_ freeze_config.freeze_embeddings model.backend.te_fp8.recipe fp8.enabled "
         "model.backend.dispatcher parallelizer.activation_checkpointing autopipeline.pp_schedule compile.enabled"),
        (nanotron.HARMLESS, "optimizer.accumulate_grad_in_fp32 model.model_config.moe_config.num_experts "
         "model.model_config.sliding_window_size optimizer.zero_stage parallelism.tp_mode"),
    ],
)  # fmt: skip
def test_no_pattern_hides_a_field_that_changes_a_step(harmless: str, fields: str) -> None:
    hidden = {field: pattern for field in fields.split() for pattern in harmless.split() if fnmatchcase(field, pattern)}
    assert hidden == {}


def test_a_field_of_sizes_that_no_reader_asks_for_is_left_out(tmp_path: Path) -> None:
    """A new size in a file of nanotron or AutoModel is a field that may change the step."""
    job = JOBS["nanotron config_tiny_llama.yaml"]
    text = job.files["llama.yaml"].replace("hidden_size: 512,", "hidden_size: 512, new_gate: 4, inner: {width: 8},")
    path = tmp_path / "llama.yaml"
    path.write_text(text)
    left_out = read_foreign(path, Asked(devices=8)).account.left_out
    assert left_out == {"model.model_config.new_gate": 4, "model.model_config.inner.width": 8}


def test_a_program_without_words_of_its_own_has_none() -> None:
    assert foreign_words(load_program("axonn"), parse_config({})) is None


@pytest.mark.parametrize(
    "words, fields",
    [
        ("--group-query-attention --num-query-groups 2", {"key_value_heads": 2, "activation": "gelu", "tied": True}),
        ("--squared-relu --disable-bias-linear", {"activation": "relu2", "biases": (), "feed_forward": 1024}),
        ("--num-experts 4 --moe-router-topk 1 --disable-bias-linear", {"activation": "gelu", "feed_forward": 1024}),
        (
            "--swiglu --untie-embeddings-and-output-weights",
            {"activation": "swiglu", "feed_forward": 640, "tied": False},
        ),
        ("--untie-embeddings-and-output-weights", {"family": "gpt2", "tied": False}),
        ("--swiglu --num-key-value-heads 2 --tokenizer-model $TOKENIZER", {"key_value_heads": 2}),
    ],
)
def test_models_of_megatron_are_planned_as_they_are(words: str, fields: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "job.sh"
    path.write_text(MEGATRON.replace("--pipeline-model-parallel-size 4", "--tensor-model-parallel-size 2") + words)
    job = read_foreign(path, Asked(devices=8))
    model = parse_run(job.run, [], unread=ELSEWHERE).model
    assert {name: getattr(model, name) for name in fields} == fields
    assert model.padded_vocabulary == 50432, "a multiple of 128 on each of two ranks"


def test_a_variable_behind_a_switch_may_be_empty(tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text(f"{SMALL} --use-distributed-optimizer ${{MORE}} --overlap-grad-reduce $MORE_YET")
    job = read_foreign(tmp_path / "job.sh", Asked(devices=8))
    assert job.run["layout"]["data"]["sync"] == "zero1"
    assert job.facts == ("overlapped=sums",)
    assert {"${MORE}", "$MORE_YET"} <= job.account.assumed.keys()
    (tmp_path / "job.sh").write_text(f"{SMALL} --use-distributed-optimizer $1")
    with pytest.raises(ConfigError, match="is an argument of the script"):
        read_foreign(tmp_path / "job.sh", Asked(devices=8))


@pytest.mark.parametrize(
    "words, tokens",
    [
        ("--tokenizer-type Llama2Tokenizer", 32000),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model $DATA/tokenizer_llama3", 50257),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model /data/tokenizer_llama3", 128256),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model ./Qwen3-14B/", 151936),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model Qwen/Qwen2.5-0.5B", 151936),
        ("--tokenizer-type GPTSentencePieceTokenizer --tokenizer-model $1", 50257),
        ("--patch-tokenizer-type Qwen3Tokenizer --extra-vocab-size 293", 151936),
        ("--patch-tokenizer-type Qwen2Tokenizer --extra-vocab-size 421", 152064),
        ("--tokenizer-type QwenTokenizer", 151643),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model /data/qwen3.5_tokens", 248320),
    ],
)
def test_a_tokenizer_names_the_vocabulary(words: str, tokens: int, tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text(f"{SMALL} {words}")
    assert read_foreign(tmp_path / "job.sh", Asked(devices=8)).account.assumed["vocab-size"][0] == tokens


@pytest.mark.parametrize(
    "mixed, dtype, products",
    [
        ('"fp16_mixed"', "fp16", []),
        ("fp16_mixed()", "fp16", []),
        ('get_mixed_precision_config("fp16_mixed")', "fp16", []),
        ("MixedPrecisionConfig(fp16=True)", "fp16", []),
        ("bf16_mixed()", "bf16", []),
        ("bf16_with_mxfp8_mixed()", "bf16", ["products=mxfp8"]),
        ('get_precision_config("fp8_mx")', "bf16", ["products=mxfp8"]),
        ('get_mixed_precision_config("bf16_with_fp8_current_scaling_mixed")', "bf16", ["products=fp8"]),
        ('MixedPrecisionConfig(bf16=True, fp8="hybrid")', "bf16", ["products=fp8"]),
        ("bf16_with_nvfp4_mixed()", "bf16", []),
        ("formats_of_another_file", "bf16", []),
    ],
)
def test_the_formats_of_a_recipe_are_read(mixed: str, dtype: str, products: list[str], tmp_path: Path) -> None:
    path = tmp_path / "recipe.py"
    path.write_text(
        "from megatron.bridge import AutoBridge\n"
        "def mine():\n    cfg = _pretrain_common()\n    cfg.model = Llama32ModelProvider1B(seq_length=4096)\n"
        f"    cfg.train.global_batch_size = 8\n    cfg.mixed_precision = {mixed}\n"
        f"    {'cfg.mixed_precision.fp8_param_gather = False' if '(' in mixed else 'pass'}\n    return cfg\n"
    )
    job = read_foreign(path.with_name("recipe.py:mine"), Asked(devices=8))
    assert job.run["model"] == "llama-3.2-1b"
    # fp16_mixed sums gradients in fp16, MixedPrecisionConfig(fp16=True) in float32.
    in_fp16 = {"level": "O2", "dtype": "fp16", "accumulate": "stored"}
    assert job.run["precision"] == (in_fp16 if "fp16_mixed" in mixed else dtype)
    assert [each for each in job.facts if each.startswith("products")] == products
    is_left = any("mixed_precision" in name and "gather" not in name for name in job.account.left_out)
    assert is_left == any(word in mixed for word in ("nvfp4", "another"))


RECIPE = (
    "from megatron.bridge import AutoBridge\n"
    "def mine():\n    cfg = {}()\n    cfg.model = Llama32ModelProvider1B()\n    cfg.model.seq_length = 4096\n"
)


@pytest.mark.parametrize(
    "base, fields, batch, micro, overlapped, left",
    [
        ("_pretrain_common", [], 32, 2, "sums,gathers", []),
        ("recipes.common._pretrain_common", ["ddp.overlap_grad_reduce = False"], 32, 2, "gathers", []),
        ("_pretrain_common", ["train.global_batch_size = 64", "train.micro_batch_size = 1"], 64, 1, "sums,gathers", []),
        ("_sft_common", [], 128, 1, "[]", []),
        ("_sft_common", ["ddp.overlap_grad_reduce = True"], 128, 1, "sums", []),
        # comm_overlap replaces the fields of ddp.
        ("_sft_common", ["comm_overlap = CommOverlapConfig(tp_comm_overlap=False)"], 128, 1, "sums,gathers", []),
        ("_pretrain_common", [
            "ddp.overlap_grad_reduce = False",
            "comm_overlap = CommOverlapConfig(tp_comm_overlap=False, overlap_param_gather=False)",
         ], 32, 2, "sums", []),
        ("ours", ["train.global_batch_size = 8"], 8, 1, "sums,gathers", ["ours()"]),
        ("other.ours", ["train.global_batch_size = 8"], 8, 1, "sums,gathers", ["other.ours()"]),
        ("ConfigContainer", ["train.global_batch_size = 8"], 8, 1, "sums,gathers", []),
    ],
)  # fmt: skip
def test_a_recipe_begins_with_a_function_of_the_program(
    base: str, fields: list[str], batch: int, micro: int, overlapped: str, left: list[str], tmp_path: Path
) -> None:
    """Values of a function of another file are those of Megatron-Bridge's file, or the function is left out."""
    text = RECIPE.format(base) + "".join(f"    cfg.{field}\n" for field in fields) + "    return cfg\n"
    (tmp_path / "recipe.py").write_text(text)
    job = read_foreign(tmp_path / "recipe.py:mine", Asked(devices=8))
    config = parse_config(job.run | {"layout": job.run["layout"] | {"ranks_per_node": 8}}, unread=ELSEWHERE)
    assert (config.batch.global_, config.micro) == (batch, micro)
    assert f"overlapped={overlapped}" in job.facts
    assert sorted(job.account.left_out) == left


@pytest.mark.parametrize(
    "fields, accumulate",
    [
        ([], "float32"),
        (["ddp.grad_reduce_in_fp32 = False"], "float32"),  # bf16_mixed replaces this
        (["ddp.grad_reduce_in_fp32 = False", 'mixed_precision = "bf16_with_mxfp8_mixed"'], "float32"),
        (["ddp.grad_reduce_in_fp32 = False", "mixed_precision = bf16_mixed()",
          "mixed_precision.grad_reduce_in_fp32 = False"], "stored"),
        (["ddp.grad_reduce_in_fp32 = True", "mixed_precision = bf16_mixed()",
          "mixed_precision.grad_reduce_in_fp32 = False"], "stored"),
        (["mixed_precision = MixedPrecisionConfig(bf16=True, grad_reduce_in_fp32=False)"], "stored"),
        (["mixed_precision = MixedPrecisionConfig(bf16=True)", "ddp.grad_reduce_in_fp32 = False"], "float32"),
    ],
)  # fmt: skip
def test_the_format_replaces_the_gradients_of_ddp(fields: list[str], accumulate: str, tmp_path: Path) -> None:
    text = RECIPE.format("_pretrain_common") + "".join(f"    cfg.{field}\n" for field in fields) + "    return cfg\n"
    (tmp_path / "recipe.py").write_text(text)
    job = read_foreign(tmp_path / "recipe.py:mine", Asked(devices=8))
    config = parse_config(job.run | {"layout": job.run["layout"] | {"ranks_per_node": 8}}, unread=ELSEWHERE)
    assert config.precision.accumulate == accumulate
    assert job.account.left_out == {}


@pytest.mark.parametrize(
    "calls, dispatch, left",
    [
        (["apply_flex_dispatcher_backend(cfg.model, cfg.model.moe_flex_dispatcher_backend)"], "deepep", []),
        (["model = cfg.model", "apply_flex_dispatcher_backend(model, 'deepep')"], "deepep", []),
        ([], "alltoall", []),
        (["print(cfg.model)", "logger.info(cfg)", "validate_config(cfg)"], "alltoall", []),
        (["ours.with_overlap(cfg)", "tune(cfg.ddp, 3)"], "alltoall", ["ddp.tune()", "ours.with_overlap()"]),
    ],
)
def test_a_function_that_gets_a_section_may_set_its_fields(
    calls: list[str], dispatch: str, left: list[str], tmp_path: Path
) -> None:
    lines = [
        "cfg = _pretrain_common()", "cfg.model = Qwen3MoEModelProvider30B_A3B()", "cfg.model.seq_length = 4096",
        "cfg.model.expert_model_parallel_size = 8", "cfg.model.moe_token_dispatcher_type = 'alltoall'",
        "cfg.model.moe_flex_dispatcher_backend = 'deepep'", *calls, "return cfg",
    ]  # fmt: skip
    text = "from megatron.bridge import AutoBridge\ndef mine():\n" + "".join(f"    {line}\n" for line in lines)
    (tmp_path / "recipe.py").write_text(text)
    job = read_foreign(tmp_path / "recipe.py:mine", Asked(devices=8))
    assert f"dispatch={dispatch}" in job.facts
    assert sorted(job.account.left_out) == left


@pytest.mark.parametrize(
    "base, field", [("_peft_common", "rng.seed = 1"), ("_sft_common", 'peft = default_peft_config("lora")')]
)
def test_a_recipe_of_adapters_is_refused(base: str, field: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.py").write_text(RECIPE.format(base) + f"    cfg.{field}\n    return cfg\n")
    with pytest.raises(ConfigError, match="peft=given trains no whole weights"):
        read_foreign(tmp_path / "recipe.py:mine", Asked(devices=8))


FILES_OF_LINES = {
    "sft.yaml": "model_name_or_path: meta-llama/Llama-3.1-8B\nfinetuning_type: full\ncutoff_len: 4096\nbf16: true\n"
                "per_device_train_batch_size: 2\ngradient_accumulation_steps: 4\n",
    "args.json": '{"model_name_or_path": "meta-llama/Llama-3.1-8B", "per_device_train_batch_size": 2, "bf16": true,\n'
                 '\t"block_size": 4096, "gradient_accumulation_steps": 4, "gradient_checkpointing": true}',
    "axo.yaml": "base_model: meta-llama/Llama-3.1-8B\nsequence_len: 4096\nmicro_batch_size: 2\nbf16: true\n"
                "gradient_accumulation_steps: 4\ngradient_checkpointing: true\n",
    "fsdp.yaml": "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 8\n"
                 "fsdp_config: {fsdp_sharding_strategy: FULL_SHARD}\n",
    "ds.json": '{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}',
}  # fmt: skip


@pytest.mark.parametrize(
    "line, micro, sync",
    [
        ("llamafactory-cli train sft.yaml", 2, "allreduce"),
        ("FORCE_TORCHRUN=1 llamafactory-cli train sft.yaml per_device_train_batch_size=1", 1, "allreduce"),
        ("torchrun --nproc_per_node 8 src/train.py sft.yaml", 2, "allreduce"),
        ("deepspeed --num_gpus 8 src/train.py sft.yaml --deepspeed ds.json", 2, "zero2"),
        ("accelerate launch --config_file fsdp.yaml src/train.py sft.yaml", 2, "zero3"),
        (
            "accelerate launch --config_file=fsdp.yaml sft.py --config sft.yaml --per-device-train-batch-size 4",
            4,
            "zero3",
        ),
        ("trl sft --config sft.yaml", 2, "allreduce"),
        ("trl sft --config=sft.yaml --bf16=true", 2, "allreduce"),
        ("cp sft.yaml other.yaml\npython run_clm.py args.json\ncat sft.yaml", 2, "allreduce"),
        ("axolotl train axo.yaml --micro-batch-size 4 --launcher torchrun -- --nproc_per_node=8", 4, "allreduce"),
        ("accelerate launch --config_file fsdp.yaml -m axolotl.cli.train axo.yaml --debug", 2, "allreduce"),
        ("cat > mine.yaml <<E\n" + FILES_OF_LINES["axo.yaml"] + "E\naxolotl train mine.yaml", 2, "allreduce"),
    ],
)
def test_a_line_that_names_its_arguments_file_is_read(line: str, micro: int, sync: str, tmp_path: Path) -> None:
    for name, text in FILES_OF_LINES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "job.sh").write_text(line)
    job = read_foreign(tmp_path / "job.sh", Asked(devices=8))
    config = parse_run(job.run | {"layout": job.run["layout"] | {"ranks_per_node": 8}}, [], unread=ELSEWHERE)
    assert (config.model.hidden, config.micro, config.batch.global_) == (4096, micro, 8 * micro * 4)
    assert (config.layout.data.sync, config.memory.recompute, config.precision.dtype) == (sync, 1, "bf16")
    assert job.account.left_out == {}


def test_json_of_others_is_not_read_as_deepspeeds(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text('{"distributed_type": "DEEPSPEED", "mixed_precision": "bf16", "num_processes": 8,\n'
                    '"deepspeed_config": {"zero_stage": 2}}')  # fmt: skip
    job = read_foreign(path, Asked(model="llama-3.1-8b", sequence=2048, devices=8))
    assert job.run["layout"]["data"]["sync"] == "zero2"
    assert job.account.left_out == {}
    path.write_text(FILES_OF_LINES["args.json"])
    assert read_foreign(path, Asked(devices=8)).account.read["per_device_train_batch_size"] == 2
    path.write_text('{"architectures": ["A"]}')
    with pytest.raises(ConfigError, match="has no field that a known program's file has"):
        read_foreign(path, Asked(model="llama-3.1-8b", devices=8))


def test_the_attention_of_a_job_is_read(tmp_path: Path) -> None:
    path = tmp_path / "job.sh"
    for words, facts in (
        ("--decoder-last-pipeline-num-layers 2", ("overlapped=[]",)),
        (
            "--decoder-last-pipeline-num-layers 2 --attention-backend unfused",
            ("attention=fused-softmax", "overlapped=[]"),
        ),
        ("--decoder-last-pipeline-num-layers 2 --transformer-impl local", ("attention=fused-softmax", "overlapped=[]")),
        ("--num-layers 16 --transformer-impl local --no-masked-softmax-fusion", ("attention=steps", "overlapped=[]")),
        (
            "--num-layers 16 --transformer-impl local --no-masked-softmax-fusion --apply-query-key-layer-scaling",
            ("attention=wide-steps", "overlapped=[]"),
        ),
        (
            "--num-layers 16 --attention-backend local --no-masked-softmax-fusion --attention-softmax-in-fp32",
            ("attention=wide-steps", "overlapped=[]"),
        ),
        (
            "--num-layers 16 --attention-backend unfused --no-masked-softmax-fusion --attention-softmax-in-fp32",
            ("attention=fused-softmax", "overlapped=[]"),
        ),
        ("--num-layers 16 --attention-softmax-in-fp32 --no-masked-softmax-fusion", ("overlapped=[]",)),
    ):
        path.write_text(MEGATRON + words)
        assert read_foreign(path, Asked(devices=8)).facts == facts


@pytest.mark.parametrize("copies, shard", [(1, None), (2, 2), (4, None)])
def test_copies_of_the_optimizer_are_read(copies: int, shard: int | None, tmp_path: Path) -> None:
    path = tmp_path / "job.sh"
    words = f"--tensor-model-parallel-size 2 --use-distributed-optimizer --num-distributed-optimizer-instances {copies}"
    path.write_text(MEGATRON.replace("--pipeline-model-parallel-size 4", words))
    data = parse_run(read_foreign(path, Asked(devices=8)).run, [], unread=ELSEWHERE).layout.data
    assert (data.size, data.shard, data.sync) == (4, shard, "allreduce" if copies == 4 else "zero1")
