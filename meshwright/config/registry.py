"""The registry: every strategy by name, ours and the strategies of other packages. No torch.

| group        | an entry is                                                   |
|--------------|---------------------------------------------------------------|
| models       | a subclass of models/section.py's Network                     |
| tensor       | a subclass of tensor/section.py's TensorSection               |
| data         | a subclass of data/section.py's DataSection                   |
| schedules    | a ScheduleRule (pipeline/schedule.py)                         |
| contexts     | a ContextKind of context/section.py                           |
| syncs        | a Sync of data_parallel/section.py                            |
| activations  | an ActivationPolicy of memory/section.py                      |
| optimizers   | an Update of optim/section.py                                 |
| sinks        | a Sink of training/sinks.py                                   |
| metrics      | a Metric of training/metric.py, in every run that knows of it |
| convert      | a subclass of convert/family.py's Family, by `model.family`   |
| eval         | a Task of tools/evaluate/tasks.py                             |
| submit       | a subclass of tools/submit/job.py's Engine                    |

No run names an entry of the last three. Commands load these entries on demand, and the entries may import torch.

An entry is written `module:attribute`. Our entries are in `OURS`; another package has entry points of the group
`meshwright.GROUP` in its metadata; a script or a notebook calls `register`. The module of an entry that a run names
imports no torch. It names code that needs torch as text, `module:attribute`, and `load_entry` loads that code.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache, reduce
from importlib import metadata
from pathlib import Path
from typing import Any, cast

from meshwright.ranks.environment import registered, remember_registered
from meshwright.ranks.errors import ConfigError, PluginError

OURS: Mapping[str, Mapping[str, str]] = {
    "models": {
        "gpt2": "meshwright.families.gpt.section:Gpt2",
        "llama": "meshwright.families.llama.section:Llama",
        "gemma": "meshwright.families.llama.gemma:Gemma",
        "phi": "meshwright.families.llama.phi:Phi",
        "gpt-oss": "meshwright.families.llama.gpt_oss:GptOss",
        "deepseek": "meshwright.families.deepseek.section:DeepSeek",
        "qwen3-next": "meshwright.families.qwen_next.section:QwenNext",
        "qwen3.5": "meshwright.families.qwen_next.section:Qwen35",
        "bert": "meshwright.families.bert.section:Bert",
        "bert-pairs": "meshwright.families.bert.section:BertPairs",
        "bert-spans": "meshwright.families.bert.section:BertSpans",
        "bert-choice": "meshwright.families.bert.section:BertChoice",
        "transformer": "meshwright.families.seq2seq.section:Attentional",
        "t5": "meshwright.families.seq2seq.section:T5",
        "vit": "meshwright.families.vision.section:Vit",
        "resnext": "meshwright.families.vision.section:ResNeXt",
    },
    "tensor": {
        "none": "meshwright.compute.tensor.section:Whole",
        "megatron": "meshwright.compute.tensor.section:Megatron",
        "tesseract": "meshwright.compute.tensor.section:Tesseract",
        "subgraph": "meshwright.compute.subgraph.section:Subgraph",
    },
    "data": {
        "text": "meshwright.data.text_section:TextData",
        "masked": "meshwright.families.bert.data_section:MaskedData",
        "pairs": "meshwright.families.seq2seq.data_section:PairData",
        "spans": "meshwright.families.seq2seq.data_section:SpanData",
        "images": "meshwright.families.vision.data_section:ImageData",
        "sentence-pairs": "meshwright.families.bert.data_section:SentencePairData",
        "squad": "meshwright.families.bert.data_section:SquadData",
        "race": "meshwright.families.bert.data_section:RaceData",
        "messages": "meshwright.data.messages_section:MessagesData",
        "preferences": "meshwright.data.preferences_section:PreferenceData",
    },
    "schedules": {
        "gpipe": "meshwright.strategies.pipeline.schedule:GPIPE",
        "1f1b": "meshwright.strategies.pipeline.schedule:ONE_F_ONE_B",
        "axonn": "meshwright.strategies.pipeline.schedule:AXONN",
        "message-driven": "meshwright.strategies.pipeline.schedule:MESSAGE_DRIVEN",
    },
    "contexts": {
        "ulysses": "meshwright.compute.context.section:ULYSSES",
        "ring": "meshwright.compute.context.section:RING_ATTENTION",
    },
    "syncs": {
        "server-loss": "meshwright.strategies.data_parallel.section:SERVER_LOSS",
        "server-gradient": "meshwright.strategies.data_parallel.section:SERVER_GRADIENT",
        "rooted": "meshwright.strategies.data_parallel.section:ROOTED",
        "allreduce": "meshwright.strategies.data_parallel.section:ALLREDUCE",
        "ring": "meshwright.strategies.data_parallel.section:RING",
        "zero1": "meshwright.strategies.data_parallel.section:ZERO1",
        "zero2": "meshwright.strategies.data_parallel.section:ZERO2",
        "zero3": "meshwright.strategies.data_parallel.section:ZERO3",
    },
    "activations": {
        "none": "meshwright.strategies.memory.section:NONE",
        "selective": "meshwright.strategies.memory.section:SELECTIVE",
        "auto": "meshwright.strategies.memory.section:AUTO",
        "ops": "meshwright.strategies.memory.section:OPS",
        "offload": "meshwright.strategies.memory.section:OFFLOAD",
    },
    "sinks": {
        "tensorboard": "meshwright.training.sinks:TENSORBOARD",
        "wandb": "meshwright.training.sinks:WANDB",
        "mlflow": "meshwright.training.sinks:MLFLOW",
        "trackio": "meshwright.training.sinks:TRACKIO",
        "prometheus": "meshwright.training.sinks:PROMETHEUS",
    },
    "optimizers": {
        "adamw": "meshwright.strategies.optim.section:ADAMW",
        "sgd": "meshwright.strategies.optim.section:SGD",
        "momentum": "meshwright.strategies.optim.section:MOMENTUM",
        "muon": "meshwright.strategies.optim.section:MUON",
    },
    "metrics": {},  # ours are in the table of training/step_report.py
    "convert": {
        "gpt2": "meshwright.families.gpt.convert:Gpt2Family",
        "llama": "meshwright.families.llama.convert:LlamaFamily",
        "gemma": "meshwright.families.llama.convert_gemma:GemmaFamily",
        "phi": "meshwright.families.llama.convert_phi:PhiFamily",
        "gpt-oss": "meshwright.families.llama.convert_gpt_oss:GptOssFamily",
        "deepseek": "meshwright.families.deepseek.convert:DeepSeekFamily",
        "qwen3-next": "meshwright.families.qwen_next.convert:QwenNextFamily",
        "qwen3.5": "meshwright.families.qwen_next.convert:Qwen35Family",
        "bert": "meshwright.families.bert.convert:BertFamily",
        "t5": "meshwright.families.seq2seq.convert:T5Family",
        "vit": "meshwright.families.vision.convert:VitFamily",
        "bert-pairs": "meshwright.families.bert.convert_tuned:BertPairsFamily",
        "bert-spans": "meshwright.families.bert.convert_tuned:BertSpansFamily",
        "bert-choice": "meshwright.families.bert.convert_tuned:BertChoiceFamily",
    },
    "eval": {
        "perplexity": "meshwright.tools.evaluate.perplexity:PERPLEXITY",
        "wikitext": "meshwright.tools.evaluate.wikitext:WIKITEXT",
        "bleu": "meshwright.families.seq2seq.sequence:BLEU",
        "lambada": "meshwright.tools.evaluate.lambada:LAMBADA",
        "masked-lm": "meshwright.families.bert.evaluate_masked:MASKED",
        "images": "meshwright.families.vision.evaluate:IMAGES",
        "pairs": "meshwright.families.bert.evaluate_choices:PAIRS",
        "squad": "meshwright.families.bert.evaluate_squad:SQUAD",
        "race": "meshwright.families.bert.evaluate_choices:RACE",
        "lm-eval": "meshwright.tools.evaluate.published:LM_EVAL",
    },
    "submit": {
        "slurm": "meshwright.tools.submit.slurm:Slurm",
        "kubernetes": "meshwright.tools.submit.kubernetes:Kubernetes",
        "ray": "meshwright.tools.submit.ray_script:Ray",
        "skypilot": "meshwright.tools.submit.skypilot:SkyPilot",
    },
}

BASES: Mapping[str, str] = {
    "models": "meshwright.compute.models.section:Network",
    "tensor": "meshwright.compute.tensor.section:TensorSection",
    "data": "meshwright.data.section:DataSection",
    "schedules": "meshwright.strategies.pipeline.schedule:ScheduleRule",
    "contexts": "meshwright.compute.context.section:ContextKind",
    "syncs": "meshwright.strategies.data_parallel.section:Sync",
    "activations": "meshwright.strategies.memory.section:ActivationPolicy",
    "optimizers": "meshwright.strategies.optim.section:Update",
    "sinks": "meshwright.training.sinks:Sink",
    "metrics": "meshwright.training.metric:Metric",
    "convert": "meshwright.training.convert.family:Family",
    "eval": "meshwright.tools.evaluate.tasks:Task",
    "submit": "meshwright.tools.submit.job:Engine",
}
"""The class that an entry of a group is an instance or a subclass of."""

NAMED_BY: Mapping[str, str] = {
    "models": "model.family",
    "tensor": "layout.tensor.kind",
    "data": "data.kind",
    "schedules": "layout.pipeline.schedule",
    "contexts": "layout.context.kind",
    "syncs": "layout.data.sync",
    "activations": "memory.recompute",
    "optimizers": "optimizer.name",
    "sinks": "metrics.sinks",
}
"""The field by which a run names an entry of a group. A run has every metric; only commands use the other groups."""


def entries(group: str) -> dict[str, Any]:
    """Return the entries of a group by name, ours first.

    In groups that a run names, unusable entries are left out, because `check_plugins` reports these. In any other group
    an unusable entry raises PluginError.
    """
    known, failures = _group(group)
    if failures and group not in NAMED_BY:
        raise PluginError("; ".join(failures))
    return known


def default_family() -> str:
    """Return the `model.family` of a run without one: the first family in `OURS`."""
    return next(iter(OURS["models"]))


def where_from(group: str, name: str) -> str:
    """Return the `module:attribute` of a strategy; empty for an unknown one."""
    brought = [(point.name, point.value) for point in _points().select(group=f"meshwright.{group}")]
    brought += [(known, value) for of, known, value, _ in registered() if of == group]
    return OURS[group].get(name) or next((value for known, value in brought if known == name), "")


def brought(config: Any) -> list[str]:
    """Return the strategies of other packages that affect a run's sums, as `field=name`."""
    fields = {group: NAMED_BY[group] for group in ("models", "tensor", "contexts", "syncs")}
    named = {group: reduce(getattr, field.split("."), config) for group, field in fields.items()}
    return [f"{fields[group]}={name}" for group, name in named.items() if name not in OURS[group]]


def register(group: str, name: str, entry: Any) -> None:
    """Register a strategy under a name, for this process and the processes that it starts, including ranks.

    The call must precede the reading of the first config, because the config's choices are fixed then. Repeating the
    same call is allowed.

    Args:
        group: a group of the table at the top of this module.
        name: the name that a run writes.
        entry: a class, or `module:attribute`. Other processes import the module, so a notebook must write a file.

    Raises:
        ConfigError: if the group or the module does not exist, the name is taken, or a config has been read.
    """
    if group not in OURS:
        raise ConfigError.of("group", group, "is no group of strategies", ", ".join(OURS))
    value, folder, loaded = _importable(entry)
    known = registered()
    if (group, name, value, folder) in known:
        return
    if name in OURS[group] or any(known_entry[:2] == (group, name) for known_entry in known):
        raise ConfigError.of("name", name, f"is the name of another {group} entry", "another name")
    base = load_entry(BASES[group])
    if not _suits(loaded, base):
        raise ConfigError.of("entry", value, f"is no {base.__name__}", f"one, as docs/extending.md has it for {group}")
    # The sections' unions and rules are made when the first config is read, from the entries known at that time.
    if _group.cache_info().currsize:
        rule = "comes after the first config was read, whose words are put together once"
        raise ConfigError.of("register", name, rule, "before it, in a new process or a kernel that is started again")
    remember_registered([*known, (group, name, value, folder)])


def _importable(entry: Any) -> tuple[str, str, Any]:
    """Return an entry as `module:attribute`, the folder of the module for sys.path, and the loaded entry.

    Raises ConfigError if another process could not import the entry.
    """
    valid = "module:attribute, as in lion:LION; in a notebook %%writefile lion.py makes the module"
    if not isinstance(entry, str | type):
        raise ConfigError.of("entry", entry, "is no class, and does not know where it stands", valid)
    value = entry if isinstance(entry, str) else f"{entry.__module__}:{entry.__qualname__}"
    module = value.partition(":")[0]
    # Ranks are started from a clean process, so the __main__ of this process is unknown to ranks.
    if module == "__main__":
        raise ConfigError.of(
            "entry", value, "stands in the script or notebook itself, which ranks do not import", valid
        )
    try:
        loaded = load_entry(value)
        file = Path(str(sys.modules[module].__file__)).resolve()
    except Exception as error:  # whatever an import of somebody else's code may raise
        raise ConfigError.of("entry", value, f"cannot be loaded: {type(error).__name__}: {error}", valid) from error
    return value, str(file.parents[module.count(".") + (file.stem == "__init__")]), loaded


def _suits(entry: Any, base: type) -> bool:
    return isinstance(entry, base) or (isinstance(entry, type) and issubclass(entry, base))


def check_plugins() -> None:
    """Raise PluginError if a strategy of another package is unusable, with package, entry point and cause."""
    if failures := [failure for group in NAMED_BY for failure in _group(group)[1]]:
        raise PluginError("; ".join(failures))


@cache
def _group(group: str) -> tuple[dict[str, Any], list[str]]:
    """Return the entries of a group by name, and a line for each unusable entry of another package."""
    failures: list[str] = []
    base, known = load_entry(BASES[group]), {name: load_entry(value) for name, value in OURS[group].items()}
    points = [
        (f"mw.register({group}, {name}, {value})", folder, metadata.EntryPoint(name, value, f"meshwright.{group}"))
        for of, name, value, folder in registered()
        if of == group
    ]
    for point in _points().select(group=f"meshwright.{group}"):
        package = point.dist.name if point.dist is not None else "a package"
        where = f"{package}: the entry point {point.name} of {point.group}, {point.value},"
        points.append((where, "", point))
    for where, folder, point in points:
        if point.name in known:
            failures.append(f"{where} has the name of another {group} entry")
            continue
        if folder and folder not in sys.path:
            sys.path.append(folder)  # the folder of the registering script, missing in the sys.path of ranks
        try:
            entry = point.load()
        except Exception as error:  # whatever an import of somebody else's code may raise
            failures.append(f"{where} cannot be loaded: {type(error).__name__}: {error}")
            continue
        if _suits(entry, base):
            known[point.name] = entry
        else:
            failures.append(f"{where} is no {base.__name__}")
    return known, failures


@cache
def _points() -> metadata.EntryPoints:
    """Return the entry points of all packages. The metadata is read once for all groups (5 ms)."""
    # Before Python 3.12 the result has another type with the same `select`.
    return cast(metadata.EntryPoints, metadata.entry_points())


def is_own() -> bool:
    """Return True if every entry is ours: no package brings one, and no script has registered any."""
    return not registered() and not any(_points().select(group=f"meshwright.{group}") for group in OURS)


def load_entry(value: str) -> Any:
    """Import the object that `module:attribute` names."""
    # EntryPoint parses `module:attribute`, so that our entries are read like the entry points of other packages.
    return metadata.EntryPoint("", value, "").load()
