"""The answers of an encoder-decoder to sources, by beam search, and the BLEU of these answers.

BLEU (Papineni et al., 2002) is computed by sacrebleu (Post, 2018, arXiv 1804.08771). Its signature names the settings:
only scores with equal signatures are comparable.

Letters: B samples, S source, R rows of beam search, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from meshwright.compute.model import Batch, to_device
from meshwright.data.files import ShowProgress, silent
from meshwright.data.section import Lengths
from meshwright.families.seq2seq.beam import Answer, Beam, beam_of, beam_search
from meshwright.families.seq2seq.blocks import DecoderCache
from meshwright.families.seq2seq.load import LoadedSequence, load_sequence
from meshwright.families.seq2seq.pair_texts import TextPairs, pairs_for
from meshwright.families.seq2seq.pairs_samples import sequence_batch
from meshwright.families.seq2seq.specials import SENTINEL
from meshwright.ranks.errors import ConfigError, DataError
from meshwright.tools.evaluate.load import BATCH_TOKENS, Facts, config_at
from meshwright.tools.evaluate.tasks import Question, Task
from meshwright.tools.generate import Generated, Request, refuse

_SENTINEL = re.compile(re.escape(SENTINEL).replace(r"\{\}", r"(\d\d?)"))

MORE = 50
"""Tokens that an answer may have beyond its source's (Vaswani et al., section 6.1)."""


def source_ids(loaded: LoadedSequence, text: str) -> list[int]:
    """Encode a text for the encoder, with an end token. If the model has sentinels, <extra_id_0> is encoded as one."""
    parts = _SENTINEL.split(text) if loaded.specials.sentinels else [text]
    ids: list[int] = []
    for at, segment in enumerate(parts):  # text and numbers of sentinels in turn
        ids += [loaded.specials.sentinels[int(segment)]] if at % 2 else loaded.tokenizer.encode(segment)
    return [*ids, loaded.specials.end]


def text_of(loaded: LoadedSequence, ids: Sequence[int]) -> str:
    """Decode an answer to a text, with sentinels as <extra_id_0>."""
    numbers = {sentinel: index for index, sentinel in enumerate(loaded.specials.sentinels)}
    texts = []
    for is_sentinel, group in groupby(ids, lambda token: token in numbers):
        run = list(group)
        texts += [SENTINEL.format(numbers[i]) for i in run] if is_sentinel else [loaded.tokenizer.decode(run)]
    return "".join(texts)


@torch.inference_mode()
def answers(
    loaded: LoadedSequence,
    sources: Sequence[Sequence[int]],
    beam: Beam,
    most: int | None = None,
    progress: ShowProgress = silent,
    *,
    batch_tokens: int = BATCH_TOKENS,
) -> list[Answer]:
    """Search the answer to each source.

    Args:
        sources: the ids of each source, with the end token.
        beam: the settings of the search.
        most: the most tokens of an answer; by default MORE than the source has, within the context.
        batch_tokens: about the number of tokens in one pass of the encoder, times the places of the beam.
    """
    order = sorted(range(len(sources)), key=lambda index: -len(sources[index]))  # little padding
    answered: dict[int, Answer] = {}
    while len(answered) < len(sources):
        first = len(answered)
        rows = max(1, batch_tokens // (len(sources[order[first]]) * beam.beams))
        chosen = order[first : first + rows]
        read = [np.array(sources[index]) for index in chosen]
        # Empty targets: the decoder writes the answer token by token.
        empty = [np.array([loaded.specials.end])] * len(read)
        batch = to_device(sequence_batch(read, empty, loaded.specials, Lengths(len(read[0]), 1)), loaded.device)
        limits = torch.tensor([most or min(len(ids) + MORE, loaded.context) for ids in read], device=loaded.device)
        step = _Decoder(loaded, batch)
        found = beam_search(step, loaded.specials.start, loaded.specials.end, limits, beam)
        answered |= dict(zip(chosen, found, strict=True))
        progress("answers", len(answered) / len(sources))
    return [answered[index] for index in range(len(sources))]


class _Decoder:
    """The step of beam search: log-probabilities of the next tokens, with a cache of keys and values."""

    def __init__(self, loaded: LoadedSequence, batch: Batch) -> None:
        self._loaded, self._mask, self._cache = loaded, batch["source_mask"], DecoderCache()
        self._memory = loaded.model.encode(batch["source"], self._mask)

    def __call__(self, tokens: Tensor, origins: Tensor) -> Tensor:
        specials = self._loaded.specials
        self._cache.select(origins)
        self._mask, self._memory = self._mask[origins], self._memory[origins]
        h = self._loaded.model.decode(tokens[:, -1:], self._memory, self._mask, self._cache)  # [R, 1, H]
        # Padding rows of the table, and ids without a token in the tokenizer, are no answers.
        logits = self._loaded.head.logits(h[:, 0])[:, : specials.vocabulary_size]
        # Padding and start token are never labels: an untrained logit of these could win by chance.
        never = torch.tensor([specials.padding, specials.start], device=logits.device)
        return logits.index_fill(1, never, -torch.inf).log_softmax(-1)


def bleu(
    loaded: LoadedSequence, held_out: TextPairs, beam: Beam, samples: int | None = None, progress: ShowProgress = silent
) -> Facts:
    """Answer the sources of the first `samples` pairs (None: all), and compute the BLEU, 0 to 100.

    `cut` in the result: the number of sources longer than the context; only the beginning of these was read.

    Raises ConfigError for less than one sample, DataError without sacrebleu.
    """
    if samples is not None and samples < 1:
        raise ConfigError.of("--samples", samples, "asks for nothing", "1 or more")
    try:
        from sacrebleu.metrics import BLEU as Metric
    except ImportError as error:
        remedy = "pip install 'meshwright[translation]'"
        raise DataError(f"BLEU needs sacrebleu, which is not installed: {remedy}") from error
    pairs = held_out.pairs[:samples]
    whole = [source_ids(loaded, source) for source, _ in pairs]
    # A cut source keeps the end token, since no training source lacks one.
    read = [ids if len(ids) <= loaded.context else [*ids[: loaded.context - 1], ids[-1]] for ids in whole]
    texts = [text_of(loaded, answer.tokens) for answer in answers(loaded, read, beam, progress=progress)]
    metric = Metric()
    scored = metric.corpus_score(texts, [[target for _, target in pairs]])
    return {
        "data": held_out.name,
        "pairs": len(pairs),
        "cut": sum(len(ids) > loaded.context for ids in whole),
        "context": loaded.context,
        "beams": beam.beams,
        "length_penalty": beam.length_penalty,
        "bleu": scored.score,
        "brevity_penalty": scored.bp,
        "signature": str(metric.get_signature()),
    }


def answer(checkpoint: Path, request: Request, device: str, context: int | None) -> Generated:
    """Generate the likeliest answer to a prompt.

    Raises ConfigError for options without an effect, or a prompt longer than the context.
    """
    sampling = request.sampling
    options = {"--temperature": sampling.temperature or None, "--top-k": sampling.top_k, "--seed": sampling.seed}
    options["--chat"] = request.chat or None
    options["--exact"] = request.exact or None
    family = config_at(checkpoint).model.family
    refuse(options, family, "which searches its likeliest answer", "--beams, --length-penalty")
    beam = beam_of(request.beams, request.length_penalty)
    loaded = load_sequence(checkpoint, device, context)
    ids = source_ids(loaded, request.prompt)
    if len(ids) > loaded.context:
        rule = f"has {len(ids)} tokens with its end, and the model reads {loaded.context}"
        raise ConfigError.of("--prompt", f"{request.prompt:.20}...", rule, "a shorter one, or a larger --context")
    found = answers(loaded, [ids], beam, request.tokens)[0]
    return Generated(loaded.folder, "", iter([text_of(loaded, found.tokens)]))


def measure(question: Question, progress: ShowProgress) -> tuple[Path, Facts]:
    """Measure BLEU on the question's pairs, or the run's held-out pairs; return the checkpoint's folder and facts."""
    beam = beam_of(question.beams, question.length_penalty)
    loaded = load_sequence(question.checkpoint, question.device, question.context)
    pairs = pairs_for(loaded, question.data, question.target, progress)
    return loaded.folder, bleu(loaded, pairs, beam, question.samples, progress)


BLEU = Task(measure, ("target", "context", "samples", "beams", "length-penalty"))
