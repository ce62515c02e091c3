"""Hostile files and words, and slips that look hostile: each is refused in a sentence, soon, without a traceback."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshwright.config import load_config
from meshwright.ranks.errors import ConfigError
from tests.patience import PATIENCE_SECONDS

CPU_SECONDS = 20
"""CPU time of this process: each refusal takes a tenth of a second; without the guard, hours."""

BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "\n".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]" for old, new in zip("abcdefghi", "bcdefghij", strict=True)
)
CHAIN = "a0: &a0 [1]\n" + "\n".join(f"a{n}: &a{n} [*a{n - 1}]" for n in range(1, 2000))

FILES = {
    "an alias bomb": (BOMB, "repeats its aliases into more than 100,000 values"),
    "an alias of itself": ("a: &a [*a]\n", "contains itself at line 1, column 4"),
    "a chain of aliases": (CHAIN, "is nested deeper than 32 levels"),
    "5000 nested lists": ("seed: " + "[" * 5000 + "]" * 5000, "is nested deeper than 32 levels at line 1, column 38"),
    "5000 nested mappings": ("seed: " + "{a: " * 5000 + "1" + "}" * 5000, "is nested deeper than 32 levels"),
    "a list as a key": ("[1, 2]: 3\n", "has a key that is no word at line 1, column 1"),
    "a mapping as a key": ("steps: {{a: 1}: 2}\n", "has a key that is no word at line 1, column 9"),
    "a number as a key": ("1: 2\n", "has a key that is no word at line 1, column 1"),
    "an octal number": ("seed: 010\n", "holds 010, which begins with a zero: write 10 (or 8, the octal number)"),
    "a number of 5000 digits": ("seed: " + "9" * 5000, "which cannot be read at line 1, column 7"),
    "two documents": ("seed: 1\n---\nseed: 2\n", "but found another document at line 2, column 1"),
    "a key twice": ("seed: 1\nsteps: 2\nseed: 3\n", "seed is given twice at line 3, column 1"),
    "a tab": ("model:\n\tlayers: 2\n", "found character '\\t' that cannot start any token at line 2, column 1"),
    "nothing": ("", "is empty"),
    "comments alone": ("# to do\n\n", "is empty"),
    "a list": ("- 1\n- 2\n", "holds no `key: value` lines"),
    "an object of Python": ("seed: !!python/object/apply:os.getcwd []\n", "could not determine a constructor"),
    "a control character": ("seed: \x01\n", "unacceptable character"),
    "a large file": ("# " + "x" * 2**20, "is larger than 1 MiB"),
}

WORDS = {
    "optimizer.lr=1e30": "is more than 1000",
    "optimizer.lr=.inf": "is not finite",
    "optimizer.lr=.nan": "is not finite",
    "optimizer.weight_decay=.nan": "is not finite",
    "model.layers=1000000000": "is more than 10000",
    "model={family: resnext, stage_blocks: [1000000000]}": "at index 0 is more than 10000",
    "model.hidden=99999999999999999999999": "is more than 2.81475e+14",
    "batch.global=99999999999999999999999": "is more than 2.81475e+14",
    "seed=99999999999999999999999": "is more than 9.22337e+18",
    "steps=1e30": "is not a whole number",
    "steps=" + "9" * 5000: "is no YAML value",
    "steps=" + "[" * 5000 + "]" * 5000: "is no YAML value",
    "steps={? [a] : 1}": "is no YAML value",
    "a" + ".a" * 5000 + "=1": "is nested deeper than any key",
}


@pytest.fixture(autouse=True)
def in_time() -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError(f"no answer in {CPU_SECONDS} s")

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.signal(signal.SIGPROF, before)


def complaint(path: Path, *words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, words)
    text = str(caught.value)
    assert len(text) < 2000, "a sentence, not a page"
    return text


@pytest.mark.parametrize("name", FILES)
def test_files(name: str, tmp_path: Path) -> None:
    content, says = FILES[name]
    path = tmp_path / "run.yaml"
    path.write_text(content)
    text = complaint(path)
    assert text.startswith(f"run={path} ")
    assert says in text


@pytest.mark.parametrize("content", [b"\x89PNG\r\n\x1a\n\xff\xfe", bytes(range(256)), b"\xff\xfes\x00e\x00e\x00d\x00"])
def test_binary_files(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    assert "is not UTF-8 text" in complaint(path)


@pytest.mark.parametrize("word", WORDS, ids=lambda word: word[:40])
def test_words(word: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("steps: 1\n")
    text = complaint(path, word)
    assert WORDS[word] in text


def test_large_counts_are_checked_without_counting(tmp_path: Path) -> None:
    """For a batch of a thousand billion, divisors and microbatches are found without trying every number."""
    path = tmp_path / "run.yaml"
    path.write_text("batch: {global: 1000000000000}\n")
    assert "layout.data.size=3 does not divide batch.global=1000000000000" in complaint(path, "layout.data.size=3")
    assert load_config(path, ["layout.pipeline.size=2"]).micro == 250_000_000_000


def test_the_command_says_a_sentence_and_ends_with_2(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(BOMB)
    command = [sys.executable, "-m", "meshwright.cli", "train", "run.yaml"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    assert ran.returncode == 2
    assert ran.stderr.startswith("meshwright: run=run.yaml is no YAML: repeats its aliases")
    assert len(ran.stderr.splitlines()) == 1
