"""The valid values that a mistake names can be followed by a program, until the run is legal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import copy, deepcopy
from itertools import islice
from random import Random
from typing import Any

import pytest

from meshwright.config.load import parse_run
from meshwright.config.shorthand import spell_out
from meshwright.config.yaml_text import plain_values
from meshwright.ranks.errors import ConfigError, Problem
from meshwright.ranks.remedies import LEFT_OUT, Remedy, of_problem, remedies_of
from tests.fuzz.axes import AXES, tree_of

ROUNDS = 8
"""The most messages before a run is legal, if a program follows each problem's first remedy."""

TEXTS: dict[str, list[object]] = {
    "1, 2, 4": ["1", "2", "4"],
    "1, 2, 3, ..., 64": ["1", "2", "3", "64"],
    "none, auto, {every: n}": ["none", "auto", "{every: n}"],
    "1 to 8": ["1", "8"],
    "1 to 1": ["1"],
    "8 or less": ["8"],
    "257 or more": ["257"],
    "16, 24, any multiple of 8": ["16", "24"],
    "a whole number >= 1": ["1"],
    "a number > 0": ["1"],
    "a number >= 0 and < 1": ["0"],
    "a whole number >= 1 or auto": ["1", "auto"],
    "true or false": ["true", "false"],
    "leave it out": [LEFT_OUT],
    "[row, col] in any order": [],
    "the model's tokenizer.json": [],
    "": [],
}

NAMED: dict[str, list[Remedy]] = {
    "g=2": [{"g": "2"}],
    "1; or g=64, any multiple": [{"f": "1"}, {"g": "64"}],
    "g.h=2 or more and i=zero1, zero2": [{"g.h": "2", "i": "zero1"}, {"f": "zero2"}],
    "leave it out, or g=adamw, sgd": [{"f": LEFT_OUT}, {"g": "adamw"}, {"g": "sgd"}],
    "g=[1, 2], or none": [{"g": "[1, 2]"}, {"g": "none"}],
    "g=megatron g.size=2": [{"g": "megatron", "g.size": "2"}],
}


@pytest.mark.parametrize("text", TEXTS)
def test_texts_are_read(text: str) -> None:
    assert [remedy["f"] for remedy in remedies_of("f", text)] == TEXTS[text]


@pytest.mark.parametrize("text", NAMED)
def test_texts_that_name_fields_are_read(text: str) -> None:
    assert list(remedies_of("f", text)) == NAMED[text]


CHOICES: dict[str, list[Any]] = {
    "model.base": [
        "llama-mini", "deepseek-mini", "mixtral-mini", "gpt2-small", "bert-tiny", "t5-tiny", "transformer-tiny",
        "vit-digits", "resnext-tiny",
    ],
    "batch.global": [8, 12, 16, 24, 64],
    "batch.micro": [1, 2, 3, 4, 8],
    "bits.kind": ["layout-free"],
    "bits.samples": [1, 2, 3, 4],
    "bits.tensor": [1, 2, 3, 4, 8],
    "bits.hidden": [1, 2, 4, 6],
    "bits.sequence": [1, 2, 3, 4, 8],
    "bits.attention": ["runs", "heads"],
    "layout.data.size": [1, 2, 3, 4],
    "layout.data.sync": [
        "allreduce", "zero1", "zero2", "zero3", "ring", "rooted", "server-gradient", "server-loss",
    ],
    "layout.data.shard": [1, 2, 3],
    "layout.data.expert": [2, 3, 4],
    "layout.data.exchange": ["messages"],
    "layout.pipeline.size": [2, 3, 4, 99],
    "layout.pipeline.chunks": [2, 3],
    "layout.pipeline.placement": ["v"],
    "layout.pipeline.schedule": ["gpipe", "1f1b", "axonn", "message-driven"],
    "layout.pipeline.limit": [1, 2, 8],
    "layout.pipeline.head": ["spread"],
    "layout.pipeline.partition": ["measured", [1, 1], [2, 2], [0, 4]],
    "layout.tensor": [
        {"kind": "megatron", "size": 2}, {"kind": "megatron", "size": 3, "sequence_parallel": True},
        {"kind": "megatron", "size": 8}, {"kind": "megatron"}, {"size": 2}, {"kind": "tesseract", "q": 2, "d": 3},
        {"kind": "tesseract", "q": 3}, {"kind": "tesseract", "q": 1, "d": 2}, {"kind": "subgraph", "size": 2},
        {"kind": "subgraph", "size": 3, "common": "one"}, {"kind": "subgraph", "size": 2, "branch": "attention"},
    ],
    "layout.context": [{"kind": "ring", "size": 2}, {"kind": "ulysses", "size": 3}, {"kind": "ulysses", "size": 4}],
    "layout.order": [["data", "pipe"], ["row", "data"], ["pipe", "data", "tensor"], ["row:2", "data"]],
    "layout.ranks_per_node": [2, 3, 8],
    "layout.transport": ["threads", "torch"],
    "precision": ["bf16", "fp16", "float64", {"level": "O1", "dtype": "float32"}, {"level": "O0", "dtype": "bf16"}],
    "memory.recompute": ["selective", "auto", "ops", "offload", 1, 2, 90],
    "memory.offload": [{"to": "host", "bucket": 1000}, {"to": "disk"}, {"bucket": "16M"}],
    "memory.summa": ["gather", "stream"],
    "optimizer.name": ["muon", "sgd", "momentum", "adamw"],
    "optimizer.momentum": [0.9],
    "optimizer.lr": [0, -1, "fast"],
    "optimizer.schedule": [{"stable": 0.5, "floor": 0.1}, {"warmup": 100}],
    "data.sequence": [100, 64, 128, 4096],
    "data.documents": ["separate"],
    "restarts": [1, {"times": 1, "shrink": True}],
    "validation": [{"every": 0, "patience": 2}, {"every": 2, "patience": 2, "metric": "loss"}],
    "checkpoint.best": [True],
    "steps": [0, 4, 10, "many"],
    "lora": [{"rank": 8}],
    "tp": [2],
}  # fmt: skip
"""Fields of a run file over a shipped model, and values that are legal in some runs."""

ALWAYS = ("model.base", "batch.global")


def drawn_runs(seed: int) -> Iterator[dict[str, Any]]:
    """Yield run files of the fuzzer's axes, and of shipped models with fields of `CHOICES`, in turns; few are legal."""
    random = Random(seed)
    while True:
        yield tree_of({axis: random.choice(values) for axis, values in AXES.items()})
        tree: dict[str, Any] = {}
        free = random.random() < 0.6
        for field, values in CHOICES.items():
            share = 0.5 if field.startswith(("bits", "layout.data.size", "layout.tensor")) else 0.2
            if field in ALWAYS or ((free or not field.startswith("bits")) and random.random() < share):
                put(tree, field, deepcopy(random.choice(values)))
        yield tree


def put(tree: dict[str, Any], field: str, value: object) -> None:
    """Set a field of a run file as a person would, or remove the field."""
    *parents, last = field.split(".")
    node = tree
    for parent in parents:
        if not isinstance(node.get(parent), dict):
            node[parent] = {}
        node = node[parent]
    if value is LEFT_OUT:
        node.pop(last, None)
    else:
        node[last] = value


def as_edits(tree: dict[str, Any], words: list[str], remedy: Remedy) -> None:
    """Follow a remedy in the file."""
    for field, value in remedy.items():
        put(tree, field, value if value is LEFT_OUT else plain_values(str(value)))


def as_words(tree: dict[str, Any], words: list[str], remedy: Remedy) -> None:
    """Follow a remedy by words; remove a field that is left out from the file and from the words."""
    for field, value in remedy.items():
        words[:] = [word for word in words if not f"{word.partition('=')[0]}.".startswith(f"{field}.")]
        if value is LEFT_OUT:
            put(tree, field, LEFT_OUT)
        else:
            words.append(f"{field}={value}")


def follow(tree: dict[str, Any], means: Any) -> list[list[Problem]]:
    """Return the messages of a run that is mended by the first remedy of each problem, until the run is legal."""
    tree, words, messages = deepcopy(tree), list[str](), list[list[Problem]]()
    for _ in range(ROUNDS + 1):
        spell_out(tree)
        try:
            parse_run(tree, words)
        except ConfigError as error:
            messages.append(list(error.problems))
        else:
            return messages
        for problem in messages[-1]:
            assert of_problem(problem), f"{problem} has no remedy"
            means(tree, words, of_problem(problem)[0])
    raise AssertionError("in a circle:\n" + "\n".join(str(problem) for each in messages[-2:] for problem in each))


@pytest.mark.parametrize("means", [as_edits, as_words])
def test_every_refusal_of_a_drawn_run_ends_legal(means: Any) -> None:
    rounds = [len(follow(tree, means)) for tree in islice(drawn_runs(7), 300)]
    assert sum(map(bool, rounds)) > 250  # nearly all runs were refused


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("means", [as_edits, as_words])
def test_every_refusal_of_many_drawn_runs_ends_legal(means: Any, seed: int) -> None:
    for tree in islice(drawn_runs(100 + seed), 2000):
        follow(tree, means)


def test_a_followed_remedy_loads_where_its_mistake_is_alone() -> None:
    """In a run of one mistake, each alternative value of the field is tried, not the first value alone."""
    tried = 0
    for tree in islice(drawn_runs(11), 600):
        spell_out(tree)
        problems = mistakes_of(tree, [])
        if len(problems) != 1:
            continue
        for remedy in of_problem(problems[0]):
            other, words = deepcopy(tree), list[str]()
            as_edits(other, words, remedy)
            assert problems[0] not in mistakes_of(other, words), (str(problems[0]), remedy)
            tried += 1
    assert tried > 30


def mistakes_of(tree: Mapping[str, Any], words: list[str]) -> list[Problem]:
    try:
        parse_run(dict(tree), words)
    except ConfigError as error:
        return list(error.problems)
    return []


def test_remedies_of_the_reported_refusals() -> None:
    """Remedies that could not be followed: a prose of numbers, fewer than one, 1 to 1."""
    tree = {"model": {"base": "vit-digits"}, "batch": {"global": 8}, "bits": {"kind": "layout-free", "hidden": 2}}
    told = [str(problem) for problem in mistakes_of(tree, [])]
    assert "bits.samples=2, or bits.hidden=1" in "\n".join(told)
    tesseract = {"layout": {"tensor": {"kind": "tesseract", "q": 1, "d": 2}}}
    (problem,) = mistakes_of(tesseract, [])
    assert str(problem).endswith("; valid: 1")
    assert of_problem(problem) == ({"layout.tensor.d": "1"},)
    (problem,) = mistakes_of({"layout": {"tensor": {"kind": "megatron"}}}, [])
    assert str(problem) == "layout.tensor.size is missing; valid: a whole number >= 1"
    (problem,) = mistakes_of({}, ["tp=2"])
    assert of_problem(problem)[0] == {"tp": LEFT_OUT, "layout.tensor": "megatron", "layout.tensor.size": "2"}


def test_a_field_is_left_out_in_another_process_as_well() -> None:
    (problem,) = mistakes_of({"lora": 8}, [])
    (copied,) = copy(ConfigError([problem])).problems
    assert deepcopy(of_problem(copied))[0]["lora"] is LEFT_OUT
