"""Megatron-LM: flop/s a GPU of GPT on DGX-A100 (SC 2021); an iteration and weak scaling of GPT-2 on DGX-2H (2019)."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from meshwright.config import Config
from meshwright.planner.plan.predict import Planner
from meshwright.ranks.errors import ConfigError
from validation.case import Finding, Row
from validation.measure import paper_tflops
from validation.paper import Line, Paper

TFLOPS, SECONDS, SHARE = "Tflop/s a GPU", "s an iteration", "share of one GPU's flop/s"
MICRO = (1, 2, 4, 8, 16)


def compare_2021(paper: Paper) -> Finding:
    """Return two rows a line: the median and the fastest of the fitting microbatches.

    The microbatch is not published, so the median counts; the fastest, which Meshwright would take, is shown as well.
    """
    planner = paper.planner()
    return Finding(tuple(row for line in paper.tables["megatron_sc21"] for row in _rows_2021(paper, line, planner)))


def _rows_2021(paper: Paper, line: Line, planner: Planner) -> Iterator[Row]:
    fitting = [one for one in (planner.predict(config) for config in _by_micro(paper, line)) if one.fits]
    assert fitting, f"{line['params_b']} B does not fit with any microbatch"
    best = min(fitting, key=lambda one: one.seconds)
    label, published = f"{line['params_b']} B, {line['gpus']} GPUs", float(line["tflops_per_gpu"])
    sizes = ", ".join(str(one.config.micro) for one in fitting)
    yield Row(f"{label}, microbatch {sizes}", TFLOPS, published, statistics.median(map(paper_tflops, fitting)))
    yield Row(f"{label}, the fastest: {best.config.micro}", TFLOPS, published, paper_tflops(best), counts=False)


def _by_micro(paper: Paper, line: Line) -> Iterator[Config]:
    tensor, stages, gpus = int(line["tensor"]), int(line["pipe"]), int(line["gpus"])
    model = {"layers": int(line["layers"]), "hidden": int(line["hidden"]), "heads": int(line["heads"])}
    layout = {
        "data": {"size": gpus // tensor // stages},
        "pipeline": _interleaved(model["layers"], stages),
        "tensor": _tensor(tensor),
    }
    for micro in MICRO:
        batch = {"global": int(line["batch"]), "micro": micro}
        try:
            yield paper.config({"model": model, "batch": batch, "layout": layout})
        except ConfigError:  # the microbatch does not divide a replica's batch
            continue


def _interleaved(layers: int, stages: int) -> dict[str, Any]:
    """Return the fewest chunks a stage, of equal numbers of layers, that the paper's interleaved schedule allows."""
    chunks = min(chunks for chunks in range(2, layers) if layers % (stages * chunks) == 0) if stages > 1 else 1
    positions = stages * chunks
    return {"size": stages, "chunks": chunks, "partition": [layers // positions] * positions}


def _tensor(size: int) -> dict[str, Any]:
    return {"kind": "megatron", "size": size} if size > 1 else {"kind": "none"}


def compare_2019(paper: Paper) -> Finding:
    """Compare one GPU, with two releases of Megatron's code, and weak scaling."""
    lines = paper.tables["megatron_2019"]
    predictions = []
    for line in lines:
        planner = paper.planner(attention=line["attention"], fuses_dropout=line["fuses_dropout"] == "yes")
        predictions.append(planner.predict(_config_2019(paper, line)))
    rows = []
    for line, prediction in zip(lines, predictions, strict=True):
        label = f"{line['model']}, {line['gpus']} GPUs, code of {line['code']}"
        if line["share"]:
            share = paper_tflops(prediction) / paper_tflops(predictions[0])
            rows.append(Row(label, SHARE, float(line["share"]), share))
        else:
            rows.append(Row(label, SECONDS, float(line["seconds"]), prediction.seconds))
    return Finding(tuple(rows))


def _config_2019(paper: Paper, line: Line) -> Config:
    layout = {"data": {"size": int(line["data"])}, "tensor": _tensor(int(line["tensor"]))}
    micro = int(line["batch"]) // int(line["data"])
    batch = {"global": int(line["batch"]), "micro": micro}
    return paper.config({"model": {"base": line["model"]}, "batch": batch, "layout": layout})
