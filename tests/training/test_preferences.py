"""Runs on pairs of answers: the numbers of the first weights are kept, and a resumed run reads these numbers."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.config import parse_run
from meshwright.ranks.errors import LaunchError, MeshwrightError
from meshwright.training.convert import export_folder
from meshwright.training.job import train
from tests.data.dialogues import make_tokenizer
from tests.data.preferences import explicit, make_pairs
from tests.training.convert.folders import saved
from tests.training.runs import lines_of, preferring_run

MEASURED = ("loss", "grad_norm", "rewards_chosen", "rewards_rejected", "reward_margin", "reward_accuracy")


def numbers_of(out: Path) -> list[dict[str, Any]]:
    return [{key: line[key] for key in (*MEASURED, "validation_loss") if key in line} for line in lines_of(out)]


def test_a_resumed_run_is_the_uninterrupted_one_also_under_another_layout(tmp_path: Path) -> None:
    whole, halves, other = (tmp_path / name for name in ("whole", "halves", "other"))
    train(preferring_run(tmp_path), whole, resume=False)
    numbers = numbers_of(whole)
    first = numbers[0]
    assert first["loss"] == pytest.approx(0.693147180559945)
    assert first["reward_margin"] == first["rewards_chosen"] == 0
    assert numbers[-1]["loss"] < 0.5
    assert numbers[-1]["reward_margin"] == pytest.approx(
        numbers[-1]["rewards_chosen"] - numbers[-1]["rewards_rejected"], rel=1e-12
    )
    assert numbers[-1]["reward_accuracy"] > 0.5
    assert {"validation_loss"} <= numbers[2].keys()

    train(preferring_run(tmp_path, "steps=3"), halves, resume=False)
    kept = (halves / "reference.json").read_bytes()
    assert kept == (whole / "reference.json").read_bytes()
    train(preferring_run(tmp_path), halves, resume=True)
    assert (halves / "reference.json").read_bytes() == kept
    assert numbers_of(halves) == numbers

    train(preferring_run(tmp_path, "steps=3", "layout.data.size=2"), other, resume=False)
    kept = (other / "reference.json").read_bytes()
    train(preferring_run(tmp_path, "layout.pipeline.size=2", "layout.pipeline.schedule=1f1b"), other, resume=True)
    assert (other / "reference.json").read_bytes() == kept
    for mine, theirs in zip(numbers_of(other), numbers, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-9, abs=1e-9)


def test_numbers_of_other_weights_pairs_or_none_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    train(preferring_run(tmp_path, "steps=1", "checkpoint.every=1", "validation.every=0"), out, resume=False)
    path = out / "reference.json"
    kept = path.read_text()

    def refused(*words: str) -> str:
        with pytest.raises((MeshwrightError, LaunchError)) as raised:
            train(preferring_run(tmp_path, "validation.every=0", *words), out, resume=True)
        return str(raised.value)

    path.unlink()
    assert (
        "reference.json: is missing; it has the numbers of the first weights, which step 1 has no longer" in refused()
    )
    path.write_text(kept.replace("[[-", "[[-1", 1))
    assert "reference.json: is damaged" in refused()
    facts = json.loads(kept)
    path.write_text(kept)
    assert "has not the numbers of the" in refused("validation.every=3")
    assert facts["weights"].startswith("2-")


class InFloat64:
    """The head of TRL's trainers in the dtype of the weights.

    trl/kernels/chunked_logprob.py (1.16) computes sums, log-probabilities and gradients in float32, also for a model in
    float64: `ChunkedLogProbFunction.forward` makes `sum_exp` and `target_logit` in float32, and `.backward`
    `grad_hidden` and `grad_weight`. With float32 the loss of equal models is 0.6931471824645996, log 2 in float32.
    """

    @staticmethod
    def apply(
        hidden: torch.Tensor, weight: torch.Tensor, bias: None, targets: torch.Tensor, temperature: float, size: int,
        cap: None, scale: float, outputs: tuple[str, ...],
    ) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
        assert (bias, temperature, cap, scale) == (None, 1.0, None, 1.0)
        logits = hidden @ weight.T
        chances = logits.log_softmax(-1)
        told = {
            "entropy": -(chances.exp() * chances).sum(-1), "log_sum_sq_probs": (2 * chances).logsumexp(-1),
            "mean_logits": logits.mean(-1), "is_top1": logits.argmax(-1) == targets,
        }  # fmt: skip
        assert set(outputs) <= {"log_probs", *told}
        numbers = (number.detach() if name in outputs else None for name, number in told.items())
        return chances.gather(-1, targets[:, None])[:, 0], *numbers


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # from the libraries, about fields of the libraries
@pytest.mark.parametrize("head, bound", [("in float32", 1e-6), ("in float64", 1e-12)])
def test_two_steps_are_those_of_trls_trainer(
    tmp_path: Path, head: str, bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From one folder, on all pairs at once by plain SGD: TRL's weights and ours after two steps.

    `head`: TRL's head rounds to float32. With the head in float64, all other lines of the trainer are TRL's.
    """
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    if head == "in float64":
        monkeypatch.setattr("trl.trainer.utils._ChunkedLogProbFunction", InFloat64)
    transformers = pytest.importorskip("transformers")
    settings = transformers.GPT2Config(
        vocab_size=320, n_embd=16, n_layer=2, n_head=2, n_positions=128, attn_pdrop=0.0, embd_pdrop=0.0,
        resid_pdrop=0.0, bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    theirs = saved(transformers.GPT2LMHeadModel, settings, tmp_path / "hf")
    make_tokenizer(tmp_path / "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    tokenizer.pad_token = tokenizer.eos_token = "<|over|>"
    arguments = trl.DPOConfig(
        output_dir=str(tmp_path / "trl"), beta=0.5, per_device_train_batch_size=8, max_steps=2, learning_rate=0.05,
        lr_scheduler_type="constant", optim="sgd", max_grad_norm=0.0, max_length=None, use_cpu=True, bf16=False,
        report_to=[], save_strategy="no", disable_tqdm=True, logging_steps=1,
    )  # fmt: skip
    rows = datasets.Dataset.from_list([explicit(number) for number in range(8)])
    trainer = trl.DPOTrainer(theirs, deepcopy(theirs), arguments, train_dataset=rows, processing_class=tokenizer)
    trainer.train()
    tree = {
        "model": {"from": str(tmp_path / "hf")},
        "data": {"source": str(make_pairs(tmp_path, "messages", 8)), "sequence": 96, "validation": 0},
        "loss": {"kind": "dpo", "beta": 0.5},
        "batch": {"global": 8, "micro": 2},
        "layout": {"data": {"size": 2}, "transport": "torch"},
        "optimizer": {"name": "sgd", "lr": 0.05, "weight_decay": 0.0, "clip": None},
        "precision": "float64",
        "metrics": {"sinks": []},
        "device": "cpu",
        "steps": 2,
    }
    train(parse_run(tree, []), tmp_path / "ours", resume=False)
    export_folder(tmp_path / "ours", tmp_path / "back")
    ours = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "back", dtype=torch.float64).state_dict()
    first = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "hf", dtype=torch.float64).state_dict()
    for name, weight in theirs.state_dict().items():
        moved = (weight - first[name]).norm()
        assert moved > 0, name
        assert (ours[name] - weight).norm() <= bound * moved, name
    logged = [line for line in trainer.state.log_history if "rewards/chosen" in line]
    for line, told in zip(logged, lines_of(tmp_path / "ours"), strict=True):
        assert told["rewards_chosen"] == pytest.approx(line["rewards/chosen"], rel=bound, abs=bound)
        assert told["reward_margin"] == pytest.approx(line["rewards/margins"], rel=bound, abs=bound)
