"""Equal bits on a GPU with threads as ranks: `pytest --device cuda tests/compute/bits`, here the 18 layouts of docs.

Without a GPU the same runs have CPU ranks, and the choice of kernels is checked.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache

import pytest

from benchmarks.bits import EIGHTEEN, SMALL
from meshwright.config import Config, parse_config
from tests.compute.bits.runs import Ended, ended

PRECISIONS = ("float32", "bf16")


def config_of(words: str, precision: str) -> Config:
    bits = {"kind": "layout-free", "tensor": 4, "hidden": 2, "sequence": 4}
    return parse_config({**SMALL, "steps": 2, "bits": bits, "precision": precision}, words.split())


@cache
def on_one_device(precision: str) -> Ended:
    return ended(config_of("", precision))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "words", [pytest.param(words, marks=pytest.mark.long if n % 8 != 7 else ()) for n, words in enumerate(EIGHTEEN[1:])]
)
def test_18_layouts_have_one_hash(words: str, precision: str) -> None:
    assert ended(config_of(words, precision)).differing(on_one_device(precision)) == []


def test_a_gpus_kernels_are_those_that_repeat_their_bits() -> None:
    """The choice of kernels is final for a process: the test starts another process."""
    program = (
        "import os, torch\n"
        "from meshwright.compute import precision\n"
        "from meshwright.config import parse_config\n"
        "asked = []\n"
        "precision.use_flash_attention = asked.append\n"
        "for kind in ('usual', 'layout-free'):\n"
        "    precision.choose_kernels(parse_config({'bits': {'kind': kind}}), torch.device('cuda', 0))\n"
        "    print(len(asked), torch.are_deterministic_algorithms_enabled(), torch.backends.cuda.cudnn_sdp_enabled(),\n"
        "          torch.backends.cuda.mem_efficient_sdp_enabled(), torch.backends.cuda.flash_sdp_enabled(),\n"
        "          os.environ.get('CUBLAS_WORKSPACE_CONFIG'))\n"
    )
    clean = {name: text for name, text in os.environ.items() if name != "CUBLAS_WORKSPACE_CONFIG"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=clean)
    assert done.stdout.splitlines() == ["1 False True True True None", "1 True False False True :4096:8"]
