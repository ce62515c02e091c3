"""A check of a script: N processes against one, recorded and compared by `meshwright parity`.

The one process runs with words of its own if the script cuts a batch into ranks' shares: it then has to read all rows.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from meshwright.ranks.errors import LaunchError
from meshwright.ranks.streams import say

SEED = 1
"""Seed of the run that is perturbed by one rounding, which gives the tolerances."""

_CHECK = '''"""{ranks} processes of {script} against one, for pytest and as a script. Written by `meshwright adopt`."""

import sys
from pathlib import Path

from meshwright.planner.adopt.proof import prove_script

SCRIPT = Path({path!r})
WORDS = {words!r}
"""The script's words with {ranks} processes: give a small model."""
ONE = {one!r}
"""The script's words with one process. If each process reads its own rows: a batch {ranks} times as large."""


def test_{ranks}_processes_equal_one(tmp_path: Path) -> None:
    assert prove_script(SCRIPT, WORDS, ONE, {ranks}, tmp_path / "proof") == 0


if __name__ == "__main__":
    sys.exit(prove_script(SCRIPT, WORDS, ONE, {ranks}, Path(sys.argv[1] if len(sys.argv) > 1 else "proof")))
'''


def write_check(script: Path, words: Sequence[str], one: str, ranks: int, folder: Path) -> Path:
    """Write test_adopted.py for pytest and CI, and return its path."""
    path = folder / "test_adopted.py"
    alone = one.split() if one else list(words)
    path.write_text(
        _CHECK.format(ranks=ranks, script=script.name, path=str(script.resolve()), words=list(words), one=alone)
    )
    return path


def prove_script(script: Path, words: Sequence[str], one: Sequence[str] | None, ranks: int, folder: Path) -> int:
    """Run a script with one process, again with one rounding added, and with N processes; compare the records.

    Returns:
        The exit code of `meshwright parity compare`: 0 if all hold.

    Raises:
        LaunchError: A run failed; its output is in the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    record = ["-m", "meshwright.parity", "record", "--stop", "--steps", "1,2"]
    alone = [str(script), *(words if one is None else one)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    # One process under torchrun as well: a script that joins a process group needs its variables.
    for name, command in (
        ("one", [*torchrun, "1", *record, "--out", str(folder / "one"), *alone]),
        ("perturbed", [*torchrun, "1", *record, "--out", str(folder / "one"), "--perturb", str(SEED), *alone]),
        ("many", [*torchrun, str(ranks), *record, "--out", str(folder / "many"), str(script), *words]),
    ):
        output = folder / f"{name}.txt"
        with output.open("w") as file:
            code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL).returncode
        if code:
            lines = output.read_text(errors="replace").splitlines()
            errors = [line for line in lines if "Error" in line]
            raise LaunchError(
                f"{shlex.join([script.name, *alone[1:]])} ended with code {code} in the run `{name}`: "
                f"{errors[0].strip()[:300] if errors else 'no error was printed'} ({output})"
            )
    say(f"compared: {folder / 'one'} and {folder / 'many'}")
    compare = [sys.executable, "-m", "meshwright.parity", "compare", str(folder / "one"), str(folder / "many")]
    return subprocess.run([*compare, "--page", str(folder / "parity.html")]).returncode
