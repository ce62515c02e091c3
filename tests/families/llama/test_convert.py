"""Hugging Face's Llama, Qwen2, Qwen3 and Mistral imported and exported: both programs' logits are equal.

A round trip keeps all bits, with at most a shard in memory. Settings that Meshwright does not compute are refused by
name.
"""

from __future__ import annotations

import json
import multiprocessing
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from meshwright.config import parse_config
from meshwright.ranks.errors import CheckpointError
from meshwright.tools.evaluate.load import load_text
from meshwright.tools.generate import Sampling, generate_text
from meshwright.training.convert import export_folder, import_folder
from tests.families.llama.logits import CASES, SIZES, YARN, hugging_face, our_logits, their_logits
from tests.training.convert.folders import check_refused, saved

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("case", CASES)
def test_the_same_logits_here_and_there_and_back(tmp_path: Path, case: str) -> None:
    """transformers' norms compute in float32 for every dtype, so the tolerance is float32's."""
    model = hugging_face(tmp_path / "hf", case, shard="4KB")
    imported = import_folder(tmp_path / "hf", tmp_path / "run" / "checkpoints" / "step-0", shard_bytes=5000)
    assert imported.has_tokenizer
    assert imported.parameters > 5000 / 8
    torch.testing.assert_close(our_logits(tmp_path / "run"), their_logits(model), rtol=1e-4, atol=1e-5)
    export_folder(tmp_path / "run", tmp_path / "back", shard_bytes=5000)
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 3
    again, facts = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(facts.values()), facts
    before = dict(model.named_parameters())
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, before[name]), name
    torch.testing.assert_close(their_logits(again.eval()), their_logits(model), rtol=0, atol=0)
    assert (tmp_path / "back" / "tokenizer.json").read_bytes() == (tmp_path / "hf" / "tokenizer.json").read_bytes()
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "back").eos_token_id == 256


@pytest.mark.parametrize("case", ["llama", "qwen2"])
def test_half_precision_comes_back_as_it_was(tmp_path: Path, case: str) -> None:
    """A tied and an untied table in bf16 return from a round trip with equal dtype, bits and logits."""
    hugging_face(tmp_path / "hf", case, dtype=torch.bfloat16)
    import_folder(tmp_path / "hf", tmp_path / "step-0")
    export_folder(tmp_path / "step-0", tmp_path / "back")
    load = transformers.AutoModelForCausalLM.from_pretrained
    before, after = (load(tmp_path / folder).eval() for folder in ("hf", "back"))
    assert after.dtype == torch.bfloat16
    torch.testing.assert_close(their_logits(after), their_logits(before), rtol=0, atol=0)


def test_settings_as_they_were_before(tmp_path: Path) -> None:
    """Older folders have rope_theta and rope_scaling instead of rope_parameters."""
    model = hugging_face(tmp_path / "hf", "llama")
    path = tmp_path / "hf" / "config.json"
    settings = json.loads(path.read_text())
    rope = settings.pop("rope_parameters")
    path.write_text(json.dumps(settings | {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}))
    import_folder(tmp_path / "hf", tmp_path / "step-0")
    torch.testing.assert_close(our_logits(tmp_path / "step-0"), their_logits(model), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "case",
    ["qwen3", "mistral, window", "qwen3, windows", "smollm3, windows", "olmo3", "gemma2", "gemma3", "phi3", "gpt-oss"],
)
def test_an_import_generates_what_transformers_does(tmp_path: Path, case: str) -> None:
    model = hugging_face(tmp_path / "hf", case)
    import_folder(tmp_path / "hf", tmp_path / "step-0")
    loaded = load_text(tmp_path / "step-0")
    prompt = torch.tensor([list(b"abc")])
    model.set_experts_implementation("eager")  # a grouped product has no float64
    theirs = model.generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=256)[0, 3:].tolist()
    ours = "".join(generate_text(loaded, "abc", 8, Sampling()))
    ended = theirs[: theirs.index(256)] if 256 in theirs else theirs
    assert ours == loaded.tokenizer.decode(ended)


def peak_growth(source: Path, out: Path, back: Path, shard_bytes: int, sent: Any) -> None:
    def peak() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    torch.ones(10).sum()
    before = peak()
    import_folder(source, out, shard_bytes=shard_bytes)
    middle = peak()
    export_folder(out, back, shard_bytes=shard_bytes)
    sent.send((middle - before, peak() - before))


def test_no_more_than_a_shard_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For 96 MB of weights in shards of 24 MB, a process's peak grows by a shard and some tensors of 4 MB.

    Freed memory returns to the system at once, as tensors above 32 MB always do.
    """
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(2**16))
    shape = {"vocab_size": 257, "hidden_size": 512, "num_hidden_layers": 6, "intermediate_size": 2048}
    config = transformers.LlamaConfig(**SIZES | shape | {"num_attention_heads": 8, "num_key_value_heads": 8})
    saved(transformers.LlamaForCausalLM, config, tmp_path / "hf", torch.float32, max_shard_size="24MB")
    whole = sum(path.stat().st_size for path in (tmp_path / "hf").glob("*.safetensors"))
    shard, context = 24 * 2**20, multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    paths = (tmp_path / "hf", tmp_path / "step-0", tmp_path / "back")
    worker = context.Process(target=peak_growth, args=(*paths, shard, sender))
    worker.start()
    imported, exported = receiver.recv()
    worker.join()
    assert whole > 3.5 * shard
    assert imported < 1.5 * shard
    assert exported < 1.5 * shard


REFUSED: list[tuple[str, dict[str, object], str]] = [
    (
        "gpt-oss",
        {"quantization_config": {"quant_method": "awq"}},
        "quant_method: awq.* is not supported; valid: quant_m",
    ),
    ("gpt-oss", {"hidden_act": "gelu"}, "hidden_act=gelu is not supported; valid: silu"),
    ("gpt-oss", {"num_key_value_heads": None}, "lacks num_key_value_heads, which a gpt_oss has"),
    ("gpt-oss", {"swiglu_limit": 0.0}, "swiglu_limit"),
    ("gpt-oss", {"attention_bias": False}, "has a tensor that gpt-oss has not: model.layers.0.self_attn.k_proj.bias"),
    ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1 is not supported; valid: 0.0"),
    ("qwen3-moe", {"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\] is not supported; valid: \[\]"),
    ("qwen3-moe", {"decoder_sparse_step": 2}, "decoder_sparse_step=2 is not supported; valid: 1"),
    (
        "qwen3-moe",
        {"shared_expert_intermediate_size": 24},
        "shared_expert_intermediate_size=24 is not supported; valid: null, 0",
    ),
    ("mixtral", {"n_shared_experts": 1}, "n_shared_experts=1 is not supported; valid: null, 0"),
    ("qwen2-moe", {"qkv_bias": False}, "qkv_bias=false is not supported; valid: true"),
    ("llama", {"num_experts": 8}, "num_experts=8 is not supported; valid: null"),
    ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has sliding_attention, and there"),
    ("qwen2", {"layer_types": ["chunked_attention"] * 2}, "layer_types has chunked_attention, which is not supported"),
    (
        "qwen2",
        {"layer_types": ["full_attention"]},
        r"layer_types=\[full_attention\] is not supported; valid: a list of 2",
    ),
    ("mistral", {"layer_types": ["full_attention"] * 2}, "layer_types=.* is not supported; valid: null"),
    ("mistral", {"sliding_window": 0}, "sliding_window=0 is no number of tokens; valid: null, or 1"),
    ("llama", {"layer_types": ["sliding_attention"] * 2}, "layer_types has sliding_attention, which a llama has not"),
    (
        "olmo3",
        {"rope_parameters": {"chunked_attention": {}}},
        "rope_parameters=.* has other sections than full_attention",
    ),
    ("olmo3", {"sliding_window": None}, "layer_types has sliding_attention, and there is no window"),
    ("olmo2", {"clip_qkv": 8.0}, "clip_qkv=8.0 is not supported; valid: null"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=true is not supported; valid: null"),
    ("gemma2", {"hidden_activation": "silu"}, "hidden_activation=silu is not supported; valid: gelu_pytorch_tanh"),
    ("phi3", {"resid_pdrop": 0.1}, "resid_pdrop=0.1 is not supported; valid: 0.0"),
    ("phi3", {"auto_map": {"AutoConfig": "code.Other"}}, "auto_map=.* is not supported; valid: null, "),
    (
        "phi3",
        {"rope_scaling": {"type": "longrope"}},
        "rope_scaling: rope_type=longrope is not supported; valid: default",
    ),
    ("phi3", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type=yarn is not supported; valid: default"),
    ("llama", {"no_rope_layers": [1, 0]}, r"no_rope_layers=\[1, 0\] is not supported; valid: null"),
    ("smollm3", {"no_rope_layers": [1, 0]}, r"no_rope_layers=\[1, 0\] is not supported; valid: null, or 4 of 0 and 1"),
    ("smollm3", {"no_rope_layers": [0] * 4}, "leaves no layer with positions"),
    ("llama", {"use_sliding_window": True}, "use_sliding_window=true is not supported; valid: null, false"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act=gelu is not supported; valid: silu"),
    (
        "llama",
        {"rope_parameters": {"rope_type": "longrope"}},
        "rope_type=longrope is not supported; valid: default, lin",
    ),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type=dynamic is not supported"),
    ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "llama3 lacks low_freq_factor, high_freq_fac"),
    ("llama", {"compression_config": {"format": "int"}}, "compression_config=.*format: int.* is not supported"),
    ("qwen2", {"rope_parameters": YARN | {"short": 1.0}}, "rope_parameters: short=1.0 is not supported; valid: "),
    ("llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0 is not supported; valid: null"),
    ("llama", {"quantization_config": {"bits": 4}}, r"quantization_config=.*bits: 4.* is not supported"),
    ("llama", {"attention_dropout": 0.1}, "attention_dropout=0.1 is not supported; valid: 0.0"),
    (
        "llama",
        {"model_type": "gemma3"},
        "model_type=gemma3 is not supported; valid: gpt2, llama, qwen2, qwen3, mistral",
    ),
    ("llama", {"num_key_value_heads": 3}, "num_key_value_heads=3 does not divide"),
    ("llama", {"hidden_size": 20}, r"is \[257, 16\], and config\.json makes it \[257, 20\]"),
    ("llama", {"attention_bias": True}, "has no tensor model.layers.0.self_attn.k_proj.bias"),
    (
        "llama-biased",
        {"attention_bias": False},
        "has a tensor that Llama has not: model.layers.0.self_attn.k_proj.bias",
    ),
    (
        "llama",
        {"vocab_size": 200},
        r"tokenizer\.json has 257 tokens, and config\.json's table 200: it is another model",
    ),
]


@pytest.mark.parametrize("case, change, message", REFUSED, ids=[next(iter(change)) for _, change, _ in REFUSED])
def test_what_we_do_not_compute_is_refused(tmp_path: Path, case: str, change: dict[str, object], message: str) -> None:
    hugging_face(tmp_path / "hf", case)
    check_refused(tmp_path, change, message)


def test_a_number_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    hugging_face(tmp_path / "hf", "llama", dtype=torch.float32)
    path = tmp_path / "hf" / "model.safetensors"
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(tensors, path, metadata=metadata)
    check_refused(tmp_path, {}, "mlp.up_proj.weight holds 1 number that is not finite")


GPT_OSS: dict[str, Any] = {"family": "gpt-oss", "experts": {"count": 2}}


@pytest.mark.parametrize(
    "fields, rule",
    [
        ({"biases": ["output"]}, r"no class of transformers has llama's layers with model.biases=\[output\]"),
        ({"norms": "behind"}, "no class of transformers has olmo2's layers with model.whole_norms=false"),
        ({"whole_norms": True}, "no class of transformers has llama's layers with model.whole_norms=true"),
        (
            {"head_norms": True, "rotary_layers": [False, True], "layers": 2},
            "has qwen3's layers with model.layer_forms",
        ),
        (
            {**GPT_OSS, "biases": ["query-key-value", "output"]},
            r"no class of transformers has gpt_oss's experts without biases: model.biases=\[query-key-value, output\]",
        ),
        (
            {**GPT_OSS, "biases": ["output", "feed-forward"]},
            r"no class of transformers has gpt_oss's layers with model.biases=\[output\]",
        ),
        ({**GPT_OSS, "head_norms": True}, "no class of transformers has gpt_oss's layers with model.head_norms=true"),
        (
            {**GPT_OSS, "experts": {"count": 2, "scores": "sigmoid"}},
            "no class of transformers has gpt_oss's experts with model.experts.scores=sigmoid; valid: softmax",
        ),
        (
            {**GPT_OSS, "experts": {"count": 2, "renormalise": False}},
            "no class of transformers has experts whose weights are not renormalised",
        ),
        (
            {"activation": "relu2"},
            "no class of transformers has Llama's layers with model.activation=relu2, model.norms=before",
        ),
        (
            {"norms": "both"},
            "no class of transformers has Llama's layers with model.activation=swiglu, model.norms=both",
        ),
    ],
)
def test_what_transformers_has_not_is_refused(fields: dict[str, Any], rule: str, tmp_path: Path) -> None:
    from tests.tools.evaluate.tiny import tiny_checkpoint

    shape = {
        "family": "llama", "layers": 1, "hidden": 16, "heads": 2, "feed_forward": 24, "vocabulary": 257,
        "positions": 16,
    }  # fmt: skip
    config = parse_config({"model": shape | fields, "data": {"sequence": 8, "tokenizer": "bytes"}})
    tiny_checkpoint(tmp_path, config)
    with pytest.raises(CheckpointError, match=rule):
        export_folder(tmp_path, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize("fields", [GPT_OSS, {"family": "gemma", "norm_epsilon": 1e-6}], ids=["gpt-oss", "gemma"])
def test_a_new_model_without_windows_is_one_of_transformers(fields: dict[str, Any], tmp_path: Path) -> None:
    """transformers' class makes a mask from the window's key, even if no layer has a window."""
    from tests.tools.evaluate.tiny import tiny_checkpoint

    shape = {"layers": 1, "hidden": 16, "heads": 2, "feed_forward": 24, "vocabulary": 257, "positions": 16}
    config = parse_config({"model": shape | fields, "data": {"sequence": 8, "tokenizer": "bytes"}})
    tiny_checkpoint(tmp_path, config)
    export_folder(tmp_path, tmp_path / "hf")
    theirs, facts = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(facts.values()), facts
    torch.testing.assert_close(our_logits(tmp_path), their_logits(theirs), rtol=1e-4, atol=1e-5)
    import_folder(tmp_path / "hf", tmp_path / "again" / "checkpoints" / "step-0")
    back = load_text(tmp_path / "again", "cpu").config.model
    assert back.layer_forms == config.model.layer_forms
