"""Text from a model, token by token, with a key-value cache: a decoder continues a prompt, an encoder-decoder answers
it by beam search.

A decoder's full context slides: its last half is computed again, and the rest is dropped. (Cached keys contain
positions, so they cannot be moved.)
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
from meshwright.training.checkpoint import find_checkpoint

DEFAULT_TOKENS = 100

_UNFINISHED = "\ufffd"


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. Temperature 0: the most likely one; else drawn, from the `top_k` most likely.

    Raises ConfigError on a value that cannot be, or that would have no effect.
    """

    temperature: float = 0.0
    top_k: int | None = None
    seed: int | None = None
    """None: 1."""

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

    Raises ConfigError where it asks for no token.
    """

    prompt: str
    tokens: int | None = None
    """The most new tokens. Default: 100 for a decoder; for an encoder-decoder 50 more than the prompt has, within the
    context."""
    sampling: Sampling = Sampling()
    beams: int | None = None
    length_penalty: float | None = None
    chat: bool = False
    """The prompt is a user's message to a run that was trained on dialogues; the answer ends with its turn."""

    def __post_init__(self) -> None:
        if self.tokens is not None and self.tokens < 1:
            raise ConfigError.of("--tokens", self.tokens, "asks for nothing", "1 or more")


@dataclass(frozen=True)
class Generated:
    """A text that is generated. `folder`: the step folder; `begun`: the prompt that the text continues, empty for an
    answer; `parts`: yielded as they are generated."""

    folder: Path
    begun: str
    parts: Iterator[str]


def generate(checkpoint: Path, request: Request, device: str = "auto", context: int | None = None) -> Generated:
    """Continue a prompt, or answer it.

    Raises ConfigError on options without an effect on the checkpoint's family, or a prompt that an encoder-decoder's
    context cannot hold; and as the loaders do.
    """
    generated: Generated = load_entry(config_at(checkpoint).model.generated_by)(checkpoint, request, device, context)
    return generated


def go_on(checkpoint: Path, request: Request, device: str, context: int | None) -> Generated:
    """The continuation by a decoder, token by token; for a run on dialogues, the answer."""
    sampling, config = request.sampling, config_at(checkpoint)
    options = {"--beams": request.beams, "--length-penalty": request.length_penalty}
    refuse(options, config.model.family, "which goes on token by token", "--temperature, --top-k, --seed")
    template = None
    if request.chat:
        folder = find_checkpoint(checkpoint)
        template = config.data.chat_template(folder) or kept_template(folder)
        if template is None:
            rule = "has no template: this run was not trained on dialogues, and its tokenizer came without one"
            raise ConfigError.of("--chat", True, rule, "without --chat")
    loaded, most = load_text(checkpoint, device, context), request.tokens or DEFAULT_TOKENS
    if template is None:
        return Generated(loaded.folder, request.prompt, generate_text(loaded, request.prompt, most, sampling))
    return Generated(loaded.folder, "", answer_text(loaded, template, request.prompt, most, sampling))


def refuse(options: dict[str, float | None], family: str, how: str, valid: str) -> None:
    """Raises ConfigError if an option was given that has no effect on a family."""
    for option, value in options.items():
        if value is not None:
            raise ConfigError.of(option, value, f"has no effect on a {family}, {how}", valid)


def generate_tokens(
    loaded: LoadedText, prompt: list[int], most: int, sampling: Sampling, ends: Sequence[int] = ()
) -> Iterator[int]:
    """At most `most` tokens that follow the prompt's; ends before a token at which transformers' `generate` ends, too
    (data/marks.py), or another of `ends`. An empty prompt becomes the token that begins a text.

    A prompt longer than the context is cut as the context is when it slides: its last half context stays.
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
        if sampling.temperature == 0:
            token = int(logits.argmax())
        else:
            # On the host and in float64, so that a seed's draws are the same from every device.
            scores = logits.cpu().double() / sampling.temperature
            likely, ids = scores.topk(min(sampling.top_k or len(scores), len(scores)))
            token = int(ids[torch.multinomial(likely.softmax(-1), 1, generator=generator)])
        if token in stops:
            return
        yield token
        tokens = [*tokens[-loaded.context :], token]
        fresh = [token]
        if cache.num_tokens == loaded.context:
            # Cached keys contain positions, so the half that stays is computed again, at positions 0, 1, ...
            fresh, cache = tokens[-half:], KeyValueCache()


def generate_text(loaded: LoadedText, prompt: str, most: int, sampling: Sampling) -> Iterator[str]:
    """The continuation of a prompt in parts, as soon as each is whole characters."""
    ids = [*loaded.tokenizer.opening, *loaded.tokenizer.encode(prompt)]
    return whole_characters(loaded.tokenizer, ids, generate_tokens(loaded, ids, most, sampling))


def answer_text(loaded: LoadedText, template: ChatTemplate, asked: str, most: int, sampling: Sampling) -> Iterator[str]:
    """The answer to a question, as the template renders it. It ends before the special token that closes a turn."""
    before, _ = template.question(asked, "--prompt")
    ids, _ = loaded.tokenizer.encode_placed(before, marked=True)
    closes = closing_token(template, loaded.tokenizer)
    ends = () if closes is None else (closes,)
    return whole_characters(loaded.tokenizer, ids, generate_tokens(loaded, ids, most, sampling, ends))


def whole_characters(tokenizer: Tokenizer, before: list[int], tokens: Iterator[int]) -> Iterator[str]:
    """The text of tokens that follow those `before`, in parts that end with whole characters.

    A token may end in the middle of a character: it is held back until the rest is there. Each part is decoded with the
    one before it in front, because some tokenizers drop the space at the beginning of a text.
    """
    known, fresh = before[-8:], []
    for token in tokens:
        fresh.append(token)
        text = _behind(tokenizer, known, fresh)
        # A character of several tokens decodes to the replacement character until its last byte is there.
        if text and not text.endswith(_UNFINISHED):
            yield text
            known, fresh = fresh, []
    if fresh and (text := _behind(tokenizer, known, fresh)):
        yield text


def _behind(tokenizer: Tokenizer, known: list[int], fresh: list[int]) -> str:
    """The text that the fresh tokens add to the known tokens' text."""
    return tokenizer.decode([*known, *fresh])[len(tokenizer.decode(known)) :]
