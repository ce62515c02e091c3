"""The layouts to compare: from files with fields that override the run file's, or from the planner.

A layouts file is YAML: a piece of a run file, or several under `layouts`:

    layouts:
      - {name: stages, layout: {pipeline: {size: 2}}, batch: {micro: 2}}
      - {name: blocks, layout: {tensor: {kind: tesseract, q: 2}}, memory: {recompute: auto}}

A `layout` replaces the run's as a whole, because a merge of two would mix kinds; without `layout` the run's is used.
Other keys override the run's one by one. The command line's `key=value` words are applied last, to every layout. A
whole run file is a layouts file too. Fields that make losses and times comparable must equal the run's: model, data,
batch.global, optimizer, seed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch

from meshwright.config import Config, parse_config, parse_run
from meshwright.config.load import load_undecided, read_run, read_yaml
from meshwright.config.section import leaves_of
from meshwright.data.files import ShowProgress, silent
from meshwright.planner.plan.cluster import Cluster
from meshwright.planner.plan.search import search
from meshwright.planner.plan.space import fixed_fields
from meshwright.ranks.errors import ConfigError, Problem
from meshwright.ranks.machine import usable_cores

OWN = ("layout", "memory", "precision", "threads")
"""The sections that a layout may set, besides batch.micro."""

NAME, LIST = "name", "layouts"


@dataclass(frozen=True)
class LayoutRequest:
    """The command's arguments that choose layouts."""

    run: Path
    words: Sequence[str]
    """`key=value` words, applied to every layout."""
    files: Sequence[Path]
    """Layouts files."""
    top: int | None = None
    """Number of layouts to take from the planner."""
    devices: int | None = None
    """Number of devices to plan for; None: the devices of this machine."""


@dataclass(frozen=True)
class Contender:
    """One layout to run. `origin`: its file, or the planner."""

    name: str
    config: Config
    origin: str


def split_words(words: Sequence[str], files: Sequence[Path]) -> tuple[list[str], list[Path]]:
    """Return the overrides and all layouts files.

    Of `--layouts a.yaml b.yaml` the option takes only a.yaml; b.yaml is parsed as a word. So with --layouts a word
    without `=` is a file; without --layouts such a word is refused later, as an override.
    """
    more = [Path(word) for word in words if "=" not in word] if files else []
    return [word for word in words if "=" in word or not files], [*files, *more]


def contenders_of(question: LayoutRequest, cluster: Cluster | None, report: ShowProgress = silent) -> list[Contender]:
    """Return the layouts of the files, then the planner's for the cluster, the fastest by prediction first.

    Raises ConfigError for a mistake in a file, if the search does, and if nothing is asked for.
    """
    run, words, top, devices = question.run, question.words, question.top, question.devices
    if devices is not None and top is None:
        raise ConfigError.of("--devices", devices, "says what to plan for, and nothing is planned", "with --top K")
    if not question.files and top is None:
        raise ConfigError.of("--layouts", "none", "leaves nothing to compare", "--layouts FILE ..., or --top K")
    contenders = from_files(run, words, question.files) if question.files else []
    if top is None:
        return contenders
    if cluster is None:
        raise ConfigError.of("--top", top, "needs a cluster to plan for", "--cluster NAME or FILE, or --layouts")
    # A comparison runs on this machine, so by default the plan is for the devices of this machine.
    devices = devices or torch.cuda.device_count() or usable_cores()
    plans = search(load_undecided(run, words), cluster, devices, top, fixed=fixed_fields(words), report=report)
    for index, prediction in enumerate(plans.predictions, 1):
        contenders.append(Contender(f"plan-{index}", prediction.config, "the planner"))
    return _numbered(contenders)


def from_configs(layouts: Mapping[str, Config]) -> list[Contender]:
    """Return a program's own configs as contenders. Raises ConfigError if two configs differ in fields of the task."""
    contenders = [Contender(name, config, name) for name, config in layouts.items()]
    if not contenders:
        raise ConfigError.of("layouts", "none", "leaves nothing to compare", "a config by name, or more")
    task = _task(contenders[0].config)
    problems = [
        replace(problem, field=f"{contender.name}: {problem.field}")
        for contender in contenders
        for problem in _foreign(_task(contender.config), task)
    ]
    if problems:
        raise ConfigError(problems)
    return contenders


def from_files(run: Path, overrides: Sequence[str], files: Iterable[Path]) -> list[Contender]:
    """Return the layouts of all files as checked configs.

    Raises ConfigError with every mistake of every file, each under the file's name.
    """
    tree = read_run(run).tree
    # The task is read without the run's own layout, which may be wrong or `auto` even if the files' layouts are fine.
    bare = {key: value for key, value in deepcopy(tree).items() if key not in OWN}
    if isinstance(bare.get("batch"), dict):
        bare["batch"] = {key: value for key, value in bare["batch"].items() if key != "micro"}
    task_words = [word for word in overrides if word.partition("=")[0].partition(".")[0] not in OWN]
    task = _task(parse_config(bare, [word for word in task_words if not word.startswith("batch.micro")]))
    contenders: list[Contender] = []
    problems: list[Problem] = []
    for path in files:
        for name, piece in _pieces(path):
            where = str(path) if name == path.stem else f"{path}, {name}"
            try:
                laid_over = [*leaves_of(piece), *({"layout"} & piece.keys())]
                merged = _merged(tree, {key: value for key, value in piece.items() if key != "layout"})
                # `layout` is replaced as a whole: a merge of two would mix kinds.
                merged |= {"layout": deepcopy(piece["layout"])} if "layout" in piece else {}
                config = parse_run(merged, overrides, laid_over=laid_over)
            except ConfigError as error:
                mistakes = list(error.problems)
            else:
                mistakes = list(_foreign(_task(config), task))
                contenders.append(Contender(name, config, str(path)))
            problems += [replace(problem, field=f"{where}: {problem.field}") for problem in mistakes]
    if problems:
        raise ConfigError(problems)
    return _numbered(contenders)


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = deepcopy(below)
    for key, value in above.items():
        under = merged.get(key)
        if key == "model" and isinstance(under, str):
            under = {"base": under}
        both = isinstance(under, dict) and isinstance(value, dict)
        merged[key] = _merged(under, value) if both else deepcopy(value)  # type: ignore[arg-type]
    return merged


def _pieces(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each layout of a file, with a name. Raises ConfigError if the file has none."""
    try:
        tree = read_yaml(path)
    except ConfigError as error:
        valid = "a YAML file with `layout: ...`, or a whole run file"
        raise ConfigError([replace(problem, field="--layouts", valid=valid) for problem in error.problems]) from error
    pieces = tree.get(LIST, [tree])
    listed = isinstance(pieces, list) and pieces and all(isinstance(piece, dict) for piece in pieces)
    if not listed or (LIST in tree and len(tree) > 1):
        raise ConfigError.of(
            "--layouts", path, "is no list of layouts", "`layouts: [{layout: ...}, ...]`, no other key"
        )
    for index, piece in enumerate(pieces, 1):
        default = path.stem if len(pieces) == 1 else f"{path.stem}-{index}"
        yield str(piece.get(NAME, default)), {key: value for key, value in piece.items() if key != NAME}


def _task(config: Config) -> dict[str, Any]:
    """Return the fields that must be equal in all layouts, as a flat dict: `model.hidden` -> 64."""
    tree = config.model_dump(mode="json", by_alias=True, exclude=set(OWN))
    del tree["batch"]["micro"]
    return leaves_of(tree)


def _foreign(task: dict[str, Any], run: dict[str, Any]) -> Iterator[Problem]:
    """Yield a problem for each field of the task that differs between a layout and the run."""
    for field in sorted(task.keys() | run.keys()):
        if task.get(field) != run.get(field):
            rule = "is not the run's, and layouts are compared on one task"
            yield Problem(field, task.get(field), rule, f"{run.get(field)}, or leave it out")


def _numbered(contenders: Sequence[Contender]) -> list[Contender]:
    """Number entries that share a name, skipping numbers in use."""
    names = Counter(contender.name for contender in contenders)
    # Unique names stay, so a generated name must not equal one of these.
    taken = {name for name, times in names.items() if times == 1}
    numbered = []
    for contender in contenders:
        name = contender.name
        if names[name] > 1:
            name = next(new for suffix in count(1) if (new := f"{contender.name}-{suffix}") not in taken)
            taken.add(name)
        numbered.append(replace(contender, name=name))
    return numbered
