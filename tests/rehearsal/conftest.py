"""A fake GPU, compiled if there is a compiler."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.rehearsal.fake_cuda import compiler, library
from tests.rehearsal.step import FakeGpu


@pytest.fixture(scope="session")
def fake_gpu() -> Iterator[FakeGpu]:
    """Yield a process with a GPU in torch."""
    if compiler() is None:
        pytest.skip("no C++ compiler here, which the fake GPU is made with: apt-get install g++")
    if torch.version.cuda is not None:
        pytest.skip("torch is built for CUDA here, whose hooks are those that the fake GPU would register")
    with FakeGpu(library()) as gpu:
        yield gpu
