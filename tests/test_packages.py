"""A release: both distributions complete, one version everywhere, links that hold on an index, extras."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from email import message_from_bytes
from email.message import Message
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

import meshwright
from tests.patience import PATIENCE_SECONDS

ROOT = Path(__file__).resolve().parent.parent
NOT_OURS = (
    ".git",
    ".venv",
    ".venv-cpu",
    ".venv-oldest",
    ".venv-newest",
    "out",
    "build",
    "dist",
    "shared",
    "node_modules",
)
"""Folders of the root that a build of the tests' copy does not need."""
MADE = ("__pycache__", "*.pyc", "*.egg-info", ".*_cache", ".hypothesis", "layout.html")


def project() -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return table


def build(kind: str, source: Path, target: Path, **variables: str) -> Path:
    """Build a distribution by the build backend alone: no network, no other environment."""
    target.mkdir(exist_ok=True)
    code = f"from setuptools import build_meta; print('made', build_meta.build_{kind}({str(target)!r}))"
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=source, env=os.environ | variables, capture_output=True, text=True,
        timeout=PATIENCE_SECONDS,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return target / ran.stdout.split()[-1]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the repository without built files."""
    if find_spec("setuptools") is None:
        pytest.skip("no setuptools here: pip install setuptools")
    folder = tmp_path_factory.mktemp("packages") / "copy"
    ignored = shutil.ignore_patterns(*MADE)

    def ignore(at: str, names: list[str]) -> set[str]:
        return ignored(at, names) | (set(NOT_OURS) & set(names) if Path(at) == ROOT else set())

    shutil.copytree(ROOT, folder, ignore=ignore, symlinks=True)
    return folder


@pytest.fixture(scope="module")
def sdist(copy: Path) -> Path:
    """Return the source distribution, unpacked."""
    # The copy has the files before the build adds others.
    archive = build("sdist", shutil.copytree(copy, copy.with_name("built"), symlinks=True), copy.with_name("dist"))
    with tarfile.open(archive) as tar:
        tar.extractall(copy.with_name("unpacked"), filter="data")
    return copy.with_name("unpacked") / archive.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def wheel(sdist: Path) -> zipfile.ZipFile:
    """Return the wheel of the unpacked source distribution, built as by an installer."""
    return zipfile.ZipFile(build("wheel", sdist, sdist.parent / "wheels"))


def metadata(wheel: zipfile.ZipFile) -> Message:
    return message_from_bytes(wheel.read(next(name for name in wheel.namelist() if name.endswith("/METADATA"))))


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_the_source_distribution_is_the_repository(copy: Path, sdist: Path) -> None:
    assert files(copy) - files(sdist) == set()


def test_the_wheel_has_the_whole_package_and_nothing_else(copy: Path, wheel: zipfile.ZipFile) -> None:
    ours = {f"meshwright/{name}" for name in files(copy / "meshwright")}
    assert {name for name in wheel.namelist() if ".dist-info/" not in name} == ours


def test_the_wheel_says_who_it_is(wheel: zipfile.ZipFile) -> None:
    facts = metadata(wheel)
    assert facts["Version"] == meshwright.__version__
    assert {*(facts.get_all("Provides-Extra") or ())} == set(project()["optional-dependencies"])
    points = wheel.read(next(name for name in wheel.namelist() if name.endswith("entry_points.txt"))).decode()
    assert "meshwright = meshwright.cli:main" in points
    assert "meshwright = meshwright.parity.plugin" in points


CHECKS = """
import meshwright.parity as parity
import torch
from torch.nn.parallel import DistributedDataParallel


def program(job, share):
    batch = lambda generator: torch.randn(8, 4, generator=generator)
    job.reference(torch.nn.Linear(4, 3), loss=lambda model, batch: model(batch).square().mean(), batch=batch)
    job.parallel(DistributedDataParallel(job.copy()), batch=share)


@parity.check(ranks=2)
def right(job):
    program(job, job.rows("data"))


@parity.check(ranks=2)
def wrong(job):
    program(job, lambda batch: batch[:4])
"""

BOXES = ("ranks", "parity")

ALONE = """
import sys


class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {absent}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)


sys.meta_path.insert(0, Refused())
"""
"""Refuses imports of installed packages that the package must not need."""


@pytest.fixture(scope="module")
def wheels(copy: Path) -> dict[str, Path]:
    """Build the distributions of a release from the repository."""
    source, target = shutil.copytree(copy, copy.with_name("apart"), symlinks=True), copy.with_name("wheels")
    return {
        "meshwright": build("wheel", source, target, MESHWRIGHT_APART="1"),
        **{f"meshwright-{box}": build("wheel", source / "packaging" / box, target) for box in BOXES},
    }


def own_files(wheel: Path) -> set[str]:
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def test_the_wheels_of_a_release_share_no_file(copy: Path, wheels: dict[str, Path]) -> None:
    """An installer that removes one distribution leaves the others whole."""
    held = [name for wheel in wheels.values() for name in own_files(wheel)]
    assert sorted(held) == sorted(f"meshwright/{name}" for name in files(copy / "meshwright"))


def test_the_wheels_of_a_release_ask_for_each_other(wheels: dict[str, Path]) -> None:
    facts = {name: metadata(zipfile.ZipFile(wheel)) for name, wheel in wheels.items()}
    assert {each["Version"] for each in facts.values()} == {meshwright.__version__}
    asked = {name: [Requirement(line) for line in each.get_all("Requires-Dist") or []] for name, each in facts.items()}
    ours = {
        name: {str(word) for word in words if word.name in wheels and not word.extras} for name, words in asked.items()
    }
    ranks, parity = (f"meshwright-{box}=={meshwright.__version__}" for box in BOXES)
    assert ours == {"meshwright": {ranks, parity}, "meshwright-ranks": set(), "meshwright-parity": {ranks}}
    others = {name: {word.name for word in words if word.marker is None} - {*wheels} for name, words in asked.items()}
    assert others["meshwright-ranks"] == {"torch", "numpy"}
    assert others["meshwright-parity"] == {"torch", "numpy", "Jinja2"}
    bounds = {word.name: word.specifier for word in map(Requirement, project()["dependencies"])}
    words = [word for box in BOXES for word in asked[f"meshwright-{box}"]]
    assert all(word.specifier == bounds[word.name] for word in words if word.name in bounds)


def test_ranks_and_parity_run_where_the_rest_is_not(wheels: dict[str, Path], tmp_path: Path) -> None:
    """A fresh environment has this environment's packages, except packages that only the rest of meshwright needs."""
    # Look for a folder: setuptools answers find_spec("pip") by replacing distutils, which torch's compiler imports.
    if not any(Path(place, "pip").is_dir() for place in sys.path):
        pytest.skip("no pip here: python -m ensurepip")
    venv.create(tmp_path / "env", symlinks=True)
    python = tmp_path / "env/bin/python"
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    install = ["install", "--no-deps", "--no-index", "--quiet", *(str(wheels[f"meshwright-{x}"]) for x in BOXES)]
    subprocess.run([*pip, *install], check=True, timeout=PATIENCE_SECONDS)
    (packages,) = (tmp_path / "env/lib").glob("python*/site-packages")
    absent = {re.match(r"\w+", line)[0].lower() for line in project()["dependencies"]}  # type: ignore[index]
    absent = {"yaml" if name == "pyyaml" else name for name in absent} - {"torch", "numpy", "jinja2"}
    (packages / "alone.py").write_text(ALONE.format(absent=absent))
    (packages / "alone.pth").write_text(f"import alone\n{sysconfig.get_path('purelib')}\n")
    (tmp_path / "checks.py").write_text(CHECKS)
    page = tmp_path / "parity.html"

    def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_SECONDS)

    ran = run(python.with_name("meshwright-parity"), "checks.py", "--json", "--page", page)
    assert ran.returncode == 1, ran.stderr
    assert ran.stdout.startswith("{"), ran.stderr
    right, wrong = json.loads(ran.stdout)["checks"]
    assert right["holds"], right["verdict"]
    assert wrong["finding"]["kind"] == "wrong data", wrong["verdict"]
    assert "wrong data" in page.read_text()
    # The package's face names the missing distribution.
    ran = run(python, "-c", "import meshwright as mw; mw.train")
    assert "mw.train is in none of the distributions that are installed: pip install meshwright" in ran.stderr
    # The program of the README of ranks runs without parity.
    subprocess.run([*pip, "uninstall", "--yes", "--quiet", "meshwright-parity"], check=True, timeout=PATIENCE_SECONDS)
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "packaging/ranks/README.md").read_text(), re.DOTALL)
    (tmp_path / "sums.py").write_text(program)
    assert run(python, "sums.py").stdout == "[1.0, 1.0]\n"


def test_links_of_the_readme_hold_away_from_the_repository(wheel: zipfile.ZipFile) -> None:
    page = str(metadata(wheel).get_payload())
    links = re.findall(r"\]\(([^)]+)\)", page)
    assert len(links) > 10
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    source = project()["urls"]["Source"]
    inside = [link.removeprefix(source) for link in links if link.startswith(source)]
    parts = [re.fullmatch(r"/(?:blob|raw)/main/([^#]+)(?:#.*)?", link) for link in inside]
    assert all(part is not None and (ROOT / part[1]).exists() for part in parts), inside


def test_one_version_stands_everywhere() -> None:
    version = meshwright.__version__
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version
    assert yaml.safe_load((ROOT / "packaging/conda/recipe.yaml").read_text())["context"]["version"] == version
    assert re.findall(r"^## (\d\S*)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[0] == version


def test_boxes_are_asked_for_by_their_version() -> None:
    (pinned,) = re.findall(r'"meshwright-ranks==(.+?)"', (ROOT / "packaging/parity/pyproject.toml").read_text())
    assert pinned == meshwright.__version__


def test_extras_are_named_by_all() -> None:
    extras = project()["optional-dependencies"]
    named = set(re.search(r"\[(.*)\]", extras["all"][0])[1].split(","))  # type: ignore[index]
    assert named == set(extras) - {"all", "dev", "site", "templates"}  # the last is of tests alone, as dev is


def test_conda_asks_for_what_pip_asks_for() -> None:
    run = yaml.safe_load((ROOT / "packaging/conda/recipe.yaml").read_text())["requirements"]["run"]
    words = {line.lower().replace(" ", "").replace("pytorch", "torch") for line in run}
    asked = {line.lower() for line in project()["dependencies"]} | {f"python{project()['requires-python']}"}
    assert words == asked


@pytest.mark.parametrize("name", ["tests", "site", "release", "versions"])
def test_workflows_can_be_read_and_call_what_is_there(name: str) -> None:
    tree = yaml.safe_load((ROOT / f".github/workflows/{name}.yml").read_text())
    assert {"name", True, "permissions", "jobs"} <= tree.keys()  # YAML 1.1 reads `on` as true
    commands = [step["run"] for job in tree["jobs"].values() for step in job["steps"] if "run" in step]
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert all(word in targets for line in commands for word in re.findall(r"^make (\S+)", line))
    assert all((ROOT / word).exists() for line in commands for word in re.findall(r"^(\.ci/\S+)", line))


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_images_are_built_of_files_that_the_context_has(name: str) -> None:
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = re.findall(r"^COPY (.*) \S+$", (ROOT / f"packaging/docker/Dockerfile.{name}").read_text(), re.MULTILINE)
    words = {word for line in copied for word in line.split()}
    assert words == let_in
    assert all((ROOT / word).exists() for word in words)


def test_the_lock_has_the_versions_of_the_constraints() -> None:
    """packaging/requirements.lock agrees with constraints.txt: `make lock` writes the lock anew."""
    pinned = re.compile(r"^([A-Za-z0-9_.\-]+)==(\S+)", re.MULTILINE)

    def versions(path: str) -> dict[str, str]:
        named = pinned.findall((ROOT / path).read_text())
        return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in named}

    locked, constrained = versions("packaging/requirements.lock"), versions("constraints.txt")
    asked = {re.match(r"[A-Za-z0-9_\-]+", word)[0].lower() for word in project()["dependencies"]}  # type: ignore[index]
    assert asked <= locked.keys()
    assert {name: locked[name] for name in locked.keys() & constrained.keys()} == {
        name: constrained[name] for name in locked.keys() & constrained.keys()
    }
