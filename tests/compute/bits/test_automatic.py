"""`bits: layout-free` alone: the parts are chosen from the run, and every layout of these parts has equal bits."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.config import Config, dump_config, parse_config, parse_run
from meshwright.ranks.errors import ConfigError
from meshwright.ranks.mesh import Mesh
from meshwright.tools.diff import difference
from tests.compute.bits.runs import Ended, ended
from tests.training.runs import config_for, make_corpus, run

GPT2: dict[str, Any] = {
    "seed": 3,
    "model": {"layers": 2, "hidden": 64, "heads": 4, "positions": 32, "vocabulary": 300, "dropout": 0.1},
    "data": {"sequence": 32},
    "batch": {"global": 8},
    "optimizer": {"lr": 1e-2, "clip": 0.5},
    "steps": 2,
    "bits": "layout-free",
}
MEGATRON = ("layout.tensor=megatron", "layout.tensor.size=2")
LAYOUTS = (
    ("batch.micro=1",),
    ("layout.data=8", "layout.data.sync=zero3"),
    ("layout.pipeline=2", "layout.data=2", "batch.micro=2"),
    (*MEGATRON, "layout.tensor.sequence_parallel=true", "layout.data=2"),
    ("layout.tensor={kind: tesseract, q: 2}",),
    ("layout.tensor={kind: subgraph, size: 2}",),
    ("layout.context=2", "layout.pipeline=2"),
    (*MEGATRON, "layout.context=2"),
)


def gpt2(*words: str) -> Config:
    return parse_config(GPT2, words)


@cache
def on_one_device(*words: str) -> Ended:
    return ended(gpt2(*words))


@pytest.mark.few(4)
@pytest.mark.parametrize("words", LAYOUTS)
def test_the_word_alone_lets_every_axis_in(words: tuple[str, ...]) -> None:
    assert ended(gpt2(*words)).differing(on_one_device()) == []


def test_rings_are_let_in_without_dropout() -> None:
    words = ("model.dropout=0.0",)
    assert gpt2(*words).bits.attention == "runs"
    ring = ("layout.context=2", "layout.context.kind=ring")
    assert ended(gpt2(*words, *ring)).differing(on_one_device(*words)) == []


def chooses_by_ranks(mesh: Mesh) -> None:
    """Double the parts on two ranks: kernels get another shape, as if the layout chose the parts."""
    from meshwright.compute.bits import assembly
    from meshwright.compute.bits.blocks import Blocks

    made = assembly.blocks_of

    def finer(config: Config, mesh: Mesh) -> Blocks:
        return made(parse_config(GPT2, ("bits.tensor=4", "bits.sequence=4", *MEGATRON)), mesh)

    assembly.blocks_of = finer  # type: ignore[assignment]


def test_parts_chosen_by_the_layout_are_seen() -> None:
    assert ended(gpt2(*MEGATRON), chooses_by_ranks, transport="torch").differing(on_one_device()) != []


@pytest.mark.parametrize("words", LAYOUTS)
def test_no_layout_changes_the_parts(words: tuple[str, ...]) -> None:
    assert gpt2(*words).bits == gpt2().bits


def test_a_written_number_leaves_the_others_at_one() -> None:
    """Run files older than `auto` keep the values."""
    for words, tensor, samples in ((("bits.tensor=4",), 4, 1), (("bits.samples=2",), 1, 2)):
        bits = gpt2(*words).bits
        assert (bits.samples, bits.tensor, bits.hidden, bits.sequence, bits.attention) == (
            samples, tensor, 1, 1, "heads",
        )  # fmt: skip
    both = gpt2("bits.samples=2", "bits.tensor=auto").bits
    assert (both.samples, both.tensor, both.sequence) == (2, gpt2().bits.tensor, 1)


def test_large_models_and_long_sequences_have_eight_parts() -> None:
    large = ("model.hidden=2048", "model.heads=16", "model.positions=4096", "data.sequence=4096")
    for words, parts in ((large, (8, 8)), (("model.hidden=512", "model.heads=8", *large[2:]), (2, 8))):
        assert (gpt2(*words).bits.tensor, gpt2(*words).bits.sequence) == parts


def test_samples_divide_every_replica() -> None:
    for batch, samples in ((8, 1), (64, 8), (128, 16), (24, 1), (72, 3), (1, 1)):
        bits = gpt2(f"batch.global={batch}").bits
        assert bits.samples == samples, batch
        for size in range(1, 9):
            if batch % size == 0:
                assert gpt2(f"batch.global={batch}", f"layout.data={size}").bits.samples == samples
    assert gpt2("batch.global=64", "data.sequence=1024", "model.positions=1024").bits.samples == 1


def test_a_smaller_microbatch_is_refused_with_a_remedy() -> None:
    with pytest.raises(ConfigError, match=r"bits\.samples=8 does not divide .*batch\.micro=2.*valid: 1, 2"):
        gpt2("batch.global=64", "batch.micro=2")


def test_the_chosen_numbers_are_written_down() -> None:
    """A resumed run does not choose again, even if a later version would choose otherwise."""
    text = dump_config(gpt2())
    assert yaml.safe_load(text)["bits"]["tensor"] == 2
    assert parse_run(yaml.safe_load(text)).bits == gpt2().bits
    assert yaml.safe_load(dump_config(gpt2("bits=usual")))["bits"] == {"kind": "usual"}


def test_an_older_run_goes_on_with_its_numbers(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path)
    tree: dict[str, Any] = {
        "model": {"layers": 1, "hidden": 32, "heads": 2, "positions": 16, "vocabulary": 300},
        "data": {"source": str(corpus), "sequence": 16}, "batch": {"global": 4}, "precision": "float32",
        "layout": {"transport": "threads"},
    }  # fmt: skip
    older = {"kind": "layout-free", "samples": 1, "tensor": 1, "hidden": 1, "sequence": 1}
    undisturbed = run(config_for(corpus, **tree, bits=older, steps=4), tmp_path / "undisturbed")
    resumed = run(config_for(corpus, **tree, bits=older, steps=2), tmp_path / "resumed")
    assert config_for(corpus, **tree, bits="layout-free", steps=4).bits.tensor == 2
    run(config_for(corpus, **tree, bits="layout-free", steps=4), resumed, resume=True)
    assert difference(resumed, undisturbed).equal
