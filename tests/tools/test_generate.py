"""Generation: the cache changes nothing, seeds repeat, the context slides, and characters are printed whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from meshwright.compute.models.experts_section import ExpertsSection
from meshwright.data.tokenizer import byte_tokenizer
from meshwright.families.llama.section import Llama
from meshwright.ranks.errors import ConfigError
from meshwright.tools.evaluate.load import LoadedText, load_text
from meshwright.tools.generate import Request, Sampling, generate, generate_text, generate_tokens, whole_characters
from tests.tools.evaluate.tiny import VOCABULARY, rigged_checkpoint, tiny_checkpoint, tiny_config

GREEDY = Sampling()


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedText:
    return load_text(tiny_checkpoint(tmp_path_factory.mktemp("run")), "cpu")


@torch.no_grad()
def without_cache(loaded: LoadedText, prompt: list[int], most: int) -> list[int]:
    """Generate greedily, with the whole window computed again for every token."""
    made: list[int] = []
    window = prompt or [loaded.tokenizer.end]
    if len(window) > loaded.context:
        window = window[-(loaded.context // 2) :]
    while len(made) < most:
        token = int(loaded.head.logits(loaded.model.hidden(torch.tensor([window])))[0, -1].argmax())
        if token == loaded.tokenizer.end:
            break
        made.append(token)
        window = [*window, token]
        if len(window) > loaded.context:
            window = window[-(loaded.context // 2) :]
    return made


def test_an_answer_ends_before_the_token_that_closes_a_turn(loaded: LoadedText) -> None:
    ids = loaded.tokenizer.encode("the cat")
    whole = list(generate_tokens(loaded, ids, 25, GREEDY))
    closes = whole[len(whole) // 2]
    assert list(generate_tokens(loaded, ids, 25, GREEDY, [closes])) == whole[: whole.index(closes)]


def test_chat_is_for_runs_on_dialogues(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--chat=True has no template: this run was not trained on dialogues"):
        generate(tiny_checkpoint(tmp_path), Request("hello", chat=True), "cpu")


def test_experts_go_with_a_cache(tmp_path: Path) -> None:
    """A token's experts depend on the token alone: earlier tokens are in the cache, and the balance is no output."""
    model = Llama(
        family="llama",
        layers=2, hidden=16, heads=2, key_value_heads=1, feed_forward=24, positions=8, vocabulary=VOCABULARY,
        experts=ExpertsSection(count=4, per_token=2, balance=0.1),
    )  # fmt: skip
    config = tiny_config().model_copy(update={"model": model})
    test_greedy_equals_a_loop_without_cache(load_text(tiny_checkpoint(tmp_path, config), "cpu"), "a long prompt")


@pytest.mark.parametrize("prompt", ["", "a", "the cat", "12345678", "123456789", "a long prompt that does not fit"])
def test_greedy_equals_a_loop_without_cache(loaded: LoadedText, prompt: str) -> None:
    ids = loaded.tokenizer.encode(prompt)
    wanted = without_cache(loaded, ids, 25)
    assert list(generate_tokens(loaded, ids, 25, GREEDY)) == wanted
    assert len(set(wanted)) > 1 or len(wanted) < 25, "a model that repeats one token shows nothing"


def test_same_seed_same_text_and_another_seed_another(loaded: LoadedText) -> None:
    def made(seed: int | None) -> list[int]:
        return list(generate_tokens(loaded, [97], 20, Sampling(1.5, 50, seed)))

    assert made(7) == made(7)
    assert made(7) != made(8)
    assert made(None) == made(1)


def test_top_1_is_greedy(loaded: LoadedText) -> None:
    greedy = list(generate_tokens(loaded, [97], 20, GREEDY))
    assert list(generate_tokens(loaded, [97], 20, Sampling(2.0, 1, 5))) == greedy


def test_top_k_draws_from_the_k_most_likely(loaded: LoadedText) -> None:
    with torch.no_grad():
        likely = loaded.head.logits(loaded.model.hidden(torch.tensor([[97]])))[0, -1].topk(3).indices.tolist()
    drawn = {next(generate_tokens(loaded, [97], 1, Sampling(50.0, 3, seed)), 256) for seed in range(40)}
    assert drawn == set(likely)


def test_stops_before_the_end_token(tmp_path: Path) -> None:
    loaded = load_text(rigged_checkpoint(tmp_path, {ord("a"): ord("b"), ord("b"): 256}))
    assert "".join(generate_text(loaded, "a", 50, GREEDY)) == "b"
    assert len(list(generate_tokens(loaded, [0], 50, GREEDY))) == 50


def test_characters_come_whole(tmp_path: Path) -> None:
    sign = "é→🙂x"
    chain = dict(zip(b"a" + sign.encode(), [*sign.encode(), 256], strict=True))
    assert len(chain) == 1 + len(sign.encode()), "every byte once, so that one table can say them all"
    loaded = load_text(rigged_checkpoint(tmp_path, chain))
    assert list(generate_text(loaded, "a", 50, GREEDY)) == ["é", "→", "🙂", "x"]
    assert list(generate_text(loaded, "a", 3, GREEDY)) == ["é", "\ufffd"]


def test_parts_join_to_the_whole_text() -> None:
    tokenizer = byte_tokenizer()
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY - 1, (200,), generator=generator).tolist() + list("é→\ufffd🙂".encode())
    assert "".join(whole_characters(tokenizer, list(b"xyz"), iter(ids))) == tokenizer.decode(ids)


def test_mistakes() -> None:
    for values, message in (
        ((-1.0,), "--temperature=-1.0"),
        ((float("nan"),), "--temperature=nan"),
        ((1.0, 0), "--top-k=0"),
        ((0.0, 5), "--top-k=5 has no effect"),
        ((0.0, None, 5), "--seed=5 has no effect"),
    ):
        with pytest.raises(ConfigError, match=message):
            Sampling(*values)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="--tokens=0"):
        Request("a", 0)
