"""The transport that `auto` takes."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from meshwright import build
from meshwright.build import resolve_transport
from meshwright.config import Config, parse_config
from meshwright.launch.mpiexec import find_mpiexec


def config(size: int = 2, sync: str = "allreduce", transport: str = "auto") -> Config:
    return parse_config({"layout": {"data": {"size": size, "sync": sync}, "transport": transport}})


@pytest.mark.skipif(find_spec("mpi4py") is None or find_mpiexec() is None, reason="no MPI here")
def test_auto_takes_mpi_where_it_is_installed() -> None:
    assert resolve_transport(config(), "cpu") == "mpi"


@pytest.mark.parametrize(
    "asked, device", [({"size": 1}, "cpu"), ({"sync": "fsdp"}, "cpu"), ({}, "cuda"), ({"transport": "torch"}, "cpu")]
)
def test_auto_takes_torch_where_mpi_does_not_serve(asked: dict[str, Any], device: str) -> None:
    assert resolve_transport(config(**asked), device) == "torch"


def test_auto_takes_torch_without_mpiexec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "find_mpiexec", lambda: None)
    assert resolve_transport(config(), "cpu") == "torch"
