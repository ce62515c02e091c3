"""Every setting of every published family is kept by an import and export, and by a run. `generate` ends a text at the
token that ends a text of transformers. An export has the dtype that the command asks for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from meshwright.config import Config, parse_run
from meshwright.data.tokenizer import load_tokenizer
from meshwright.tools.evaluate.load import load_text
from meshwright.tools.generate import Request, generate
from meshwright.training.convert import export_folder, import_folder
from meshwright.training.job import train
from tests.training.convert.published import CHATML, FAMILIES, publish
from tests.training.runs import lines_of

transformers = pytest.importorskip("transformers")

FILES = (
    *("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json"),
    "chat_template.jinja",
)
LONG_CHATS = (
    *("qwen2.5-instruct", "qwen3", "qwen3.5", "smollm2-instruct", "smollm3"),
    *("gemma-2-instruct", "gemma-3-instruct", "gpt-oss"),
)
CHATS = [
    *("llama-3.1-instruct", "mistral-instruct", "qwen3-next"),
    *(pytest.param(name, marks=pytest.mark.long) for name in LONG_CHATS),
]


def settings_of(folder: Path) -> dict[str, Any]:
    """Return every setting by file and key."""
    read = {}
    for name in FILES:
        path = folder / name
        if path.is_file():
            text = path.read_text()
            tree = json.loads(text) if name.endswith(".json") else {"text": text}
            read |= {f"{name}: {key}": value for key, value in tree.items()}
    return read


def run_of(hf: Path, source: Path, *words: str, **changes: Any) -> Config:
    tree = {
        "model": {"from": str(hf)},
        "data": {"source": str(source), "sequence": 48, "validation": 0.2},
        "batch": {"global": 2, "micro": 2},
        "validation": {"every": 0},
        "layout": {"transport": "torch"},
        "precision": {"level": "O0", "dtype": "float32"},
        "metrics": {"sinks": []},
        "optimizer": {"lr": 1e-3, "schedule": {"warmup": 0}},
        "device": "cpu",
        "steps": 1,
    }
    return parse_run(tree | changes, words)


def dialogues(folder: Path, count: int = 12) -> Path:
    path = folder / "chat.jsonl"
    said = [[("user", f"say {number}"), ("assistant", "ab")] for number in range(count)]
    lines = [json.dumps({"messages": [{"role": role, "content": text} for role, text in one]}) for one in said]
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def texts(folder: Path) -> Path:
    path = folder / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": f"text {number} of some words"}) + "\n" for number in range(40)))
    return path


@torch.no_grad()
def logits_of(folder: Path, **how: Any) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **how).eval()
    model.set_experts_implementation("eager")
    logits: torch.Tensor = model(torch.tensor([[5, 9, 200, 31, 256, 80]])).logits
    return logits


@pytest.mark.few(3)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_setting_comes_back_as_it_was(tmp_path: Path, name: str) -> None:
    publish(name, tmp_path / "hf")
    import_folder(tmp_path / "hf", tmp_path / "step-0")
    export_folder(tmp_path / "step-0", tmp_path / "back")
    assert settings_of(tmp_path / "back") == settings_of(tmp_path / "hf")
    assert (tmp_path / "back" / "tokenizer.json").read_bytes() == (tmp_path / "hf" / "tokenizer.json").read_bytes()
    before, after = (logits_of(tmp_path / folder) for folder in ("hf", "back"))
    assert after.dtype == torch.bfloat16
    torch.testing.assert_close(after, before, rtol=0, atol=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_marks_are_read_from_the_tokenizers_own_files(tmp_path: Path, name: str) -> None:
    publish(name, tmp_path / "hf")
    family, tokenizer = FAMILIES[name], load_tokenizer(tmp_path / "hf" / "tokenizer.json")
    assert (None if tokenizer.begin is None else tokenizer.name_of(tokenizer.begin)) == family.begin
    assert tokenizer.name_of(tokenizer.end) == family.end
    assert {tokenizer.name_of(token) for token in tokenizer.marks.stops} == set(family.stops)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["llama-3.1", "mistral-instruct", "qwen3-base", "deepseek-r1-distill-qwen"])
def test_a_run_of_text_writes_them_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The run's documents are between the family's marks, as transformers' tokenizer begins a text."""
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    publish(name, tmp_path / "hf")
    config = run_of(tmp_path / "hf", texts(tmp_path))
    train(config, tmp_path / "out", resume=False)
    family, loaded = FAMILIES[name], load_text(tmp_path / "out", "cpu")
    folder = config.data.prepare(config, lambda *_: None)
    begin, end = (None if token is None else loaded.tokenizer.id_of(token) for token in (family.begin, family.end))
    tokens = torch.from_numpy(config.data.open(config, folder).train.samples(0, 4)["tokens"].numpy())
    ended = (tokens[:, :-1] == end).nonzero()
    assert len(ended)
    if begin is not None:
        assert all(tokens[row, place + 1] == begin for row, place in ended.tolist())
    export_folder(tmp_path / "out", tmp_path / "back")
    assert settings_of(tmp_path / "back") == settings_of(tmp_path / "hf")
    ids = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")("ab")["input_ids"]
    assert ids == [*loaded.tokenizer.opening, *b"ab"]


@pytest.mark.parametrize("name", CHATS)
def test_a_chat_stops_where_transformers_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A run that has learned a single answer stops at the end of this answer."""
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    publish(name, tmp_path / "hf", torch.float32)
    optimizer = {"lr": 0.03, "schedule": {"warmup": 0}}
    config = run_of(tmp_path / "hf", dialogues(tmp_path), steps=40, optimizer=optimizer)
    assert config.data.kind == "messages"
    train(config, tmp_path / "out", resume=False)
    export_folder(tmp_path / "out", tmp_path / "back")
    assert settings_of(tmp_path / "back") == settings_of(tmp_path / "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    asked = [{"role": "user", "content": "say 3"}]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    theirs = model.generate(**prompt, max_new_tokens=20, do_sample=False)[0, prompt["input_ids"].shape[1] :].tolist()
    assert tokenizer.decode(theirs) == f"ab{FAMILIES[name].closes or FAMILIES[name].end}"
    assert "".join(generate(tmp_path / "out", Request("say 3", 20, chat=True), "cpu").parts) == "ab"
    prompted = tokenizer.decode(prompt["input_ids"][0]).removeprefix(FAMILIES[name].begin or "")
    plain = "".join(generate(tmp_path / "out", Request(prompted, 20), "cpu").parts)
    assert FAMILIES[name].end not in plain


def test_a_template_of_the_runs_own_ends_what_transformers_generates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chat of this base model never has the model's own end. The export reads the run's folder alone."""
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    publish("qwen2.5", tmp_path / "hf")
    own = CHATML.replace("\n", " ")
    (tmp_path / "own.jinja").write_text(own)
    source = dialogues(tmp_path)
    train(run_of(tmp_path / "hf", source, f"data.template={tmp_path / 'own.jinja'}"), tmp_path / "out", resume=False)
    before = settings_of(tmp_path / "hf")
    for path in (tmp_path / "own.jinja", *(tmp_path / "hf").iterdir()):
        path.unlink()
    export_folder(tmp_path / "out", tmp_path / "back")
    after = settings_of(tmp_path / "back")
    assert after.pop("chat_template.jinja: text") == own
    assert before.pop("tokenizer_config.json: chat_template") == CHATML
    assert after.pop("generation_config.json: eos_token_id") == [256, 258]
    assert before.pop("generation_config.json: eos_token_id") == 256
    assert after == before
    assert "".join(generate(tmp_path / "out", Request("say 3", 3, chat=True), "cpu").parts) is not None


@pytest.mark.parametrize("asked, named", [("float32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16")])
def test_the_dtype_that_is_asked_for(tmp_path: Path, asked: str, named: str) -> None:
    publish("qwen3", tmp_path / "hf", torch.float32)
    import_folder(tmp_path / "hf", tmp_path / "step-0")
    export_folder(tmp_path / "step-0", tmp_path / "back", dtype=asked)
    assert {str(x.dtype) for x in load_file(tmp_path / "back" / "model.safetensors").values()} == {f"torch.{named}"}
    assert json.loads((tmp_path / "back" / "config.json").read_text())["torch_dtype"] == named
    dtype = getattr(torch, named)
    there, here = logits_of(tmp_path / "hf", dtype=dtype), logits_of(tmp_path / "back", dtype="auto")
    assert here.dtype == dtype
    torch.testing.assert_close(here, there, rtol=0, atol=0)


def test_the_dtype_of_a_run_that_drew_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dtype is the precision's; begin and end are from the run's own tokenizer."""
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    model = {"family": "llama", "layers": 1, "hidden": 16, "heads": 2, "feed_forward": 24, "vocabulary": 300}
    data = {"source": str(texts(tmp_path)), "sequence": 16, "validation": 0.2}
    config = run_of(tmp_path, tmp_path, model=model, data=data, precision={"level": "O2", "dtype": "bf16"})
    train(config, tmp_path / "out", resume=False)
    export_folder(tmp_path / "out", tmp_path / "back")
    settings = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (settings["torch_dtype"], settings["bos_token_id"], settings["eos_token_id"]) == ("bfloat16", None, 256)
    assert logits_of(tmp_path / "back", dtype="auto").dtype == torch.bfloat16


def test_a_mixtral_is_trained_as_its_file_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """Under output_router_logits=false the loss has no balance loss, as in transformers; under true the loss has
    one."""
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    model = publish("mixtral", tmp_path / "hf", torch.float32)
    config = run_of(tmp_path / "hf", texts(tmp_path))
    train(config, tmp_path / "out", resume=False)
    batch = config.data.open(config, config.data.prepare(config, lambda *_: None)).train.samples(0, 2)
    model.set_experts_implementation("eager")
    with torch.no_grad():
        theirs = F.cross_entropy(model(batch["tokens"]).logits.flatten(0, 1), batch["labels"].flatten())
    assert lines_of(tmp_path / "out")[0]["loss"] == pytest.approx(float(theirs), rel=1e-6)
    assert "no balance loss" in capfd.readouterr().out
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"output_router_logits": True}))
    assert run_of(tmp_path / "hf", texts(tmp_path)).model.experts.balance == 0.02
