"""The rank of benchmarks/start.py. The fork server imports this module once for all, like a real run's entry."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from meshwright.training import worker as training
from meshwright.training.loop import Trainer

PARTS = {
    "forward graphs": "_compile.compile_inner",
    "of it tracing": "bytecode_tracing",
    "backward graphs": "backward._backward_impl",
    "of both loading kernels": "PyCodeCache.load_by_key_path",
}
"""Stages of compiling by torch's names. Loading waits for the C++ compiler if kernels are not on disk."""


SEPARATE = "START_SEPARATE_KERNELS"
"""A variable that is set: each C++ kernel is compiled as a file of its own."""


def worker(rank: Any, out: Path, **arguments: Any) -> None:
    """Train, and write the times of the first step's begin and end, the processor seconds before, of the step, and of
    the processes that the step started (the C++ compiler's), and the seconds of torch's compiler by stage."""
    if SEPARATE in os.environ:
        from meshwright.compute.tensor import compiler

        compiler.join_kernels = lambda: None
    turn = Trainer.turn

    def timed(self: Trainer, *words: Any) -> Any:
        begins = {"processor, a rank": time.process_time(), "begins": time.time()}
        result = turn(self, *words)
        marks = begins | {"ends": time.time()}
        processes = resource.getrusage(resource.RUSAGE_CHILDREN)
        marks["processor, the step"] = time.process_time() - begins["processor, a rank"]
        marks["processor, C++"] = processes.ru_utime + processes.ru_stime
        if "torch._dynamo" in sys.modules:
            counted = torch._dynamo.utils.compilation_time_metrics
            marks |= {stage: sum(counted.get(name, [])) for stage, name in PARTS.items()}
        Path(out, f"start-{rank.mesh.rank}.json").write_text(json.dumps(marks))
        return result

    with patch.object(Trainer, "turn", timed):
        training.train_rank(rank, out=out, **arguments)
