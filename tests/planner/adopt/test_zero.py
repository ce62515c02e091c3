"""DeepSpeed's JSON under `meshwright adopt`: stages are recorded and edited, with or without DeepSpeed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.planner.adopt.adopted import Adopted
from meshwright.planner.adopt.edits import edits_of
from meshwright.planner.adopt.job import AdoptError, Question, run_rank
from meshwright.planner.adopt.zero import ZeroWords, config_of
from meshwright.planner.plan.cluster import load_cluster
from meshwright.ranks.errors import ConfigError

EXAMPLES = Path(__file__).resolve().parents[3] / "examples/adopt"
CLUSTER = load_cluster("dgx-h100")
SMALL = {"reduce_bucket_size": 20000, "allgather_bucket_size": 50000, "stage3_param_persistence_threshold": 100}
SMALL |= {"stage3_prefetch_bucket_size": 10000, "stage3_max_reuse_distance": 0, "stage3_max_live_parameters": 40000}


def zero_json(tmp_path: Path, stage: int, **more: Any) -> Path:
    tree = {"zero_optimization": {"stage": stage, **SMALL}, "bf16": {"enabled": True}}
    tree |= {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 2, **more}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(tree, indent=2) + "\n")
    return path


def adopted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: int, ranks: int = 4, **more: Any) -> Adopted:
    monkeypatch.setenv("TINY", "1")
    words = ("--batch", "1", "--config", str(zero_json(tmp_path, stage, **more)))
    return run_rank(Question(EXAMPLES / "zero.py", words, CLUSTER, ranks), 0, tmp_path / "out")


def sent(facts: Adopted, verb: str) -> int:
    return sum(c.payload_bytes for c in facts.collectives if c.verb == verb)


@pytest.mark.parametrize("stage", [0, *(pytest.param(stage, marks=pytest.mark.long) for stage in (1, 2)), 3])
def test_a_stage_splits_its_parts_and_sends_its_bytes(
    stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = adopted(tmp_path, monkeypatch, stage)
    whole, parts = facts.parameters, facts.memory.parts
    assert parts["weights"] == 2 * whole // (4 if stage == 3 else 1)
    # Masters and both moments in float32; AdamW's counter of steps has 4 bytes.
    assert parts["states"] == pytest.approx(12 * whole / 4, abs=64)
    # Stages 2 and 3 sum the gradients of each of two microbatches; stages 0 and 1 sum the gradients of a step.
    sums = sent(facts, "reduce_scatter" if stage == 3 else "all_reduce")
    assert sums == pytest.approx((2 if stage < 2 else 4) * whole, abs=64)
    gathered = sent(facts, "all_gather")
    if stage < 3:
        assert gathered == 2 * whole
    else:  # before a forward and a backward pass of two microbatches, if not kept for a next use; norms stay whole
        matrices = 2 * whole - 2 * 5 * 64
        assert 3 * matrices < gathered < 4 * matrices
    note = next(note for note, _ in facts.unseen if "DeepSpeed's engine does not run" in note.text)
    assert note.where.startswith("zero.py:")


def test_offload_moves_states_to_the_host_and_says_that_its_seconds_are_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zero = {"stage": 2, **SMALL, "offload_optimizer": {"device": "cpu"}}
    facts = adopted(tmp_path, monkeypatch, 2, zero_optimization=zero, elasticity={"enabled": False})
    assert facts.memory.parts["states"] == facts.memory.parts["gradients"] == 0
    assert facts.memory.host >= 12 * facts.parameters / 4
    said = " ".join(note.text for note, _ in facts.unseen)
    assert "the host's seconds are not counted" in said
    assert "without an effect here: elasticity" in said


def test_edits_change_the_json_and_are_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = adopted(tmp_path, monkeypatch, 2)
    config = tmp_path / "ds.json"
    assert before.configs == [str(config)]
    words = ("--batch", "1", "--config", str(config))
    edits = {edit.title: edit for edit in edits_of(EXAMPLES / "zero.py", words, before, 4)}
    assert "FSDP2" not in edits
    edit = edits["ZeRO stage 3"]
    changed = [row for row in edit.diff.splitlines() if row[:1] in "+-" and row[:3] not in ("+++", "---")]
    assert changed == ['-    "stage": 2,', '+    "stage": 3,']
    after = run_rank(Question(EXAMPLES / "zero.py", words, CLUSTER, 4), 0, tmp_path / "after", edit)
    assert after.memory.parts["weights"] * 4 == before.memory.parts["weights"]
    assert json.loads(config.read_text())["zero_optimization"]["stage"] == 2
    twice = run_rank(
        Question(EXAMPLES / "zero.py", words, CLUSTER, 4), 0, tmp_path / "twice", edits["accumulation x 2"]
    )
    assert (before.microbatches, twice.microbatches) == (2, 4)


PLAIN = """
import argparse
import deepspeed
import torch
from torch import nn
parser = argparse.ArgumentParser()
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
rows = [torch.randn(64) for _ in range(32)]
engine, _, loader, _ = deepspeed.initialize(
    args=args, model=model, model_parameters=model.parameters(), training_data=rows
)
for x in loader:
    loss = engine(x.to(engine.device)).square().mean()
    engine.backward(loss)
    engine.step()
"""


def test_a_script_of_deepspeed_itself_reads_its_micro_batch_from_the_json(tmp_path: Path) -> None:
    script, tree = tmp_path / "script.py", {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}}
    script.write_text(PLAIN)
    config = tmp_path / "ds.json"
    config.write_text(json.dumps(tree))
    words = ("--deepspeed", f"--deepspeed_config={config}")
    facts = run_rank(Question(script, words, CLUSTER, 2), 0, tmp_path / "out")
    assert facts.inputs[0][1] == (2, 64)
    assert facts.optimizers == ["AdamW"]
    (edit,) = (e for e in edits_of(script, words, facts, 2) if e.title == "micro-batch x 2")
    assert run_rank(Question(script, words, CLUSTER, 2), 0, tmp_path / "after", edit).inputs[0][1] == (4, 64)
    config.write_text(json.dumps(tree | {"zero_optimization": {"stage": 4}}))
    with pytest.raises(AdoptError, match=r"script.py:11: .*zero_optimization.stage"):
        run_rank(Question(script, words, CLUSTER, 2), 0, tmp_path / "refused")


def test_trainer_reads_the_json_of_its_words(tmp_path: Path) -> None:
    config = zero_json(tmp_path, 3, gradient_accumulation_steps="auto")
    words = f"--output_dir {tmp_path / 'run'} --report_to none --save_strategy no --bf16 --deepspeed {config}"
    sizes = "--width 64 --layers 2 --heads 4 --vocabulary 256 --length 32 --per_device_train_batch_size 4"
    question = Question(EXAMPLES / "trainer.py", (*words.split(), *sizes.split()), CLUSTER, 2)
    facts = run_rank(question, 0, tmp_path / "out")
    # Each parameter is padded to an even number.
    assert facts.memory.parts["weights"] == pytest.approx(facts.parameters, abs=8)
    assert sent(facts, "reduce_scatter") > 0


@pytest.mark.parametrize(
    "tree, message",
    [
        ({"zero_optimization": {"stage": 5}}, "zero_optimization.stage=5 is no stage of ZeRO"),
        ({"zero_optimization": True}, "zero_optimization=True is no section"),
        ({"zero_optimization": {"stage": "2"}}, "zero_optimization.stage=2 is no whole number"),
        ({"zero_optimization": {"stage": True}}, "zero_optimization.stage=True is no whole number"),
        ({"zero_optimization": {"reduce_bucket_size": 0.5}}, "zero_optimization.reduce_bucket_size=0.5 is no whole"),
        ({"zero_optimization": {"stage3_max_reuse_distance": -1}}, "stage3_max_reuse_distance=-1 is no whole number"),
        ({"zero_optimization": {"offload_optimizer": "cpu"}}, "offload_optimizer=cpu is no section"),
        ({"zero_optimization": {"sub_group_size": float("inf")}}, "sub_group_size=inf is no whole number"),
        ({"gradient_clipping": "1"}, "gradient_clipping=1 is no number"),
        ({"bf16": True}, "bf16=True is no section"),
        ({"gradient_accumulation_steps": [4]}, r"gradient_accumulation_steps=\[4\] is no whole number"),
    ],
)
def test_a_value_of_another_form_is_named(tree: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ZeroWords.of(tree)


def test_numbers_are_read_as_deepspeed_reads_them(tmp_path: Path) -> None:
    words = ZeroWords.of({"zero_optimization": {"reduce_bucket_size": 5e8, "sub_group_size": "auto"}})
    assert (words.bucket, words.group) == (500_000_000, 1_000_000_000)
    path = tmp_path / "ds.json"
    path.write_text("[1]\n")
    with pytest.raises(ConfigError, match="is no section with fields"):
        config_of(path)
