"""Weights without float32 masters, Liger's kernels and TRL's defaults in jobs of transformers' Trainer."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import pytest
import yaml

from meshwright.config.load import ELSEWHERE, parse_config
from meshwright.planner.foreign import trainer
from meshwright.planner.foreign.job import Asked
from meshwright.planner.foreign.reading import read_foreign
from meshwright.planner.foreign.words import foreign_words
from meshwright.planner.plan.software import load_program

ONE_B = Asked("llama-3.2-1b", 64, 8, 8)
LINE = "torchrun t.py --model_name_or_path meta-llama/Llama-3.2-1B --per_device_train_batch_size 1 --max_length 64"
TRL = "model_name_or_path: meta-llama/Llama-3.2-1B\nper_device_train_batch_size: 1\nmax_length: 64\n"
FACTORY = TRL.replace("max_length", "finetuning_type: full\ncutoff_len")
AXOLOTL = "base_model: meta-llama/Llama-3.2-1B\nsequence_len: 64\nmicro_batch_size: 1\n"
FSDP = "fsdp_config: {reshard_after_forward: true}\n"
AUTOMODEL = (
    "model: {pretrained_model_name_or_path: meta-llama/Llama-3.2-1B}\ndataset: {seq_length: 64}\n"
    "step_scheduler: {global_batch_size: 64, local_batch_size: 1}\ndistributed: {strategy: fsdp2"
)
ACCELERATE = {
    "sharded.yaml": "{distributed_type: FSDP, mixed_precision: bf16, num_processes: 8}",
    "whole.yaml": "{distributed_type: MULTI_GPU, mixed_precision: bf16, num_processes: 8}",
    "wide.yaml": "{distributed_type: FSDP, mixed_precision: 'no', num_processes: 8}",
    "z2.conf": '{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}',
}


@pytest.mark.parametrize(
    "name, text, stored, left_out",
    [
        # FSDP with mixed precision makes loaded weights float32; DeepSpeed has float32 masters.
        ("a.sh", f"{LINE} --bf16 --torch_dtype bfloat16 --fsdp full_shard", False, []),
        ("b.sh", f"{LINE} --bf16 --dtype auto --fsdp full_shard", False, []),
        ("c.sh", f"{LINE} --torch_dtype bfloat16 --deepspeed z2.conf", False, []),
        ("d.sh", f"accelerate launch --config_file sharded.yaml {LINE} --dtype bfloat16", False, []),
        ("a.yaml", f"{AXOLOTL}{FSDP}bf16: true", False, []),
        # Replicas do not, nor does FSDP without mixed precision.
        ("e.sh", f"{LINE} --bf16 --torch_dtype bfloat16", True, []),
        ("f.sh", f"{LINE} --torch_dtype bfloat16 --fsdp full_shard", True, []),
        ("g.sh", f"accelerate launch --config_file whole.yaml {LINE} --torch_dtype bfloat16", True, []),
        ("h.sh", f"accelerate launch --config_file wide.yaml {LINE} --torch_dtype bfloat16", True, []),
        ("b.yaml", f"{FACTORY}pure_bf16: true", True, []),
        ("c.yaml", f"{TRL}dtype: bfloat16", True, []),
        ("d.yaml", f"{AXOLOTL}bf16: auto", True, []),
        ("e.yaml", f"{AXOLOTL}{FSDP}bf16: full", True, []),
        # float32 weights, and dtypes that no run of ours has or that no field tells.
        ("i.sh", f"{LINE} --bf16 --torch_dtype float32", False, []),
        ("f.yaml", f"{FACTORY}bf16: true\npure_bf16: false", False, []),
        ("g.yaml", f"{AXOLOTL}fp16: true\nbf16: false", False, []),
        ("j.sh", f"{LINE} --bf16 --torch_dtype auto", False, ["torch_dtype"]),
        ("k.sh", f"{LINE} --fp16 --torch_dtype bfloat16", False, ["torch_dtype"]),
        ("l.sh", f"{LINE} --torch_dtype float16", False, ["torch_dtype"]),
    ],
)
def test_weights_are_stored_in_bf16_where_the_program_leaves_them(
    name: str, text: str, stored: bool, left_out: list[str], tmp_path: Path
) -> None:
    for file, content in {**ACCELERATE, name: text}.items():
        (tmp_path / file).write_text(content)
    job = read_foreign(tmp_path / name, ONE_B)
    assert sorted(job.account.left_out) == left_out
    config = parse_config(job.run | {"layout": job.run["layout"] | {"ranks_per_node": 8}}, unread=ELSEWHERE)
    assert (config.optimizer.masters, config.optimizer.states) == (("bf16",) * 2 if stored else ("float32",) * 2)
    if stored:  # the answer's words say so, and FSDP's mixed precision would not
        sliced = parse_config(
            {**job.run, "layout": {"data": {"size": 8, "sync": "zero3"}, "ranks_per_node": 8}}, unread=ELSEWHERE
        )
        words = str(foreign_words(load_program(job.program, job.facts), sliced, job.form))
        assert ("bf16: full" if job.program == "axolotl" else "mixed_precision: 'no'") in words


@pytest.mark.parametrize(
    "name, text, precision",
    [
        ("a.yaml", f"{FACTORY}bf16: false\nfp8: true", "bf16"),
        ("b.yaml", f"{FACTORY}bf16: false\nfp8: true\nfsdp: full_shard", "bf16"),
        ("c.yaml", f"{AXOLOTL}{FSDP}bf16: false\nfp8: true", "bf16"),
        ("d.sh", f"accelerate launch --mixed_precision fp8 {LINE.removeprefix('torchrun ')}", "bf16"),
        ("e.yaml", f"{FACTORY}fp16: true\nfp8: true", "fp16"),
        ("f.yaml", f"{FACTORY}bf16: false", "float32"),
        ("g.yaml", f"{AXOLOTL}{FSDP}bf16: false", "float32"),
    ],
)
def test_fp8_is_mixed_precision_with_bf16(name: str, text: str, precision: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    job = read_foreign(tmp_path / name, ONE_B)
    layout = job.run["layout"] | {"ranks_per_node": 8}
    assert parse_config(job.run | {"layout": layout}, unread=ELSEWHERE).precision.dtype == precision
    assert ("products=fp8" in job.facts) == ("fp8" in text)


@pytest.mark.parametrize(
    "name, text, often",
    [
        ("a.yaml", f"{FACTORY}fsdp: full_shard\ngradient_accumulation_steps: 4", False),
        ("b.yaml", f"{FACTORY}fsdp: full_shard\naccelerator_config: {{gradient_accumulation_kwargs: "
                   "{sync_each_batch: true}}", True),
        ("c.yaml", f"{AXOLOTL}{FSDP}gradient_accumulation_steps: 4", False),
        ("d.sh", f"{LINE} --deepspeed z2.conf", True),
        ("e.yaml", f"{AUTOMODEL}}}", False),
        ("f.yaml", f"{AUTOMODEL}, defer_fsdp_grad_sync: false}}", True),
        ("g.yaml", f"{AUTOMODEL}, defer_fsdp_grad_sync: false, pp_size: 2}}", True),
    ],
)  # fmt: skip
def test_fsdp_sums_gradients_once_a_step_unless_told(name: str, text: str, often: bool, tmp_path: Path) -> None:
    """Accelerate and AutoModel do not sum before the last microbatch; DeepSpeed's stages 2 and 3 always do."""
    for file, content in {**ACCELERATE, name: text}.items():
        (tmp_path / file).write_text(content)
    job = read_foreign(tmp_path / name, ONE_B)
    assert job.account.left_out == {}
    program = load_program(job.program, job.facts)
    assert program.software.sums == (("stages" if job.program == "automodel" else "microbatch") if often else "step")
    sliced = parse_config(
        {**job.run, "layout": {"data": {"size": 8, "sync": "zero3"}, "ranks_per_node": 8}}, unread=ELSEWHERE
    )
    words = str(foreign_words(program, sliced, job.form))
    assert ("sync_each_batch: true" in words or "defer_fsdp_grad_sync: false" in words) == (often and name != "d.sh")


@pytest.mark.parametrize(
    "name, text, facts, left_out",
    [
        ("a.yaml", f"{TRL}use_liger_kernel: true", {"logits=slices", "norms=fast"}, []),
        ("b.yaml", f"{FACTORY}enable_liger_kernel: true", {"logits=slices", "norms=fast"}, []),
        ("c.yaml", f"{TRL}use_liger_kernel: false", set(), []),
        ("d.yaml", f"{TRL}use_liger_kernel: true\nliger_kernel_config: {{fused_linear_cross_entropy: false}}",
         {"norms=fast"}, []),
        ("e.yaml", f"{TRL}use_liger_kernel: true\nliger_kernel_config: {{swiglu: false}}",
         {"logits=slices", "norms=fast"}, ["liger_kernel_config.swiglu"]),
        ("f.yaml", f"{AXOLOTL}{FSDP}liger_rms_norm: true", {"norms=fast"}, []),
        ("a.sh", f"{LINE} --deepspeed z2.conf --use_liger_kernel true", {"logits=slices", "norms=fast"}, []),
        ("b.sh", f"accelerate launch --config_file sharded.yaml {LINE} --use_liger_kernel",
         {"logits=slices", "norms=fast"}, []),
    ],
)  # fmt: skip
def test_ligers_kernels_are_facts(name: str, text: str, facts: set[str], left_out: list[str], tmp_path: Path) -> None:
    for file, content in {**ACCELERATE, name: text}.items():
        (tmp_path / file).write_text(content)
    job = read_foreign(tmp_path / name, ONE_B)
    assert facts == {fact for fact in job.facts if fact.startswith(("logits", "norms"))}
    assert sorted(job.account.left_out) == left_out
    load_program(job.program, job.facts)


@pytest.mark.parametrize(
    "name, text",
    [
        ("a.yaml", "model_name_or_path: meta-llama/Llama-3.2-1B\ndataset_name: trl-lib/Capybara\n"),
        ("a.sh", "trl sft --model_name_or_path meta-llama/Llama-3.2-1B --dataset_name trl-lib/Capybara"),
        ("b.sh", "trl sft --model_name_or_path meta-llama/Llama-3.2-1B --dataset_name a --deepspeed z2.conf"),
        ("c.sh", "torchrun --nproc_per_node 8 trl/scripts/sft.py --model_name_or_path meta-llama/Llama-3.2-1B"),
        ("d.sh", "accelerate launch -m trl.scripts.sft --model_name_or_path meta-llama/Llama-3.2-1B"),
    ],
)
def test_trls_defaults_replace_the_trainers(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "z2.conf").write_text('{"zero_optimization": {"stage": 2}}')
    (tmp_path / name).write_text(text)
    job = read_foreign(tmp_path / name, Asked(devices=8))
    assert (job.run["data"]["sequence"], job.run["memory"]["recompute"]) == (1024, 1)
    assert job.run["precision"] == "bf16"
    assumed = {field.lstrip("-") for field, (_, why) in job.account.assumed.items() if why == trainer.TRL}
    assert assumed == {trainer.LENGTHS[0], "bf16", "gradient_checkpointing"}
    line = text.replace("trl sft", "torchrun run_clm.py").replace("trl/scripts/sft.py", "trl.yaml/run_clm.py")
    if line != text:  # another program with such flags has the Trainer's defaults
        (tmp_path / name).write_text(f"{line} --per_device_train_batch_size 8 --fp16")
        other = read_foreign(tmp_path / name, Asked(sequence=1024, devices=8))
        assert (other.run["memory"]["recompute"], other.run["precision"]) == ("none", "fp16")


@pytest.mark.parametrize(
    "launch, program, sync",
    [
        ("multi_gpu", "fsdp", "allreduce"), ("fsdp1", "fsdp", "zero3"), ("fsdp2", "fsdp", "zero3"),
        ("zero1", "deepspeed-trainer", "zero1"), ("zero2", "deepspeed-trainer", "zero2"),
        ("zero3", "deepspeed-trainer", "zero3"), ("sharded.yaml", "fsdp", "zero3"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("file", ["", "--config sft.yaml"])
def test_trl_names_files_of_accelerate(launch: str, program: str, sync: str, file: str, tmp_path: Path) -> None:
    """By name or by path, with flags or a file of arguments; each name's fields are those of TRL's own file."""
    name = "" if file else "--model_name_or_path meta-llama/Llama-3.2-1B"
    line = f"trl sft {file} {name} --accelerate_config {launch} --num_processes 4"
    texts = {**ACCELERATE, "sft.yaml": "model_name_or_path: meta-llama/Llama-3.2-1B\ndataset_name: a\n"}
    for each, content in {**texts, "a.sh": line}.items():
        (tmp_path / each).write_text(content)
    job = read_foreign(tmp_path / "a.sh", Asked(devices=4))
    assert (job.program, job.run["layout"]["data"]["sync"]) == (program, sync)
    assert (job.run["batch"], job.run["data"]["sequence"]) == ({"global": 32, "micro": 8}, 1024)
    assert (job.run["memory"]["recompute"], job.run["precision"]) == (1, "bf16")
    assert job.account.left_out == {}
    assert job.account.assumed["--per_device_train_batch_size"] == (8, trainer.MICRO_WHY)


def test_names_of_trls_files_are_these() -> None:
    folder = resources.files(pytest.importorskip("trl.accelerate_configs"))
    files = {Path(each.name).stem: each for each in folder.iterdir() if each.name.endswith(".yaml")}
    assert files.keys() == trainer.TRL_LAUNCHES.keys()
    for name, fields in trainer.TRL_LAUNCHES.items():
        theirs = yaml.safe_load(files[name].read_text())
        for field, value in fields.items():
            told = theirs[field]
            assert (told | value if isinstance(told, dict) else value) == told


@pytest.mark.parametrize(
    "rest", ["--output_dir out/trl", "--output_dir=out/trl", "--run_name trl", "--model_revision trl.scripts", "a/atrl"]
)
def test_a_value_that_names_trl_starts_another_program(rest: str, tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text(f"{LINE} {rest}")
    assert read_foreign(tmp_path / "a.sh", ONE_B).run["memory"]["recompute"] == "none"


def test_trl_has_these_defaults() -> None:
    """The values are those of the package, where it is installed."""
    config = pytest.importorskip("trl").SFTConfig
    fields = config.__dataclass_fields__
    assert (fields["max_length"].default, fields["gradient_checkpointing"].default) == (trainer.TRL_LENGTH, True)
    assert fields["bf16"].default is None  # true, if fp16 is not set
