"""A paper as data: papers/NAME.yaml names the cluster and the run of the measurement; csv files hold the tables.

| key           | meaning                                                                               |
|---------------|---------------------------------------------------------------------------------------|
| title, source | the paper                                                                             |
| cluster       | a name of meshwright/configs/clusters                                                 |
| fitted        | changes of that cluster's file, if the paper's programs have another speed than ours  |
| software      | a preset of meshwright/configs/software.yaml, if other than for our own runs          |
| run           | the run that all rows share                                                           |
| tables        | csv files next to the paper's file; lines that begin with # name the figures' sources |
| assumed       | assumptions on facts that the paper does not say, a sentence each                     |
| limit         | the largest mean error, as in docs/validation.md, which a test checks                 |
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.config import Config, parse_config
from meshwright.config.load import read_yaml
from meshwright.planner.plan.cluster import Cluster, load_cluster
from meshwright.planner.plan.predict import Planner
from meshwright.planner.plan.software import OWN_SOFTWARE, Software, load_program

PAPERS = Path(__file__).resolve().parent / "papers"

Line = Mapping[str, str]
"""A line of a table: column -> text."""


@dataclass(frozen=True)
class Paper:
    """See the module. `tables`: by the file's name without suffix; `has_fit`: whether there is a fitted cluster."""

    name: str
    title: str
    source: str
    cluster: Cluster
    software: Software
    run: dict[str, Any]
    tables: dict[str, tuple[Line, ...]]
    assumed: tuple[str, ...]
    limit: float
    has_fit: bool

    def planner(self, **software: Any) -> Planner:
        """Return a planner for the paper's programs and cluster. `software`: fields other than in the paper's file."""
        return Planner(self.cluster, self.software.model_copy(update=software))

    def config(self, changes: Mapping[str, Any]) -> Config:
        """Return the paper's run with these sections merged in. Raises ConfigError if the result is no legal run."""
        return parse_config(merged(self.run, changes))


def load_paper(name: str, *, fitted: bool = True) -> Paper:
    """Load a paper by file name. `fitted`: whether the file's changes of the cluster for the paper's programs apply."""
    tree = read_yaml(PAPERS / f"{name}.yaml")
    tables = {Path(file).stem: read_table(PAPERS / file) for file in tree.pop("tables")}
    cluster, changes, assumed = load_cluster(tree.pop("cluster")), tree.pop("fitted", {}), tuple(tree.pop("assumed"))
    software = load_program(tree.pop("software")).software if "software" in tree else OWN_SOFTWARE
    if fitted:
        cluster = Cluster.model_validate(merged(cluster.model_dump(by_alias=True), changes))
    return Paper(
        name=name, cluster=cluster, software=software, tables=tables, assumed=assumed, has_fit=bool(changes), **tree
    )


def read_table(path: Path) -> tuple[Line, ...]:
    """Return the lines of a csv file, without comments."""
    with path.open(newline="", encoding="utf-8") as file:
        return tuple(csv.DictReader(line for line in file if not line.startswith("#")))


def merged(tree: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tree with changes: sections are merged, other values replaced."""
    result = deepcopy(dict(tree))
    for key, value in changes.items():
        below = result.get(key)
        result[key] = merged(below, value) if isinstance(below, dict) and isinstance(value, Mapping) else value
    return result
