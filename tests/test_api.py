"""docs/api.md runs unchanged; and the cost of the package's names before use."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import meshwright as mw
from meshwright.ranks.errors import ConfigError, DataError
from tests.patience import PATIENCE_SECONDS
from tests.training.runs import config_for, make_corpus

PAGE = Path(__file__).resolve().parent.parent / "docs" / "api.md"
BLOCK = re.compile(r"^```(?:python|yaml)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# ([\w.]+)\n")


def run_python(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )


def test_the_page_runs_as_it_stands(tmp_path: Path) -> None:
    script = []
    for block in BLOCK.findall(PAGE.read_text()):
        named = FILE.match(block)
        if named:
            (tmp_path / named[1]).write_text(block)
        else:
            script.append(block)
    body = textwrap.indent("\n".join(script), "    ")
    (tmp_path / "page.py").write_text(f'if __name__ == "__main__":\n{body}')
    ran = subprocess.run(
        [sys.executable, "page.py"], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert ran.returncode == 0, ran.stderr
    assert "Warning" not in ran.stderr


def test_every_name_is_on_the_page_and_there() -> None:
    assert len(mw.__all__) <= 14
    for name in mw.__all__:
        assert f"`mw.{name}" in PAGE.read_text(), name
        assert getattr(mw, name) is not None
    assert dir(mw) == sorted([*mw.__all__, "__version__"])
    with pytest.raises(AttributeError, match="module meshwright has no attribute trian"):
        mw.trian  # noqa: B018


def test_names_survive_each_other_s_imports() -> None:
    """A name that is also a module's would become the module after the module's import."""
    assert callable(mw.train)
    import meshwright.training.job  # noqa: F401

    assert all(callable(vars(mw).get(name, mw.train)) for name in mw.__all__ if name != "launch")


def test_configs_and_their_mistakes_need_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys, meshwright as mw\n"
        "config = mw.load({'layout': {'data': {'size': 2}}}, ['steps=3'])\n"
        "print(config.steps, 'torch' in sys.modules)\n"
    )
    assert run_python(code, tmp_path).stdout == "3 False\n"


def test_layouts_of_two_tasks_are_not_compared(tmp_path: Path) -> None:
    configs = {"a": mw.load({"seed": 1}), "b": mw.load({"seed": 2})}
    with pytest.raises(ConfigError, match="b: seed=2 is not the run's, and layouts are compared on one task; valid: 1"):
        mw.compare(configs, tmp_path / "out")


def test_the_history_of_a_run_that_goes_on(tmp_path: Path) -> None:
    """An unfinished last line is ignored, of a repeated step the last line counts, and infinite values are numbers."""
    earlier = (
        '{"step": 1, "loss": 2.0, "mfu": "unknown", "utilisation": ["unknown", 0.5], "phase_seconds": {"pipeline": 1}}'
    )
    lines = [earlier, '{"step": 2, "loss": "nan"}', '{"step": 2, "loss": 1.5}']
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 3, "grad_norm": "inf", "loss": 1.0}', '{"st']))
    assert mw.history(tmp_path) == [
        {"step": 1, "loss": 2.0, "mfu": None, "utilisation": [None, 0.5], "phase_seconds": {"passes": 1}},
        {"step": 2, "loss": 1.5},
        {"step": 3, "grad_norm": float("inf"), "loss": 1.0},
    ]
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(DataError, match=r"line 1 is not a step with a loss"):
        mw.history(tmp_path)
    with pytest.raises(DataError, match=r"cannot be read: No such file"):
        mw.history(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("optimiser", "lion", "lion:LION"), "group=optimiser is no group of strategies; valid: models, tensor"),
        (("optimizers", "adamw", "lion:LION"), "name=adamw is the name of another optimizers entry; valid: another"),
        (("schedules", "lion", "lion:LION"), "entry=lion:LION is no ScheduleRule; valid: one, as docs/extending.md"),
        (("optimizers", "lion", "lion:TIGER"), "entry=lion:TIGER cannot be loaded: AttributeError"),
        (("optimizers", "lion", "nowhere:LION"), "entry=nowhere:LION cannot be loaded: ModuleNotFoundError"),
        (("optimizers", "lion", 7), "entry=7 is no class, and does not know where it stands; valid: module:attribute"),
    ],
)
def test_what_cannot_be_registered(arguments: tuple[object, ...], message: str, tmp_path: Path) -> None:
    (tmp_path / "lion.py").write_text("from meshwright.strategies.optim.section import ADAMW as LION\n")
    script = f"import meshwright as mw\nmw.register(*{arguments!r})"
    ran = run_python(script, tmp_path)
    assert ran.returncode == 1
    assert message in ran.stderr


def test_registering_comes_first_and_may_be_said_again(tmp_path: Path) -> None:
    (tmp_path / "lion.py").write_text("from meshwright.strategies.optim.section import ADAMW as LION\n")
    script = (
        "import os, meshwright as mw\n"
        "for _ in range(2):\n"
        "    mw.register('optimizers', 'lion', 'lion:LION')\n"
        "    assert mw.load({'optimizer': {'name': 'lion'}}).optimizer.name == 'lion'\n"
        "class Own: pass\n"
        "for entry in ('lion:LION', Own):\n"
        "    try:\n"
        "        mw.register('optimizers', 'tiger', entry)\n"
        "    except ConfigError as error:\n"
        "        print(error)\n"
    )
    ran = run_python("from meshwright.ranks.errors import ConfigError\n" + script, tmp_path)
    assert ran.returncode == 0, ran.stderr
    late, own = ran.stdout.splitlines()
    assert late.startswith("register=tiger comes after the first config was read")
    assert own.startswith("entry=__main__:Own stands in the script or notebook itself, which ranks")


def test_what_is_asked_after_each_step_may_end_the_run(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path)

    def fails(step: dict[str, object]) -> None:
        raise LookupError(f"in step {step['step']}")

    # Enough steps that a run on a busy machine cannot have made all steps before the answer.
    config = config_for(corpus, steps=500)
    with pytest.raises(LookupError, match="in step 1"):
        mw.train(config, tmp_path / "out", each=fails)
    steps = mw.history(tmp_path / "out")
    assert 1 <= len(steps) < 500
    mw.train(config, tmp_path / "answered", each=lambda step: True)
    assert 1 <= len(mw.history(tmp_path / "answered")) < 500
    assert (tmp_path / "out" / "checkpoints" / f"step-{len(steps)}").is_dir()
