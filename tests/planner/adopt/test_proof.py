"""`meshwright adopt --prove`: N processes of a script against one process, and mistakes planted in copies of
examples."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshwright.parity.recorded import RecordedRun
from meshwright.planner.adopt.edits import batch_times
from meshwright.planner.adopt.proof import Proof, prove_script, record_processes, shares_of
from meshwright.ranks.errors import LaunchError
from tests.command_line import environment_for, meshwright
from tests.patience import PATIENCE_SECONDS

EXAMPLES = Path(__file__).resolve().parents[3] / "examples/adopt"
TRAINER = (
    "--output_dir out --report_to none --save_strategy no --max_steps 3 --use_cpu --per_device_train_batch_size 4 "
    "--width 64 --layers 2 --heads 4 --vocabulary 256 --length 32"
)
SMALL = {
    "gpt.py": "--layers 2 --width 64 --heads 4 --block_size 32 --vocabulary 256 --dtype float32 --batch_size 4",
    "ddp.py": "--batch 4", "fsdp.py": "--size tiny --sequence 32 --float32", "trainer.py": TRAINER,
    "vision.py": "--batch 8 --groups 4", "tensor_parallel.py": "", "accelerated.py": "", "pipeline.py": "",
    "lora.py": "", "packed.py": "",
}  # fmt: skip

COPIES = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    model(torch.randn(6, 8)).square().mean().backward()
    optimizer.step()
"""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TINY", "1")
    monkeypatch.chdir(tmp_path)


def proved(folder: Path, name: str, old: str = "", new: str = "", words: str | None = None) -> Proof:
    """Prove a copy of an example with a line changed."""
    for path in EXAMPLES.glob("*.py"):
        text = path.read_text()
        assert path.name != name or old in text
        (folder / path.name).write_text(text.replace(old, new) if path.name == name and old else text)
    return prove_script(folder / name, (SMALL[name] if words is None else words).split(), None, 2, folder / "proof")


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.long) for name in SMALL if name != "ddp.py"])
def test_two_processes_of_an_example_equal_one(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    pytest.importorskip("peft")
    proof = proved(tmp_path, name)
    assert proof.verdict == "PASS: 2 processes equal one in step 1, step 2"
    assert proof.times == (1 if name in ("tensor_parallel.py", "pipeline.py") else 2)
    compared = {row.kind for result in proof.results for row in result.rows}
    assert {"loss", "gradient", "weight", "state"} <= compared


def test_a_gradient_that_is_not_reduced_is_named(tmp_path: Path) -> None:
    line = "    model = DistributedDataParallel("
    left_out = (
        "    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ['blocks.1.mlp.0.weight'])\n"
    )
    proof = proved(tmp_path, "ddp.py", line, left_out + line)
    assert not proof.holds
    assert proof.verdict.startswith("FAIL: 2 processes differ from one, step 1: missing reduction at blocks.1.mlp.0: ")
    assert proof.edited == "--batch 8"


@pytest.mark.long
@pytest.mark.parametrize(
    "name, old, new, words, said",
    [
        ("gpt.py", "        loss.backward()", "        (loss * world).backward()", None, "step 1: scaled at "),
        ("ddp.py", "loss = model(x", "loss = model.module(x", None, "step 1: missing reduction at "),
        ("vision.py", "", "", "--batch 8", "step 1: wrong values at stem.1: "),
    ],
    ids=["loss not averaged", "no reduction", "batch norm of own rows"],
)
def test_a_mistake_is_named(name: str, old: str, new: str, words: str | None, said: str, tmp_path: Path) -> None:
    proof = proved(tmp_path, name, old, new, words)
    assert not proof.holds
    assert said in proof.verdict


def test_the_command_says_that_copies_split_nothing(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(COPIES)
    ran = meshwright(tmp_path, "adopt", "--edits", "0", "--out", "out", "--prove", "2", "--json", "script.py")
    assert ran.returncode == 0, ran.stderr
    proof = json.loads(ran.stdout)["proof"]
    assert proof["holds"]
    assert proof["verdict"].endswith("; but nothing is split, each process is a copy of the one")
    assert "step 1" in (tmp_path / "out/proof/parity.html").read_text()


def test_a_failing_process_is_named_with_the_line(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, time\nif os.environ['RANK'] == '1':\n    raise ValueError('no rows')\ntime.sleep(10_000)\n"
    )
    begun = time.monotonic()
    with pytest.raises(LaunchError, match=r"process 1 of 2 ended with code 1: script.py:3: ValueError: no rows"):
        record_processes(script, (), 2, tmp_path / "many", tmp_path / "many.txt")
    assert time.monotonic() - begun < PATIENCE_SECONDS


def test_ctrl_c_ends_all_processes_of_a_proof(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import os, time\n"
        "if 'RANK' in os.environ:\n    print('begun', os.getpid(), flush=True)\n    time.sleep(10_000)\n" + COPIES
    )
    # A background job of a shell ignores Ctrl-C, and the job's children do so as well.
    command = ["env", "--default-signal=INT", sys.executable, "-m", "meshwright.cli", "adopt", "--edits", "0"]
    command += ["--out", "out", "--prove", "2", "script.py"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment_for(tmp_path), stdout=subprocess.DEVNULL, start_new_session=True
    )
    output, end = tmp_path / "out/proof/many.txt", time.monotonic() + PATIENCE_SECONDS
    while not (output.is_file() and output.read_text().count("begun") == 2):
        assert time.monotonic() < end
        assert process.poll() is None
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(PATIENCE_SECONDS) != 0
    numbers = [line.split()[1] for line in output.read_text().splitlines()]
    assert not any(Path(f"/proc/{number}").exists() for number in numbers)


def test_stages_are_no_shares_of_a_batch(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(COPIES.replace("manual_seed(0)", "manual_seed(int(__import__('os').environ['RANK']))"))
    record_processes(script, (), 2, tmp_path / "many", tmp_path / "many.txt")
    assert shares_of(RecordedRun.read(tmp_path / "many")) == (1, False)


@pytest.mark.parametrize(
    "text, words, factor, made",
    [
        ("", ("--batch_size", "8", "--x", "1"), 2, (None, ("--batch_size", "16", "--x", "1"), "--batch_size 16")),
        ("", ("--train-batch-size=8",), 3, (None, ("--train-batch-size=24",), "--train-batch-size=24")),
        ("", ("data.batch_size=4",), 0.5, (None, ("data.batch_size=2",), "data.batch_size=2")),
        ("", ("--batch_size", "1"), 0.5, None),
        ("batch_size, length = 4, 8\n", (), 2, ("batch_size, length = 8, 8\n", (), "batch_size, length = 8, 8")),
        ("HfArgumentParser(TrainingArguments)\n", (), 2,
         (None, ("--per_device_train_batch_size", "16"), "--per_device_train_batch_size 16")),
        ("steps = 4\n", ("--rate", "3"), 2, None),
    ],
)  # fmt: skip
def test_a_batch_is_scaled_where_the_script_says_it(
    text: str, words: tuple[str, ...], factor: float, made: tuple[str | None, tuple[str, ...], str] | None
) -> None:
    assert batch_times(text, words, factor) == made
