"""A fake GPU, compiled where there is a compiler."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rehearsal.fake_cuda import compiler, library


@pytest.fixture(scope="session")
def fake_gpu() -> Path:
    """The library that gives torch a GPU."""
    if compiler() is None:
        pytest.skip("no C++ compiler here, which the fake GPU is made with: apt-get install g++")
    return library()
