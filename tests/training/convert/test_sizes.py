"""Shipped sizes equal the config.json that the authors publish, read like any folder's. transformers' model of this
config.json has the same number of parameters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from meshwright.config import parse_config
from meshwright.families.llama.section import Llama
from meshwright.training.convert.folder import Settings
from meshwright.training.convert.transfer import family_of
from tests.families.llama.sizes import BESIDE, COLUMNS, COUNTS, SIZES

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("name", SIZES)
def test_a_shipped_size_is_the_published_one(tmp_path: Path, name: str) -> None:
    settings = dict(zip(COLUMNS, SIZES[name][:-1], strict=True)) | {"hidden_act": "silu"} | BESIDE[name]
    (tmp_path / "config.json").write_text(json.dumps(settings))
    read = Settings(tmp_path / "config.json")
    published = family_of(read).read(read, frozenset())
    shipped = parse_config({"model": name, "data": {"sequence": 1}}).model
    assert isinstance(published, Llama)
    assert isinstance(shipped, Llama)
    assert published.width_of_head == shipped.width_of_head
    assert published.num_key_value_heads == shipped.num_key_value_heads
    spelled = ("head_width", "key_value_heads")  # null, or the number that null means
    if published.experts is not None:  # a run without weights to begin from has the balance of the authors' training
        assert published.experts.balance == 0, "output_router_logits=false leaves it out"
        balanced = published.experts.model_copy(update={"balance": settings["router_aux_loss_coef"]})
        published = published.model_copy(update={"experts": balanced})
    assert published.model_dump(exclude=set(spelled)) == shipped.model_dump(exclude=set(spelled))
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path))
    assert sum(parameter.numel() for parameter in theirs.parameters()) == COUNTS[name]


def test_every_published_size_is_here() -> None:
    assert SIZES.keys() == BESIDE.keys()
