"""Words for features that Meshwright lacks, in several spellings: as a key, a section, an option and a value."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from meshwright.cli.app import refuse_foreign
from meshwright.config.load import parse_run
from meshwright.config.scope import PAGE, TOPICS, topic_of_address, topic_of_key
from meshwright.config.words import KEYS
from meshwright.ranks.errors import ConfigError
from tests.config.fields import FIELDS

SPELLINGS: dict[str, list[str]] = {
    "LoRA": [
        "lora",
        "LoRA",
        "use_lora",
        "use-lora",
        "lora_rank",
        "lora_r",
        "lora-alpha",
        "lora_dropout",
        "loraRank",
        "qlora",
        "q_lora",
        "rslora",
        "dora",
        "peft",
        "peft_config",
        "adapters",
        "adapter_name",
        "target_modules",
        "lora_target_modules",
        "modules_to_save",
        "prompt_tuning",
        "ia3",
        "enable_lora",
        "finetuning_type",
    ],
    "FP8": [
        "fp8",
        "FP8",
        "float8",
        "use_fp8",
        "enable-fp8",
        "fp8_recipe",
        "fp8-format",
        "e4m3",
        "float8_e4m3fn",
        "nvfp4",
        "mxfp8",
        "transformer_engine",
        "enable_float8_linear",
    ],
    "frozen weights": ["freeze", "freeze_layers", "frozen_layers", "trainable_layers", "unfreeze"],
    "quantised weights": [
        "load_in_4bit",
        "load_in_8bit",
        "bnb_4bit_quant_type",
        "bitsandbytes",
        "quantization",
        "quantization_config",
        "quantize",
        "gptq",
        "nf4",
        "int8",
    ],
    "Apple GPUs": ["mps", "MPS", "use_mps", "use_mps_device", "metal", "mlx", "apple", "apple-silicon", "apple_gpu"],
    "other accelerators": ["tpu", "TPU", "xpu", "use_xpu", "tpu_cores", "xla", "npu", "hpu", "ipu"],
    "AMD GPUs": ["rocm", "ROCm", "use_rocm", "hip", "amd"],
    "preference tuning": [
        "rlhf",
        "RLHF",
        "dpo",
        "DPO",
        "dpo_beta",
        "use-dpo",
        "ppo",
        "ppo_epochs",
        "grpo",
        "orpo",
        "kto",
        "reward",
        "reward_model",
        "rewards",
        "reward-funcs",
        "preference",
        "ref_model",
        "trl",
        "preference_data",
        "chosen",
        "rejected",
    ],
    "distillation": ["distill", "distillation", "teacher", "teacher_model", "kd_alpha"],
    "remote storage": ["s3", "s3_bucket", "S3", "gcs", "gcs_path", "aws_region", "remote_path", "storage_options"],
    "uploads to the Hub": [
        "push_to_hub",
        "push-to-hub",
        "pushToHub",
        "PUSH_TO_HUB",
        "push_to_hub_model_id",
        "hub_model_id",
        "hub_token",
        "hub-private-repo",
        "repo_id",
        "upload",
        "upload_to_hub",
    ],
    "sweeps": [
        "sweep",
        "sweeps",
        "wandb_sweep",
        "sweep_id",
        "optuna",
        "hyperparameters",
        "hyperparameter_search",
        "grid_search",
        "n_trials",
        "multirun",
        "ray_tune",
    ],
    "serving": ["vllm", "use_vllm", "serve", "serving", "onnx"],
}

VALUES: dict[str, list[str]] = {
    "FP8": [
        "precision=fp8",
        "precision=FP8",
        "precision.dtype=float8",
        "precision.dtype=fp8_e4m3",
        "precision=float8_e5m2",
    ],
    "Apple GPUs": ["device=mps", "device=MPS", "device=mps:0", "device=metal", "device=mlx"],
    "other accelerators": ["device=tpu", "device=xla", "device=xpu", "device=xpu:0", "device=npu"],
    "AMD GPUs": ["device=rocm", "device=hip", "device=amd"],
    "quantised weights": ["optimizer=adamw_8bit", "optimizer.name=paged_adamw_8bit", "precision=int8", "precision=nf4"],
    "preference tuning": ["data.kind=dpo", "data.kind=preference", "data.kind=reward"],
    "remote storage": [
        "data=s3://bucket/x",
        "data.source=gs://b/x",
        "data.source=hf://datasets/a/b",
        "data.source=https://a.b/c.txt",
        "data.tokenizer=s3://b/tokenizer.json",
        "data.source=az://b/x",
        "data.source=S3://bucket/x",
        "data.mixture={s3://b/x: 1}",
    ],
}


def refusal(*words: str) -> str:
    with pytest.raises(ConfigError) as raised:
        parse_run({}, words)
    return str(raised.value)


ALL = [(topic, word) for topic, words in SPELLINGS.items() for word in words]


@pytest.mark.parametrize("topic, word", ALL, ids=[word for _, word in ALL])
def test_every_spelling_is_answered_as_key_section_and_option(topic: str, word: str) -> None:
    assert topic_of_key(word) is TOPICS[topic]
    wanted = f"{TOPICS[topic].sentence} ({PAGE}); valid: {TOPICS[topic].remedy}"
    assert wanted in refusal(f"{word}=1")
    assert wanted in refusal(f"{word}.rank=8")
    assert wanted in refusal(f"model.{word}=true")
    with pytest.raises(ConfigError, match=re.escape(wanted)):
        refuse_foreign([f"--{word}"])
    with pytest.raises(ConfigError, match=re.escape(wanted)):
        refuse_foreign(["out", f"--{word}=8"])


@pytest.mark.parametrize("topic", VALUES)
def test_values_are_answered(topic: str) -> None:
    for word in VALUES[topic]:
        assert f"{TOPICS[topic].sentence} ({PAGE}); valid: {TOPICS[topic].remedy}" in refusal(word), word


@pytest.mark.parametrize("address", ["s3://b/run", "gs://b/run", "hf://a/b", "s3a://b"])
def test_folders_elsewhere_are_answered(address: str) -> None:
    for words in (["quickstart", "--out", address], ["quickstart", f"--out={address}"], [address]):
        with pytest.raises(ConfigError, match="is no folder: files are read and written on disks of these machines"):
            refuse_foreign(words)
    refuse_foreign(["out", "--prompt", f"copy {address}"])
    refuse_foreign(["out", "--prompt", address])
    assert topic_of_address(address) is TOPICS["remote storage"]


def test_no_field_of_ours_and_no_answered_word_is_a_topic() -> None:
    ours = {part for field in FIELDS for part in field.split(".")}
    elsewhere = {"adapter", "dora", "rslora"}  # keys of model.adapter, which the answer names
    assert {word for word in ours if topic_of_key(word)} == elsewhere
    assert not {word for theirs in KEYS.values() for word in theirs if topic_of_key(word)}


def test_other_mistakes_keep_their_words() -> None:
    assert "did you mean" in refusal("stepz=3")
    assert PAGE not in refusal("data=no_such_file.txt")
    assert PAGE not in refusal("device=cpus")
    assert PAGE not in refusal("data=lora")


def test_the_page_has_a_paragraph_for_each_topic() -> None:
    page = (Path(__file__).resolve().parents[2] / PAGE).read_text()
    for words in (
        "LoRA",
        "FP8",
        "Quantised weights",
        "Apple GPUs",
        "Other accelerators",
        "AMD GPU",
        "Preference tuning",
        "Distillation",
        "Remote storage",
        "Uploads to the Hub",
        "Sweeps",
        "Serving",
    ):
        assert words in page
        assert any(
            words.lower() in topic.lower() or topic.lower() in words.lower() or topic == "AMD GPUs" for topic in TOPICS
        )
