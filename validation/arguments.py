"""Rows of Megatron-LM's CI: a line's columns and the note's arguments, read as `plan --from` reads a job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwright.planner.foreign.job import Asked, ForeignJob
from meshwright.planner.foreign.megatron import read_arguments
from meshwright.ranks.foreign import parse_json
from validation.paper import Line

FLAGS = {
    "num-layers": "layers", "hidden-size": "hidden", "num-attention-heads": "heads", "ffn-hidden-size": "ffn",
    "vocab-size": "vocab", "seq-length": "seq", "max-position-embeddings": "seq", "tensor-model-parallel-size": "tp",
    "pipeline-model-parallel-size": "pp", "context-parallel-size": "cp", "expert-model-parallel-size": "ep",
    "micro-batch-size": "micro", "global-batch-size": "batch",
}  # fmt: skip
"""Arguments, and the columns with the arguments' values."""


def arguments_of(line: Line) -> dict[str, Any]:
    """Return Megatron-LM's arguments by flag; a note's words in capitals are the environment's."""
    told: dict[str, Any] = {flag: line[column] for flag, column in FLAGS.items() if line[column]}
    if int(line["vpp"]) > 1 and int(line["pp"]) > 1:
        told["num-virtual-stages-per-pipeline-rank"] = line["vpp"]
    if line["sharding"] == "zero1":
        told["use-distributed-optimizer"] = True
    if line["recompute"] != "none":
        told["recompute-granularity"] = line["recompute"]
    told["fp16" if line["precision"] == "fp16" else "bf16"] = True
    return told | {flag: value for flag, value in parse_json(line["note"]).items() if not flag.isupper()}


def job_of(line: Line) -> ForeignJob:
    """Return the row's job. Raises ConfigError as read_arguments does."""
    return read_arguments(Path(line["model"]), Asked(devices=int(line["gpus"])), arguments_of(line))
