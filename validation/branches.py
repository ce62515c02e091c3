"""SUPER: the speed-up of the best D&SP layout over pure data parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from meshwright.config import Config
from meshwright.config.load import read_yaml
from meshwright.configs import shipped
from meshwright.planner.plan.predict import Planner
from validation.case import Finding, Row
from validation.paper import Line, Paper

SPEEDUP = "speed-up"


def compare(paper: Paper) -> Finding:
    """Return a row a line."""
    planner = paper.planner()
    return Finding(tuple(_row(paper, line, planner) for line in paper.tables["super"]))


def _row(paper: Paper, line: Line, planner: Planner) -> Row:
    replicas = planner.predict(_config(paper, line, {"data": {"size": int(line["gpus"])}})).seconds
    best = min(planner.predict(config).seconds for config in _subgraphs(paper, line))
    label = f"{line['model']}, {line['experiment']}, {line['heads']} heads"
    return Row(label, SPEEDUP, float(line["speedup"]), replicas / best)


def _subgraphs(paper: Paper, line: Line) -> Iterator[Config]:
    """Yield heads dealt over all GPUs, with common layers on all GPUs or on one."""
    for common, branch in product(("all", "one"), ("attention-core", "attention", "block")):
        tensor = {"kind": "subgraph", "size": int(line["ways"]), "common": common, "branch": branch}
        yield _config(paper, line, {"tensor": tensor})


def _config(paper: Paper, line: Line, layout: dict[str, Any]) -> Config:
    """Return a config with the model's work a head; without a published batch, a GPU has one sequence."""
    model, heads = read_yaml(shipped("models")[line["model"]]), int(line["heads"])
    wider = heads / model["heads"]
    widths = {key: int(model[key] * wider) for key in ("hidden", "feed_forward") if key in model}
    batch = int(line["global_batch"] or line["gpus"])
    return paper.config({"model": model | widths | {"heads": heads}, "batch": {"global": batch}, "layout": layout})
