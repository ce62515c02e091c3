"""Small pretrained BERT folders, made by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.data.tokenizer import byte_tokenizer
from meshwright.families.bert.convert import with_specials
from meshwright.families.bert.specials import specials_of
from tests.training.convert.folders import saved

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 261, "max_position_embeddings": 8, "hidden_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "intermediate_size": 64, "pad_token_id": 257,
}  # fmt: skip

KINDS = {
    ("original", True): "BertForPreTraining",
    ("original", False): "BertForMaskedLM",
    ("megatron", True): "MegatronBertForPreTraining",
    ("megatron", False): "MegatronBertForMaskedLM",
}


def hugging_face(
    folder: Path, order: str = "original", pairs: bool = True, *, dtype: torch.dtype = torch.float64, **changes: Any
) -> Any:
    """Save a random BERT with transformers, and a tokenizer; return the model."""
    kind = getattr(transformers, KINDS[order, pairs])
    model = saved(kind, kind.config_class(**{**SIZES, **changes}), folder, dtype)
    tokenizer = byte_tokenizer()
    (folder / "tokenizer.json").write_text(with_specials(tokenizer.to_json(), specials_of(tokenizer)))
    return model
