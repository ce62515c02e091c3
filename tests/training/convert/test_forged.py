"""Broken or forged Hugging Face folders: refused in a sentence, soon, and no files are left."""

from __future__ import annotations

import json
import random
import shutil
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from meshwright.compute.models.experts_section import ExpertsSection
from meshwright.families.bert.section import Bert, BertChoice, BertPairs, BertSpans
from meshwright.families.deepseek.section import DeepSeek
from meshwright.families.gpt.section import Gpt2
from meshwright.families.llama.gemma import Gemma
from meshwright.families.llama.gpt_oss import GptOss
from meshwright.families.llama.phi import Phi
from meshwright.families.llama.section import Llama
from meshwright.families.qwen_next.section import Qwen35, QwenNext
from meshwright.families.seq2seq.section import T5
from meshwright.families.vision.section import Vit
from meshwright.ranks.errors import CheckpointError, ConfigError, DataError
from meshwright.training.convert import export_folder, import_folder
from meshwright.training.convert.folder import Settings
from meshwright.training.convert.transfer import families, family_of
from tests.tools.evaluate.tiny import tiny_checkpoint, tiny_config

CONFIG, WEIGHTS, INDEX, TOKENIZER = "config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.json"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small GPT-2, exported by Meshwright."""
    folder = tmp_path_factory.mktemp("sound")
    tiny_checkpoint(folder, tiny_config())
    export_folder(folder, folder / "hf")
    import_folder(folder / "hf", folder / "again")  # the folder can be imported
    return folder / "hf"


@pytest.fixture
def hf(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "hf"))


def complaint(hf: Path) -> str:
    with pytest.raises((CheckpointError, DataError)) as caught:
        import_folder(hf, hf.parent / "out")
    assert [path.name for path in hf.parent.iterdir()] == ["hf"], "something is left"
    text = str(caught.value)
    assert str(hf) in text
    assert len(text) < 600
    return text


@pytest.mark.parametrize(
    "key, value, says",
    [
        ("n_layer", 10**9, "is more than 10000"),
        ("n_layer", 5000, "makes a model of 5000 layers, and the folder holds 28 tensors"),
        ("n_layer", "2", "n_layer=2 is not a whole number"),
        ("n_layer", 2.5, "n_layer=2.5 is not a whole number"),
        ("n_layer", None, "n_layer=null is not a whole number"),
        ("n_layer", True, "n_layer=true is not"),
        ("n_layer", [2], "n_layer=[2] is not a whole number"),
        ("n_embd", 10**30, "is more than"),
        ("n_embd", 2**40, "cannot be those of a model"),
        ("n_embd", -16, "n_embd=-16 is less than 1"),
        ("n_head", 0, "n_head=0 is less than 1"),
        ("vocab_size", {"a": 1}, "vocab_size={a: 1} is not a whole number"),
        ("layer_norm_epsilon", float("nan"), "is not finite"),
        ("layer_norm_epsilon", 0, "is not above 0"),
        ("attn_pdrop", [0.1], "_pdrop=[0.1] is not a number"),
        ("attn_pdrop", 1.5, "is not below 1"),
        ("tie_word_embeddings", "no", "tie_word_embeddings=no is not true or false"),
        ("activation_function", ["gelu_new"], "is not supported"),
        ("model_type", ["gpt2"], "is not supported"),
        ("model_type", {"a": 1}, "is not supported"),
    ],
)
def test_settings(hf: Path, key: str, value: Any, says: str) -> None:
    settings = json.loads((hf / CONFIG).read_text())
    dropouts = ("attn_pdrop", "embd_pdrop", "resid_pdrop")  # Meshwright reads all three as one setting
    settings |= dict.fromkeys(dropouts if key in dropouts else (key,), value)
    (hf / CONFIG).write_text(json.dumps(settings))
    assert says in complaint(hf)


@pytest.mark.parametrize(
    "content, says",
    [
        (b"", "cannot be read"),
        (b"[]", "holds no settings"),
        (b"{", "cannot be read"),
        (b"\xff\xfe\x00", "cannot be read"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "cannot be read"),
        (b'{"n_layer": ' + b"9" * 5000 + b"}", "cannot be read"),
        (b"{}", "lacks model_type, the name of its architecture; valid: gpt2, llama, "),
        (b'{"n_embd": 16}', "lacks vocab_size, n_positions, n_layer, n_head"),
    ],
)
def test_settings_files(hf: Path, content: bytes, says: str) -> None:
    (hf / CONFIG).write_bytes(content)
    assert says in complaint(hf)


def with_header(change: Callable[[dict[str, Any]], None]) -> Callable[[bytes], bytes]:
    """Return a function that changes a file's header and keeps the data."""

    def changed(content: bytes) -> bytes:
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + content[8 + length :]

    return changed


def names(header: dict[str, Any]) -> list[str]:
    return sorted((name for name in header if name != "__metadata__"), key=lambda name: header[name]["data_offsets"])


def overlap(header: dict[str, Any]) -> None:
    first, second, *_ = names(header)
    header[second]["data_offsets"] = header[first]["data_offsets"]


def beyond(header: dict[str, Any]) -> None:
    last = names(header)[-1]
    start, stop = header[last]["data_offsets"]
    header[last]["data_offsets"] = [start, stop + 10**12]


def backwards(header: dict[str, Any]) -> None:
    first = names(header)[0]
    header[first]["data_offsets"] = header[first]["data_offsets"][::-1]


def another_dtype(header: dict[str, Any]) -> None:
    for name in names(header):
        header[name]["dtype"] = "I64" if header[name]["dtype"] == "F64" else "I32"


def another_shape(header: dict[str, Any]) -> None:
    header[names(header)[0]]["shape"] = [2**40, 2**40]


def another_name(header: dict[str, Any]) -> None:
    header["../../etc/passwd"] = header.pop(names(header)[0])


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda content: b"", "no readable safetensors file"),
        (lambda content: content[:-1], "no readable safetensors file"),
        (lambda content: content[: len(content) // 2], "no readable safetensors file"),
        (lambda content: b"version https://git-lfs.github.com/spec/v1\noid", "fetch them with git lfs pull"),
        (lambda content: content + b"x", "no readable safetensors file"),
        (lambda content: struct.pack("<Q", 2**60) + content[8:], "no readable safetensors file"),
        (with_header(overlap), "no readable safetensors file"),
        (with_header(beyond), "no readable safetensors file"),
        (with_header(backwards), "no readable safetensors file"),
        (with_header(another_shape), "no readable safetensors file"),
        (with_header(another_dtype), "which holds no weights"),
        (with_header(another_name), "has no tensor"),
    ],
)
def test_weight_files(hf: Path, change: Callable[[bytes], bytes], says: str) -> None:
    path = hf / WEIGHTS
    path.write_bytes(change(path.read_bytes()))
    assert says in complaint(hf)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_none(hf: Path, value: float) -> None:
    tensors = load_file(hf / WEIGHTS)
    tensors["transformer.ln_f.bias"][3] = value
    save_file(tensors, hf / WEIGHTS)
    assert f"{WEIGHTS}: transformer.ln_f.bias holds 1 number that is not finite" in complaint(hf)


def test_a_dtype_that_no_run_has(hf: Path) -> None:
    tensors = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in load_file(hf / WEIGHTS).items()}
    save_file(tensors, hf / WEIGHTS)
    assert "stored as torch.float8_e4m3fn, which holds no weights; valid: float32, float64, " in complaint(hf)


@pytest.mark.parametrize(
    "content, says",
    [
        (b"{}", "is no index"),
        (b'{"weight_map": 3}', "is no index"),
        (b'{"weight_map": {}}', "the folder holds 0 tensors"),
        (b'{"weight_map": ' + b"[" * 100_000, "is no index"),
        (b'{"weight_map": {"a": "../model.safetensors"}}', "not a file of this folder"),
        (b'{"weight_map": {"a": "/etc/passwd"}}', "not a file of this folder"),
        (b'{"weight_map": {"a": ".."}}', "not a file of this folder"),
        (b'{"weight_map": {"a": ""}}', "not a file of this folder"),
        (b'{"weight_map": {"a": "x\\u0000y"}}', "not a file of this folder"),
        (b'{"weight_map": {"a": "' + b"x" * 5000 + b'"}}', "not a file of this folder"),
        (b'{"weight_map": {"a": 3}}', "is missing"),
        (b'{"weight_map": {"a": "config.json"}}', "no readable safetensors file"),
    ],
)
def test_indices(hf: Path, content: bytes, says: str) -> None:
    (hf / INDEX).write_bytes(content)
    import_folder(hf, hf.parent / "out")  # next to a whole file, neither we nor transformers read an index
    shutil.rmtree(hf.parent / "out")
    (hf / WEIGHTS).unlink()
    assert says in complaint(hf)


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xff", b"[" * 100_000, b'{"model": {"type": "BPE"}}'])
def test_tokenizers(hf: Path, content: bytes) -> None:
    (hf / TOKENIZER).write_bytes(content)
    assert TOKENIZER in complaint(hf)


def test_any_byte_may_change(sound: Path, tmp_path: Path) -> None:
    """Each of 100 damaged folders is imported or refused with an error of Meshwright. A refused import leaves no
    files."""
    draw = random.Random(5)
    refused = 0
    for number in range(100):
        hf = Path(shutil.copytree(sound, tmp_path / "hf"))
        name = draw.choice([CONFIG, WEIGHTS])
        content = bytearray((hf / name).read_bytes())
        place = draw.randrange(min(len(content), 2000))  # in the weights mostly the header
        content[place] ^= 1 << draw.randrange(8)
        (hf / name).write_bytes(content)
        out = tmp_path / "out"
        try:
            import_folder(hf, out)
        except (CheckpointError, DataError, ConfigError):
            refused += 1
            assert not out.exists(), number
        shutil.rmtree(out, ignore_errors=True)
        shutil.rmtree(hf)
    assert refused > 50


MODELS = {
    "gpt2": Gpt2(),
    "llama": Llama(family="llama"),
    "phi": Phi(family="phi"),
    "gemma": Gemma(family="gemma"),
    "gpt-oss": GptOss(family="gpt-oss"),
    "qwen3-next": QwenNext(family="qwen3-next"),
    "qwen3.5": Qwen35(family="qwen3.5"),
    "deepseek": DeepSeek(
        family="deepseek",
        experts=ExpertsSection(count=8, width=64, shared=64, scores="sigmoid", bias_rate=0.0),
    ),
    "bert": Bert(family="bert"),
    "t5": T5(family="t5"),
    "vit": Vit(family="vit"),
    "bert-pairs": BertPairs(family="bert-pairs"),
    "bert-spans": BertSpans(family="bert-spans"),
    "bert-choice": BertChoice(family="bert-choice"),
}
WRONG = (None, "x", "", [1], [], {}, {"a": 1}, -1, 0, 10**9, 10**30, 0.5, True, False, float("nan"), float("inf"))


@pytest.mark.parametrize("name", MODELS)
def test_any_setting_may_be_anything(name: str, tmp_path: Path) -> None:
    """Every key of a family's config.json is read or refused as a checkpoint is refused, for every kind of value."""
    assert MODELS.keys() == families().keys()
    family, path = families()[name], tmp_path / CONFIG
    right = json.loads(json.dumps(family.settings(MODELS[name]) | {"torch_dtype": "float32"}))
    outcomes = Counter[str]()
    for key in right:
        for value in (*WRONG, ...):
            changed = {other: right[other] for other in right if other != key} | ({} if value is ... else {key: value})
            path.write_text(json.dumps(changed))
            settings = Settings(path)
            try:
                family_of(settings).read(settings, frozenset())
                outcomes["read"] += 1
            except CheckpointError:
                outcomes["refused"] += 1
    assert min(outcomes["read"], outcomes["refused"]) > 50
