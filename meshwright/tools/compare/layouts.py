"""The layouts that are compared: from files that lie over the run's, or from the planner.

A layouts file is YAML: a piece of a run file, or several under `layouts`:

    layouts:
      - {name: stages, layout: {pipeline: {size: 2}}, batch: {micro: 2}}
      - {name: blocks, layout: {tensor: {kind: tesseract, q: 2}}, memory: {recompute: auto}}

`layout` is said whole: it takes the place of the run's, for half of one means little over another; where it is not said
the run's stands. Other keys lie over the run's one by one. The command line's `key=value` words come last, for every
layout. A whole run file is a layouts file too. What makes losses and times comparable must be the run's own: model,
data, batch.global, optimizer, seed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from meshwright.config import Config, parse_config, parse_run
from meshwright.config.load import read_yaml
from meshwright.errors import ConfigError, Problem
from meshwright.tools.plan.auto import free_tree

OWN = ("layout", "memory", "precision", "threads")
"""The sections that a layout may have of its own; and batch.micro."""

NAME, LIST = "name", "layouts"


@dataclass(frozen=True)
class Entry:
    """One layout to run. `origin`: the file that it is from, or the planner."""

    name: str
    config: Config
    origin: str


def from_files(run: Path, overrides: Sequence[str], files: Iterable[Path]) -> list[Entry]:
    """The layouts of all files, each a checked config.

    Raises ConfigError with every mistake of every file, each under its file's name.
    """
    tree = free_tree(run)
    task = _task(task_of(run, overrides))
    entries: list[Entry] = []
    problems: list[Problem] = []
    for path in files:
        for name, piece in _pieces(path):
            where = str(path) if name == path.stem else f"{path}, {name}"
            try:
                laid_over = [field for field, _ in _flat(piece)] + [*({"layout"} & piece.keys())]
                config = parse_run(over(tree, piece), overrides, laid_over=laid_over)
            except ConfigError as error:
                problems += [_in(where, problem) for problem in error.problems]
                continue
            problems += [_in(where, problem) for problem in _foreign(_task(config), task)]
            entries.append(Entry(name, config, str(path)))
    if problems:
        raise ConfigError(problems)
    return told_apart(entries)


def from_planner(configs: Iterable[Config]) -> list[Entry]:
    """The planner's layouts, the one that it thinks fastest first."""
    return [Entry(f"plan-{place}", config, "the planner") for place, config in enumerate(configs, 1)]


def task_of(run: Path, overrides: Sequence[str]) -> Config:
    """The run without a layout: what all layouts compute. Raises ConfigError as load_config does."""
    tree = {key: value for key, value in free_tree(run).items() if key not in OWN}
    if isinstance(tree.get("batch"), dict):
        tree["batch"] = {key: value for key, value in tree["batch"].items() if key != "micro"}
    kept = [word for word in overrides if word.partition("=")[0].partition(".")[0] not in OWN]
    return parse_config(tree, [word for word in kept if not word.startswith("batch.micro")])


def over(tree: dict[str, Any], piece: dict[str, Any]) -> dict[str, Any]:
    """A run's tree with a layout's piece over it: `layout` replaced whole, other sections key by key."""
    merged = _merged(tree, {key: value for key, value in piece.items() if key != "layout"})
    return merged | ({"layout": deepcopy(piece["layout"])} if "layout" in piece else {})


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
    """Each layout of a file with its name. Raises ConfigError where the file holds none."""
    try:
        tree = read_yaml(path)
    except ConfigError as error:
        valid = "a YAML file with `layout: ...`, or a whole run file"
        raise ConfigError([Problem("--layouts", found.value, found.rule, valid) for found in error.problems]) from error
    pieces = tree.get(LIST, [tree])
    listed = isinstance(pieces, list) and pieces and all(isinstance(piece, dict) for piece in pieces)
    if not listed or (LIST in tree and len(tree) > 1):
        raise ConfigError.of(
            "--layouts", path, "is no list of layouts", "`layouts: [{layout: ...}, ...]`, no other key"
        )
    for number, piece in enumerate(pieces, 1):
        default = path.stem if len(pieces) == 1 else f"{path.stem}-{number}"
        yield str(piece.get(NAME, default)), {key: value for key, value in piece.items() if key != NAME}


def _task(config: Config) -> dict[str, Any]:
    """What must be alike in all layouts, flat: `model.hidden` -> 64."""
    tree = config.model_dump(mode="json", by_alias=True, exclude=set(OWN))
    del tree["batch"]["micro"]
    return dict(_flat(tree))


def _flat(tree: dict[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{key}.")
        else:
            yield before + key, value


def _foreign(own: dict[str, Any], run: dict[str, Any]) -> Iterator[Problem]:
    """What a layout asks for that is not the run's."""
    for field in sorted(own.keys() | run.keys()):
        if own.get(field) != run.get(field):
            rule = "is not the run's, and layouts are compared on one task"
            yield Problem(field, own.get(field), rule, f"{run.get(field)}, or leave it out")


def _in(where: str, problem: Problem) -> Problem:
    return Problem(f"{where}: {problem.field}", problem.value, problem.rule, problem.valid)


def told_apart(entries: Sequence[Entry]) -> list[Entry]:
    """Those of a name that another has too are numbered, past numbers that others have."""
    names = Counter(entry.name for entry in entries)
    taken = {name for name, times in names.items() if times == 1}
    told = []
    for entry in entries:
        name = entry.name
        if names[name] > 1:
            name = next(made for number in count(1) if (made := f"{entry.name}-{number}") not in taken)
            taken.add(name)
        told.append(replace(entry, name=name))
    return told
