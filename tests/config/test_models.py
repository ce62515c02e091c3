"""The shipped models have the sizes in their names."""

from __future__ import annotations

import pytest

from meshwright.config import model_names, parse_config
from meshwright.config.schema import Model
from tests.families.llama.sizes import COUNTS

PARAMETERS = {
    "gpt2-mini": 10e6,
    "gpt2-small": 124e6,
    "gpt2-medium": 355e6,
    "gpt2-large": 774e6,
    "gpt2-xl": 1.558e9,
    "megatron-1.2b": 1.2e9,
    "megatron-2.5b": 2.5e9,
    "megatron-4.2b": 4.2e9,
    "megatron-8.3b": 8.3e9,
    "axonn-12b": 12e9,
    "axonn-24b": 24e9,
    "axonn-50b": 50e9,
    "axonn-100b": 100e9,
}

VITS = {"vit-digits", "vit-tiny", "vit-small", "vit-base", "vit-large"}
"""Counted to the last parameter in tests/families/vision/test_vit.py."""

BERTS = {"bert-base", "bert-large", "bert-tiny", "megatron-bert-336m", "megatron-bert-1.3b", "megatron-bert-3.9b"}
"""Counted in tests/families/bert/test_model.py."""

RESNEXTS = {"resnext-50", "resnext-tiny"}
"""Counted in tests/families/vision/test_resnext.py."""

TRANSFORMERS = {"transformer-base", "transformer-big", "transformer-tiny"}
"""Counted in tests/families/seq2seq/test_transformer.py."""

T5S = {"t5-small", "t5-base", "t5-large", "t5-large-32heads", "t5-tiny"}
"""Counted in tests/families/seq2seq/test_t5.py."""

LLAMAS = set(COUNTS)
"""Counted in tests/families/llama/test_model.py."""

DEEPSEEKS = {"deepseek-v3", "deepseek-mini", "moonlight-16b-a3b", "kimi-k2"}
"""Counted in tests/families/deepseek/test_convert.py."""

QWENS = {
    "qwen3-next-80b-a3b", "qwen3-next-mini", "qwen3.5-0.8b", "qwen3.5-27b", "qwen3.5-35b-a3b", "qwen3.5-397b-a17b",
}  # fmt: skip
"""Counted in tests/families/qwen_next/test_convert.py."""


def num_parameters(model: Model) -> int:
    """Return GPT-2's count, from the layers: attention 4 H^2 + 4 H, feed-forward 2 H N + N + H, two norms 4 H."""
    hidden, inner = model.hidden, model.inner
    layer = (4 * hidden**2 + 4 * hidden) + (2 * hidden * inner + inner + hidden) + 4 * hidden
    embeddings = (model.padded_vocabulary * (1 if model.tied else 2) + model.positions) * hidden
    return embeddings + model.layers * layer + 2 * hidden


def test_every_shipped_model_is_in_the_table() -> None:
    counted = set(PARAMETERS) | VITS | BERTS | RESNEXTS | TRANSFORMERS | T5S | LLAMAS | DEEPSEEKS | QWENS
    assert set(model_names()) == counted


@pytest.mark.parametrize("name", PARAMETERS)
def test_size_is_what_the_name_says(name: str) -> None:
    model = parse_config({"model": name, "data": {"sequence": 128}}).model
    assert num_parameters(model) == pytest.approx(PARAMETERS[name], rel=0.05)


def test_gpt2_small_to_the_last_parameter() -> None:
    # 124,439,808 as published; the padding of the vocabulary adds 47 rows
    assert num_parameters(parse_config({"model": "gpt2-small"}).model) == 124_439_808 + 47 * 768
