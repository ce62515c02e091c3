"""Contenders of the head: equal losses and gradients on a CPU, and a line for each that is missing or fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec

import pytest
import torch

from benchmarks import head
from benchmarks.one_gpu import STAGES

SMALL = (48, 24, 96, torch.float32)


def test_contenders_agree_and_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU's list of contenders: Liger and quack need Triton's or CUTLASS's kernels, and fail here by name."""
    monkeypatch.setattr(head, "SHAPES", {"cpu": {"small": SMALL}})
    plain = head.contenders

    def without_compiler(device: str, classes: int, labels: torch.Tensor) -> object:
        return ((name, make) for name, make in plain("cuda", classes, labels) if "compiled" not in name)

    monkeypatch.setattr(head, "contenders", without_compiler)
    found = head.measured("cpu", "small", 1)
    measured = [name for name, each in found.items() if "seconds" in each]
    known = tuple(map(int, version("torch").split(".")[:2])) >= (2, 13)
    assert {"torch, whole logits", *["torch, linear_cross_entropy"] * known} <= {*measured}
    assert known or "LinearCrossEntropyOptions" in found["torch, linear_cross_entropy"]["error"]
    for name in measured:
        assert found[name]["gradients_off"] < 1e-5
        assert found[name]["loss"] == pytest.approx(found["torch, whole logits"]["loss"], rel=1e-6)
    for name, package in head.PACKAGES.items():
        if find_spec(package.replace("-", "_").replace("quack_kernels", "quack")) is None:
            assert found[name] == {"error": f"{package} is not installed"}


def test_every_shape_is_a_stage_of_one_gpu() -> None:
    assert {f"head of {name}" for name in head.SHAPES["cuda"]} <= {*STAGES}


def test_liger_computes_what_our_head_computes() -> None:
    """Under Triton's interpreter, in float32, with an uncounted token."""
    if find_spec("liger_kernel") is None or find_spec("triton") is None:
        pytest.skip("needs liger-kernel and triton")
    code = """
import json, torch
from benchmarks.head import liger_head
from meshwright.compute.tensor.cross_entropy import Classes, chunked_loss
from meshwright.ranks.comm import RankGroup, SoloComm
torch.manual_seed(0)
h, table = torch.randn(40, 16, requires_grad=True), torch.randn(97, 16, requires_grad=True)
labels = torch.randint(97, (40,))
labels[3] = -100
theirs = liger_head(labels)(h, table)
gradients = torch.autograd.grad(theirs, (h, table))
ours = chunked_loss(h, table, None, labels, Classes(97, SoloComm(RankGroup("", (0,), 0))), 1 / 39)
pairs = zip((theirs, *gradients), (ours, *torch.autograd.grad(ours, (h, table))))
print(json.dumps([float((a - b).detach().norm() / b.detach().norm()) for a, b in pairs]))
"""
    told = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], check=True, capture_output=True, text=True,
        env=os.environ | {"TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert max(json.loads(told.stdout.splitlines()[-1])) < 2e-6
