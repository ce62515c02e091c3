"""The functions of a file that are checks, and the checks' names: factories, lambdas, partials, methods, equal
names."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from meshwright.parity.check import MARKED, collect, load_checks
from meshwright.ranks.errors import ConfigError, LaunchError
from tests.patience import PATIENCE_SECONDS

ROOT = Path(__file__).resolve().parents[2]
HEAD = """
from functools import partial
import torch
from meshwright import parity

def program(job, wrong=False):
    batch = lambda generator: {"x": torch.randn(8, 4, generator=generator)}
    loss = lambda model, batch: model(batch["x"]).square().mean()
    job.reference(torch.nn.Linear(4, 3), loss=loss, batch=batch)
    scaled = (lambda model, batch: 2 * loss(model, batch)) if wrong else loss
    job.parallel(torch.nn.parallel.DistributedDataParallel(job.copy()), loss=scaled, batch=job.rows("data"))

def make(wrong):
    def check(job):
        program(job, wrong)
    return check

mark = parity.check(ranks=2)
"""
FORMS = {
    "two functions": ("@mark\ndef a(job): program(job)\n@mark\ndef b(job): program(job)\n", ["a", "b"]),
    "a factory": ("right = mark(make(False))\nwrong = mark(make(True))\n", ["right", "wrong"]),
    "a factory that marks": (
        "def made(wrong):\n    @mark\n    def check(job): program(job, wrong)\n    return check\n"
        "right, wrong = made(False), made(True)\n",
        ["right", "wrong"],
    ),
    "lambdas": ("a = mark(lambda job: program(job))\nmark(lambda job: program(job))\n", ["a", "lambda"]),
    "partials": ("CHECKS = [mark(partial(program, wrong=w)) for w in (False, True)]\n", ["program", "program-2"]),
    "a loop": ("for w in (False, True):\n    mark(make(w))\n", ["check", "check-2"]),
    "a dict": ("CHECKS = {w: mark(make(w)) for w in (False, True)}\n", ["check", "check-2"]),
    "a callable object": (
        "class Program:\n    def __call__(self, job): program(job)\nmark(Program())\nmark(Program())\n",
        ["Program", "Program-2"],
    ),
    "bound methods": (
        "class Programs:\n    def one(self, job): program(job)\nmark(Programs().one)\nmark(Programs().one)\n",
        ["one", "one-2"],
    ),
    "a static method": ("class Group:\n    @staticmethod\n    @mark\n    def a(job): program(job)\n", ["a"]),
    "one name twice": ("@mark\ndef a(job): program(job)\n@mark\ndef a(job): program(job)\n", ["a", "a-2"]),
    "two names of one": ("@mark\ndef a(job): program(job)\nb = a\n", ["a"]),
    "two numbers of ranks": ("@mark\n@parity.check(ranks=[3, 4])\ndef a(job): program(job)\n", ["a", "a", "a"]),
    "parametrize": ("@mark.parametrize('wrong', [False, True])\ndef a(job, wrong): program(job, wrong)\n", ["a", "a"]),
    "pytest's parametrize above": (
        "import pytest\n@pytest.mark.parametrize('wrong, other', [(False, 1), pytest.param(True, 2, id='bad')])\n"
        "@mark\ndef a(job, wrong, other): program(job, wrong)\n",
        ["a", "a"],
    ),
    "pytest's parametrize below, and ours": (
        "import pytest\n@mark.parametrize('x', [1, 2, 3])\n@pytest.mark.parametrize('wrong', [False, True])\n"
        "def a(job, wrong, x): program(job, wrong)\n",
        ["a"] * 6,
    ),
    "values with an id and no word": (
        "class Case:\n    def __init__(self, wrong): self.id, self.marks, self.wrong = 'mine', ['x'], wrong\n"
        "@mark.parametrize('case', [Case(False), Case(True)], ids=iter([None, 'bad']))\n"
        "def a(job, case): program(job, case.wrong)\n",
        ["a", "a"],
    ),
    "a parametrized factory": (
        "for w in (False, True):\n    mark.parametrize('x', [1, 2])(lambda job, x, w=w: program(job, w))\n",
        ["lambda", "lambda", "lambda-2", "lambda-2"],
    ),
    "a default": ("@mark\ndef a(job, wrong=False): program(job, wrong)\n", ["a"]),
}


def write(folder: Path, body: str, name: str = "checks.py") -> Path:
    (folder / name).write_text(HEAD + body)
    return folder / name


@pytest.mark.parametrize("form", FORMS)
def test_each_function_is_a_check_of_its_own_name(form: str, tmp_path: Path) -> None:
    body, names = FORMS[form]
    checks = collect(write(tmp_path, body))
    # The order of a name is the order of the marks; of two marks on one function, the inner is first.
    assert sorted(check.name for check in checks) == sorted(names)
    assert len({check.title for check in checks}) == len(checks)
    marked = vars(load_checks(tmp_path / "checks.py"))[MARKED]
    assert all(callable(marked[check.number]) for check in checks)
    assert all(check.line > HEAD.count("\n") - 9 for check in checks), "a line of the function or its mark"


@pytest.mark.parametrize(
    "body, words",
    [
        (
            "class Group:\n    @mark\n    def a(self, job): program(job)\n",
            r"a\(self, job\) is called with the job alone",
        ),
        (
            "@mark\ndef a(job, wrong): program(job)\n",
            r"a\(job, wrong\) is called with the job alone.*functools.partial",
        ),
        ("@mark\ndef a(): pass\n", r"a\(\) is called with the job alone; valid: a function of one argument"),
        ("@mark\ndef a(job, *, wrong): pass\n", r"a\(job, \*, wrong\) is called with the job alone"),
    ],
)
def test_a_function_that_needs_more_than_the_job_is_refused(body: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        collect(write(tmp_path, body))


def test_checks_of_two_files_keep_their_files_and_have_names_of_their_own(tmp_path: Path) -> None:
    write(tmp_path, "@mark\ndef ddp(job): program(job)\n", "other_checks.py")
    body = "from other_checks import make as theirs, ddp as their_ddp\n@mark\ndef ddp(job): program(job)\n"
    ours, made, theirs = collect(write(tmp_path, body + "made = mark(theirs(False))\n"))
    assert [ours.name, made.name, theirs.name] == ["ddp", "made", "their_ddp"]
    # A factory of another file makes checks of the calling file.
    assert [each.file.name for each in (ours, made, theirs)] == ["checks.py", "checks.py", "other_checks.py"]
    assert (ours.number, made.number, theirs.number) == (0, 1, 0)


def run(folder: Path, *words: str) -> tuple[int, str]:
    ran = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, timeout=PATIENCE_SECONDS,
                         cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)})  # fmt: skip
    return ran.returncode, ran.stdout + ran.stderr


def test_the_checks_of_a_factory_are_judged_each(tmp_path: Path) -> None:
    write(tmp_path, FORMS["a factory"][0])
    code, text = run(tmp_path, "meshwright", "parity", "checks.py")
    assert code == 1, text
    assert "right[data2]  " in text
    assert "wrong[data2]: scaled at" in text
    assert "Traceback" not in text


def test_cases_are_judged_each_with_its_values(tmp_path: Path) -> None:
    write(tmp_path, FORMS["pytest's parametrize above"][0])
    code, text = run(tmp_path, "meshwright", "parity", "checks.py")
    assert code == 1, text
    assert "a[False-1-data2]  " in text
    assert "a[bad-data2]: scaled at" in text


@pytest.mark.parametrize(
    "body, words",
    [
        ("@mark.parametrize('a, b', [(1, 2), (3,)])\ndef a(job, a, b): pass\n", r"has no value for each of a, b"),
        ("@mark.parametrize('x', [1, 2], ids=['1'])\ndef a(job, x): pass\n", r"1 ids are no word for each of 2 cases"),
        ("@mark.parametrize('x', [1])\ndef a(job): pass\n", r"a\(job\) is called with the job alone and x"),
        ("import pytest\n@mark.parametrize('x', [pytest.param(1, marks=pytest.mark.skip)])\ndef a(job, x): pass\n",
         r"has a case with marks of pytest's"),
        ("import pytest\n@pytest.mark.parametrize('x', [1], indirect=True)\n@mark\ndef a(job, x): pass\n",
         r"needs fixtures, which ranks do not have"),
    ],
)  # fmt: skip
def test_parameters_that_cannot_be_given_are_refused(body: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        collect(write(tmp_path, body))


def test_pytest_collects_each_check_of_the_command(tmp_path: Path) -> None:
    installed = any(point.value == "meshwright.parity.plugin" for point in metadata.entry_points(group="pytest11"))
    loaded = [] if installed else ["-p", "meshwright.parity.plugin"]
    wanted = []
    for number, (body, _) in enumerate(FORMS.values()):
        file = write(tmp_path, body, f"test_{number}.py")
        wanted += [f"{file.name}::{check.title}" for check in collect(file)]
    options = [*loaded, "--collect-only", "-q", "-p", "no:cacheprovider", f"--rootdir={tmp_path}"]
    _, text = run(tmp_path, "pytest", *options, ".")
    found = [line.replace("::Group::", "::") for line in text.splitlines() if "::" in line]
    assert sorted(found) == sorted(wanted), text


def test_a_check_that_the_import_does_not_make_is_told(tmp_path: Path) -> None:
    late = "one = mark(make(False))\n    print(parity.run_check(one.parity_checks[0]).verdict)\n"
    write(tmp_path, f"if __name__ == '__main__':\n    {late}")
    code, text = run(tmp_path, "checks")
    assert code == 0, text
    assert "does not make the check check: make it on a line of the file that its import runs" in text


@pytest.mark.parametrize(
    "script, error",
    [
        ("import argparse\nargparse.ArgumentParser().parse_args(['--steps', '3'])\n", ConfigError),
        ("open('trained', 'w').close()\nmodel.save('checkpoint')\n", ConfigError),
        ("import sys\nparity = 1\nsys.exit(2)\n", LaunchError),
    ],
)
def test_a_training_script_is_sent_to_record(
    script: str, error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(script)
    with pytest.raises(error, match=r"meshwright parity record --out FOLDER .*train\.py"):
        collect(tmp_path / "train.py")
    assert not (tmp_path / "trained").exists()
