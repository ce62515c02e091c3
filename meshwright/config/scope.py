"""Words for features that Meshwright does not have, each answered in a sentence with another tool.

`docs/scope.md` is the page. A word may be a key, an option, or a value: capitals, and dashes or dots for underscores,
make no difference. A topic that is built later loses the row and the paragraph.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from meshwright.config.section import shown
from meshwright.ranks.errors import Problem
from meshwright.ranks.remedies import of_problem

PAGE = "docs/scope.md"


@dataclass(frozen=True)
class Topic:
    """A feature of other tools: the forms of words, a sentence about Meshwright, and the remedy.

    `values`: the forms of values; empty for the forms of keys.
    """

    words: str
    sentence: str
    remedy: str
    values: str = ""

    def answers_value(self, value: str) -> bool:
        form = self.values or self.words
        return re.fullmatch(form, value.strip().lower() if self.values else _plain(value)) is not None


TOPICS: dict[str, Topic] = {
    "LoRA": Topic(
        r"(\w*_)?(([qrv]|rs|lo)?_?lora|dora|peft|adapters?|qalora|loftq|ia3)(_\w+)?|lora\w+|(prefix|prompt|p)_tuning\w*"
        r"|target_modules|modules_to_save|finetuning_type",
        "LoRA and DoRA are the section model.adapter, and there are no other adapters",
        "model.adapter={rank: 16}; PEFT trains others, and `meshwright parity` proves such a program on several ranks",
    ),
    "frozen weights": Topic(
        r"(un)?freeze\w*|frozen_\w+|trainable_\w+|train_only\w*",
        "weights are frozen by patterns of their names",
        "model.frozen=[blocks.0.*, tokens.*]; all others are trained",
    ),
    "FP8": Topic(
        r"(\w*_)?(fp8|float8|f8|mxfp8|nvfp8|fp4|float4|nvfp4|mxfp4)(_\w+)?|\w*e4m3\w*|\w*e5m2\w*"
        r"|transformer_engine\w*|te_recipe",
        "linears of layers multiply in FP8 by precision.products=fp8, and nothing is in FP4 or MXFP8",
        "precision=bf16 precision.products=fp8; torchao and Transformer Engine have the others",
    ),
    "quantised weights": Topic(
        r"(load_)?(in_)?(4|8)_?bits?|load_in_\w+|bnb\w*|bitsandbytes\w*|(\w*_)?quant(i[sz]\w*)?(_\w+)?|quanto|gptq\w*|awq\w*"
        r"|nf4|int4|int8|(paged_)?(adamw|adam|lion|sgd)_?(8|4)bit|adamw_bnb_8bit|paged_\w+|gguf\w*|qat",
        "weights and states of optimizers are floats of 16 to 64 bits, and nothing is quantised",
        "leave it out; memory.offload=host takes states off a GPU, and an export can be quantised by other tools",
    ),
    "Apple GPUs": Topic(
        r"(use_|device_)?(mps|metal|mlx|apple\w*|macos|m[1-5](_(pro|max|ultra))?)(_device|_gpu|_backend)?(_\d+)?",
        "runs are on CPUs and NVIDIA GPUs, and a Mac's GPU is not used",
        "device=cpu, or device=auto",
        values=r"(mps|metal|mlx|apple|m[1-5])(:\d+)?",
    ),
    "other accelerators": Topic(
        r"(use_)?(tpu|xla|xpu|hpu|npu|ipu|neuron|trainium|gaudi|ascend|habana|intel_gpu)(_\w+)?",
        "runs are on CPUs and NVIDIA GPUs",
        "device=cpu, cuda or auto; `meshwright plan` knows two TPUs as clusters",
        values=r"(tpu|xla|xpu|hpu|npu|ipu|neuron|trainium|gaudi|ascend|habana|vulkan|directml|dml|privateuseone)(:\d+)?",
    ),
    "AMD GPUs": Topic(
        r"(use_)?(rocm|hip|amd|rccl)(_\w+)?",
        "no run was ever made on an AMD GPU",
        "device=cuda, which is what PyTorch for ROCm calls its GPUs: try it, and `meshwright verify` it",
        values=r"(rocm|hip|amd|mi\d+x?)(:\d+)?",
    ),
    "preference tuning": Topic(
        r"(\w*_)?(rlhf|rlaif|rlvr|[id]?dpo|ppo|i?grpo|dapo|orpo|kto|simpo|rloo|gspo|cpo|bco)(_\w+)?|(\w+_)?rewards?(_\w+)?"
        r"|preferences?(_\w+)?|ref(erence)?_model\w*|reinforcement\w*|rl|rl_\w+|trl\w*|chosen(_\w+)?|rejected(_\w+)?",
        "preferences are learned by DPO alone, without a model of rewards or reinforcement learning",
        "loss={kind: dpo, beta: 0.1} with data.kind=preferences (docs/preferences.md); TRL starts from an export",
    ),
    "distillation": Topic(
        r"(\w+_)?distil\w*|teacher(_\w+)?|student(_\w+)?|kd_\w+",
        "a run has one model, and no teacher",
        "leave it out; a teacher's answers can be data (data.kind=messages)",
    ),
    "remote storage": Topic(
        r"(use_)?(s3|gcs|aws|azure|abfs|hdfs|minio|boto3?|fsspec|storage_options)(_\w+)?|remote_(path|dir|folder|storage|data)\w*"
        r"|(cloud|object)_(path|storage|bucket)\w*",
        "files are read and written on disks of these machines",
        "a folder: copy it (`aws s3 sync`, `gcloud storage rsync`) or mount it; "
        "hub:OWNER/NAME and model={from: OWNER/NAME} read the Hugging Face Hub",
        values=r"(s3a?|gs|gcs|az|abfss?|adl|wasbs?|hdfs|hf|r2|oss|cos|obs|minio|dbfs|https?|ftp|sftp|ssh|file)://?.*",
    ),
    "uploads to the Hub": Topic(
        r"(\w+_)?push_?to_?(the_)?hub(_\w+)?|pushtohub\w*|hub_\w+|upload(_\w+)?|hf_(repo|upload|token|hub)\w*"
        r"|(hf_)?repo_(id|name|type)|publish(_\w+)?",
        "a run sends nothing to the Hub; an export may be uploaded",
        "`meshwright convert export CHECKPOINT --out FOLDER --push OWNER/NAME`, or `hf upload OWNER/NAME FOLDER`",
    ),
    "sweeps": Topic(
        r"(\w+_)?sweeps?(_\w+)?|multi_?run|optuna\w*|ray_tune\w*|hyper_?param\w*|grid_search\w*|random_search\w*|hp_\w*|hpo"
        r"|n_?trials?|num_trials|auto_?tune\w*|lr_(finder?|find)|auto_lr_find",
        "a run is one run: there are no sweeps",
        "a loop of the shell, `for lr in 1e-4 3e-4; do meshwright train RUN optimizer.lr=$lr --out out/$lr; done`",
    ),
    "serving": Topic(
        r"(use_)?(vllm|sglang|tgi|llama_?cpp|ollama|onnx|tensorrt\w*|triton_server)(_\w+)?|serv(e|ing)(_\w+)?",
        "nothing is served",
        "`meshwright convert export`, whose folder vLLM and other servers of Hugging Face's form read",
    ),
}  # fmt: skip
"""The topics, by their names on the page."""

_VALUED = (
    "device",
    "precision",
    "precision.dtype",
    "precision.level",
    "layout.transport",
    "optimizer.name",
    "data.kind",
)
"""Fields of choices that may hold a word of a topic."""
_PATHS = (
    "data.source",
    "data.mixture",
    "data.tokenizer",
    "data.template",
    "data.held_out",
    "data.target",
    "model.from",
)
_STORAGE = TOPICS["remote storage"]


def topic_of_key(key: str) -> Topic | None:
    """Find the topic of an unknown key or option, or of a part: `--push-to-hub`, `lora.rank`."""
    parts = key.lstrip("-").split(".")
    return next((topic for word in parts for topic in TOPICS.values() if re.fullmatch(topic.words, _plain(word))), None)


def topic_of_address(value: str) -> Topic | None:
    """Return the topic of remote storage if the value is an address there, else None."""
    return _STORAGE if _STORAGE.answers_value(value) else None


def answered(problem: Problem, *, unknown: bool) -> Problem:
    """Add the sentence of a topic to a problem. `unknown`: the field is an unknown key."""
    value = shown(problem.value)
    topic = topic_of_key(problem.field) if unknown else None
    if not unknown and problem.field in _VALUED:
        topic = next((topic for topic in TOPICS.values() if topic.answers_value(value)), None)
    elif not unknown and problem.field.startswith(_PATHS):
        topic = topic_of_address(value.removeprefix("hub:")) or topic_of_address(problem.field.partition("mixture.")[2])
    if topic is None:
        return problem
    # The guess of a near word would lead elsewhere.
    rule = re.sub(r" \(did you mean .*\?\)", "", problem.rule)
    return replace(problem, rule=f"{rule}: {topic.sentence} ({PAGE})", valid=topic.remedy, mend=of_problem(problem))


def _plain(word: str) -> str:
    """Write a word in small letters, with underscores for dashes and blanks: `LoRA-rank` -> `lora_rank`."""
    return re.sub(r"[\s\-.:/]+", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z][a-z])", "_", word.strip())).lower().strip("_")
