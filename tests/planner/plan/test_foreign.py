"""Jobs of other programs, read and answered in their words."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.config import Config, parse_config
from meshwright.planner.plan.cluster import load_cluster
from meshwright.planner.plan.foreign import foreign_words, read_foreign
from meshwright.planner.plan.question import NamedRun, asked_run
from meshwright.planner.plan.software import load_program
from meshwright.ranks.errors import ConfigError

TORCHTITAN = """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 2
seq_len = 8192
[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = 4
tensor_parallel_degree = 2
[activation_checkpoint]
mode = "selective"
[compile]
enable = true
"""
MEGATRON = """
torchrun pretrain_gpt.py --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 \\
  --num-query-groups 8 --swiglu --seq-length=4096 --vocab-size 128256 --micro-batch-size 1 --global-batch-size 128 \\
  --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 \\
  --num-layers-per-virtual-pipeline-stage 8 --use-distributed-optimizer --bf16 --fp8-format hybrid  # and data
"""
ACCELERATE = """
num_processes: 8
mixed_precision: bf16
fsdp_config: {fsdp_sharding_strategy: SHARD_GRAD_OP, fsdp_activation_checkpointing: true}
"""
AUTOMODEL = """
step_scheduler: {global_batch_size: 32, local_batch_size: 2}
distributed: {dp_size: 4, tp_size: 2, activation_checkpointing: true}
"""
H100 = load_cluster("dgx-h100")


def asked(folder: Path, name: str, text: str, named: NamedRun = NamedRun()) -> tuple[Config, str]:
    path = folder / name
    path.write_text(text)
    config, _, job = asked_run(path, None, named, [], H100)
    assert job is not None
    return config, job.program


def test_torchtitan(tmp_path: Path) -> None:
    config, program = asked(tmp_path, "job.toml", TORCHTITAN)
    assert program == "torchtitan"
    assert (config.model.hidden, config.model.num_blocks, config.batch.global_, config.micro) == (4096, 32, 16, 2)
    assert (config.layout.data.size, config.layout.data.shard, config.layout.data.sync) == (8, 4, "zero3")
    assert config.layout.axes[-1] == ("tensor", 2)
    assert config.memory.recompute == "ops"
    words = str(foreign_words(load_program(program), config))
    for line in (
        "local_batch_size = 2", "data_parallel_replicate_degree = 2", "data_parallel_shard_degree = 4",
        "tensor_parallel_degree = 2", 'mode = "selective"',
    ):  # fmt: skip
        assert line in words
    assert asked(tmp_path, "eager.toml", TORCHTITAN.replace("true", "false"))[1] == "torchtitan-eager"


def test_megatron(tmp_path: Path) -> None:
    config, program = asked(tmp_path, "pretrain.sh", MEGATRON)
    assert program == "megatron-core"
    assert config.model.family == "llama"
    assert (config.data.lengths.source, config.batch.global_, config.micro) == (4096, 128, 1)
    assert (config.layout.pipeline.size, config.layout.pipeline.chunks, config.layout.data.sync) == (2, 2, "zero1")
    words = str(foreign_words(load_program(program), config)).split("\n")
    assert {"--sequence-parallel", "--tensor-model-parallel-size 2", "--use-distributed-optimizer"} <= set(words)
    assert "--num-layers-per-virtual-pipeline-stage 8" in words
    assert read_foreign(tmp_path / "pretrain.sh", None, None, None).facts == ("products=fp8",)


def test_accelerate_and_automodel_need_what_their_files_do_not_say(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--model=nothing is given, and .*job.yaml does not say it"):
        asked(tmp_path, "job.yaml", ACCELERATE)
    config, program = asked(tmp_path, "job.yaml", ACCELERATE, NamedRun("llama-3.1-8b", 4096, 32))
    assert (program, config.layout.data.sync, config.layout.data.size, config.memory.recompute) == (
        "fsdp",
        "zero2",
        8,
        1,
    )
    assert "fsdp_sharding_strategy: SHARD_GRAD_OP" in str(foreign_words(load_program(program), config))
    config, _ = asked(tmp_path, "auto.yaml", AUTOMODEL, NamedRun("llama-3.1-8b", 4096))
    assert (config.batch.global_, config.micro, config.layout.world_size) == (32, 2, 8)


def test_a_file_that_is_none_of_these_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--from=.*none.toml is no file"):
        read_foreign(tmp_path / "none.toml", None, None, None)
    (tmp_path / "other.yaml").write_text("a: 1")
    with pytest.raises(ConfigError, match="has neither fsdp_config"):
        read_foreign(tmp_path / "other.yaml", None, None, None)
    (tmp_path / "line").write_text("python train.py --layers 3")
    with pytest.raises(ConfigError, match="has no --num-layers"):
        read_foreign(tmp_path / "line", None, None, None)
    (tmp_path / "job.toml").write_text(TORCHTITAN)
    with pytest.raises(ConfigError, match=r"--from=.* has no effect beside the run file run.yaml"):
        asked_run(tmp_path / "job.toml", Path("run.yaml"), NamedRun(), [], H100)


def test_a_program_without_words_of_its_own_has_none() -> None:
    assert foreign_words(load_program("axonn"), parse_config({})) is None
