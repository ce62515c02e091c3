"""Jobs of other programs as runs: sizes, batch, layout, memory, and the source of each value."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.config.load import model_names
from meshwright.planner.foreign.account import Account
from meshwright.planner.plan.software import JobForm
from meshwright.ranks.errors import ConfigError, MeshwrightError

Tree = dict[str, Any]


@dataclass(frozen=True)
class Asked:
    """Options of `plan --from` other than the file.

    Attributes:
        model: A model's name, in place of the file's.
        sequence: Tokens of a sequence, in place of the file's.
        batch: Samples a step, in place of the file's.
        devices: The number of devices of the plan.
    """

    model: str | None = None
    sequence: int | None = None
    batch: int | None = None
    devices: int = 1


@dataclass(frozen=True)
class Degrees:
    """Sizes of a job's axes as the job's program names them.

    Attributes:
        tensor: Ranks that cut a layer's matrices.
        by_sequence: True if these ranks cut activations between layers by sequence.
        stages: Pipeline stages.
        chunks: Virtual stages of a rank.
        schedule: Our name of the pipeline's schedule.
        context: Ranks that cut a sequence.
        context_kind: `ring` or `ulysses`.
        experts: Number of ranks with different experts.
        expert_tensor: Ranks that cut one expert; None: all ranks that cut a layer, and only replicas differ in experts.
        sync: Our value of `layout.data.sync`.
        shard: Ranks that cut states together; None: all replicas.
        replicas: The number of replicas in the file; None: all other devices.
    """

    tensor: int = 1
    by_sequence: bool = False
    stages: int = 1
    chunks: int = 1
    schedule: str = "1f1b"
    context: int = 1
    context_kind: str = "ring"
    experts: int = 1
    expert_tensor: int | None = None
    sync: str = "allreduce"
    shard: int | None = None
    replicas: int | None = None

    def data(self, devices: int) -> int:
        """Return the number of replicas on a number of devices.

        Raises:
            ConfigError: The other axes do not divide the devices, or the file's degrees are of another number.
        """
        others = self.tensor * self.stages * self.context
        if devices % others:
            rule = f"does not hold the file's tensor {self.tensor} x stages {self.stages} x context {self.context}"
            raise ConfigError.of("--devices", devices, rule, f"a multiple of {others}")
        replicas = devices // others
        if self.replicas is not None and self.replicas != replicas:
            rule = f"is not the file's number: its degrees multiply to {self.replicas * others}"
            raise ConfigError.of("--devices", devices, rule, f"{self.replicas * others}")
        return replicas

    def dealt(self, devices: int) -> tuple[int, bool]:
        """Return (size of our expert axis, True if the context axis deals experts too).

        Megatron-LM numbers an expert's ranks first, then the ranks of other experts, out of all ranks of a stage: these
        are the tensor ranks of a layer, then context ranks, then replicas (core/parallel_state.py).

        Raises:
            ConfigError: Some tensor ranks of a layer have equal experts.
        """
        axis, rest = divmod(self.experts * (self.expert_tensor or self.tensor), self.tensor)
        if rest:
            rule = f"times {self.experts} ranks of experts leaves equal experts on some of {self.tensor} tensor ranks"
            raise ConfigError.of("--expert-tensor-parallel-size", self.expert_tensor, rule, f"{self.tensor}")
        replicas = self.data(devices)
        over_context = replicas % axis > 0 and axis % self.context == 0 and replicas % (axis // self.context) == 0
        return (axis // self.context, True) if over_context and self.expert_tensor is not None else (axis, False)

    def expert_facts(self, devices: int) -> tuple[str, ...]:
        """Return the software's facts on the ranks that have different experts."""
        cut = self.expert_tensor not in (None, self.tensor)
        over_context = self.dealt(devices)[1]
        return (*([f"expert_tensor={self.expert_tensor}"] if cut else ()), *(["expert_context=true"] * over_context))

    def layout(self, devices: int) -> Tree:
        """Make the section `layout` of a run."""
        replicas = self.data(devices)
        layout: Tree = {"data": {"size": replicas}}
        # A sync has no effect, and is refused, where no two ranks sum one gradient.
        if replicas * self.context * self.stages > 1 or (self.tensor > 1 and self.by_sequence):
            layout["data"]["sync"] = self.sync
        if self.shard not in (None, replicas):
            layout["data"]["shard"] = self.shard
        if (axis := self.dealt(devices)[0]) > 1:
            layout["data"]["expert"] = axis
        if self.tensor > 1:
            layout["tensor"] = {"kind": "megatron", "size": self.tensor, "sequence_parallel": self.by_sequence}
        if self.stages > 1:
            layout["pipeline"] = {"size": self.stages, "schedule": self.schedule, "chunks": self.chunks}
        if self.context > 1:
            layout["context"] = {"size": self.context, "kind": self.context_kind}
        return layout


@dataclass(frozen=True)
class ForeignJob:
    """Job of a known program.

    Attributes:
        program: A preset of configs/software.
        form: The form of the file, among the forms of the program; None: the preset's.
        run: The tree of a run file, with the job's own layout.
        facts: Facts of the software that the file changes, `name=value`.
        account: The file's fields: read, assumed, left out.
    """

    program: str
    run: Tree
    account: Account
    facts: tuple[str, ...] = ()
    form: JobForm | None = None


def model_of(asked: Asked, account: Account, told: str | Tree | None, path: Path) -> Any:
    """Make the section `model`: the option's name, the file's sizes, or our model of the file's name.

    Args:
        asked: The options.
        account: The file's account; a similar model that is not equal is listed there as assumed.
        told: A name (of the Hub, or the program's own), sizes in the form of a Hugging Face config.json, or None.
        path: The file, for the error.

    Raises:
        ConfigError: Neither option nor file gives a model that is known here.
    """
    if asked.model is not None:
        account.assume("model", asked.model, "--model")
        return asked.model
    if isinstance(told, dict):
        # Imported here: a file that names a model needs no reader of sizes.
        from meshwright.training.convert.folder import Settings
        from meshwright.training.convert.transfer import family_of

        try:
            settings = Settings(path, told)
            return family_of(settings).read(settings, frozenset()).model_dump(mode="json")
        except MeshwrightError as error:
            raise ConfigError.of("--model", "nothing", f"is given, and {error}", "--model NAME") from error
    if told is None:
        raise ConfigError.of("--model", "nothing", f"is given, and {path} does not say it", "--model NAME")
    name = known_name(told)
    if name is None:
        rule = f"is given, and {path} names {told}, whose sizes are not known here"
        raise ConfigError.of("--model", "nothing", rule, f"--model NAME: {', '.join(model_names())}")
    if name in ALIKE.values() and name not in told.lower().replace("_", "-"):
        account.assume("model", name, f"of {told}'s sizes")
    return name


def read_model(name: str) -> Any:
    """Read the section `model` of a shipped model."""
    # Imported here: a file with sizes does not need the whole config.
    from meshwright.config import parse_config

    return parse_config({"model": name}).model


def layers_of(model: str | Mapping[str, Any]) -> int:
    """Return the number of layers of a section `model`, or of a shipped model by name."""
    return int(read_model(model).num_blocks if isinstance(model, str) else model["layers"])


SCHEDULES = (("gpipe", "gpipe"), ("afab", "gpipe"), ("1f1b", "1f1b"), ("interleaved1f1b", "1f1b"))
"""Other programs' schedules in small letters, each with ours; an interleaved schedule has several stages a rank."""


def schedule_of(told: str, field: str) -> str:
    """Translate another program's schedule to ours. Raises ConfigError for a schedule that has no counterpart."""
    found = next((ours for theirs, ours in SCHEDULES if theirs == told.lower()), None)
    if found is None:
        raise ConfigError.of(field, told, "has no schedule of ours", ", ".join(theirs for theirs, _ in SCHEDULES))
    return found


SAME_SIZES = (
    ("llama-3-8b", "llama-3.1-8b"), ("llama-3-70b", "llama-3.1-70b"), ("llama-3-405b", "llama-3.1-405b"),
    ("llama-3.3-70b", "llama-3.1-70b"), ("deepseek-r1-distill-llama-8b", "llama-3.1-8b"),
    ("deepseek-r1-distill-llama-70b", "llama-3.1-70b"), ("gpt2", "gpt2-small"), ("deepseek-v3-671b", "deepseek-v3"),
    ("deepseek-v3.1", "deepseek-v3"), ("deepseek-r1", "deepseek-v3"),
    *((f"deepseek-r1-distill-qwen-{size}", f"qwen2.5-{size}") for size in ("7b", "14b", "32b")),
    *((f"qwen2.5-coder-{size}", f"qwen2.5-{size}") for size in ("0.5b", "1.5b", "3b", "7b", "14b", "32b")),
    *((f"qwen2.5-math-{size}", f"qwen2.5-{size}") for size in ("1.5b", "7b", "72b")),
    *((f"qwen2-{size}", f"qwen2.5-{size}") for size in ("0.5b", "1.5b", "7b", "72b")),
    *((f"{name}-{size}", f"llama-2-{size}") for name in ("llama", "vicuna") for size in ("7b", "13b")),
    ("olmo-2-1124-7b", "olmo-2-7b"), ("olmo-2-1124-13b", "olmo-2-13b"), ("olmo-2-0325-32b", "olmo-2-32b"),
    ("olmo-3-1025-7b", "olmo-3-7b"), ("olmo-3-1125-32b", "olmo-3-32b"), ("mistral-7b-v0.1", "mistral-7b-0.1"),
    ("mistral-7b-instruct-v0.1", "mistral-7b-0.1"), ("mistral-7b-v0.2", "mistral-7b-0.2"),
    ("mistral-7b-instruct-v0.2", "mistral-7b-0.2"), ("mistral-nemo", "mistral-nemo-12b"), ("qwq-32b", "qwen2.5-32b"),
    ("qwen3-coder-30b-a3b", "qwen3-30b-a3b"), ("vit-base-patch16-224", "vit-base"),
)  # fmt: skip
"""Models' names elsewhere, each with our model of the same sizes."""
ALIKE = dict(SAME_SIZES)
RELEASE = r"-(instruct|base|chat|hf|it|pt|think|thinking|cased|uncased|fp8|bf16|1m|in21k|checkpoints|v\d+\.\d+|\d{4})$"
"""End of a name that tells a training, a number format or a date, and changes no size."""


def known_name(told: str) -> str | None:
    """Return our name of a model named elsewhere, `llama-3.1-8b` for `NousResearch/Meta-Llama-3.1-8B-Instruct`; None if
    the sizes are not known here. A folder of the Hub's cache, `models--OWNER--NAME/snapshots/HASH`, has the name; so
    has a class of Megatron-Bridge, `Llama31ModelProvider8B`, without punctuation."""
    cached = re.search(r"models--[^/]+--([^/]+)/snapshots/", told)
    last = cached[1] if cached else told.rstrip("/").rpartition("/")[2]
    name = last.lower().replace("___", ".").replace("_", "-").removesuffix(".yaml")
    name, names = name.removeprefix("meta-"), model_names()
    apart = re.sub(r"^([a-z]+)(?=\d)", r"\1-", name)  # llama3-8b, gemma2-9b
    if (plain := re.sub(r"(?:moe)?(?:model)?provider|-|(?<=\d)p(?=\d)", "", name)) != name.replace("-", ""):
        return next((known_name(each) for each in (*names, *ALIKE) if re.sub(r"[-.]", "", each) == plain), None)
    while name not in ALIKE and name not in names:
        shorter = re.sub(RELEASE, "", name)
        if shorter == name:
            return None if apart == told else known_name(apart)
        name = shorter
    return name if name in names else ALIKE[name]


def harmless_sizes(prefix: str) -> str:
    """Return patterns of a Hugging Face config.json's fields, below a prefix, that change neither seconds nor bytes."""
    return " ".join(f"{prefix}{each}" for each in HARMLESS_SIZES.split())


def stored_in_bf16(states: str = "bf16") -> Tree:
    """Return the run's fields for bf16 weights and gradients without float32 masters, and for the states' dtype."""
    return {
        "optimizer": {"name": "adamw", "masters": "bf16", "states": states},
        "precision": {"level": "O2", "dtype": "bf16", "accumulate": "stored"},
    }


FUSED = ("flash_attention_2", "flash_attention_3", "flash_attention_4", "sdpa", "flash", "true")
"""Words for an attention that keeps no scores, as a plan assumes."""
HARMLESS_SIZES = """
*_token_id initializer_range use_cache pretraining_tp *torch_dtype dtype architectures* transformers_version
_name_or_path is_*_config n_ctx *rope*interleave* *interleaved_rotary z_loss* _use_qkv_packed auto_map* model_type
_target_
"""


def run_of(
    asked: Asked, account: Account, degrees: Degrees, *, model: Any, sequence: Any, micro: int, global_: int | None,
    recompute: Any, precision: str, path: Path, accumulation: int = 1, offload: str = "none",
    tf32: bool = False,
) -> Tree:  # fmt: skip
    """Make the tree of a run file.

    Args:
        asked: The options, with priority over the file.
        account: The file's account.
        degrees: The job's axes.
        model: The section `model`.
        sequence: Tokens of a sequence; None: not in the file.
        micro: Samples of a microbatch on a replica.
        global_: Samples of a step; None: replicas x `micro` x `accumulation`.
        recompute: Our value of `memory.recompute`.
        precision: bf16, fp16 or float32.
        path: The file, for errors.
        accumulation: Microbatches of a step, if the file has no global batch.
        offload: Our value of `memory.offload`.
        tf32: Whether a flag outside of `account` lets float32 products run in TF32; torch's default is no.

    Raises:
        ConfigError: The file lacks the sequence's tokens, or the devices do not fit.
    """
    if asked.sequence is not None:
        account.assume("sequence", asked.sequence, "--sequence")
    sequence = asked.sequence or sequence
    if not sequence:
        raise ConfigError.of("--sequence", "nothing", f"is given, and {path} does not say it", "--sequence N")
    if isinstance(model, str):
        sizes = read_model(model).model_dump(mode="json")
        model = sizes if "rope" in sizes and int(sequence) > sizes["positions"] else model
    if isinstance(model, dict) and "rope" in model and int(sequence) > model["positions"]:
        account.assume("model.positions", int(sequence), "the sequence's tokens, since rotary positions have no table")
        model["positions"] = int(sequence)
    layout = degrees.layout(asked.devices)
    replicas = layout["data"]["size"]
    if asked.batch is not None:
        account.assume("batch.global", asked.batch, "--batch")
    elif global_ is None:
        global_ = replicas * micro * accumulation
        account.assume("batch.global", global_, f"{replicas} replicas x {micro} samples x {accumulation} microbatches")
    step = asked.batch or global_
    assert step is not None
    memory: Tree = {"recompute": recompute}
    memory["offload"] = offload
    tf32 = account.flag("tf32") or tf32  # no effect on half precision
    return {
        "model": model,
        "data": {"sequence": int(sequence), "tokenizer": "tokenizer.json"},
        "batch": {"global": step, "micro": micro},
        "layout": layout,
        "memory": memory,
        "precision": {"level": "O0", "dtype": precision, "tf32": tf32} if precision == "float32" else precision,
    }
