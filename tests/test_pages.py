"""The commands of README, guide and course, typed in a fresh shell, in the page's order, after the page's installation.

Quick: the shell has stubs for `python3 -m venv`, pip and make, and the installed `meshwright` is a stub that notes its
words. Each command's words are then read as the command line reads words, with all fields of the run. With --long the
commands run, except the commands of READ_ONLY.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.ranks.errors import ConfigError
from tests.patience import PATIENCE_SECONDS
from tests.typed_commands import ROOT, read_as_typed

COURSE = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs/course").glob("[1-9]-*.md"))
ALONE = ("README.md", "docs/index.md", "docs/guide.md", "docs/course/index.md")
AFTER = ("docs/run_file.md", "docs/data.md", "docs/coming_from.md")
PAGES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(ALONE, ()),
    **dict.fromkeys((*COURSE, *AFTER), ("docs/course/index.md",)),
    "docs/evaluation.md": ("docs/index.md",),
}
"""Each page, and the earlier pages with commands that the page's reader has typed."""

READ_ONLY = {
    "RUN.yaml": "the reader's own run file",
    "model={from:": "a published model's folder",
    "--data ": "the reader's own data",
    "lm-eval:": "lm-evaluation-harness, an extra, and its data sets from a network",
    "meshwright.tools.harness": "the same",
    "out/squad": "a run of the reader's",
    "out/race": "a run of the reader's",
    "benchmarks.": "a measurement of minutes",
}
"""Parts of commands that no test runs, and the reason."""
CODES = {
    "examples/parity/ddp.py": 1,
    "meshwright diff out/first out/second": 1,
    "meshwright verify docs/course/": 2,
    "docs/course/": 1,
}
"""Parts of commands with an exit code for a difference: a lesson's exercise is wrong before the marked line is
mended."""

VENV = """#!/bin/sh
# python3 -m venv FOLDER
case "$1 $2" in "-m venv") ;; *) echo "no stub for: python3 $*" >&2; exit 3;; esac
mkdir -p "$3/bin"
echo "PATH=$(pwd)/$3/bin:\\$PATH; export PATH" > "$3/bin/activate"
cp "$STUBS/pip" "$3/bin/pip"
"""
PIP = """#!/bin/sh
# pip install -c constraints.txt -e .
case "$*" in "install -c constraints.txt -e "*) ;; *) echo "no stub for: pip $*" >&2; exit 3;; esac
for name in meshwright python torchrun pytest; do cp "$STUBS/$name.in" "$(dirname "$0")/$name"; done
"""
NOTE = """#!{python}
import json, os, sys
with open(os.environ["NOTED"], "a") as file:
    file.write(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]) + "\\n")
"""
RUN = """#!/bin/sh
exec {python} -c "from meshwright.cli import main; main()" "$@"
"""


def commands_of(page: str) -> list[str]:
    """Return the lines of a page's blocks of shell commands, without comments."""
    blocks = re.findall(r"^```sh\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in block.splitlines() if line.strip() and not line.startswith("#")]


def shell(page: str, folder: Path, *, for_real: bool) -> subprocess.CompletedProcess[str]:
    """Type the commands of a page, and of the pages before, in a new shell, in a folder like a clone's root."""
    stubs, clone = folder / "stubs", folder / "clone"
    stubs.mkdir()
    clone.mkdir()
    for name in ("examples", "docs", "constraints.txt", "pyproject.toml", "meshwright", "benchmarks", "tests"):
        (clone / name).symlink_to(ROOT / name)
    note = NOTE.format(python=sys.executable)
    real = RUN.format(python=sys.executable)
    files = {"python3": VENV, "pip": PIP, "make": note, "meshwright.in": real if for_real else note}
    files |= {"python.in": f'#!/bin/sh\nexec {sys.executable} "$@"\n' if for_real else note}
    files |= {"torchrun.in": note, "pytest.in": note}
    for name, text in files.items():
        (stubs / name).write_text(text)
        (stubs / name).chmod(0o755)
    lines = ["set -e"]
    for typed in (*PAGES[page], page):
        for line in commands_of(typed):
            if for_real and any(part in line for part in READ_ONLY):
                continue
            code = next((code for part, code in CODES.items() if part in line), 0) if for_real else 0
            lines += [line] if code == 0 else [f"code=0; {line} || code=$?", f'test "$code" = {code}']
    told = {"PATH": f"{stubs}:/usr/bin:/bin", "STUBS": str(stubs), "NOTED": str(folder / "noted"), "HOME": str(folder)}
    kept = {name: os.environ[name] for name in ("TMPDIR", "XDG_CACHE_HOME") if name in os.environ}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        ["bash", "-c", "\n".join(lines)], cwd=clone, env=told | kept | {"PYTHONPATH": path}, check=False, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=20 * PATIENCE_SECONDS,
    )  # fmt: skip


@pytest.mark.parametrize("page", PAGES)
def test_a_shell_that_followed_the_page_knows_every_command(page: str, tmp_path: Path) -> None:
    ran = shell(page, tmp_path, for_real=False)
    assert ran.returncode == 0, ran.stdout
    noted = [json.loads(line) for line in (tmp_path / "noted").read_text().splitlines()]
    typed = [words[1:] for words in noted if words[0] == "meshwright"]
    assert typed
    for words in typed:
        if page.startswith("docs/course/") and str(words[-1]).startswith("docs/course/"):
            assert (ROOT / words[-1]).is_file()  # an exercise, with a mistake that tests/test_course.py checks
            continue
        read_as_typed(words)


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.long
def test_every_command_of_the_page_works(page: str, tmp_path: Path) -> None:
    ran = shell(page, tmp_path, for_real=True)
    assert ran.returncode == 0, ran.stdout[-4000:]


@pytest.mark.parametrize("page", PAGES)
def test_commands_are_marked_as_commands(page: str) -> None:
    """A block of shell commands is marked as such and has nothing else: the copy button copies commands."""
    text = (ROOT / page).read_text()
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        first = block.splitlines()[0]
        if re.match(r"(meshwright|python3?|pip|make|torchrun|srun) ", first):
            assert language == "sh", (page, first)
        assert language, (page, first)


def test_the_table_of_commands_can_be_typed() -> None:
    """The guide's table of all commands."""
    part = (ROOT / "docs/guide.md").read_text().split("| `meshwright ...` |", 1)[1].split("\n\n", 1)[0]
    rows = [words for line in part.splitlines() for words in re.findall(r"^\| `([^`]+)` \|", line)]
    assert len(rows) > 15
    for row in rows:
        read_as_typed(shlex.split(row))


def test_a_wrong_command_is_seen() -> None:
    """A command that the command line refuses is refused by this test's reader."""
    with pytest.raises(ConfigError):
        read_as_typed(["train", "quickstart", "layout.data.sync=rng"])
    with pytest.raises(Exception, match="No such option"):
        read_as_typed(["verify", "quickstart", "--quick"])
    with pytest.raises(AssertionError, match="no command prove"):
        read_as_typed(["prove", "quickstart"])


def test_the_first_run_of_the_readme_is_the_file() -> None:
    text = (ROOT / "README.md").read_text()
    assert f"```yaml\n{(ROOT / 'examples/first.yaml').read_text()}```" in text


# Links


LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
OURS = "github.com/meshwright"
"""No such repository is published yet, so no page has a link there."""


def documents() -> list[Path]:
    ignored = {".venv", "out", "dist", "build"}
    found = [path for path in ROOT.rglob("*.md") if not ignored & set(path.relative_to(ROOT).parts)]
    return sorted(path for path in found if not any(part.startswith(".") for part in path.relative_to(ROOT).parts))


def slugs_of(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the site make anchors."""
    plain = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    heads = re.findall(r"^#+ (.+)$", plain, re.MULTILINE)
    words = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", head) for head in heads]
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in words}


BUILT = {"docs/course/layout.html"}
"""Pages that `make site` writes: tests/test_course.py runs the command."""


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_go_to_files_and_headings_that_exist(path: Path) -> None:
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    for link in (one or other for one, other in LINK.findall(text)):
        assert OURS not in link, link
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, anchor = link.partition("#")
        target = path if not name else path.parent / name
        notebook = target.with_suffix(".ipynb")
        built = target.resolve().relative_to(ROOT).as_posix() in BUILT
        assert built or target.exists() or notebook.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in slugs_of(target), link


def test_no_page_has_an_address_of_ours_outside_of_links() -> None:
    for path in documents():
        assert OURS not in path.read_text(), path
