"""The state probe: packed programs with separate documents pass, and each way to see another document is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright import parity
from meshwright.parity.states import places_of
from meshwright.ranks.errors import ParityError

WIDTH, VOCABULARY = 8, 19
LENGTHS = [7, 5, 4]


class Attention(nn.Module):
    """Causal attention, in documents or over the row."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.qkv, self.out = how, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, document: Tensor) -> Tensor:
        mask = document[:, :, None] == document[:, None]
        if self.how in ("leaks", "both ways"):
            mask = torch.ones_like(mask)
        if self.how != "both ways":
            mask = mask.tril()
        query, key, value = self.qkv(x).chunk(3, -1)
        return self.out(F.scaled_dot_product_attention(query, key, value, mask))


class Convolution(nn.Module):
    """A causal convolution of each channel over the last four positions."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.conv1d = how, nn.Conv1d(WIDTH, WIDTH, 4, groups=WIDTH, padding=3)

    def forward(self, x: Tensor, document: Tensor) -> Tensor:
        if self.how == "leaks":
            return self.conv1d(x.mT)[..., : x.shape[1]].mT
        ends = [int(n) for n in torch.unique_consecutive(document[0], return_counts=True)[1]]
        return torch.cat([self.conv1d(part.mT)[..., : part.shape[1]].mT for part in x.split(ends, 1)], 1)


class GatedScan(nn.Module):
    """h = a h + (1 - a) x, with a reset at each document's start."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.gate = how, nn.Linear(WIDTH, WIDTH)
        self.register_buffer("num_calls", torch.zeros(1))

    def forward(self, x: Tensor, document: Tensor) -> Tensor:
        self.num_calls += 1  # type: ignore[operator]
        self.last = x
        decay, state, states = torch.sigmoid(self.gate(x)), torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            if self.how != "leaks" and t and bool(document[0, t] != document[0, t - 1]):
                state = torch.zeros_like(state)
            state = decay[:, t] * state + (1 - decay[:, t]) * x[:, t]
            states.append(state)
        return torch.stack(states, 1)


class Model(nn.Module):
    """Embeddings, two mixers and a head. `wrong`: the mixer that leaks, and how."""

    def __init__(self, wrong: str = "") -> None:
        super().__init__()
        torch.manual_seed(3)
        name, _, how = wrong.partition(":")
        self.wrong = wrong
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(32, WIDTH)
        kinds: dict[str, Any] = {"attention": Attention, "conv": Convolution, "scan": GatedScan}
        self.layers = nn.ModuleDict({
            key: kind((how or "leaks") if name == key else "") for key, kind in kinds.items()
        })  # fmt: skip
        self.dropout, self.head = nn.Dropout(0.5), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> dict[str, Tensor]:
        document = (position_ids == 0).cumsum(-1)
        positions = torch.arange(input_ids.shape[1])[None] if self.wrong == "positions" else position_ids
        x = self.tokens(input_ids) + self.places(positions)
        for mixer in self.layers.values():
            x = x + mixer(x, document)
        return {"loss": x.mean(), "logits": self.head(self.dropout(x))}


def batch(rows: int = 1) -> dict[str, Tensor]:
    ids = torch.randint(0, VOCABULARY, (rows, sum(LENGTHS)), generator=torch.Generator().manual_seed(4))
    positions = torch.cat([torch.arange(count) for count in LENGTHS])[None].expand(rows, -1)
    return {"input_ids": ids, "position_ids": positions}


WRONG = {
    "attention": ("attention", "layers.attention", "document 2 sees document 1 at layers.attention", 1),
    "attention:both ways": ("attention", "layers.attention", "block-diagonal mask", 2),
    "conv": ("convolution", "layers.conv.conv1d", "pass seq_idx or cu_seqlens", 1),
    "scan": ("recurrent", "layers.scan", "set states to zero", 1),
    "positions": ("positions", "places", "document 2 is not what it is alone, first at places", 1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2])
def test_documents_that_are_apart_pass(rows: int, dtype: torch.dtype) -> None:
    model = Model().to(dtype)
    for keywords in ({}, {"lengths": LENGTHS}, {"call": lambda model, batch: model(**batch)["logits"]}):
        probe = parity.state_probe(model, batch(rows), **keywords)  # type: ignore[arg-type]
        probe.check()
        assert probe.findings == []
        assert "3 documents do not see each other" in probe.line


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wrong", WRONG)
def test_what_sees_another_document_is_named(wrong: str, dtype: torch.dtype) -> None:
    kind, module, words, number = WRONG[wrong]
    probe = parity.state_probe(Model(wrong).to(dtype), batch())
    assert len(probe.findings) == number, probe.line
    for finding in probe.findings:
        assert (finding.kind, finding.module) == (kind, module), finding.sentence
    assert words in probe.line
    with pytest.raises(ParityError, match="state probe: document"):
        probe.check()


def test_a_later_document_is_seen_too() -> None:
    assert "document 1 sees document 2" in parity.state_probe(Model("attention:both ways"), batch()).line


def test_a_probe_leaves_everything_as_it_was() -> None:
    model = Model().train()
    model.layers["conv"].eval()
    model(**batch())
    buffers, last, state = model.layers["scan"].num_calls.clone(), model.layers["scan"].last, torch.get_rng_state()
    modes = [module.training for module in model.modules()]
    parity.state_probe(model, batch())
    assert torch.equal(model.layers["scan"].num_calls, buffers)
    assert model.layers["scan"].last is last
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_rows_without_documents_are_refused() -> None:
    with pytest.raises(ParityError, match="give lengths"):
        places_of({"input_ids": torch.zeros(1, 4)}, "input_ids", None)
    with pytest.raises(ParityError, match="give two or more"):
        parity.state_probe(Model(), batch(), lengths=[16])
    with pytest.raises(ParityError, match="different tokens"):
        parity.state_probe(Model(), batch() | {"input_ids": torch.zeros(1, 16, dtype=torch.long)})


def test_a_sequential_model_of_one_tensor() -> None:
    """The model reads tokens alone. A recurrent layer of torch leaks, and cannot be reset."""
    torch.manual_seed(0)

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.gru = nn.Embedding(VOCABULARY, WIDTH), nn.GRU(WIDTH, WIDTH, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.gru(self.tokens(x))[0]

    (finding,) = parity.state_probe(Recurrent(), batch()["input_ids"], lengths=LENGTHS).findings
    assert (finding.kind, finding.module) == ("recurrent", "gru")


@pytest.mark.parametrize("packed", [True, False])
def test_llama_of_transformers(packed: bool) -> None:
    """Position ids that restart give the model a mask of documents. Without position ids, one document sees the
    other."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    model, given = transformers.LlamaForCausalLM(config), batch()
    if not packed:
        del given["position_ids"]
    probe = parity.state_probe(model, given, lengths=LENGTHS)
    assert [finding.kind for finding in probe.findings] == ["attention"] * (not packed), probe.line
    assert packed or "document 2 sees document 1 at model.layers.0.self_attn" in probe.line
