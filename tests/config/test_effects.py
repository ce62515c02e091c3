"""Every field has an effect in every run, or is in the table of fields with an effect in some runs."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshwright.api import load
from meshwright.config import Config, dump_config, dump_tree, load_config, parse_config, parse_run
from meshwright.config.effects import EFFECTS
from meshwright.config.load import load_undecided
from meshwright.config.section import Section
from meshwright.configs import shipped
from meshwright.ranks.errors import ConfigError
from meshwright.tools.compare.layouts import from_files

ALWAYS = {
    *(
        "seed",
        "weights",
        "epochs",
        "device",
        "compile",
        "threads",
        "restarts.times",
        "restarts.shrink",
        "timeout.join",
        "timeout.wait",
    ),
    *("batch.global", "batch.micro", "bits.kind"),
    *("loss.kind", "loss.beta", "loss.label_smoothing"),  # the section is null in a run on single texts
    *("data.mixture", "data.validation"),  # eval measures the held-out data, also of a run without validation
    *("data.split", "data.column"),  # refused by another rule, which reads the source (records_section.py)
    *("data.kind", "data.tokenizer", "data.sequence", "data.target", "data.languages", "data.buckets"),
    *(
        "data.begin",
        "data.end",
        "data.documents",
        "data.template",
        "data.template_arguments",
        "data.turns",
        "data.overlong",
        "data.held_out",
        "data.stride",
    ),
    *("layout.data.size", "layout.pipeline.size", "layout.context.size", "layout.transport", "layout.ranks_per_node"),
    *("layout.tensor.kind", "layout.tensor.size", "layout.tensor.q", "layout.tensor.d"),
    *("precision.level", "precision.dtype"),
    *("memory.recompute", "memory.offload.to", "memory.empty_cache_every"),
    *("optimizer.name", "optimizer.lr", "optimizer.weight_decay", "optimizer.clip"),
    *("optimizer.masters",),  # refused by a rule if no weights are bf16
    *("optimizer.schedule.warmup", "optimizer.schedule.decay"),
    *("checkpoint.every", "checkpoint.keep", "validation.every"),
    *("metrics.sinks", "metrics.peak_flops", "check.every", "check.root_every", "check.sums", "logging.level"),
}
"""Fields that no other field can switch off. A model's fields are of this kind: a family has no field of another
family, and a kind of data no field of another kind (test_kinds.py)."""

EFFECTIVE: dict[str, tuple[str, ...]] = {
    "steps=5": (),
    "data.source=FILE": (),
    "layout.data.sync=zero1": ("layout.data.size=2",),
    "layout.data.bucket=1M": ("layout.data.size=2",),
    "layout.data.shard=2": ("layout.data.size=4", "layout.data.sync=zero3"),
    "layout.data.expert=2": ("layout.data.size=4", "model=mixtral-mini"),
    "layout.data.exchange=messages": ("layout.data.size=2", "layout.data.expert=2", "model=mixtral-mini"),
    "layout.pipeline.schedule=1f1b": ("layout.pipeline.size=2",),
    "layout.context.kind=ulysses": ("layout.context.size=2",),
    "layout.pipeline.limit=2": ("layout.pipeline.size=2",),
    "layout.pipeline.chunks=2": ("layout.pipeline.size=2",),
    "layout.pipeline.placement=v": ("layout.pipeline.size=2", "layout.pipeline.chunks=2"),
    "layout.pipeline.partition=[6, 6]": ("layout.pipeline.size=2",),
    "layout.pipeline.head=spread": ("layout.pipeline.size=2", "model.tied=false"),
    "layout.tensor.sequence_parallel=true": ("layout.tensor={kind: megatron, size: 2}",),
    "layout.tensor.common=one": ("layout.tensor={kind: subgraph, size: 2}",),
    "layout.tensor.branch=block": ("layout.tensor={kind: subgraph, size: 2}",),
    "layout.order=[pipe, data]": ("layout.data.size=2", "layout.pipeline.size=2"),
    "precision.loss_scale.initial=1024": ("precision.level=O1", "precision.dtype=fp16"),
    "precision.loss_scale.interval=10": ("precision.level=O2", "precision.dtype=fp16"),
    "precision.loss_scale.max_skips=10": ("precision.level=O1", "precision.dtype=fp16"),
    "precision.accumulate=stored": ("precision.level=O2", "precision.dtype=bf16", "batch.micro=1"),
    "precision.products=float32": ("precision.level=O2", "precision.dtype=bf16", "device=cpu"),
    "precision.tf32=false": (),
    "memory.summa=stream": ("layout.tensor={kind: tesseract, q: 2}",),
    "memory.logits=64M": (),
    "memory.offload.bucket=1M": ("memory.offload.to=host", "precision.level=O2", "precision.dtype=bf16"),
    "memory.offload.chunk=2": ("memory.offload.to=host", "precision.level=O2", "precision.dtype=bf16"),
    "optimizer.betas=[0.8, 0.9]": (),
    "optimizer.epsilon=1e-6": (),
    "optimizer.momentum=0.5": ("optimizer.name=momentum",),
    "optimizer.states=bf16": (),
    "optimizer.schedule.floor=0": ("optimizer.schedule.decay=cosine",),
    "optimizer.schedule.stable=0.8": ("optimizer.schedule.decay=sqrt",),
    "metrics.project=mine": ("metrics.sinks=[trackio]",),
    "metrics.offline=true": ("metrics.sinks=[tensorboard, mlflow]",),
    "metrics.address=0.0.0.0": ("metrics.sinks=[prometheus]",),
    "metrics.port=9100": ("metrics.sinks=[prometheus]",),
    "validation.batches=2": ("validation.every=5",),
    "validation.metric=accuracy": ("validation.every=5", "validation.patience=1"),
    "validation.patience=2": ("validation.every=5",),
    "checkpoint.best=true": ("validation.every=5",),
    "bits.samples=2": ("bits=layout-free",),
    "bits.tensor=2": ("bits=layout-free",),
    "bits.hidden=2": ("bits=layout-free",),
    "bits.sequence=2": ("bits=layout-free",),
    "bits.attention=runs": ("bits=layout-free", "bits.sequence=2"),
}
"""Every field of the table, with words that make the field effective."""

IDLE: dict[str, tuple[tuple[str, ...], str]] = {
    "steps=1000": (("epochs=2",), "beside epochs"),
    "data.source=stdlib": (("data.mixture={stdlib: 1}",), "beside data.mixture"),
    "layout.data.sync=ring": ((), "where no two ranks have parts of one gradient"),
    "layout.data.shard=2": (("layout.data.size=4", "layout.data.sync=ring"), "with layout.data.sync=ring, which"),
    "layout.data.expert=2": (("layout.data.size=4",), "with a model that has no experts"),
    "layout.data.exchange=messages": (("layout.data.size=2", "model=mixtral-mini"), "with layout.data.expert=1"),
    "layout.data.bucket=16M": (("layout.data.size=2", "layout.data.sync=zero3"), "with layout.data.sync=zero3, which"),
    "layout.pipeline.schedule=gpipe": ((), "with layout.pipeline.size=1"),
    "layout.context.kind=ulysses": ((), "with layout.context.size=1"),
    "layout.pipeline.limit=3": ((), "with layout.pipeline.size=1"),
    "layout.pipeline.chunks=2": ((), "with layout.pipeline.size=1"),
    "layout.pipeline.placement=v": (("layout.pipeline.size=2",), "where every stage has one chunk"),
    "layout.pipeline.partition=measured": ((), "with layout.pipeline.size=1"),
    "layout.pipeline.head=spread": ((), "with layout.pipeline.size=1"),
    "layout.tensor.sequence_parallel=true": (("layout.tensor={kind: megatron, size: 1}",), "with layout.tensor.size=1"),
    "layout.tensor.common=one": (("layout.tensor={kind: subgraph, size: 1}",), "with layout.tensor.size=1"),
    "layout.tensor.branch=block": (("layout.tensor={kind: subgraph, size: 1}",), "with layout.tensor.size=1"),
    "layout.order=[data, pipe]": (("layout.data.size=2",), "on a layout that has one axis"),
    "precision.loss_scale.initial=65536": ((), "with precision.dtype=float32"),
    "precision.loss_scale.interval=10": (("precision.level=O1", "precision.dtype=bf16"), "with precision.dtype=bf16"),
    "precision.loss_scale.max_skips=10": ((), "with precision.dtype=float32"),
    "precision.accumulate=float32": (("precision.level=O1", "precision.dtype=bf16"), "where no half-precision"),
    "precision.products=stored": (("device=cpu",), "with precision.dtype=float32 and device=cpu"),
    "precision.tf32=true": (("device=cpu",), "with precision.dtype=float32 and device=cpu"),
    "memory.summa=stream": ((), "with layout.tensor.kind=none"),
    "memory.logits=64M": (("bits=layout-free",), "with bits.kind=layout-free"),
    "memory.offload.bucket=1M": ((), "with memory.offload.to=none"),
    "memory.offload.chunk=4": ((), "with memory.offload.to=none"),
    "optimizer.betas=[0.9, 0.95]": (("optimizer.name=sgd",), "with optimizer.name=sgd"),
    "optimizer.epsilon=1e-8": (("optimizer.name=momentum",), "with optimizer.name=momentum"),
    "optimizer.momentum=0.9": ((), "with optimizer.name=adamw"),
    "optimizer.states=float32": (("optimizer.name=sgd",), "with optimizer.name=sgd, which has no states"),
    "optimizer.schedule.floor=0.0": ((), "with optimizer.schedule.decay=constant"),
    "optimizer.schedule.stable=0.5": (("optimizer.schedule.decay=inverse-sqrt",), "with optimizer.schedule.decay=inv"),
    "metrics.project=meshwright": ((), "without a tracker that has projects"),
    "metrics.offline=true": (("metrics.sinks=[trackio]",), "without a tracker that sends"),
    "metrics.address=0.0.0.0": ((), "without a sink that is asked"),
    "metrics.port=9100": (("metrics.sinks=[tensorboard]",), "without a sink that is asked"),
    "validation.batches=8": ((), "with validation.every=0"),
    "validation.metric=loss": (("validation.every=5",), "where nothing depends on the best validation"),
    "validation.patience=2": ((), "with validation.every=0"),
    "checkpoint.best=true": ((), "with validation.every=0"),
    "bits.samples=2": ((), "with bits.kind=usual"),
    "bits.tensor=2": ((), "with bits.kind=usual"),
    "bits.hidden=2": ((), "with bits.kind=usual"),
    "bits.sequence=1": ((), "with bits.kind=usual"),
    "bits.attention=runs": (("bits=layout-free",), "where a sequence is one run"),
}
"""Every field of the table, at any value, with a run in which the field has no effect, and the reason."""


def test_replicas_without_a_sample_are_refused_where_an_effect_counts_microbatches() -> None:
    with pytest.raises(ConfigError, match=r"layout\.data\.size|batch\.global"):
        parse_run({}, ["batch.global=4", "layout.data=6", "precision=bf16"])


def leaves(annotation: Any, before: str = "") -> Iterator[str]:
    """Yield the dotted names of all fields of a section, or of any section of a union."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        for name, field in annotation.model_fields.items():
            path = f"{before}.{field.alias or name}".removeprefix(".")
            inner = list(leaves(field.annotation, path))
            yield from inner or [path]
    elif isinstance(annotation, type) or not typing.get_args(annotation):
        return
    else:
        for part in typing.get_args(annotation):
            yield from leaves(part, before)


def words(tmp_path: Path, *given: str) -> list[str]:
    for name in ("text", "text.jsonl"):
        (tmp_path / name).write_text('{"en": "a", "de": "b"}\n')
    return [word.replace("FILE", str(tmp_path / "text")) for word in given]


def test_every_field_is_declared_once() -> None:
    conditional = [field for effect in EFFECTS for field in effect.fields]
    declared = [*conditional, *ALWAYS]
    fields = {field for field in leaves(Config) if not field.startswith("model.")}
    assert len(fields) > 50
    assert fields == set(declared), "a field of the schema says nothing of its effect, or one that is gone still does"
    assert len(declared) == len(set(declared))
    assert sorted(word.partition("=")[0] for word in EFFECTIVE) == sorted(conditional)
    assert sorted(word.partition("=")[0] for word in IDLE) == sorted(conditional)
    deciding = {name for effect in EFFECTS for name in effect.decided_by}
    assert deciding <= fields | {"layout.tensor", "model.family"}


@pytest.mark.parametrize("word", EFFECTIVE)
def test_a_field_may_be_written_where_it_has_an_effect(word: str, tmp_path: Path) -> None:
    config = parse_run({}, words(tmp_path, *EFFECTIVE[word], word))
    (effect,) = (effect for effect in EFFECTS if word.partition("=")[0] in effect.fields)
    assert effect.holds(config)


@pytest.mark.parametrize("word", IDLE)
def test_a_field_is_refused_where_it_has_no_effect(word: str) -> None:
    around, why = IDLE[word]
    field = word.partition("=")[0]
    with pytest.raises(ConfigError) as caught:
        parse_run({}, [*around, word])
    (line,) = str(caught.value).split("\n")
    assert line.startswith(f"{field}=")
    assert f" has no effect {why}" in line
    assert "; valid: leave it out" in line


def test_words_that_decide_nothing_may_stand_anywhere() -> None:
    layout = {"pipeline": {"size": 1, "limit": "auto", "partition": "auto"}, "order": "auto"}
    memory = {"summa": "auto", "offload": {"to": "none"}}
    data = {"objective": "auto", "target": None, "languages": None}
    assert parse_run({"layout": layout, "memory": memory, "data": data}) == Config()


def test_a_word_switches_off_what_the_file_sets_up() -> None:
    file = {"layout": {"pipeline": {"size": 2, "schedule": "1f1b"}}, "precision": {"level": "O2", "dtype": "fp16"}}
    file["precision"] |= {"loss_scale": {"initial": 1024}}
    config = parse_run(file, ["layout.pipeline.size=1", "precision={level: O0, dtype: float32}"])
    assert config.layout.pipeline.schedule == "1f1b"
    with pytest.raises(ConfigError, match=r"^layout\.pipeline\.schedule=gpipe has no effect"):
        parse_run(file, ["layout.pipeline.size=1", "layout.pipeline.schedule=gpipe"])
    with pytest.raises(ConfigError, match=r"^layout\.pipeline\.schedule=1f1b has no effect"):
        parse_run({"layout": {"pipeline": {"schedule": "1f1b"}}}, ["steps=3"])


def test_the_last_word_says_how_long_a_run_is() -> None:
    assert parse_run({"epochs": 2}, ["steps=5"]).epochs is None
    assert parse_run({"steps": 5}, ["epochs=2"]).epochs == 2
    with pytest.raises(ConfigError, match=r"^steps=5 has no effect beside epochs.*; valid: leave it out, or epochs="):
        parse_run({"steps": 5, "epochs": 2})
    assert "steps" not in dump_tree(parse_run({"epochs": 2}))


def test_what_a_planner_will_decide_makes_nothing_idle() -> None:
    fixed = ["layout.pipeline.schedule=1f1b", "memory.summa=stream"]
    assert parse_run({}, fixed, undecided=("layout",)).memory.summa == "stream"
    with pytest.raises(ConfigError, match=r"^optimizer\.momentum"):
        parse_run({}, [*fixed, "optimizer.momentum=0.9"], undecided=("layout",))


def test_fields_of_mistaken_sections_are_left_alone() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_run({}, ["optimizer.name=adam", "optimizer.momentum=0.9"])
    assert [problem.field for problem in caught.value.problems] == ["optimizer.name"]


def test_a_dump_says_what_has_an_effect_and_reads_back(tmp_path: Path) -> None:
    config = parse_run({}, ["layout.tensor={kind: tesseract, q: 2}", "memory.summa=stream", "optimizer.name=sgd"])
    tree = dump_tree(config)
    assert tree["memory"]["summa"] == "stream"
    assert "momentum" not in tree["optimizer"]
    assert "schedule" not in tree["layout"]["pipeline"]
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(config))
    assert load_config(path) == config


def test_a_program_may_change_a_dump_so_that_fields_lie_idle() -> None:
    tree = parse_run({}, ["precision={level: O2, dtype: fp16, loss_scale: {initial: 8}}"]).model_dump(by_alias=True)
    tree["precision"] |= {"level": "O0", "dtype": "float64"}
    assert parse_config(tree).precision.loss_scale.initial == 8


@pytest.mark.parametrize("run", shipped("runs").values(), ids=lambda path: path.stem)
def test_shipped_runs_write_nothing_in_vain(run: Path) -> None:
    load_config(run)


def test_files_are_held_to_it_and_programs_are_not(tmp_path: Path) -> None:
    tree = {"optimizer": {"name": "sgd", "momentum": 0.9}}
    path = tmp_path / "run.yaml"
    path.write_text("optimizer: {name: sgd, momentum: 0.9}\n")
    with pytest.raises(ConfigError, match=r"^optimizer\.momentum=0\.9 has no effect with optimizer\.name=sgd"):
        load_config(path)
    with pytest.raises(ConfigError, match=r"^optimizer\.momentum=0\.9 has no effect"):
        load(path)
    with pytest.raises(ConfigError, match=r"^optimizer\.momentum=0\.9 has no effect"):
        load_undecided(path)
    layouts = tmp_path / "layouts.yaml"
    layouts.write_text("layouts: [{layout: {pipeline: {size: 1, schedule: 1f1b}}}]\n")
    run = tmp_path / "plain.yaml"
    run.write_text("layout: {tensor: {kind: tesseract, q: 2}}\nmemory: {summa: stream}\n")
    with pytest.raises(ConfigError) as caught:
        from_files(run, [], [layouts])
    (line,) = str(caught.value).split("\n")  # the run's summa has no effect under this layout, and is no mistake
    assert f"{layouts}: layout.pipeline.schedule=1f1b has no effect with layout.pipeline.size=1" in line
    assert parse_config(tree).optimizer.momentum == 0.9
