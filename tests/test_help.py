"""The command line before any run: help, `config`, a shell's completions, options that are fields."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from meshwright.cli import app
from meshwright.cli.app import OPERATE, PREDICT, PROVE, RUN
from meshwright.cli.completion import complete_shipped
from meshwright.config.words import KEYS
from meshwright.configs import SCHEMA, shipped
from meshwright.parity.command import run_words
from meshwright.ranks.errors import ConfigError
from tests.command_line import environment_for, meshwright
from tests.typed_commands import read_as_typed

LINE = 60


def commands(group: typer.core.TyperGroup, before: str = "") -> dict[str, typer.core.TyperCommand]:
    """Return all commands by their words, also the commands of groups."""
    found = {}
    for name, command in group.commands.items():
        inner = commands(command, f"{before}{name} ") if isinstance(command, typer.core.TyperGroup) else {}
        found |= {f"{before}{name}": command} | inner
    return found


COMMANDS = commands(get_command(app))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_says_in_a_line_what_it_does(name: str) -> None:
    first = (COMMANDS[name].help or "").split("\n\n")[0]
    assert "\n" not in first
    assert len(first) <= LINE
    assert first.endswith(".")


EXAMPLE = re.compile(r"^Example: (meshwright .+(?:\n\S.*)*)", re.MULTILINE)
RUNS_OF_EXAMPLES = {"run.yaml": "quickstart"}
"""A reader's files in examples, and the shipped run to read instead."""


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_an_example_that_can_be_typed(name: str) -> None:
    (example,) = EXAMPLE.findall(COMMANDS[name].help or "")
    program, *words = shlex.split(example)
    assert [program, *words[: len(name.split())]] == ["meshwright", *name.split()]
    read_as_typed([RUNS_OF_EXAMPLES.get(word, word) for word in words])


@pytest.mark.parametrize("words", [["parity"], ["parity", "record"], ["parity", "compare"]])
def test_parity_has_an_example_for_each_of_its_commands(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_words([*words[1:], "--help"])
    (example,) = re.findall(r"Example: (meshwright .+)", capsys.readouterr().out)
    assert shlex.split(example)[1 : len(words) + 1] == words
    read_as_typed(shlex.split(example)[1:])


def test_commands_stand_in_parts() -> None:
    text = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80"}).stdout
    places = [text.index(f"\n{part}:\n") for part in (RUN, PROVE, PREDICT, OPERATE)]
    assert places == sorted(places)
    assert "\nCommands:\n" not in text, "every command has a part"
    assert "..." not in text.split("COMMAND [ARGS]...")[1], "no line is cut"
    for words in ("meshwright train quickstart", "meshwright verify quickstart", "meshwright plan gpt2", "config"):
        assert words in text
    assert "--install-completion" in text


def test_train_says_where_fields_are_listed() -> None:
    text = " ".join(CliRunner().invoke(app, ["train", "--help"]).stdout.split())
    assert "`meshwright config` lists them all" in text


def refused(*words: str) -> str:
    error = CliRunner().invoke(app, list(words)).exception
    assert isinstance(error, ConfigError), error
    return str(error)


@pytest.mark.parametrize(
    "words, answer",
    [
        (
            ["train", "quickstart", "--steps", "5"],
            "--steps=5 is no option: fields are written key=value; valid: steps=5",
        ),
        (["train", "quickstart", "--steps=5"], "valid: steps=5"),
        (["plan", "gpt2", "--tp", "2"], "--tp=2 is no option: fields are written key=value; valid: layout.tensor=mega"),
        (["verify", "quickstart", "--layout.data.size", "4"], "valid: layout.data.size=4"),
        (["train", "quickstart", "--lr", "1e-3"], "valid: optimizer.lr=1e-3"),
        (
            ["train", "quickstart", "--bf16"],
            "--bf16=true is no option: fields are written key=value; valid: precision=",
        ),
        (["train", "quickstart", "--bf16", "steps=3"], "--bf16=true"),
        (["train", "quickstart", "--per-device-train-batch-size", "4", "--output-dir", "x"], "valid: --out=x"),
    ],
)
def test_an_option_that_is_a_field(words: list[str], answer: str) -> None:
    assert answer in refused(*words)


def test_options_of_the_command_are_its_own() -> None:
    """`--steps` is an option of verify, and typer reports an unknown option."""
    assert "did you mean quickstart" in refused("verify", "quikstart", "--steps", "2")
    assert "No such option: --nonsense" in CliRunner().invoke(app, ["train", "quickstart", "--nonsense"]).output


def test_options_in_the_table_of_other_tools_words_are_trains() -> None:
    known = {option for param in COMMANDS["train"].params for option in param.opts}
    assert {ours.partition("=")[0] for ours in KEYS if ours.startswith("--")} <= known


HEAVY = """
import atexit, sys
heavy = {"torch", "numpy"}
atexit.register(lambda: heavy & set(sys.modules) and print("imported:", *heavy & set(sys.modules), file=sys.stderr))
sys.argv[0] = "meshwright"
from meshwright.cli import main
main()
"""
"""The command line; at the end, stderr names the imported heavy packages."""


def light(tmp_path: Path, *words: str, **told: str) -> subprocess.CompletedProcess[str]:
    """Run a command that must import neither torch nor numpy."""
    done = subprocess.run(
        [sys.executable, "-c", HEAVY, *words],
        cwd=tmp_path,
        env=environment_for(tmp_path) | told,
        capture_output=True,
        text=True,
    )
    assert "imported:" not in done.stderr, done.stderr
    return done


def completed(tmp_path: Path, *words: str) -> list[str]:
    """Return the answer to bash, which reads `=` as a separate word."""
    told = {"_MESHWRIGHT_COMPLETE": "complete_bash", "COMP_CWORD": str(len(words) - 1), "COMP_WORDS": "\n".join(words)}
    done = light(tmp_path, **told)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize("words", [["--help"], [], ["--version"], ["verify", "--help"], ["config", "layout.tensor"]])
def test_help_imports_neither_torch_nor_numpy(words: list[str], tmp_path: Path) -> None:
    done = light(tmp_path, *words)
    assert re.search("meshwright|layout", done.stdout + done.stderr)


def test_a_heavy_import_is_seen(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"imported:.* torch"):
        light(tmp_path, "doctor")


def answers(*words: str) -> list[str]:
    """Return the answer in this process, as zsh and fish ask: a word is whole."""
    told = {"_MESHWRIGHT_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": " ".join(("meshwright", *words))}
    text = CliRunner().invoke(app, [], env=told, prog_name="meshwright").stdout
    return [word for word in text.replace('"', " ").replace("\\", "").split() if not word.startswith("_arguments")]


def test_a_shell_completes_without_torch(tmp_path: Path) -> None:
    assert completed(tmp_path, "meshwright", "tr") == ["train"]
    assert completed(tmp_path, "meshwright", "train", "quick") == ["quickstart"]
    values = ["zero1", "zero2", "zero3"]
    assert completed(tmp_path, "meshwright", "train", "gpt2", "layout.data.sync", "=", "zer") == values
    assert set(values) < set(completed(tmp_path, "meshwright", "train", "gpt2", "layout.data.sync", "="))


@pytest.mark.parametrize(
    "words, wanted",
    [
        (["train", "gpt2", "lay"], ["layout.data.", "layout.tensor.", "layout.order="]),
        (["train", "gpt2", "layout.data.s"], ["layout.data.size=", "layout.data.sync=", "layout.data.shard="]),
        (["train", "gpt2", "layout.data.sy"], ["layout.data.sync=allreduce", "layout.data.sync=zero3"]),
        (["train", "gpt2", "steps"], ["steps=", "steps=1000"]),
        (["plan", "gpt2", "optimizer.name=a"], ["optimizer.name=adamw"]),
        (["plan", "gpt2", "optimizer=m"], ["optimizer=muon", "optimizer=momentum"]),
        (["verify", "gpt2", "model.tied="], ["model.tied=true", "model.tied=false"]),
        (["verify", "gpt2", "model=qwen3-8"], ["model=qwen3-8b"]),
        (["train", "gpt2", "layout.tensor.kind=mega"], ["layout.tensor.kind=megatron"]),
        (["config", "layout.ten"], ["layout.tensor."]),
        (["plan", "gpt2", "--cluster", "dgx-h"], ["dgx-h100", "dgx-h200"]),
    ],
)
def test_words_are_completed(words: list[str], wanted: list[str]) -> None:
    assert set(wanted) <= set(answers(*words))


def test_runs_are_completed() -> None:
    assert complete_shipped("runs")("") == list(shipped("runs"))


def test_config_is_printed_for_a_person_a_script_and_an_editor(tmp_path: Path) -> None:
    """Neither form of the answer imports torch."""
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    told = meshwright(tmp_path, "config", "optimizer.lr").stdout
    assert told.splitlines()[:2] == ["optimizer.lr: The learning rate at its peak.", "  default 0.0003"]
    (facts,) = json.loads(meshwright(tmp_path, "config", "layout.data.size", "--json").stdout)["fields"]
    assert facts["default"] == "1"
    schema = meshwright(tmp_path, "config", "--schema").stdout
    assert schema == SCHEMA.read_text()
    jsonschema.Draft202012Validator.check_schema(json.loads(schema))
    wrong = meshwright(tmp_path, "config", "layout.data.sze")
    assert wrong.returncode == 2
    assert "did you mean layout.data.size?" in wrong.stderr
    assert "is asked for in several forms" in refused("config", "steps", "--page")
    assert meshwright(tmp_path, "--help").returncode == 0


def test_a_run_by_its_name_has_a_folder_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    told = refused("train", "nosuch")
    assert told.startswith("run=nosuch is no such file; valid: a YAML file, or one of our runs by its name: bert, ")
    assert "/" not in told
    assert refused("train", "steps=3").startswith("run=steps=3 is a field")
    (tmp_path / "out" / "quickstart").mkdir(parents=True)
    (tmp_path / "out" / "quickstart" / "metrics.jsonl").write_text("")
    assert "out/quickstart holds a run already" in refused("train", "quickstart", "data.source=stdlib", "device=cpu")
