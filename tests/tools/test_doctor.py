"""The doctor names each thing found, and for each missing thing the one command that adds this thing."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from contextlib import redirect_stdout
from importlib import metadata
from io import StringIO
from pathlib import Path

import pytest
import torch

from meshwright.tools import doctor
from meshwright.tools.doctor import Diagnosis, Finding, as_dict, examine, render, required_libraries, size_text


def by_name(report: Diagnosis) -> dict[str, Finding]:
    return {finding.name: finding for finding in report.findings}


def printed(report: Diagnosis) -> str:
    with redirect_stdout(StringIO()) as output:
        render(report, width=200)
    return output.getvalue()


def test_this_machine(tmp_path: Path) -> None:
    report = examine(tmp_path / "not" / "there" / "yet")
    found = by_name(report)
    assert found["torch"].value == torch.__version__
    assert found["numpy"].value == metadata.version("numpy")
    assert found["gloo"].value is True
    assert found["gpus"].value == [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    assert isinstance(found["working_bytes"].value, int)
    assert found["working_bytes"].value > 0
    assert str(tmp_path / "not" / "there" / "yet") in printed(report)


def test_json_form_is_plain() -> None:
    report = examine()
    read = json.loads(json.dumps(as_dict(report)))
    assert read == as_dict(report)
    assert set(read) == {"python", "machine", "backends", "libraries", "disk", "missing"}
    assert read["machine"]["memory_bytes"] > 2**20


def test_every_extra_of_the_package_is_looked_for() -> None:
    """The extras that no run uses, and the extra with all others, are not looked for."""
    project = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())["project"]
    names = {re.split(r"\W*[<>=]", line)[0] for line in project["dependencies"]}
    assert names <= by_name(examine()).keys()
    offered = {package for package in required_libraries().values() if "[" in package}
    assert offered == {
        f"meshwright[{extra}]" for extra in project["optional-dependencies"].keys() - {"all", "dev", "mpi", "site"}
    }


def test_a_package_run_from_its_sources_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda name: None)
    assert by_name(examine())["meshwright"].command.endswith("pip install -e .")


def test_missing_packages_bring_one_command_each(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(distribution: str) -> str:
        if distribution == "meshwright":
            return "1.0"
        raise metadata.PackageNotFoundError(distribution)

    monkeypatch.setattr(metadata, "version", absent)
    monkeypatch.setattr(doctor, "find_mpiexec", lambda: None)
    report = examine()
    commands = {finding.name: finding.command for finding in report.missing}
    pip = f"{sys.executable} -m pip install"
    assert commands["mpi4py"] == commands["mpi_library"] == commands["mpiexec"] == f"{pip} 'meshwright[mpi]'"
    assert commands["transformers"] == commands["pyarrow"] == f"{pip} 'meshwright[hf]'"
    assert commands["sacrebleu"] == f"{pip} 'meshwright[translation]'"
    assert commands["tensorboard"] == f"{pip} 'meshwright[tensorboard]'"
    assert as_dict(report)["missing"] == commands
    text = printed(report)
    assert f"Missing: mpi4py, mpi_library, mpiexec\n  {pip} 'meshwright[mpi]'" in text
    assert text.count("meshwright[mpi]") == 1
    assert "Optional, not installed: wandb\n" in text
    assert "Missing: numpy\n" in text


def test_an_mpi_that_cannot_be_loaded_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_ASK_MPI", "raise RuntimeError('cannot load MPI library')")
    monkeypatch.setattr(doctor, "_version", lambda distribution: "1.0")
    finding = by_name(examine())["mpi_library"]
    assert finding.text == "cannot be loaded: RuntimeError: cannot load MPI library"
    assert finding.missing


def test_an_mpi_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_ASK_MPI", "import time; time.sleep(60)")
    monkeypatch.setattr(doctor, "_MPI_SECONDS", 0.1)
    monkeypatch.setattr(doctor, "_version", lambda distribution: "1.0")
    assert by_name(examine())["mpi_library"].text.startswith("did not answer")


def test_a_library_of_many_words_is_named_by_its_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_ASK_MPI", "print('Open MPI v5.0.11, package: x\\nmore')")
    monkeypatch.setattr(doctor, "_version", lambda distribution: "1.0")
    assert by_name(examine())["mpi_library"].value == "Open MPI v5.0.11"


def test_nothing_missing_is_said() -> None:
    assert "Nothing is missing" in printed(Diagnosis((Finding("python", "version", "3.11", "3.11"),)))


@pytest.mark.parametrize(
    "num_bytes, text",
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (5 * 2**40, "5.0 TiB"), (2**60, "1048576.0 TiB")],
)
def test_size_text(num_bytes: int, text: str) -> None:
    assert size_text(num_bytes) == text
