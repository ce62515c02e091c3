"""The kernels that Inductor writes for a GPU beside a plan's. It needs torch's build for CUDA, no GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import json, sys
from benchmarks.graph_kernels import HOST, WORDS, layer_kernels, planned_bytes
from meshwright.config import load_config
from meshwright.training.decisions import resolve
config = resolve(load_config("gpt2", [*WORDS.split(), *sys.argv[1:]]), HOST).config
print(json.dumps([[found.size_bytes for found in layer_kernels(config)], planned_bytes(config)]))
"""


@pytest.mark.skipif(torch.version.cuda is None or find_spec("triton") is None, reason="torch has no Triton here")
@pytest.mark.parametrize(
    "words",
    [
        "model.base=gpt2-small batch.micro=32 batch.global=64",
        pytest.param(
            "model.base=llama-3.2-1b data.sequence=4096 batch.micro=2 batch.global=16", marks=pytest.mark.long
        ),
    ],
)
def test_a_plan_counts_the_bytes_of_a_layers_kernels(words: str) -> None:
    """Within a twelfth, forward and backward. In a process of its own: torch's modules are patched."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words.split()], capture_output=True, text=True, check=True, cwd=ROOT
    )
    found, planned = json.loads(done.stdout.splitlines()[-1])
    assert planned == pytest.approx(found, rel=1 / 12)
