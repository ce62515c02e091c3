"""peft's folders: peft loads an export over the base without a warning and computes the same logits. An export's
tensors are the trained tensors to the bit, merged weights compute as adapters do, and a run begins from peft's
folder."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from meshwright.config import Config, parse_run
from meshwright.data.tokenizer import byte_tokenizer
from meshwright.ranks.errors import CheckpointError, ConfigError
from meshwright.tools.evaluate.load import load_text
from meshwright.tools.generate import Request, generate
from meshwright.training.checkpoint import Checkpoint
from meshwright.training.checkpoint.reader import find_checkpoint
from meshwright.training.convert import export_folder
from meshwright.training.job import train
from tests.families.llama.logits import hugging_face
from tests.families.qwen_next.models import InFloat64
from tests.training.convert.folders import saved
from tests.training.runs import lines_of, make_corpus

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft", reason="pip install peft")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("data"))


def run_of(hf: Path, corpus: Path, *words: str, **adapter: Any) -> Config:
    tree = {
        "model": {"from": str(hf), "adapter": {"rank": 4, **adapter}},
        "data": {"source": str(corpus), "sequence": 12},
        "batch": {"global": 4, "micro": 2},
        "layout": {"transport": "torch"},
        "precision": {"level": "O0", "dtype": "float32"},
        "optimizer": {"lr": 1e-2, "schedule": {"warmup": 0}},
        "metrics": {"sinks": []},
        "validation": {"every": 0},
        "checkpoint": {"every": 2},
        "device": "cpu",
        "steps": 4,
    }
    return parse_run(tree, words)


def base_of(folder: Path, kind: str, dtype: torch.dtype = torch.float32) -> Path:
    if kind == "gpt2":
        config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=4, n_positions=64, vocab_size=300)
        saved(transformers.GPT2LMHeadModel, config, folder, dtype)
        byte_tokenizer().save(folder / "tokenizer.json")
    else:
        hugging_face(folder, kind)
    return folder


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    tokens = torch.arange(24).view(2, 12) * 5 % 250
    with InFloat64():  # casts of float64 alone
        result: torch.Tensor = model.eval()(tokens).logits
    return result


def in_peft(base: Path, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`")  # a warning between the two libraries
        model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
        model.set_experts_implementation("eager")  # a grouped product does not support float64
        return peft.PeftModel.from_pretrained(model, folder)


@torch.no_grad()
def ours(out: Path) -> torch.Tensor:
    loaded = load_text(out, "cpu")
    tokens = torch.arange(24).view(2, 12) * 5 % 250
    result: torch.Tensor = loaded.head.logits(loaded.model.hidden(tokens))
    return result


@pytest.mark.parametrize(
    "kind, adapter",
    [
        ("qwen3", {}),
        ("llama", {"on": ["q_proj", "v_proj"], "rslora": True}),
        ("gpt2", {"alpha": 3.0}),
        ("gpt2", {"dora": True}),
        ("llama", {"dora": True, "on": ["v_proj"]}),
    ],
)
def test_what_is_exported_is_what_was_trained(kind: str, adapter: dict[str, Any], tmp_path: Path, corpus: Path) -> None:
    base, out = base_of(tmp_path / "hf", kind), tmp_path / "out"
    train(run_of(base, corpus, **adapter), out, resume=False)
    export_folder(out, tmp_path / "adapter")
    export_folder(out, tmp_path / "merged", merged=True)
    checkpoint = Checkpoint(find_checkpoint(out))
    stored = {name for name, kind in checkpoint.manifest.parts if kind == "weight"}
    assert stored
    assert all(".adapter." in name for name in stored)
    written = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(written) == len(stored)
    theirs = in_peft(base, tmp_path / "adapter")
    taken = peft.get_peft_model_state_dict(theirs)
    assert taken.keys() == written.keys()
    assert all(torch.equal(taken[name], written[name]) for name in taken)
    wanted = ours(out)
    torch.testing.assert_close(logits(theirs), wanted, rtol=1e-5, atol=1e-5)
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    torch.testing.assert_close(logits(whole), wanted, rtol=1e-5, atol=1e-5)
    plain = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    assert (logits(plain) - wanted).abs().max() > 1e-2
    assert generate(out, Request("a", 4)).parts


def test_a_run_begins_from_pefts_folder_and_goes_back_to_the_bit(tmp_path: Path, corpus: Path) -> None:
    base = base_of(tmp_path / "hf", "qwen3")
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing`")
    settings = peft.LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj", "v_proj", "down_proj"])
    theirs = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), settings)
    for name, parameter in theirs.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    theirs.save_pretrained(tmp_path / "peft")
    config = run_of(base, corpus, "model.adapter={from: " + str(tmp_path / "peft") + "}", "steps=1")
    assert config.model.adapter.scale == 3
    train(config, tmp_path / "out", resume=False)
    first = tmp_path / "out" / "checkpoints" / "step-0"
    torch.testing.assert_close(logits(theirs), ours(first), rtol=1e-5, atol=1e-5)
    export_folder(first, tmp_path / "again")
    before, after = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("peft", "again"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


DOUBLE = "precision={level: O0, dtype: float64}"
EXPERTS = ["feed_forward.expand", "feed_forward.contract"]


@pytest.mark.parametrize(
    "kind, on",
    [
        ("mixtral", EXPERTS), ("qwen2-moe", ["all-linear"]), ("qwen3-moe", [*EXPERTS, "q_proj"]),
        ("qwen3-moe", ["feed_forward.expand"]), ("qwen3-moe", ["feed_forward.contract"]), ("gpt-oss", ["all-linear"]),
    ],
)  # fmt: skip
def test_adapters_of_experts_are_pefts_target_parameters(
    kind: str, on: list[str], tmp_path: Path, corpus: Path
) -> None:
    """In float64, peft's logits over the base are the run's. An import and a second export keep the tensors to the
    bit."""
    base, out = base_of(tmp_path / "hf", kind), tmp_path / "out"
    train(run_of(base, corpus, DOUBLE, on=on, begin="random"), out, resume=False)
    export_folder(out, tmp_path / "adapter")
    written = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    theirs = in_peft(base, tmp_path / "adapter", torch.float64)
    taken = peft.get_peft_model_state_dict(theirs)
    assert taken.keys() == written.keys()
    assert all(torch.equal(taken[name], written[name]) for name in taken)
    wanted = ours(out)
    torch.testing.assert_close(logits(theirs), wanted, rtol=1e-9, atol=1e-9)
    with theirs.disable_adapter():
        assert (logits(theirs) - wanted).abs().max() > 1e-3
    config = run_of(base, corpus, DOUBLE, "model.adapter={from: " + str(tmp_path / "adapter") + "}", "steps=1")
    train(config, tmp_path / "again", resume=False)
    first = tmp_path / "again" / "checkpoints" / "step-0"
    torch.testing.assert_close(ours(first), wanted, rtol=1e-12, atol=1e-12)
    export_folder(first, tmp_path / "back")
    after = load_file(tmp_path / "back" / "adapter_model.safetensors")
    assert after.keys() == written.keys()
    assert all(torch.equal(after[name], written[name]) for name in after)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_run_begins_from_pefts_dora(kind: str, tmp_path: Path, corpus: Path) -> None:
    base = base_of(tmp_path / "hf", kind, torch.float64)
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing`")
    targets = ["c_attn", "c_fc"] if kind == "gpt2" else ["q_proj", "v_proj", "up_proj", "down_proj"]
    settings = peft.LoraConfig(r=4, lora_alpha=12, target_modules=targets, use_dora=True, fan_in_fan_out=kind == "gpt2")
    theirs = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64), settings)
    for name, parameter in theirs.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
        if "magnitude" in name:
            parameter.data.mul_(1 + 0.1 * torch.randn_like(parameter))
    theirs.save_pretrained(tmp_path / "peft")
    config = run_of(base, corpus, DOUBLE, "model.adapter={from: " + str(tmp_path / "peft") + "}", "steps=1")
    assert config.model.adapter.dora
    train(config, tmp_path / "out", resume=False)
    first = tmp_path / "out" / "checkpoints" / "step-0"
    torch.testing.assert_close(ours(first), logits(theirs), rtol=1e-9, atol=1e-9)
    export_folder(first, tmp_path / "again")
    before, after = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("peft", "again"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():  # magnitudes: one rounded sum and one rounded difference
        torch.testing.assert_close(after[name], tensor, rtol=1e-15 * ("magnitude" in name), atol=0)


def test_a_run_goes_on_under_another_layout_from_adapters_alone(tmp_path: Path, corpus: Path) -> None:
    base = base_of(tmp_path / "hf", "qwen3")
    double = "precision={level: O0, dtype: float64}"
    train(run_of(base, corpus, double), tmp_path / "straight", resume=False)
    out = tmp_path / "out"
    train(run_of(base, corpus, double, "steps=2"), out, resume=False)
    small = sum(file.stat().st_size for file in (out / "checkpoints" / "step-2").glob("*.safetensors"))
    (base / "model.safetensors").unlink()
    cut = "layout={tensor: {kind: megatron, size: 2}, transport: torch}"
    config = run_of_kept(out, double, cut)
    train(config, out, resume=True)
    losses = [[line["loss"] for line in lines_of(folder)] for folder in (tmp_path / "straight", out)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)
    whole = sum(file.stat().st_size for file in (out / "checkpoints" / "step-0").glob("*.safetensors"))
    assert small < whole
    for file in (out / "checkpoints" / "step-0").iterdir():
        file.unlink()
    with pytest.raises(CheckpointError, match=r"has adapters alone, and .*step-0 with their base is missing: `meshw"):
        export_folder(out, tmp_path / "merged", merged=True)
    export_folder(out, tmp_path / "adapter")


def run_of_kept(out: Path, *words: str) -> Config:
    """Load the run's own config: the base's folder is removed."""
    from meshwright.config.load import load_config

    return load_config(out / "config.yaml", [*words, "steps=4"])


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"peft_type": "IA3"}, "peft_type=IA3 is not supported; valid: LORA"),
        ({"bias": "all"}, "bias=all is not supported; valid: none"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save="),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern="),
        ({"target_parameters": ["mlp.gate.weight"]}, "target_parameters=[mlp.gate.weight] is not supported; valid:"),
        ({"target_modules": ".*attn.*"}, "target_modules=.*attn.* is not supported; valid: all-linear, or a list"),
    ],
)
def test_other_adapters_are_refused(changes: dict[str, Any], message: str, tmp_path: Path, corpus: Path) -> None:
    base = base_of(tmp_path / "hf", "llama")
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["q_proj"]} | changes
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError) as refusal:
        run_of(base, corpus, f"model.adapter={{from: {tmp_path}}}")
    assert message in str(refusal.value)
