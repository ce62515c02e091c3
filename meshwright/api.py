"""Runs from a program: the commands as functions, on configs instead of files (docs/api.md).

Every function raises ConfigError for a mistake before any process starts, LaunchError where a rank dies, Interrupted
where somebody stops it; all are MeshwrightErrors. Nothing is printed but by `train`.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.config import Config, parse_config, parse_run
from meshwright.config.load import read_run, run_tree
from meshwright.training import decisions

if TYPE_CHECKING:
    from meshwright.planner.plan.search import SearchResult
    from meshwright.tools.compare.result import Comparison
    from meshwright.tools.verify.job import Verdict
    from meshwright.training.follow import Each
    from meshwright.training.parts import Parts


def load(run: str | Path | Mapping[str, Any], overrides: Iterable[str] = ()) -> Config:
    """A checked config of a run file, of a shipped run by its name, or of a dict of fields; `overrides`: words on top.

    Raises ConfigError with all mistakes at once. `layout: auto` asks the planner, as the command does.
    """
    if isinstance(run, Mapping):
        file, parse = run_tree(dict(run), overrides), parse_config
    else:
        file, parse = read_run(Path(run), overrides), parse_run
    if not file.auto:
        return parse(file.tree, file.words)
    # Imported when asked for: the planner, and torch, are seconds that most calls do not need.
    from meshwright.planner.plan.question import planned_config

    return planned_config(file, file.words)


def resolve(config: Config) -> Config:
    """The config as this machine would run it: every `auto` is a value. `train` and the others do so by themselves."""
    return decisions.resolve(config, decisions.this_machine()).config


def train(config: Config, out: str | Path, *, resume: bool = False, each: Each | None = None) -> Path:
    """Run the config into the folder `out`, on local ranks; the folder. `resume`: go on from its newest checkpoint.

    `each`: called here, in a thread, with the numbers of every step as `history` gives them; a true answer ends the run
    a step or two later, with a checkpoint. What it raises ends the run as well, and is raised here.
    """
    from meshwright.training.job import train as run_training

    run_training(config, Path(out), resume=resume, each=each)
    return Path(out)


def history(out: str | Path) -> list[dict[str, Any]]:
    """The numbers of every step of the run in a folder, which may still go on: a dict a step, as metrics.jsonl has
    them. Raises DataError where there is none, or its file is damaged."""
    from meshwright.training.follow import METRICS, read_history

    return read_history(Path(out) / METRICS)


def verify(config: Config, *, steps: int = 5, as_configured: bool = False) -> Verdict:
    """Hold the layout against plain torch on one device, in float64 unless `as_configured`.

    The verdict `holds` or not, has all comparisons in `rows`, and raises what differs by `check()`.
    """
    from meshwright.tools.verify.job import verify as run_verification

    return run_verification(config, steps=steps, as_configured=as_configured)


def plan(
    config: Config, cluster: str, devices: int | None = None, *, top: int = 5, fixed: Collection[str] = ()
) -> SearchResult:
    """The fastest layouts of a run that fit on a cluster, by its name or file: `predictions`, the fastest first.

    `devices`: by default as many as the config's layout has ranks. `fixed`: fields that keep the config's values.
    """
    from meshwright.planner.plan.cluster import load_cluster
    from meshwright.planner.plan.search import search

    return search(config, load_cluster(cluster), devices or config.layout.world_size, top, fixed=fixed)


def compare(
    layouts: Mapping[str, Config], out: str | Path, *, steps: int = 6, rounds: int = 1, cluster: str | None = None
) -> Comparison:
    """Run configs of one task here in turns, and write a page on them to the new folder `out`.

    `cluster`: where steps are predicted for as well; by default cluster.yaml, if there is one here. Raises ConfigError
    where the configs differ in more than their layouts.
    """
    from meshwright.tools.compare.job import Order, cluster_of
    from meshwright.tools.compare.job import compare_layouts as run_comparison
    from meshwright.tools.compare.layouts import from_configs

    return run_comparison(from_configs(layouts), Order(Path(out).name, Path(out), steps, rounds), cluster_of(cluster))


def save(parts: Parts, folder: str | Path, step: int, *, samples: int = 0) -> Path:
    """Write a checkpoint folder/step-N of what all ranks hold. Collective over the world.

    `samples`: how many the run has seen, for who restores it. Raises CheckpointError where it cannot be written.
    """
    from meshwright.training.checkpoint import CheckpointWriter, pieces_of
    from meshwright.training.checkpoint.manifest import Origin
    from meshwright.training.checkpoint.restore import progress_of

    origin = Origin(parts.config.model_dump(mode="json", by_alias=True))
    writer = CheckpointWriter(Path(folder), parts.mesh, sys.maxsize, origin, {})
    writer.save(progress_of(parts, step, samples), pieces_of(parts))
    writer.wait()
    return Path(folder) / f"step-{step}"
