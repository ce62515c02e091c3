"""Readers of other programs' files, chosen by the file's content.

| file                                        | program             |
|---------------------------------------------|---------------------|
| config_registry.py:FUNCTION, NAME.toml      | torchtitan          |
| recipe.py:FUNCTION                          | Megatron-Bridge     |
| a script or line with --module, --config    | torchtitan          |
| a script or line with --num-layers ...      | Megatron-LM         |
| a script or line with --deepspeed FILE.json | DeepSpeed           |
| a script or line with --config_file FILE    | Accelerate          |
| a script or line with --fsdp, or neither    | the Trainer         |
| a line `megatron sft`, `megatron pt`        | ms-swift            |
| YAML with tensor_model_parallel_size ...    | Megatron-LM, Primus |
| YAML with MODEL_ARGS                        | Megatron-LM's CI    |
| YAML with fsdp_config, distributed_type ... | Accelerate          |
| YAML with base_model or sequence_len        | axolotl             |
| YAML with model_name_or_path                | LLaMA-Factory, TRL  |
| YAML with step_scheduler, distributed       | NeMo AutoModel      |
| YAML with parallelism, tokens               | nanotron            |
| NAME.json                                   | DeepSpeed           |

No file is run. Only the file, and the JSON or YAML that the file names, are read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path
from typing import Any

from meshwright.config.load import plain_values, read_yaml
from meshwright.planner.foreign import automodel, huggingface, megatron, nanotron, titan, trainer, zero
from meshwright.planner.foreign.account import Account, fields_of
from meshwright.planner.foreign.job import Asked, ForeignJob
from meshwright.planner.foreign.shell import ARGUMENTS, Script, read_script
from meshwright.ranks.errors import ConfigError
from meshwright.ranks.foreign import parse_json

FORMS = (
    "a job of torchtitan, Megatron-LM or -Bridge, Primus, ms-swift, Accelerate, DeepSpeed, the Trainer, TRL, "
    "LLaMA-Factory, axolotl, AutoModel or nanotron"
)
MAX_BYTES = 2**20
ACCELERATE = {"fsdp_config", "deepspeed_config", "distributed_type", "parallelism_config"}


def read_foreign(source: Path, asked: Asked) -> ForeignJob:
    """Read the job of a file; options have priority over the file's values.

    Args:
        source: A file, or FILE.py:FUNCTION.
        asked: The other options of `plan --from`.

    Raises:
        ConfigError: The file is no job of a known program, has too few fields, or has a layout unknown here.
    """
    path, function = source, None
    if not source.is_file() and ":" in source.name:
        path, function = source.with_name(source.name.rpartition(":")[0]), source.name.rpartition(":")[2]
    if not path.is_file():
        raise ConfigError.of("--from", path, "is no file", FORMS)
    if path.stat().st_size > MAX_BYTES:
        raise ConfigError.of("--from", path, "is larger than 1 MiB", FORMS)
    try:
        return read_file(path, function, asked)
    except (SyntaxError, UnicodeDecodeError, ValueError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError.of("--from", path, f"cannot be read: {error}", FORMS) from error


def read_file(path: Path, function: str | None, asked: Asked) -> ForeignJob:
    """Read the job of a file by the ending of the file's name."""
    ending = path.suffix.lower()
    if ending == ".toml":
        return titan.read_toml(path, asked)
    if ending in (".yaml", ".yml"):
        return read_mapping(path, asked, read_yaml(path))
    if ending == ".json":
        tree = parse_json(path.read_text(encoding="utf-8"))
        if not isinstance(tree, dict):
            raise ConfigError.of("--from", path, "holds no fields", FORMS)
        if not zero.FIELDS & tree.keys() or trainer.is_trainer(tree) or ACCELERATE & tree.keys():
            return read_mapping(path, asked, tree)
        return huggingface.read_deepspeed(path, asked, tree, Account({}))
    text = path.read_text(encoding="utf-8")
    if ending == ".py":
        if "torchtitan" in text:
            return titan.read_registry(path, function, asked)
        if not re.search(r"\bmegatron\.bridge\b", text):
            refuse_unread(path, dict.fromkeys(text.splitlines(), ""))
        if re.search(r"\bmegatron\.", text):
            return megatron.read_recipe(path, function, asked)
        raise ConfigError.of("--from", path, "is Python of neither torchtitan nor Megatron-Bridge", FORMS)
    return read_words(path, asked, text)


def read_mapping(path: Path, asked: Asked, tree: dict[str, Any]) -> ForeignJob:
    """Read the job of a YAML file."""
    refuse_unread(path, tree)
    if isinstance(flags := tree.get("MODEL_ARGS"), dict):  # jobs of Megatron-LM's CI
        return megatron.read_arguments(path, asked, {name.lstrip("-"): value for name, value in flags.items()})
    if tree.keys() & {"base_model", "sequence_len"}:
        return huggingface.read_axolotl(path, asked, tree)
    if "parallelism" in tree and "tokens" in tree:
        return nanotron.read_nanotron(path, asked, tree)
    if "megatron_lm_config" in tree:
        return megatron.read_arguments(path, asked, tree)
    if ACCELERATE & set(tree):
        return huggingface.read_accelerate(path, asked, tree)
    if "distributed" in tree or "step_scheduler" in tree:
        return automodel.read_automodel(path, asked, tree)
    if trainer.is_trainer(tree):
        trl = path.suffix != ".json" and not tree.keys() & {*trainer.OF_FACTORY}
        return huggingface.read_trainer(path, asked, tree, trl=trl)
    if megatron.is_megatron(tree):
        return megatron.read_arguments(path, asked, tree)
    raise ConfigError.of("--from", path, "has no field that a known program's file has", FORMS)


def read_words(path: Path, asked: Asked, text: str) -> ForeignJob:
    """Read the job of a launch script, or of a line of flags."""
    try:
        script = read_script(text, path.parent)
    except RecursionError:
        rule = "nests more brackets, branches or calls than can be read"
        raise ConfigError.of("--from", path, rule, "the command's line in a file of its own") from None
    flags = script.flags
    sections = ("training.", "parallelism.", "job.config")
    if any(name.startswith(sections) for name in flags) or {"module", "config"} <= set(flags):
        job = titan.read_flags(path, asked, flags)
    elif megatron.is_megatron(flags):
        job = megatron.read_arguments(path, asked, flags, files=script.files, swift=script.starts("megatron"))
    elif (fields := named_arguments(path, script)) and not trainer.is_trainer(fields):
        job = read_mapping(path, asked, fields)
    else:
        job = read_trainers(path, asked, fields or script.flags, script.words or text.split())
    for condition in script.undecided:
        job.account.assume(
            f"if {condition}", "both branches", "the condition hangs on values that the script does not set"
        )
    for word in script.unmatched:
        job.account.assume(f"case {word}", "no branch", "the word hangs on values that the script does not set")
    return job


def read_trainers(path: Path, asked: Asked, flags: Mapping[str, Any], words: list[str]) -> ForeignJob:
    """Read the job of the Trainer's arguments in a launch script, with those of a file that the script names.

    Raises:
        ConfigError: The arguments are no job's; for a known program that is not read, with the program's name.
    """
    trl = trainer.starts_trl(words)
    if named := flags.get("config_file") or (trl and flags.get("accelerate_config")):
        tree = (trainer.TRL_LAUNCHES.get(named) if trl else None) or read_yaml(zero.file_beside(path, named))
        given = {name: value for name, value in flags.items() if name != "accelerate_config"}
        return huggingface.read_accelerate(path, asked, tree, given, trl=trl)
    if trainer.is_trainer(flags) or any(flags.get(name) for name in huggingface.NAMED_JSON):
        return huggingface.read_trainer(path, asked, flags, "--", trl=trl)
    refuse_unread(path, dict.fromkeys(words, ""))
    rule = (
        "has no --num-layers and --hidden-size (Megatron-LM), --module and --config (torchtitan), --deepspeed or "
        "--per_device_train_batch_size (the Trainer)"
    )
    raise ConfigError.of("--from", path, rule, FORMS)


LAUNCH = {"launcher", "num_processes", "role", "local_ranks_filter", "num_cpu_threads_per_process"}
"""Flags of launchers that are no arguments of the Trainer."""


def named_arguments(path: Path, script: Script) -> dict[str, Any]:
    """Return the fields of a file that a line names, `train.py args.yaml` or `--config args.yaml`; nothing without one.

    The line's flags and words `field=value` have priority over the file's fields.

    Raises:
        ConfigError: The file is not here.
    """
    flags, words = {name.replace("-", "_"): value for name, value in script.flags.items()}, script.words
    behind = [
        word for before, word in pairwise(words) if not before.startswith("--") and not before.endswith(ARGUMENTS)
    ]
    told = (flags.pop("config", ""), script.flags.get("config-file", ""), *behind)
    named = next(
        (each for each in told if each.endswith(ARGUMENTS) and not each.startswith("-") and "=" not in each), None
    )
    if named is None:
        return {}
    text = script.files.get(named.rpartition("/")[2])
    if text is None:
        file = zero.file_beside(path, named)
        tree = parse_json(file.read_text(encoding="utf-8")) if named.endswith(".json") else read_yaml(file)
    else:
        tree = plain_values(text)
    if not trainer.is_trainer(tree | flags):  # the launcher's flags are no fields of the program
        launch = {name for name in flags for each in trainer.HARMLESS.split() if fnmatchcase(name, each)}
        flags = {name: value for name, value in flags.items() if name in tree or name not in launch | LAUNCH}
    at = next(index for index, word in enumerate(words) if word.endswith(named))
    given = [word.partition("=")[::2] for word in words[at:] if re.match(r"[A-Za-z_][\w.]*=", word)]
    for name, value in (*flags.items(), *given):
        holder, (*above, last) = tree, name.split(".")
        for key in above:
            inner = holder.get(key)
            holder[key] = holder = inner if isinstance(inner, dict) else {}
        holder[last] = value if value else True
    return dict(tree)


UNREAD = (
    ("torchtune", r"_component_=torchtune\."), ("Composer, llm-foundry or OLMo", r"\bdevice_train_microbatch_size="),
    ("Levanter", r"^trainer\.(mp|model_axis_size|tracker)\b"), ("verl", r"^actor_rollout_ref\.|verl\.trainer"),
    ("NeMo's YAML of 2023 and 2024", r"^(trainer|model)\.(megatron_amp_O2|num_nodes|precision)="),
    ("OLMo-core", r"olmo_core"),
    ("OpenRLHF", r"openrlhf\."), ("NeMo 2.0", r"nemo_run|nemo\.collections"), ("LitGPT", r"\blitgpt\b"),
    ("fairseq", r"fairseq"), ("ColossalAI", r"colossalai"), ("MaxText", r"maxtext|^ici_fsdp_parallelism="),
    ("GPT-NeoX", r"^pipe[-_]parallel[-_]size="),
)  # fmt: skip
"""Programs whose jobs are not read here, each with a pattern of a line `field=value` or of a word."""


def refuse_unread(path: Path, tree: Mapping[str, Any]) -> None:
    """Raise ConfigError for a job of a known program that is not read, by the program's name."""
    lines = [f"{name}={value}" for name, value in fields_of(tree)]
    for program, pattern in UNREAD:
        if any(re.search(pattern, line) for line in lines):
            raise ConfigError.of("--from", path, f"is a job of {program}, which is not read", FORMS)
