"""A run file and overrides become one Config; every mistake is named, in one message, before torch is imported."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from meshwright.config import Config, dump_config, load_config, model_names, parse_config
from meshwright.config.load import parse_run
from meshwright.config.section import parse_counts
from meshwright.configs import shipped
from meshwright.ranks.errors import ConfigError

RUNS = list(shipped("runs").values())


def mistakes(tree: dict[str, Any], *overrides: str) -> list[str]:
    """Return the lines of the message."""
    with pytest.raises(ConfigError) as caught:
        parse_config(tree, overrides)
    return str(caught.value).split("\n")


def mistake(tree: dict[str, Any], *overrides: str) -> str:
    """Return the message of one line."""
    (line,) = mistakes(tree, *overrides)
    return line


@pytest.mark.parametrize("run", RUNS, ids=lambda path: path.stem)
def test_shipped_runs_load(run: Path) -> None:
    config = load_config(run)
    assert config.steps > 0
    assert isinstance(hash(config), int), "a plan remembers by sections"


@pytest.mark.parametrize("run", RUNS, ids=lambda path: path.stem)
def test_dump_reads_back_as_the_same_config(run: Path, tmp_path: Path) -> None:
    config = load_config(run, ["optimizer.lr=3e-4", "optimizer.clip=null"])
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(config))
    assert load_config(path) == config


def test_empty_section_is_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("{}\n")
    assert load_config(path) == Config()


@pytest.mark.parametrize(
    "word, value",
    [("3e-4", 3e-4), ("1E3", 1000.0), ("1.5e-2", 0.015), ("2", 2.0), ("1_000e-3", 1.0), ("+1e0", 1.0)],
)
def test_floats_of_yaml_1_2(word: str, value: float) -> None:
    assert parse_config({}, [f"optimizer.lr={word}"]).optimizer.lr == value


@pytest.mark.parametrize("word", ["1e", "e5", "1.0.0e3"])
def test_what_only_looks_like_a_float_is_refused(word: str) -> None:
    assert f"optimizer.lr={word} is not a number" in mistake({}, f"optimizer.lr={word}")


def test_overrides_reach_every_depth_and_the_last_wins() -> None:
    config = parse_config(
        {"model": "gpt2-mini", "steps": 5},
        ["steps=6", "steps=7", "model.layers=2", "optimizer.betas=[0.8, 0.9]", "layout.data.bucket=4M", "seed=0"],
    )
    assert config.steps == 7
    assert (config.model.layers, config.model.hidden) == (2, 256)
    assert config.optimizer.betas == (0.8, 0.9)
    assert config.layout.data.bucket == 4 * 2**20
    assert config.seed == 0


def test_a_precision_in_a_word() -> None:
    config = parse_run({"precision": "bf16"}, ["precision.accumulate=stored", "batch.micro=1"])
    assert (config.precision.level, config.precision.dtype, config.precision.accumulate) == ("O2", "bf16", "stored")
    assert parse_run({"precision": "bf16"}).precision.accumulate == "float32"
    assert parse_run({"precision": {"level": "O1", "dtype": "fp16"}}, ["precision=float64"]).precision.level == "O0"
    with pytest.raises(ConfigError, match=r"^precision=bf61 is no precision .did you mean bf16.*valid: bf16, fp16"):
        parse_run({"precision": "bf61"})


def test_override_replaces_a_whole_section_and_a_text_may_hold_an_equals_sign(tmp_path: Path) -> None:
    source = tmp_path / "a=b.txt"
    source.touch()
    config = parse_config({"optimizer": {"lr": 1.0}}, ["optimizer={name: sgd}", f"data.source={source}"])
    assert (config.optimizer.name, config.optimizer.lr) == ("sgd", 3e-4)
    assert config.data.source == str(source)


def test_overrides_leave_the_tree_as_it_was() -> None:
    tree = {"layout": {"data": {"size": 1}}, "model": {"base": "gpt2-mini"}}
    parse_config(tree, ["layout.data.size=2", "model.layers=1"])
    assert tree == {"layout": {"data": {"size": 1}}, "model": {"base": "gpt2-mini"}}


def test_model_by_name_and_by_base() -> None:
    assert parse_config({"model": "gpt2-xl"}) == parse_config({"model": {"base": "gpt2-xl"}})
    assert parse_config({"model": "gpt2-mini"}, ["model=gpt2-xl"]).model.layers == 48
    assert parse_config({"model": {"base": "gpt2-mini", "layers": 1}}, ["model.base=gpt2-xl"]).model.layers == 1


@pytest.mark.parametrize(
    "word, message",
    [
        ("stpes=3", r"stpes=3 is an unknown key \(did you mean steps\?\); valid: seed, model, .*steps"),
        ("optimizer.learning=1", r"optimizer.learning=1 is an unknown key; valid: name, lr, "),
        ("batch.globl=8", r"batch.globl=8 is an unknown key \(did you mean global\?\); valid: global, micro"),
        ("model.layer=8", r"model.layer=8 is an unknown key \(did you mean layers\?\); .*, base"),
        ("steps=abc", "steps=abc is not a whole number; valid: a whole number >= 1"),
        ("steps=1.5", "steps=1.5 is not a whole number"),
        ("steps=true", "steps=true is not a whole number"),
        ("steps=", "steps=null is not a whole number"),
        ("steps=-3", "steps=-3 is less than 1; valid: a whole number >= 1"),
        ("optimizer.lr=0", "optimizer.lr=0 is not above 0; valid: a number > 0"),
        ("optimizer.lr=true", "optimizer.lr=true is not a number"),
        ("optimizer.lr=.inf", "optimizer.lr=inf is not finite"),
        ("optimizer.lr=.nan", "optimizer.lr=nan is not (above 0|finite)"),
        ("optimizer.schedule.floor=2", "optimizer.schedule.floor=2 is more than 1; valid: a number >= 0 and <= 1"),
        ("model.dropout=1", "model.dropout=1 is not below 1; valid: a number >= 0 and < 1"),
        ("model.tied=3", "model.tied=3 is not true or false"),
        ("data.source=5", "data.source=5 is not a text"),
        ("optimizer.betas=[0.9]", r"optimizer.betas=\[0.9\] is not a list of 2 numbers; valid: a list of 2, each"),
        ("optimizer.betas=[0.9, 2]", "optimizer.betas=2 at index 1 is not below 1"),
        ("optimizer.clip=none", "optimizer.clip=none is neither a number nor null; valid: a number > 0 or null"),
        ("batch.micro=atuo", r"batch.micro=atuo is neither a whole number nor auto \(did you mean auto\?\)"),
        ("batch.micro=0", "batch.micro=0 is less than 1; valid: a whole number >= 1 or auto"),
        ("layout.data.bucket=16X", "bucket=16X is neither a whole number nor auto; valid: .*, or a size such as 16M"),
        (
            "layout.data.sync=alreduce",
            r"is none of the choices \(did you mean allreduce\?\); valid: server-loss, .*zero3",
        ),
        (
            "layout=3",
            "layout=3 is not a section; valid: a section with the keys data, pipeline, context, tensor, transport",
        ),
        (
            "layout.data=[2]",
            r"layout.data=\[2\] is not a section; valid: a section with the keys size, sync, shard, expert, exchange, "
            "bucket",
        ),
        (
            "model=gpt2-smal",
            r"model=gpt2-smal is no model that we have \(did you mean gpt2-small\?\); valid: .*gpt2-xl",
        ),
        ("model=3", "model=3 is neither a model's name nor a section; valid: .*gpt2-xl"),
        ("steps.x=3", "steps.x=3 cannot be set: steps=7 is a value, not a section"),
        ("steps", "override=steps is not of the form key.sub=value; valid: steps=100, "),
        ("=3", "override==3 is not of the form key.sub=value"),
        ("steps=[1", r"steps=\[1 is no YAML value"),
        ("steps={a: 1, a: 2}", "is no YAML value"),
    ],
)
def test_a_mistake_says_field_value_rule_and_what_would_work(word: str, message: str) -> None:
    line = mistake({"steps": 7}, word)
    assert re.search(message, line), line


def test_all_mistakes_at_once_those_of_rules_too() -> None:
    tree = {
        "steps": -1,
        "stpes": 5,
        "model": {"base": "gpt2-mini", "heads": 7},
        "data": {"sequence": 9999, "source": "/no/such/text"},
        "layout": {"data": {"sync": "rings"}},
    }
    fields = {line.split("=")[0] for line in mistakes(tree, "optimizer.lr=fast", "bad")}
    assert fields == {
        *(
            "steps",
            "stpes",
            "model.heads",
            "data.sequence",
            "data.source",
            "layout.data.sync",
            "optimizer.lr",
            "override",
        )
    }


def test_a_mistaken_section_does_not_raise_further_mistakes() -> None:
    # the default model would be too short for the sequence, but the run does not ask for the default model
    assert "is no model" in mistake({"model": "gpt3", "data": {"sequence": 2048}})
    assert "is not a section" in mistake({"layout": 3, "batch": {"global": 7}})


@pytest.mark.parametrize(
    "content, message",
    [
        (b"a: [1\nb: 2\n", "is no YAML: .* at line 2, column 2"),
        (b"steps: 2\nsteps: 3\n", "is no YAML: steps is given twice at line 2, column 1"),
        (b"- 1\n", "holds no `key: value` lines; valid: .*quickstart"),
        (b"\xff\xfe\x00", "is not UTF-8 text"),
        (None, "is no such file; valid: .*quickstart"),
    ],
)
def test_files_that_are_no_runs(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "run.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"^run={re.escape(str(path))} {message}"):
        load_config(path)


def test_a_folder_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_config(tmp_path)


def test_config_errors_come_without_torch() -> None:
    code = (
        "import sys\n"
        "from meshwright.config import load_config\n"
        "from meshwright.ranks.errors import ConfigError\n"
        "try:\n"
        f"    load_config({str(RUNS[0])!r}, ['stpes=3', 'model.heads=7'])\n"
        "except ConfigError as error:\n"
        "    print(len(error.problems), 'torch' in sys.modules, 'numpy' in sys.modules)\n"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.split() == ["2", "False", "False"], answer.stdout + answer.stderr


def test_help_comes_without_the_config() -> None:
    """The config's schema takes most of the time of a command that needs no schema."""
    heavy = "{'meshwright.config.section', 'meshwright.ranks.launch', 'torch'}"
    code = f"import sys, meshwright.cli; print({heavy} & set(sys.modules))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout == "set()\n"


def test_model_names_are_the_shipped_files() -> None:
    assert {"gpt2-mini", "gpt2-small", "megatron-8.3b", "axonn-100b"} <= set(model_names())


def test_counts_of_an_option_are_sorted_and_each_once() -> None:
    assert parse_counts("--ranks", "4, 2,4", "ranks", least=2) == (2, 4)
    for words in ("1", "two", "2,,4", "0", ""):
        with pytest.raises(ConfigError, match=r"--ranks=\w* is not a number of ranks; valid: 2 or more, such as 2,4,8"):
            parse_counts("--ranks", words, "ranks", least=2)
