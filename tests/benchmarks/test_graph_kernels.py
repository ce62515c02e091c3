"""The kernels that Inductor writes for a GPU, compared with a plan's. The test needs Triton, and no GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import json, sys
from benchmarks.graph_kernels import HOST, WORDS, layer_kernels, planned_bytes
from meshwright.config import load_config
from meshwright.training.decisions import resolve
from meshwright.config.section import with_field
config = resolve(load_config("gpt2", [*WORDS.split(), *sys.argv[2:]]), HOST).config
config = with_field(config, "compile", sys.argv[1])
print(json.dumps([[found.size_bytes for found in layer_kernels(config)], planned_bytes(config)]))
"""


GPT2 = "model.base=gpt2-small batch.micro=32 batch.global=64"
TORCH = tuple(int(number) for number in version("torch").split(".")[:2])
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


@cache
def counted(compiles: str, words: str) -> list[list[int]]:
    """Return bytes of a layer's kernels, forward and backward, and of a plan's. torch is patched in another process."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, compiles, *words.split()], capture_output=True, text=True, check=True, cwd=ROOT
    )
    found: list[list[int]] = json.loads(done.stdout.splitlines()[-1])
    return found


@needs_triton
@pytest.mark.skipif(TORCH < (2, 13), reason="kernels are planned as torch 2.13's Inductor makes them")
@pytest.mark.parametrize(
    "words",
    [
        GPT2,
        pytest.param(
            "model.base=llama-3.2-1b data.sequence=4096 batch.micro=2 batch.global=16", marks=pytest.mark.long
        ),
    ],
)
def test_a_plan_counts_the_bytes_of_a_layers_kernels(words: str) -> None:
    """Bytes agree within a twelfth, forward and backward."""
    found, planned = counted("blocks", words)
    assert planned == pytest.approx(found, rel=1 / 12)


@needs_triton
@pytest.mark.skipif(TORCH < (2, 13), reason="kernels are planned as torch 2.13's Inductor makes them")
def test_our_kernels_save_passes_over_activations() -> None:
    """By Inductor's count a layer of GPT-2 small has 44.4 instead of 56.3 activations."""
    (blocks, _), (kernels, _) = (counted(compiles, GPT2) for compiles in ("blocks", "kernels"))
    activation = 2 * 32 * 1024 * 768
    assert blocks[0] == pytest.approx(kernels[0], rel=1e-3)
    assert 11.5 * activation < blocks[1] - kernels[1] < 12.5 * activation
