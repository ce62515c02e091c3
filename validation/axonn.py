"""AxoNN: phases of a step and memory of 12 B parameters on 48 V100, and the best layouts of AxoNN's search space."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshwright.config import Config
from meshwright.config.section import divisors, with_field
from meshwright.planner.plan.predict import Planner, Prediction
from meshwright.ranks.errors import ConfigError
from meshwright.strategies.memory.section import best_group
from meshwright.training.phases import DATA_PARALLEL, PASSES
from validation.case import Claim, Finding, Row
from validation.measure import total_memory_bytes
from validation.paper import Line, Paper

PIPELINE_SECONDS, DATA_SECONDS, MEMORY = "pipeline phase, s", "data-parallel phase, s", "memory of 48 GPUs, GB"

MICRO = (1, 2, 4, 8, 16)
TOP = 3
LAYERS = 48
"""The layers of both sizes with a published best layout."""


def compare(paper: Paper) -> Finding:
    """Return the phases' table, and a claim for each size."""
    planner = paper.planner()
    rows = [row for line in paper.tables["axonn_phases"] for row in _rows(paper, line, planner)]
    return Finding(tuple(rows), tuple(_best(paper, line, planner) for line in paper.tables["axonn_best"]))


def _rows(paper: Paper, line: Line, planner: Planner) -> Iterator[Row]:
    stages, replicas, offload = int(line["g_inter"]), int(line["g_data"]), line["offload"] == "yes"
    prediction = planner.predict(paper.config(changes_of(stages, replicas, offload)))
    label = f"G_inter {stages} x G_data {replicas}" + (", offload" if offload else "")
    if line["pipeline_phase_s"]:
        yield Row(
            label, PIPELINE_SECONDS, float(line["pipeline_phase_s"]), prediction.phases[PASSES], fitted=paper.has_fit
        )
    if line["data_parallel_phase_s"]:
        yield Row(
            label,
            DATA_SECONDS,
            float(line["data_parallel_phase_s"]),
            prediction.phases[DATA_PARALLEL],
            fitted=paper.has_fit,
        )
    if line["total_memory_gb"]:
        yield Row(label, MEMORY, float(line["total_memory_gb"]), total_memory_bytes(prediction) / 1e9)


def changes_of(stages: int, replicas: int, offload: bool) -> dict[str, Any]:
    """Return AxoNN's layout: stages of equal numbers of layers, neighbours in a node."""
    pipeline = {"size": stages, "partition": [LAYERS // stages] * stages}
    memory = {"offload": {"to": "host" if offload else "none"}}
    return {"layout": {"data": {"size": replicas}, "pipeline": pipeline}, "memory": memory}


def ranking(paper: Paper, line: Line, planner: Planner) -> list[Prediction]:
    """Return every layout of AxoNN's search space that fits the devices' memory, the fastest first."""
    predictions = [_fitting(config, planner) for config in _space(paper, line)]
    return sorted((one for one in predictions if one is not None), key=lambda one: one.seconds)


def _fitting(config: Config, planner: Planner) -> Prediction | None:
    """Return the prediction with the largest groups of recomputed layers that fit, or None if no group fits.

    Groups are tried from the paper's formula down (section IV; AxoNN's code takes the size as an argument, ckp_coeff).
    """
    layers = LAYERS // config.layout.pipeline.size
    largest = best_group(layers, LAYERS)
    for every in (size for size in reversed(divisors(layers)) if size <= largest):
        prediction = planner.predict(with_field(config, "memory.recompute", every))
        if prediction.fits:
            return prediction
    return None


def _space(paper: Paper, line: Line) -> Iterator[Config]:
    """Yield G_inter x G_data x microbatch, with the offloaded optimizer, without layouts that cannot be cut evenly."""
    gpus = int(line["gpus"])
    for stages in (stages for stages in range(1, LAYERS + 1) if LAYERS % stages == 0 and gpus % stages == 0):
        for micro in MICRO:
            changes = changes_of(stages, gpus // stages, offload=True)
            sizes = {"model": {"base": line["model"]}, "batch": {"global": 16384, "micro": micro}}
            try:
                yield paper.config(changes | sizes)
            except ConfigError:  # the batch does not divide
                continue


def _best(paper: Paper, line: Line, planner: Planner) -> Claim:
    ranked = ranking(paper, line, planner)[:TOP]
    wanted = (int(line["g_inter"]), int(line["micro"]))
    found = [(one.config.layout.pipeline.size, one.config.micro) for one in ranked]
    text = f"{line['model']}: G_inter {wanted[0]}, microbatch {wanted[1]} among the first {TOP}"
    names = [f"({stages}, {micro}) {one.seconds:.1f} s" for (stages, micro), one in zip(found, ranked, strict=True)]
    return Claim(text, wanted in found, ", ".join(names))
