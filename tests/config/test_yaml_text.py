"""YAML: numbers with two readings are refused in every text that is read; a written text is read back equally."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Literal

import pytest
import yaml

from meshwright.config import load_config
from meshwright.config.section import Section
from meshwright.config.yaml_text import complaint, plain_values, yaml_text
from meshwright.planner.plan.cluster import load_cluster
from meshwright.planner.plan.software import load_program
from meshwright.planner.plan.space import fixed_fields
from meshwright.ranks.errors import ConfigError

PACKAGE = Path(__file__).resolve().parents[2] / "meshwright"

REFUSED = {
    "010": "write 10 (or 8, the octal number)",
    "-010": "write -10 (or -8, the octal number)",
    "0777": "write 777 (or 511",
    "08": "write 8",
    "00": "write 0,",
    "0_10": "write 10",
    "007": "write 7,",
    "00.5": "write 0.5",
    "010.5": "write 10.5",
    "010e3": "write 10e3",
    "1:30": "write 90",
    "-1:30": "write -90",
    "1:30.5": "write 90.5",
    "0:30.5": "write 30.5",
    "12:30:45": "write 45045",
    "1_0.5": "write 10.5",
    "1_0": "write 10",
    "1__000": "write 1000",
    "1_": "write 1",
    "1_0e3": "write 10e3",
    "1_00_000": "write 100000",
    "0x_1F": "write 0x1F",
    "0b101": "write 5",
    "-0b11": "write -3",
    "!!int 010": "write 10",
    "!!float 1:30": "write 90",
}
"""Numbers that YAML 1.1 and a person read differently, and the remedy of each."""

READ = {
    "10": 10,
    "-3": -3,
    "+5": 5,
    "0": 0,
    "0.5": 0.5,
    ".5": 0.5,
    "1.": 1.0,
    "1e-3": 0.001,
    "3.0e-4": 3e-4,
    "1E5": 1e5,
    "5.e3": 5000.0,
    "0x1F": 31,
    "1_000": 1000,
    "1_000_000": 1_000_000,
    "1_000.5": 1000.5,
    ".inf": float("inf"),
    "-.inf": float("-inf"),
    "true": True,
    "False": False,
    "~": None,
    "null": None,
    "yes": "yes",
    "no": "no",
    "on": "on",
    "off": "off",
    "0o17": "0o17",
    "2024-01-01": "2024-01-01",
    "2024-13-45": "2024-13-45",
    "127.0.0.1:80": "127.0.0.1:80",
    "1:75": "1:75",
    "'010'": "010",
    '"1:30"': "1:30",
    "row:2": "row:2",
    "16M": "16M",
}


@pytest.mark.parametrize("text", REFUSED)
def test_numbers_with_two_readings_are_refused_with_line_and_remedy(text: str) -> None:
    with pytest.raises(yaml.YAMLError) as raised:
        plain_values(f"a: 1\nx: {text}\n")
    told = complaint(raised.value)
    assert REFUSED[text] in told
    assert "in quotes for a text" in told
    assert "at line 2, column 4" in told


@pytest.mark.parametrize("text", READ)
def test_numbers_and_words_with_one_reading_are_read(text: str) -> None:
    value = plain_values(f"x: {text}")["x"]
    assert value == READ[text]
    assert type(value) is type(READ[text])


def test_nan_is_read_and_refused_by_its_field() -> None:
    assert plain_values("x: .nan")["x"] != plain_values("x: .nan")["x"]
    with pytest.raises(ConfigError, match=r"optimizer.lr=nan is not finite"):
        load_config("quickstart", ["optimizer.lr=.nan"])


@pytest.mark.parametrize("text", ["010", "1:30", "1_0.5", "0b11", "08"])
def test_every_reader_refuses_them(text: str, tmp_path: Path) -> None:
    file = tmp_path / "file.yaml"
    file.write_text(f"# one\nsteps: {text}\n")
    for read in (
        lambda: load_config(file),
        lambda: load_config("quickstart", [f"steps={text}"]),
        lambda: load_config("quickstart", [f"optimizer={{lr: {text}}}"]),
        lambda: load_cluster(str(file)),
        lambda: load_program(facts=[f"attention={text}"]),
        lambda: fixed_fields([f"steps={text}"]),
    ):
        with pytest.raises(ConfigError, match="in quotes for a text at line"):
            read()


@pytest.mark.parametrize("field", ["steps", "optimizer.lr", "batch.micro", "layout.pipeline.limit"])
@pytest.mark.parametrize("text", ["010", "1_0", " 10", "10 ", "0_1", "00.5", "1_0e3"])
def test_a_field_of_numbers_refuses_them_in_quotes_too(text: str, field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field}={text} (is a text, and no number as YAML 1.2 writes it|is)"):
        load_config("quickstart", [f"{field}='{text}'"])


@pytest.mark.parametrize("word", ["optimizer.betas=['0_9', 0.95]", "optimizer.betas=[0.9, '00.95']"])
def test_a_list_of_numbers_refuses_them_too(word: str) -> None:
    with pytest.raises(ConfigError, match=r"is a text, and no number as YAML 1\.2 writes it"):
        load_config("quickstart", [word])
    assert load_config("quickstart", ["optimizer.betas=['0.9', '0.95']"]).optimizer.betas == (0.9, 0.95)


def test_a_plain_number_in_quotes_is_a_number_and_a_name_may_have_digits() -> None:
    class Named(Section):
        name: str | None
        folder: Path
        size: int | Literal["auto"]

    config = load_config("quickstart", ["steps='40'", "optimizer.lr='3e-4'"])
    assert (config.steps, config.optimizer.lr) == (40, 3e-4)
    assert Named(name="010", folder="010", size="10").name == "010"  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="is a text, and no number"):
        Named(name="010", folder="010", size="010")  # type: ignore[arg-type]


@pytest.mark.parametrize("word", ["yes", "no", "on", "off", "true", "false"])
def test_words_of_truth_are_taken_by_fields_of_truth_alone(word: str) -> None:
    truth = word in ("yes", "on", "true")
    assert load_config("quickstart", [f"precision.tf32={word}", "device=cuda"]).precision.tf32 is truth
    with pytest.raises(ConfigError, match=f"^steps={word} is not a whole number|true and false are not numbers"):
        load_config("quickstart", [f"steps={word}"])


@pytest.mark.parametrize("word", ["none", "no", "off", "false", "null", "~"])
@pytest.mark.parametrize("field", ["validation", "check", "restarts"])
def test_every_word_for_none_switches_off(field: str, word: str) -> None:
    config = load_config("quickstart", [f"{field}={word}"])
    assert [config.validation.every, config.check.every, config.restarts.times][
        ["validation", "check", "restarts"].index(field)
    ] == 0


@pytest.mark.parametrize("text", [text for text in [*REFUSED, *READ, "", "=", "a: b", "# c"] if "!!" not in text])
def test_written_texts_are_read_back_as_texts(text: str) -> None:
    for flow in (False, True):
        written = yaml_text({"x": text}, flow=flow)
        assert plain_values(written) == {"x": text}
        assert yaml.safe_load(written) == {"x": text}  # other readers of the file know YAML 1.1


def test_one_module_loads_yaml() -> None:
    loads = {"load", "safe_load", "load_all", "safe_load_all", "full_load", "unsafe_load"}
    found = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in loads and ast.unparse(node.value) == "yaml"
    }
    # A Kubernetes patch is read by Kubernetes' rules: `defaultMode: 0400` is octal.
    assert found == {"tools/submit/manifests.py"}
