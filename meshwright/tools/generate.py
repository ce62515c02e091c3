"""Text from a model, token by token, with a key-value cache.

A decoder continues a prompt; an encoder-decoder answers a prompt by beam search. When a decoder's context is full, the
last half of the context is computed again and the rest is dropped. (Cached keys contain positions and cannot be moved.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from meshwright.compute.models.decoder import KeyValueCache
from meshwright.config.registry import load_entry
from meshwright.data.chat import ChatTemplate, closing_token, kept_template
from meshwright.data.tokenizer import Tokenizer
from meshwright.ranks.errors import ConfigError
from meshwright.tools.evaluate.load import LoadedText, config_at, load_text
from meshwright.training.checkpoint import Checkpoint, find_checkpoint

DEFAULT_TOKENS = 100
REQUIRE_EXACT = "meshwright.tools.exact:require_exact"
EXACT_DECODER = "meshwright.tools.exact:ExactDecoder"
"""Entries of generation with equal bits, which other runs do not import."""

_UNFINISHED = "\ufffd"


@dataclass(frozen=True)
class Sampling:
    """Choice of the next token. Temperature 0: the most likely token; else drawn from the `top_k` most likely tokens.

    Raises ConfigError on a value out of range, or without an effect.
    """

    temperature: float = 0.0
    top_k: int | None = None
    seed: int | None = None
    """Seed of the draws; None: 1."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            valid = "0 (greedy) or more, such as 0.8"
            raise ConfigError.of("--temperature", self.temperature, "is no temperature", valid)
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError.of("--top-k", self.top_k, "leaves nothing to draw from", "1 or more")
        for option, value in (("--top-k", self.top_k), ("--seed", self.seed)):
            if value is not None and self.temperature == 0:
                raise ConfigError.of(option, value, "has no effect at temperature 0", "with --temperature, such as 0.8")


@dataclass(frozen=True)
class Request:
    """A request to a checkpoint; None: not given. `sampling` is for decoders, the next two fields for encoder-decoders.

    Raises ConfigError if `tokens` is less than 1.
    """

    prompt: str
    tokens: int | None = None
    """Largest number of new tokens. Default: 100 for a decoder; for an encoder-decoder 50 more than the prompt has,
    within the context."""
    sampling: Sampling = Sampling()
    beams: int | None = None
    length_penalty: float | None = None
    chat: bool = False
    """Whether the prompt is a user's message to a run that was trained on dialogues; the answer is one turn."""
    exact: bool = False
    """Whether log-probabilities must have the bits of training (tools/exact.py); of a run with layout-free bits."""

    def __post_init__(self) -> None:
        if self.tokens is not None and self.tokens < 1:
            raise ConfigError.of("--tokens", self.tokens, "asks for nothing", "1 or more")


@dataclass(frozen=True)
class Generated:
    """A generated text."""

    folder: Path
    """The step folder of the checkpoint."""
    begun: str
    """The prompt that the text continues; empty for an answer."""
    parts: Iterator[str]
    """The text in parts, as soon as generated."""


def generate(checkpoint: Path, request: Request, device: str = "auto", context: int | None = None) -> Generated:
    """Continue or answer a prompt.

    Raises ConfigError for options without an effect on the checkpoint's family, or if an encoder-decoder's context is
    too short for the prompt; further as the loaders do.
    """
    generated: Generated = load_entry(config_at(checkpoint).model.generated_by)(checkpoint, request, device, context)
    return generated


def go_on(checkpoint: Path, request: Request, device: str, context: int | None) -> Generated:
    """Continue a prompt with a decoder, token by token; with `request.chat`, answer the prompt."""
    sampling, config = request.sampling, config_at(checkpoint)
    if request.exact and request.chat:
        raise ConfigError.of("--exact", True, "has no form of an answer yet", "without --chat")
    options: dict[str, float | None] = {"--beams": request.beams, "--length-penalty": request.length_penalty}
    refuse(options, config.model.family, "which goes on token by token", "--temperature, --top-k, --seed")
    template = None
    if request.chat:
        folder = find_checkpoint(checkpoint)
        template = config.data.chat_template(folder) or kept_template(folder)
        if template is None:
            rule = "has no template: this run was not trained on dialogues, and its tokenizer came without one"
            raise ConfigError.of("--chat", True, rule, "without --chat")
    if request.exact:
        load_entry(REQUIRE_EXACT)(config, "--exact")
        options = {"--context": context}
        refuse(options, "run with --exact", "whose text ends with the sequence of training", "without --context")
    loaded, most = load_text(checkpoint, device, context), request.tokens or DEFAULT_TOKENS
    if request.exact:
        return Generated(loaded.folder, request.prompt, exact_text(loaded, request.prompt, most, sampling))
    if template is None:
        return Generated(loaded.folder, request.prompt, generate_text(loaded, request.prompt, most, sampling))
    return Generated(loaded.folder, "", answer_text(loaded, template, request.prompt, most, sampling))


def refuse(options: dict[str, float | None], family: str, how: str, valid: str) -> None:
    """Raise ConfigError if an option was given that has no effect on a family."""
    for option, value in options.items():
        if value is not None:
            raise ConfigError.of(option, value, f"has no effect on a {family}, {how}", valid)


def generate_tokens(
    loaded: LoadedText, prompt: list[int], most: int, sampling: Sampling, ends: Sequence[int] = ()
) -> Iterator[int]:
    """Yield at most `most` tokens that follow the prompt. An empty prompt becomes the token that begins a text.

    Generation ends before a stop token, as in transformers' `generate` (data/marks.py), or before a token of `ends`.
    Of a prompt longer than the context, the last context // 2 tokens are read, as when a full context slides.
    """
    # On the host, so that every device draws the same numbers.
    generator = torch.Generator().manual_seed(1 if sampling.seed is None else sampling.seed)
    tokens, stops = prompt or [loaded.tokenizer.first], loaded.tokenizer.marks.stops.union(ends)
    half = max(1, loaded.context // 2)
    fresh = tokens if len(tokens) <= loaded.context else tokens[-half:]
    cache = KeyValueCache()
    for _ in range(most):
        with torch.inference_mode():
            h = loaded.model.hidden(torch.tensor([fresh], device=loaded.device), cache)  # [1, T, H]
            logits = loaded.head.logits(h[0, -1])[: loaded.tokenizer.vocabulary_size]  # [V]; other ids are no tokens
        token = drawn(logits, sampling, generator)
        if token in stops:
            return
        yield token
        tokens = [*tokens[-loaded.context :], token]
        fresh = [token]
        if cache.num_tokens == loaded.context:
            # Cached keys contain positions, so the kept half is computed again at positions 0, 1, ...
            fresh, cache = tokens[-half:], KeyValueCache()


def drawn(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Return the most likely token of logits [V], or one drawn from the likely tokens."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    # On the host and in float64, so that a seed's draws are the same from every device.
    scores = logits.cpu().double() / sampling.temperature
    likely, ids = scores.topk(min(sampling.top_k or len(scores), len(scores)))
    return int(ids[torch.multinomial(likely.softmax(-1), 1, generator=generator)])


def exact_text(loaded: LoadedText, prompt: str, most: int, sampling: Sampling) -> Iterator[str]:
    """Yield the continuation of a prompt, whose logits have the bits of training's forward pass.

    The text ends at the latest with the sequence of training, since no later position was trained.

    Raises ConfigError if the prompt leaves no place in the sequence.
    """
    tokenizer = loaded.tokenizer
    ids = [*tokenizer.opening, *tokenizer.encode(prompt)] or [tokenizer.first]
    generator = torch.Generator().manual_seed(1 if sampling.seed is None else sampling.seed)

    def choose(row_index: int, position: int, logits: torch.Tensor) -> int | None:
        token = drawn(logits[: tokenizer.vocabulary_size], sampling, generator)
        return None if position - len(ids) == most or token in tokenizer.marks.stops else token

    decoder = load_entry(EXACT_DECODER)(loaded.config, loaded.device, cached=True).load(Checkpoint(loaded.folder))
    return whole_characters(tokenizer, ids, iter(decoder.continued({0: ids}, choose)[0].tokens))


def generate_text(loaded: LoadedText, prompt: str, most: int, sampling: Sampling) -> Iterator[str]:
    """Yield the continuation of a prompt in parts of whole characters."""
    ids = [*loaded.tokenizer.opening, *loaded.tokenizer.encode(prompt)]
    return whole_characters(loaded.tokenizer, ids, generate_tokens(loaded, ids, most, sampling))


def answer_text(loaded: LoadedText, template: ChatTemplate, asked: str, most: int, sampling: Sampling) -> Iterator[str]:
    """Yield the answer to a question, which the template renders, up to the special token that closes a turn."""
    before, _ = template.question(asked, "--prompt")
    ids, _ = loaded.tokenizer.encode_placed(before, marked=True)
    closes = closing_token(template, loaded.tokenizer)
    ends = () if closes is None else (closes,)
    return whole_characters(loaded.tokenizer, ids, generate_tokens(loaded, ids, most, sampling, ends))


def whole_characters(tokenizer: Tokenizer, before: list[int], tokens: Iterator[int]) -> Iterator[str]:
    """Yield the text of `tokens`, which follow the tokens `before`, in parts that end with whole characters.

    A token that ends in the middle of a character is held back until the character is complete. Each part is decoded
    together with the previous part, because some tokenizers drop the space at the beginning of a text.
    """
    known, fresh = before[-8:], []
    for token in tokens:
        fresh.append(token)
        text = _behind(tokenizer, known, fresh)
        # A character of several tokens decodes to the replacement character until the last token is there.
        if text and not text.endswith(_UNFINISHED):
            yield text
            known, fresh = fresh, []
    if fresh and (text := _behind(tokenizer, known, fresh)):
        yield text


def _behind(tokenizer: Tokenizer, known: list[int], fresh: list[int]) -> str:
    """Return the text that the fresh tokens add to the text of the known tokens."""
    return tokenizer.decode([*known, *fresh])[len(tokenizer.decode(known)) :]
