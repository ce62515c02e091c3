"""Rules that join fields: each can fail, names both fields, and lists values that pass."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from meshwright.config import parse_run, rules
from meshwright.config.registry import entries
from meshwright.config.rules import RULES
from meshwright.config.section import Rule, divisors, listed
from meshwright.data.messages_section import MessagesData
from meshwright.families.bert.data_section import SquadData
from meshwright.families.deepseek.section import DeepSeek
from meshwright.families.llama.section import Llama
from meshwright.families.qwen_next.section import QwenNext
from meshwright.families.seq2seq.data_section import PairData
from meshwright.families.seq2seq.section import T5
from meshwright.families.vision.section import ResNeXt, Vit
from meshwright.ranks.errors import ConfigError
from meshwright.strategies.memory.section import GROUPING


def mistake(**tree: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_run(tree)
    (problem,) = caught.value.problems
    return str(problem)


def test_every_rule_is_listed() -> None:
    found = [*GROUPING, *(value for value in vars(rules).values() if isinstance(value, Rule))]
    brought = [rule for rule in RULES if rule not in found]
    assert set(found) <= set(RULES)
    groups = ("models", "tensor", "data", "contexts", "optimizers", "syncs", "activations")
    ruled = [entry for group in groups for entry in entries(group).values()]
    assert len(brought) == len({own for entry in ruled for own in entry.rules})


def test_rules_name_fields_that_exist() -> None:
    tree = parse_run({}).model_dump(by_alias=True)
    for family in (
        Llama(family="llama"),
        DeepSeek(family="deepseek"),
        QwenNext(family="qwen3-next"),
        Vit(family="vit"),
        T5(family="t5"),
        ResNeXt(family="resnext"),
    ):
        tree["model"] |= family.model_dump()
    tree["data"] |= PairData(kind="pairs").model_dump() | MessagesData(kind="messages").model_dump()
    tree["data"] |= SquadData(kind="squad").model_dump()
    for rule in RULES:
        for field in rule.reads:
            node: Any = tree
            for key in field.split("."):
                node = node[key]


def test_heads_divide_hidden() -> None:
    expected = "model.heads=7 does not divide model.hidden=64; valid: 1, 2, 4, 8, 16, 32, 64"
    assert mistake(model={"hidden": 64, "heads": 7}) == expected


def test_distances_have_buckets() -> None:
    line = mistake(model={"family": "t5", "distance_max": 16})
    exact = "is among the 16 distances that model.distance_buckets=32 tells apart exactly"
    assert line == f"model.distance_max=16 {exact}; valid: 17 or more"
    line = mistake(model={"family": "t5", "distance_buckets": 3})
    assert line == "model.distance_buckets=3 is not enough for near and far, ahead and behind; valid: 4 or more"
    parse_run({"model": {"family": "t5", "distance_buckets": 4, "distance_max": 3}})


def test_sequence_fits_positions() -> None:
    line = mistake(model={"positions": 128}, data={"sequence": 129})
    assert line == "data.sequence=129 is longer than model.positions=128; valid: 128 or less"
    parse_run({"model": {"positions": 128}, "data": {"sequence": 128}})


def test_replicas_divide_batch() -> None:
    line = mistake(batch={"global": 10}, layout={"data": {"size": 4}})
    assert line == "layout.data.size=4 does not divide batch.global=10; valid: 1, 2, 5, 10"


def test_microbatches_divide_replica() -> None:
    line = mistake(batch={"global": 12, "micro": 4}, layout={"data": {"size": 2}})
    part = "a replica's 6 sequences (batch.global=12 / layout.data.size=2)"
    assert line == f"batch.micro=4 does not divide {part}; valid: 1, 2, 3, 6"
    config = parse_run({"batch": {"global": 12, "micro": 3}, "layout": {"data": {"size": 2}}})
    assert (config.replica_batch, config.micro, config.num_microbatches) == (6, 3, 2)


def test_micro_auto_is_the_replicas_part() -> None:
    config = parse_run({"batch": {"global": 12}, "layout": {"data": {"size": 2}}})
    assert (config.micro, config.num_microbatches) == (6, 1)


@pytest.mark.parametrize(
    "batch, layout, micro",
    [
        (16, {"pipeline": {"size": 2}}, 4),
        (16, {"pipeline": {"size": 4}, "data": {"size": 2}}, 1),
        (3, {"pipeline": {"size": 4}}, 1),
        (48, {"pipeline": {"size": 2}, "tensor": {"kind": "tesseract", "q": 2, "d": 2}}, 12),
        (8, {"pipeline": {"size": 4}, "tensor": {"kind": "tesseract", "q": 2, "d": 2}}, 4),
    ],
)
def test_micro_auto_feeds_the_stages(batch: int, layout: dict[str, Any], micro: int) -> None:
    """A stage has two microbatches if the batch has enough, and every rank that splits rows has rows."""
    assert parse_run({"batch": {"global": batch}, "layout": layout}).micro == micro


@pytest.mark.parametrize(
    "partition, rule",
    [
        ([4, 8, 0], "is not one number for each of layout.pipeline.size=2 stages"),
        ([4, 4], "does not add up to the model's 12 layers"),
    ],
)
def test_partition_is_of_the_layers(partition: list[int], rule: str) -> None:
    line = mistake(layout={"pipeline": {"size": 2, "partition": partition}})
    assert rule in line
    assert line.endswith("valid: auto, measured, or 2 numbers that add up to 12")
    parse_run({"layout": {"pipeline": {"size": 3, "partition": [0, 12, 0]}}})


def test_no_stage_in_the_middle_is_empty() -> None:
    assert "nothing to do" in mistake(layout={"pipeline": {"size": 3, "partition": [6, 0, 6]}})


def test_stages_have_layers() -> None:
    line = mistake(layout={"pipeline": {"size": 5}}, model={"layers": 2})
    assert line.endswith("is more than the model's 2 layers, the embedding and the head can fill; valid: 4 or less")


@pytest.mark.parametrize(
    "pipeline, told",
    [
        ({"size": 4, "chunks": 4}, "layout.pipeline.chunks=4 on 4 stages is more than the model's 12 layers"),
        ({"size": 2, "chunks": 2, "schedule": "axonn"}, "which knows one chunk a stage; valid: 1, or"),
        ({"size": 2, "chunks": 2, "schedule": "1f1b", "placement": "v"}, "loop, or layout.pipeline.schedule=gpipe"),
        ({"size": 2, "chunks": 3, "limit": 2}, "leaves no place for a microbatch in each of layout.pipeline.chunks=3"),
        ({"size": 2, "chunks": 2, "partition": [6, 6]}, "valid: auto, measured, or 4 numbers that add up to 12"),
        ({"size": 2, "chunks": 2, "partition": [6, 0, 3, 3]}, "leaves a chunk between the first and the last"),
    ],
)  # fmt: skip
def test_chunks_that_cannot_be(pipeline: dict[str, Any], told: str) -> None:
    assert told in mistake(layout={"pipeline": pipeline})


def test_limit_has_an_effect() -> None:
    line = mistake(layout={"pipeline": {"size": 2, "schedule": "gpipe", "limit": 3}})
    assert line.startswith("layout.pipeline.limit=3 has no effect on layout.pipeline.schedule=gpipe")


def test_sync_goes_with_stages() -> None:
    line = mistake(layout={"pipeline": {"size": 2}, "data": {"size": 2, "sync": "server-loss"}})
    assert "runs a whole model on every rank" in line


def test_recomputed_groups_fit() -> None:
    line = mistake(model={"layers": 2}, memory={"recompute": {"every": 3}})
    assert line == "memory.recompute.every=3 is more than the model's 2 layers; valid: 2 or less"


@pytest.mark.parametrize("source", ["/no/such/folder", ""])
def test_source_exists(source: str) -> None:
    assert mistake(data={"source": source}).startswith(
        f"data.source={source} is no such file or folder; valid: stdlib,"
    )


VIT = {"family": "vit", "image": 12, "patch": 4, "hidden": 8, "heads": 2}
IMAGES = {"source": "digits"}


@pytest.mark.parametrize("source, rule", [("stdlib", "is not what a vit reads"), ("/no/such", "is no such file or")])
def test_a_vit_reads_images(source: str, rule: str) -> None:
    line = mistake(model=VIT, data={"source": source})
    assert line.startswith(f"data.source={source} {rule}")
    assert line.endswith("; valid: digits, a folder of class folders of jpg and png files")


def test_a_vit_reads_a_folder(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("no image")
    line = mistake(model=VIT, data={"source": str(tmp_path / "text.txt")})
    assert line.startswith(f"data.source={tmp_path / 'text.txt'} is no folder; valid: digits,")
    parse_run({"model": VIT, "data": {"source": str(tmp_path)}})


def test_a_text_model_does_not_read_digits() -> None:
    line = mistake(data=IMAGES)
    assert line.startswith("data.source=digits is not what a gpt2 reads; valid: stdlib, unicode, a text,")


def test_patches_divide_image() -> None:
    line = mistake(model=VIT | {"patch": 5}, data=IMAGES)
    assert line == "model.patch=5 does not divide model.image=12; valid: 1, 2, 3, 4, 6, 12"


def test_channels() -> None:
    line = mistake(model=VIT | {"channels": 2}, data=IMAGES)
    assert line == "model.channels=2 is neither grey nor red, green and blue; valid: 1, 3"


@pytest.mark.parametrize(
    "tokenizer, message",
    [
        ("bpe:256", "does not name a vocabulary of 257 tokens or more"),
        ("bpe:", "does not name a vocabulary of 257 tokens or more"),
        ("bpe:4k", "does not name a vocabulary of 257 tokens or more"),
        ("/no/such/tokenizer.json", "is no such file; valid: bytes, bpe:SIZE, a tokenizer.json file"),
        ("byte", "is no such file; valid: bytes"),
    ],
)
def test_tokenizers(tokenizer: str, message: str) -> None:
    assert mistake(data={"tokenizer": tokenizer}).startswith(f"data.tokenizer={tokenizer} {message}")


@pytest.mark.parametrize("tokenizer, size", [("bytes", 257), ("bpe:300", 300)])
def test_tokenizer_fits_vocabulary(tokenizer: str, size: int) -> None:
    line = mistake(model={"vocabulary": size - 1}, data={"tokenizer": tokenizer})
    rule = f"is smaller than the {size} tokens of data.tokenizer={tokenizer}"
    assert line == f"model.vocabulary={size - 1} {rule}; valid: {size} or more"
    parse_run({"model": {"vocabulary": size}, "data": {"tokenizer": tokenizer}})


@pytest.mark.parametrize("tokenizer, size", [("bytes", 257), ("bpe:300", 300)])
def test_tokenizer_and_berts_own_tokens_fit_vocabulary(tokenizer: str, size: int) -> None:
    line = mistake(model={"family": "bert", "vocabulary": size + 3}, data={"tokenizer": tokenizer})
    rule = f"is smaller than the {size} tokens of data.tokenizer={tokenizer} and [PAD], [CLS], [SEP], [MASK]"
    assert line == f"model.vocabulary={size + 3} {rule}; valid: {size + 4} or more"
    parse_run({"model": {"family": "bert", "vocabulary": size + 4}, "data": {"tokenizer": tokenizer}})


def test_tokenizer_file_that_exists_passes(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    assert parse_run({"data": {"tokenizer": str(path)}}).data.tokenizer == str(path)


@pytest.mark.parametrize("level, dtype, valid", [("O0", "bf16", "float32, float64"), ("O2", "float32", "bf16, fp16")])
def test_dtype_fits_level(level: str, dtype: str, valid: str) -> None:
    line = mistake(precision={"level": level, "dtype": dtype})
    assert line == f"precision.dtype={dtype} does not go with precision.level={level}; valid: {valid}"


@pytest.mark.parametrize("word", ["fsdp", "FSDP2", "fully_shard"])
def test_torchs_own_sharding_is_a_contender_of_a_benchmark(word: str) -> None:
    line = mistake(layout={"data": {"sync": word, "size": 2}})
    assert line.startswith(f"layout.data.sync={word} is none of the choices (did you mean zero3?): python")
    assert "python -m benchmarks.data_parallel --only zero3 compares zero3 with torch's FSDP2" in line


def test_warmup_fits_steps() -> None:
    """A short trial of a run file is a run: decisions.py cuts the warm-up, and says so."""
    assert parse_run({"steps": 10, "optimizer": {"schedule": {"warmup": 11}}}).optimizer.schedule.warmup == 11


def test_mpi_must_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    line = mistake(layout={"transport": "mpi"})
    assert line.startswith("layout.transport=mpi needs mpi4py, which is not installed; valid: torch, auto; or")


def test_mpi_does_not_reach_gpus() -> None:
    pytest.importorskip("mpi4py")
    assert "moves host memory only" in mistake(layout={"transport": "mpi"}, device="cuda")


def test_divisors_and_their_listing() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert listed([1, 2, 3]) == "1, 2, 3"
    assert listed(list(range(1, 21)), most=4) == "1, 2, 3, ..., 20"
