"""The referee's rows are whole, each is predicted or has a reason, and the figures agree with the rows."""

from __future__ import annotations

import pytest

from meshwright.planner.plan.cluster import load_cluster
from meshwright.planner.plan.software import load_program
from validation import public
from validation.arguments import arguments_of, job_of
from validation.beside import SIZES, by_formula, formula_bytes
from validation.paper import read_table
from validation.public import FOLDER, Judged, PublicRow, Recipe, judge, load_sets
from validation.scatter import sentence, write_page
from validation.strategies import beyond, by_dispatcher, by_strategy, not_fitting, quantile, strategy

SETS = load_sets()
COLUMNS = [
    "model",
    "hidden",
    "layers",
    "heads",
    "kv_heads",
    "ffn",
    "vocab",
    "seq",
    "device",
    "gpus",
    "tp",
    "pp",
    "vpp",
    "cp",
    "ep",
    "sharding",
    "micro",
    "batch",
    "recompute",
    "precision",
    "seconds",
    "memory_gb",
    "note",
]


@pytest.mark.parametrize(
    "model, device, note, micro, dispatch",
    [
        ("DeepSeekV3", "GB200", "25.11 NeMo Container", "1", "alltoall"),
        ("DeepSeekV3", "B200", "26.02 NeMo Container", "1", "hybridep"),
        ("DeepSeekV3", "GB300", "26.06 NeMo Container", "1", "hybridep, overlapped"),
        ("DeepSeekV3", "B300", "26.06 NeMo Container", "2", "hybridep"),
        ("Kimi_K2", "GB300", "26.06 NeMo Container", "2", "hybridep"),
        ("Qwen3_30B_a3B", "B300", "26.06.01 NeMo Container", "8", "hybridep, overlapped"),
        ("Qwen3_30B_a3B", "B200", "26.02 NeMo Container", "1", "alltoall"),
        ("Qwen3_30B_a3B", "B200", "26.04 NeMo Container", "4", "hybridep"),
        ("Qwen3_30B_a3B", "H100", "26.06 NeMo Container", "1", "hybridep"),
        ("Qwen3_235B_a22B", "GB300", "26.04 NeMo Container", "2", "hybridep"),
        ("Qwen3_235B_a22B", "H100", "26.02 NeMo Container", "1", "alltoall, overlapped"),
        ("Qwen3_235B_a22B", "B300", "26.04 NeMo Container", "2", "alltoall"),
    ],
)
def test_a_row_takes_the_facts_of_its_own_recipe(model: str, device: str, note: str, micro: str, dispatch: str) -> None:
    """The facts are from the repository's files of that time (sources are next to the facts)."""
    line = {"model": model, "device": device, "note": note, "micro": micro}
    recipe = next(recipe for recipe in SETS["bridge"].recipes if recipe.fits(line))
    software = load_program("megatron-core", recipe.facts).software
    assert f"{software.dispatch}{', overlapped' if 'experts' in software.overlapped else ''}" == dispatch


def test_more_ranks_of_experts_than_replicas_are_planned() -> None:
    """32 ranks of experts are two tensor ranks of sixteen replicas."""
    lines = [line for line in read_table(FOLDER / "bridge.csv") if line["device"] == "H100" and line["ep"] == "32"]
    config = public.parse_config(public._tree(lines[0], SETS["bridge"]))
    assert (config.layout.data.size, config.layout.data.expert) == (16, 16)
    assert "expert_tensor=1" in public._facts(lines[0], SETS["bridge"])


@pytest.mark.parametrize(
    "model, device, micro, precision, spared",
    [
        ("GPT OSS 120B", "B200", "4", "BF16", ("recomputed=layernorm,moe_act",)),
        ("GPT OSS 120B", "GB300", "4", "BF16", ()),
        ("LLAMA3_70B", "GB200", "2", "FP8", ("host_layers=40",)),
        ("LLAMA3_70B", "GB300", "2", "FP8", ("host_layers=20",)),
        ("LLAMA3_70B", "GB300", "1", "MXFP8", ()),
        ("DeepSeekV3", "GB300", "1", "MXFP8", ()),
        ("DeepSeekV3", "B200", "1", "MXFP8", ("recomputed=mla_up_proj",)),
        ("Kimi_K2", "GB300", "2", "MXFP8", ("recomputed=mla_up_proj",)),
    ],
)
def test_a_row_spares_the_memory_of_its_recipe(
    model: str, device: str, micro: str, precision: str, spared: tuple[str, ...]
) -> None:
    line = {"model": model, "device": device, "micro": micro, "precision": precision, "note": "", "pp": "1"}
    assert next((each.facts for each in SETS["bridge"].spared if each.fits(line)), ()) == spared


def test_a_row_that_ran_and_does_not_fit_says_what_its_recipe_spares() -> None:
    line = {"model": "a", "device": "B200", "micro": "1", "precision": "FP8", "note": "", "pp": "1"}
    lacking, fitting = PublicRow("a", 1.0, None, fits="does not fit"), PublicRow("b", 1.0, None, fits="tight")
    sparing = SETS["bridge"].model_copy(update={"spared": (Recipe(source="a file", held="norms"),)})
    assert not_fitting([line, line], [lacking, fitting], sparing) == {"norms": [lacking]}
    assert not_fitting([line], [lacking], SETS["bridge"]) == {"not known": [lacking]}
    assert not_fitting([line], [PublicRow("c", None, None, fits="does not fit", ran_out=True)], sparing) == {}


def test_a_row_that_contradicts_its_recipe_does_not_count() -> None:
    lines = [
        line
        for line in read_table(public.FOLDER / "bridge.csv")
        if any(each.fits(line) for each in SETS["bridge"].doubted)
    ]
    assert [(line["pp"], line["vpp"], line["micro"], line["seconds"]) for line in lines] == [("4", "1", "2", "6.83")]
    assert "the recipe has microbatches of one" in public._judged(lines[0], SETS["bridge"], {}).doubtful


def test_rows_are_grouped_by_model_and_dispatcher() -> None:
    lines = [{"model": model} for model in ("a", "a", "b", "b")]
    rows = [
        PublicRow("one", 1.0, None, 1.1, dispatch="deepep"), PublicRow("two", 1.0, None, 1.2, dispatch="alltoall"),
        PublicRow("three", 1.0, None, 1.3, dispatch="deepep"), PublicRow("four", None, None, 1.3, dispatch="deepep"),
    ]  # fmt: skip
    found = {key: [row.label for row in group] for key, group in by_dispatcher(lines, rows).items()}
    assert found == {
        ("a", "alltoall"): ["two"], ("a", "deepep"): ["one"], ("b", "deepep"): ["three"],
        ("all", "alltoall"): ["two"], ("all", "deepep"): ["one", "three"],
    }  # fmt: skip


@pytest.mark.parametrize("name", SETS)
def test_a_set_names_its_source_its_program_and_its_clusters(name: str) -> None:
    rows_set = SETS[name]
    assert rows_set.source
    assert rows_set.checked
    load_program(rows_set.software, rows_set.facts)
    for told in rows_set.clusters.values():
        load_cluster(told if isinstance(told, str) else told["like"])
    table = FOLDER / f"{name}.csv"
    assert table.read_text().startswith("# "), "a table says where its figures come from"
    lines = read_table(table)
    assert lines
    assert all(list(line) == COLUMNS for line in lines)
    assert all(line["device"] for line in lines)


def test_every_table_is_a_sets() -> None:
    assert {path.stem for path in FOLDER.glob("*.csv")} == set(SETS)


def row(measured: float, predicted: float | None, **more: str) -> PublicRow:
    return PublicRow("a", measured, None, predicted, None, **more)


def test_figures_of_a_set_are_of_the_rows_that_were_said(tmp_path) -> None:
    rows = (row(1.0, 1.1), row(2.0, 1.0), row(4.0, None, missing="FP4"), row(3.0, None, doubtful="a typo"))
    judged = Judged("some", SETS["mpt"], rows)
    assert judged.errors() == pytest.approx([0.1, -0.5])
    assert judged.ordered == (0, 1)
    assert judged.said == {"FP4": 1}
    assert sentence(judged).startswith("2 of 4 rows: seconds 30.0% off on average, -20.0% signed, 0 of 1 pairs")
    assert sentence(judged).endswith("; 1 doubtful")
    write_page([judged], tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert text.count("<circle") == 2
    assert "<td>FP4</td>" in text


def test_a_row_that_ran_out_of_memory_held_more_than_the_device_has() -> None:
    rows = (
        PublicRow("a", None, 11.0, None, 10.0, fits="fits"),
        PublicRow("b", None, None, None, 8.0, fits="tight", ran_out=True, device_bytes=10),
        PublicRow("c", None, None, None, 12.0, fits="does not fit", ran_out=True, device_bytes=10),
    )
    judged = Judged("some", SETS["bloom"], rows)
    assert judged.most_unseen == pytest.approx(0.25)
    assert sentence(judged).endswith("at most 25.0% above; ran out of memory: 1 tight, 1 does not fit")


def test_rows_are_predicted_as_their_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows are a dense Llama with measured memory, and a row that needs a fact outside of a plan."""
    lines = (*read_table(FOLDER / "simumax.csv")[:2], read_table(FOLDER / "automodel.csv")[0])
    monkeypatch.setattr(public, "read_table", lambda path: lines)
    judged = judge("simumax", SETS["simumax"])
    assert [bool(one.seconds) for one in judged.rows] == [True, True, False]
    assert judged.rows[2].missing == "a cluster of H100-80GB"
    assert max(map(abs, judged.memory_errors())) < 0.1


def test_megatrons_formula_is_what_it_says_of_a_row() -> None:
    """llama3-70b cut to 12 layers, tensor 4: 12 bytes a parameter, 32 of a token's width and a layer."""
    [line] = [
        one
        for one in read_table(FOLDER / "simumax.csv")
        if one["model"].startswith("llama3_70b") and (one["tp"], one["seq"]) == ("4", "4096")
    ][:1]
    hidden, tokens = 8192, 4096
    layers = 12 * (2 * hidden**2 * (1 + 8 / 64) + 3 * hidden * 28672 + 4 * hidden) + 2 * hidden
    states = 12 * (layers + 2 * hidden * 128256) / 4
    kept = tokens * (hidden * 32 * 12 + 8 + hidden + 4 * (hidden + 128256)) / 4
    assert formula_bytes(line) == pytest.approx(states + kept)
    assert formula_bytes(line) / 2**30 == pytest.approx(float(line["memory_gb"]), rel=0.03)


def test_a_row_without_the_formulas_sizes_is_left_out() -> None:
    """A job with sizes in its arguments has empty columns."""
    lines = [line for line in read_table(FOLDER / "simumax.csv") if line["model"].startswith("llama3_70b")][:1]
    row = PublicRow("", None, 1e10, bytes=1e10)
    assert len(by_formula("set", lines, [row]).errors) == 1
    for name in SIZES:
        assert by_formula("set", [lines[0] | {name: ""}], [row]).errors == ()


CI = read_table(FOLDER / "megatron-ci.csv")


def test_a_row_of_arguments_is_a_job_as_plan_reads_it() -> None:
    """Columns and note are arguments; words in capitals belong to the environment, and become facts in the set."""
    [line] = [one for one in CI if one["model"].endswith("vp1_uneven_pipeline") and one["device"] == "H100"]
    told = arguments_of(line)
    assert told["decoder-last-pipeline-num-layers"] == 2
    assert not any(flag.isupper() for flag in told)
    job = job_of(line)
    assert job.run["layout"]["pipeline"] == {"size": 4, "schedule": "1f1b", "chunks": 1, "partition": [2, 4, 4, 2]}
    assert "attention=fused-softmax" in job.facts
    assert not job.account.left_out


@pytest.mark.parametrize(
    "model, device",
    [
        ("mcore_te_tp1_pp1_resume_torch_dist_dist_optimizer", "GB200"),
        ("mcore_te_tp1_pp4_vp1", "A100-80GB"),
        ("mcore_te_tp2_pp2_resume_torch_dist", "A100-80GB"),
        ("mcore_te_tp2_pp2_cp2", "H100"),
        ("mcore_te_tp2_pp1_te_8experts2parallel_dist_optimizer", "A100-80GB"),
    ],
)
def test_the_memory_of_megatrons_ci_is_met(model: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row of each strategy is checked, on the last rank."""
    lines = [one for one in CI if (one["model"], one["device"]) == (model, device)]
    monkeypatch.setattr(public, "read_table", lambda path: lines)
    [error] = judge("megatron-ci", SETS["megatron-ci"]).memory_errors()
    assert abs(error) < 0.02


def test_errors_are_grouped_by_the_first_cut() -> None:
    told = [strategy(line) for line in CI[:4]]
    assert told == ["stages", "tensor", "tensor", "data"]
    rows = [PublicRow("a", None, 11.0, 1.0, 10.0), PublicRow("b", None, 9.0, 1.0, 10.0), PublicRow("c", None, 9.0)]
    assert beyond(rows) == pytest.approx([0.1, 0.0])
    grouped = by_strategy([{"device": "H100", **dict.fromkeys(("ep", "pp", "cp", "tp"), "1")}] * 3, rows)
    assert grouped == {("H100", "data"): rows[:2]}
    assert quantile([float(number) for number in range(100)]) == 94.0
