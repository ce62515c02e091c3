"""Words that another program fills in, such as a portal's form: each is valid, quoted or refused, and never executed.

Every setting of every engine has every word once; so have the run's key=value words, --out and the run file's name. A
batch script runs with a stub of srun that prints its words, shells of pods and tasks run with a stub of python,
manifests are read back, and a Ray script is compiled. The test fails if a word makes a file, or a line that an engine
would read as an option.
"""

from __future__ import annotations

import ast
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_origin
from unittest.mock import patch

import pytest
import yaml

from meshwright.config.registry import OURS
from meshwright.ranks.errors import ConfigError
from meshwright.tools.submit import job
from tests.tools.submit.asked import VOLUME, containers, stub, with_stubs, written

WORDS = (
    "x\ntouch PWNED", "x\r\ntouch PWNED", "x; touch PWNED", "$(touch PWNED)", "`touch PWNED`", "a b", " a", "a ",
    "x' ; touch PWNED '", 'x" ; touch PWNED "', "x # y", "#", "%j", "x%", "x && touch PWNED", "x | touch PWNED", "\\",
    "x\\", "${HOME}", "$HOME", "~", "*", "-x", "--help", "x\ttouch", "\x00", "\x1b[31m", "é", "\udc80", "",
    "x > PWNED", "{{x}}", "{x}", "a: b", "- a", "!!python/object:x", "null", "0x10", "x\u2028touch PWNED", "$(A)", "$$",
)  # fmt: skip

OTHERS = {
    "kubernetes": list(VOLUME),
    "skypilot": [*VOLUME],
    "slurm": [],
    "ray": [],
}
"""The settings that must be set."""

SHELL = "setup"
"""The setting with lines of shell for the user's program, which is shell by intent."""

NEEDS = {
    "mounts": ["container=image"],
    "runtime": ["container=image"],
    "container": [],
    "locked_memory": ["rdma=rdma/ib"],
}


def settings_of(engine: str) -> Iterator[str]:
    for name, field in job.engine_class(engine).model_fields.items():
        if name not in (SHELL, "patch"):
            kind = get_origin(field.annotation)
            yield from [f"{name}.qos", f"{name}.A"] if kind is dict else [name]


CASES = [(engine, setting) for engine in OURS["submit"] for setting in settings_of(engine)]


def taken(engine: str, run: Path, settings: list[str], words: list[str] = [], out: Path | None = None) -> str | None:  # noqa: B006
    """Return the text that an engine writes, or None if the engine refuses the words, in one line each."""
    device = "device=cuda" if any(setting.startswith("gpu=") for setting in settings) else "device=cpu"
    try:
        return written(engine, run, settings, [device, *words], out=out)
    except ConfigError as error:
        refused = error
    assert not any(each in str(refused) for each in ("\ntouch", "\r", "\x1b", "\x00"))
    return None


def check_batch(text: str, folder: Path) -> list[str]:
    """Run a batch script; return srun's words. No word is executed, and sbatch reads one option a line."""
    for line in text.splitlines():
        if line.startswith("#SBATCH"):
            assert len(shlex.split(line.removeprefix("#SBATCH"), comments=True)) == 1, line
    before_commands = text.partition("\nset -u\n")[0].splitlines()
    assert all(line.startswith("#") or not line for line in before_commands), before_commands
    (folder / "cwd").mkdir()
    stub(folder, "srun", 'for word in "$@"; do printf "%s\\0" "$word"; done')
    script = folder / "job.sbatch"
    script.write_text(text)
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    done = subprocess.run(["bash", script], cwd=folder / "cwd", env=with_stubs(folder), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\0")[:-1]


def check_shell(shell: str, folder: Path, **variables: str) -> list[str]:
    """Run the shell of a node; return the words of the node's first rank."""
    (folder / "cwd").mkdir(exist_ok=True)
    stub(folder, "python", '[ "$RANK" != 0 ] || for word in "$@"; do printf "%s\\0" "$word"; done')
    stub(folder, "ulimit", "echo unlimited")
    done = subprocess.run(
        ["sh", "-c", shell], cwd=folder / "cwd", env=with_stubs(folder, **variables), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\0")[:-1]


def as_kubernetes(text: str, variables: dict[str, str]) -> str:
    """Replace $(NAME) as Kubernetes does in a command: $$ is a $, and an unknown name stays."""
    parts, at = [], 0
    while at < len(text):
        if text[at : at + 2] == "$$":
            parts.append("$")
            at += 2
        elif text[at : at + 2] == "$(" and (end := text.find(")", at)) >= 0:
            name = text[at + 2 : end]
            parts.append(variables.get(name, text[at : end + 1]))
            at = end + 1
        else:
            parts.append(text[at])
            at += 1
    return "".join(parts)


def program_of(engine: str, text: str) -> str:
    documents = list(yaml.safe_load_all(text))
    (container,) = containers(documents[1]) if engine == "kubernetes" else [{"command": [documents[0]["run"]]}]
    return str([container["command"], container.get("env")])


def check(engine: str, text: str, folder: Path) -> list[str]:
    """Run or read an engine's text; return the words of a rank's program."""
    match engine:
        case "slurm":
            words = check_batch(text, folder)
        case "ray":
            ast.parse(text)
            names: dict[str, Any] = {"__name__": "script"}
            with patch.object(sys, "path", list(sys.path)):  # the script drops the current folder
                exec(compile(text, "script", "exec"), names)
            words = names["PLACEMENT"].words
        case "kubernetes":
            documents = list(yaml.safe_load_all(text))
            (container,) = containers(documents[1])
            variables = {each["name"]: each["value"] for each in container.get("env", [])}
            shell = as_kubernetes(container["command"][2], {**variables, "A": "'; touch PWNED; '"})
            words = check_shell(shell, folder, JOB_COMPLETION_INDEX="0")
        case _:
            (task,) = yaml.safe_load_all(text)
            words = check_shell(task["run"], folder, SKYPILOT_NODE_RANK="0", SKYPILOT_NODE_IPS="10.0.0.1")
    assert not list(folder.rglob("PWNED"))
    assert not Path("PWNED").exists()
    return words


@pytest.mark.parametrize("engine, setting", CASES)
def test_a_setting_is_in_its_form_quoted_or_refused(
    engine: str, setting: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    seen = set[str]()
    others = [word for word in OTHERS[engine] if not word.startswith(f"{setting}=")]
    for number, word in enumerate(WORDS):
        needs = [*others, *NEEDS.get(setting, []), *(["gpu=H100"] if setting == "gpu" else [])]
        text = taken(engine, run, [*needs, f"{setting}={word}"])
        if text is not None:
            assert not any(control in word for control in "\r\x00\x1b\udc80"), (setting, word)
            program = text if engine in ("slurm", "ray") else program_of(engine, text)
            # Skip a shell that has run before, and words without a character of the shell: one test is enough.
            if program in seen or (engine == "slurm" and not set(word) & set("'\"`$\\#;&|>\n~*")):
                continue
            seen.add(program)
            (folder := tmp_path / str(number)).mkdir()
            words = check(engine, text, folder)
            assert "meshwright" in words
            assert words[-1] == "--resume"


@pytest.mark.parametrize("engine", OURS["submit"])
@pytest.mark.parametrize("number", range(len(WORDS)))
def test_the_run_s_words_reach_the_ranks_as_they_are(
    engine: str, number: int, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    word = f"metrics.project={json.dumps('x' + WORDS[number])}"
    if "\x00" in word or "\udc80" in WORDS[number]:
        return
    text = taken(engine, run, OTHERS[engine], ["metrics.sinks=[trackio]", word])
    assert text is not None
    (folder := tmp_path / "here").mkdir()
    assert word in check(engine, text, folder)


@pytest.mark.parametrize("engine", OURS["submit"])
@pytest.mark.parametrize("number", range(len(WORDS)))
def test_the_run_s_folder_and_file_reach_the_ranks_as_they_are(
    engine: str, number: int, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm's script writes the run file next to --out, with any name of --out."""
    monkeypatch.chdir(tmp_path)
    word = WORDS[number]
    out = Path("/runs" if engine in ("kubernetes", "skypilot") else tmp_path / "outs", f"x{word}")
    (folder := tmp_path / "here").mkdir()
    if "/" not in word and "\x00" not in word and "\udc80" not in word:
        named = tmp_path / f"x{word}.yaml"
        named.write_text(run.read_text())
        text = taken(engine, named, OTHERS[engine])
        assert (text is None) == any(control in word for control in "\n\r\t\x1b\u2028")
        if text is not None:
            check(engine, text, folder)
    text = taken(engine, run, OTHERS[engine], out=out)
    if text is not None:
        (again := tmp_path / "again").mkdir()
        words = check(engine, text, again)
        assert words[words.index("--out") + 1] == str(out)
        if engine == "slurm":
            assert Path(f"{out}.run.yaml").read_text() == run.read_text()


def test_the_run_file_of_a_batch_script_ends_where_it_ends(run: Path, tmp_path: Path) -> None:
    """A line of the run file neither ends the file early, nor is a command or an option of sbatch."""
    hostile = "# END_OF_RUN_FILE_0\nmodel: gpt2-mini\n# $(touch PWNED) `touch PWNED`\n#SBATCH --partition=mine\n"
    run.write_text(hostile + "data: {source: stdlib}\nbatch: {global: 8}\nname: |\n  x\nEND_OF_RUN_FILE_0: 1\n")
    with pytest.raises(ConfigError, match="unknown key"):
        written("slurm", run, words=["device=cpu"])
    run.write_text(hostile + "data:\n  source: |-\n    x\nbatch: {global: 8}\nlayout: {data: {size: 4}}\n"
                   "# next\n")  # fmt: skip
    text = run.read_text().replace("# next", "END_OF_RUN_FILE_0")
    assert text  # the mark as a line is YAML without a key, so a comment is needed
    out = tmp_path / "outs" / "x"
    written_text = written("slurm", run, words=["device=cpu"], out=out)
    check_batch(written_text, tmp_path)
    assert Path(f"{out}.run.yaml").read_text() == run.read_text()
    assert "#SBATCH --partition=mine" not in written_text.partition("\nset -u\n")[0]
