"""The findings in the models of every family, against closed forms, hand-made bounds and the kit's cuts."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from meshwright.cli import app
from meshwright.compute.models.chain import chain_of
from meshwright.config import Config, parse_config
from meshwright.families.bert.section import ASKED_SHARE, Bert
from meshwright.tools.branches.findings import Findings, RegionGroup, TracedModel, findings_of, trace_model
from meshwright.tools.branches.regions import find_operator_parts
from meshwright.tools.branches.report import flops_text, place_text, render

B, T, H, N, V, LAYERS = 4, 128, 256, 1024, 20800, 2

MODELS: dict[str, dict[str, Any]] = {
    "gpt2-mini": {"layers": LAYERS},
    "bert-tiny": {"layers": 1},
    "vit-digits": {"layers": 1},
    "transformer-tiny": {"layers": 1},
    "t5-tiny": {"layers": 1},
    "resnext-tiny": {},
}


def config_of(name: str) -> Config:
    data = {"source": "digits"} if name in ("vit-digits", "resnext-tiny") else {"sequence": T}
    return parse_config({"model": {"base": name, **MODELS[name]}, "data": data, "batch": {"global": B}})


@cache
def traced(name: str) -> TracedModel:
    return trace_model(config_of(name))


def group_at(found: Findings, where: str, num_branches: int) -> RegionGroup:
    (group,) = [g for g in found.groups if place_text(g.places) == where and len(g.region.flops) == num_branches]
    return group


def test_gpt2_mini_in_closed_form() -> None:
    found = findings_of(traced("gpt2-mini"), (2, 3))
    core, attention = 4 * B * T * T * H, 4 * B * T * T * H + 8 * B * T * H * H
    feed_forward = 4 * B * T * H * N + B * T * N
    assert len(found.groups) == 3
    for where, count, total in (
        ("blocks.0-1.attention.core", 8, core),
        ("blocks.0-1.attention", 8, attention),
        ("blocks.0-1.feed_forward", N, feed_forward),
    ):
        assert group_at(found, where, count).region.flops == (total / count,) * count
    per_layer = attention + feed_forward + 4 * B * T * H  # two norms, two sums
    loss = 2 * B * T * H * V + B * T * V + 1  # the head, its cross entropy, the scale
    assert found.total_flops == LAYERS * per_layer + 2 * B * T * H + loss  # positions added; the last norm
    assert found.longest_flops == found.total_flops
    assert found.lone == 2 * LAYERS


def test_bounds_of_layouts_by_hand() -> None:
    found = findings_of(traced("gpt2-mini"), (2, 3))
    total = found.total_flops
    core, attention, feed_forward = (group.total_flops for group in found.groups)
    assigned = {"attention-core": [core / 8], "attention": [attention / 8], "block": [attention / 8, feed_forward / N]}
    whole = {"attention-core": core, "attention": attention, "block": attention + feed_forward}
    assert found.layouts.keys() == assigned.keys()
    for value, bounds in found.layouts.items():
        halves, thirds = (sum(each * n for each, n in zip(assigned[value], most)) for most in ((4, N / 2), (3, 342)))
        assert bounds[2].all_ranks == pytest.approx(2, rel=1e-12)
        assert bounds[2].one_subgrid == pytest.approx(total / (total - whole[value] + halves), rel=1e-12)
        assert bounds[3].all_ranks == pytest.approx(total / ((total - whole[value]) / 3 + thirds), rel=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_every_pair_of_a_model_is_found_by_itself(name: str) -> None:
    """The linears found around branches are the linears that models ask of the kit; costs are the family's."""
    config, model = config_of(name), traced(name)
    regions = find_operator_parts(model.graph)
    cut = [region for region in regions if model.cut_by(region)]
    assert {path for region in cut for path in region.linears} == set(model.pairs)
    heads = [region for region in cut if region.form != "columns"]
    assert {len(region.flops) for region in heads} == {config.model.branches[1]}
    seconds = [path for path, at in model.pairs.items() if at == "branches" and path.endswith(("output", "contract"))]
    assert len(heads) == 2 * len(seconds)
    section, products = config.model, 2 * B * chain_of(config).products(config).total
    if isinstance(section, Bert):  # the trace has the classes of all tokens, the family of asked tokens only
        length = config.data.sequence
        products += 2 * B * (length - round(ASKED_SHARE * length)) * section.padded_vocabulary * section.hidden
    assert model.graph.total_flops == pytest.approx(products, rel=0.05)  # element-wise work; padding of the classes


def test_branches_of_whole_operators() -> None:
    """ResNeXt's shortcut is next to the paths; a Transformer's encoder is next to the decoder's first steps."""
    groups = findings_of(traced("resnext-tiny"), (2,)).groups
    (block,) = [g for g in groups if g.places == ("blocks.1",) and g.region.form == "split/join"]
    assert (block.region.enter, block.region.leave, block.cut_by) == ("split", "sum", ())
    assert block.region.names[1] == "blocks.1.shortcut.transform ... blocks.1.shortcut.norm"
    assert block.region.flops[1] == 2 * B * 16 * 64 * 128 + B * 16 * 128  # 4 x 4 positions
    encoder, decoder = findings_of(traced("transformer-tiny"), (2,)).groups[0].region.names
    assert encoder.endswith("blocks.1.cross.key_value")
    assert decoder.endswith("blocks.1.cross.query")


def test_the_command(tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    run.write_text("model: {base: gpt2-mini, layers: 1}\nlayout: {tensor: {kind: subgraph, size: 2}}\n")
    answer = CliRunner().invoke(app, ["branches", str(run), "--json", "--grids", "4"])
    assert answer.exit_code == 0, answer.output
    facts = json.loads(answer.output)
    assert [region["num_branches"] for region in facts["regions"]] == [8, 8, N]
    assert facts["layouts"]["block"]["4"]["all"] == pytest.approx(4)


def test_tables(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    render(findings_of(traced("gpt2-mini"), (2, 4)))
    shown = capsys.readouterr().out
    (row,) = [line for line in shown.splitlines() if "blocks.0-1.attention.core" in line]
    assert [cell.strip() for cell in row.split("│")[1:4]] == ["blocks.0-1.attention.core", "slice, concat", "8 heads"]
    assert "4 joins of a value with what one branch alone makes of it" in shown
    assert "common: all" in shown
    assert place_text(("blocks.0.a", "blocks.1.a", "blocks.3.a")) == "blocks.0-1,3.a"
    assert place_text(("",)) == "-"
    assert [flops_text(x) for x in (12, 1.5e3, 2.25e9)] == ["12", "1.50 k", "2.25 G"]
