"""Held-out samples of an encoder-decoder: how well it predicts their targets, and how good its own answers are.

| --data | pairs | spans |
|---|---|---|
| none | the run's held-out split | the same |
| a prepared folder | its validation split | the same |
| FILE.tsv, FILE.jsonl; FILE and --target FILE | all of it | - |
| any other text | - | all of it |

BLEU (Papineni et al., 2002) is sacrebleu's (Post, 2018, arXiv 1804.08771), whose signature says how it was computed:
scores compare only where signatures agree.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from meshwright.data.files import ShowProgress, silent
from meshwright.data.packed import PackedCorpus, document_ends, is_prepared, open_packed
from meshwright.data.packing import corpus_for
from meshwright.data.pairs import pair_corpus
from meshwright.data.pairs_samples import sequence_batch
from meshwright.data.section import Lengths, PairData
from meshwright.data.span_window import span_lengths
from meshwright.data.spans import SpanSamples
from meshwright.environment import cache_folder
from meshwright.errors import ConfigError, DataError
from meshwright.model import Batch
from meshwright.tools.evaluate.beam import Beam
from meshwright.tools.evaluate.load import BATCH_TOKENS, Facts, LoadedSequence, exponential
from meshwright.tools.evaluate.perplexity import check_tokenizer, check_trained, stream_for
from meshwright.tools.evaluate.sequence import answers, source_ids, target_loss, text_of


@dataclass(frozen=True)
class TextPairs:
    """`name`: what was read, for the reader of the result."""

    pairs: list[tuple[str, ...]]
    name: str


def _asked(loaded: LoadedSequence, data: str | None, target: str | None) -> PairData | None:
    """The pairs that the run learned, or those to measure in their place; None: it learned spans, and `data` is a text.

    Raises ConfigError where `target` has no partner.
    """
    learned = PairData.of(loaded.config.data)
    if data is not None:
        given = (learned or PairData(kind="pairs")).model_copy(update={"source": data, "target": target})
        return given if learned or PairData.claims(given.model_dump()) else None
    if target is not None:
        raise ConfigError.of("--target", target, "has no partner", "with --data, the file of its sources")
    return learned


def pairs_for(
    loaded: LoadedSequence, data: str | None, target: str | None = None, progress: ShowProgress = silent
) -> TextPairs:
    """The pairs to measure. Raises DataError where they cannot be read, ConfigError where there are none of the run."""
    asked = _asked(loaded, data, target)
    if data is not None and not is_prepared(Path(data).expanduser()):
        unpacked = pair_corpus(asked or PairData(kind="pairs", source=data, target=target))
        return _some(list(unpacked.read()), unpacked.where)
    if data is not None:
        folder = Path(data).expanduser()
        return _held_out(open_packed(folder), loaded, f"validation split of {folder}")
    check_trained(loaded)
    if asked is None:
        raise ConfigError.of("--data", "none", f"leaves {loaded.folder} without pairs: it learned spans", "a tsv file")
    corpus = corpus_for(asked, cache_folder(), progress)
    return _held_out(corpus, loaded, f"the run's held-out split (data.source={asked.source})")


def _some(pairs: list[tuple[str, ...]], name: str) -> TextPairs:
    if not pairs:
        raise DataError(f"{name}: holds no pair")
    return TextPairs(pairs, name)


def _held_out(corpus: PackedCorpus, loaded: LoadedSequence, name: str) -> TextPairs:
    """A source and its target in turn, each with an end token behind it."""
    if corpus.header.kind != "pairs":
        raise DataError(f"{corpus.folder}: was prepared of {corpus.header.kind}, and pairs are wanted")
    check_tokenizer(corpus, loaded, name)
    tokens = np.asarray(corpus.tokens("validation"))
    documents = np.split(tokens, document_ends(tokens, corpus.header.end) + 1)[:-1]
    texts = [corpus.tokenizer.decode(document[:-1].tolist()) for document in documents]
    return _some(list(zip(texts[::2], texts[1::2], strict=True)), name)


def target_perplexity(
    loaded: LoadedSequence, data: str | None, target: str | None = None, progress: ShowProgress = silent
) -> Facts:
    """Measure held-out samples of what the run learned: targets of pairs, or spans cut out of a text as in validation.

    End tokens count, label smoothing does not. `left_out` in the result: pairs with a side beyond the context.

    Raises as `pairs_for` and `stream_for`; DataError where all pairs are too long.
    """
    read = _pair_batches if _asked(loaded, data, target) is not None else _span_batches
    name, samples, left_out, batches = read(loaded, data, target, progress)
    total, num_tokens, done = 0.0, 0, 0
    for batch in batches:
        loss, num = target_loss(loaded, batch)
        total, num_tokens, done = total + loss, num_tokens + num, done + len(batch["labels"])
        progress("perplexity", done / samples)
    return {
        "data": name,
        "samples": samples,
        "left_out": left_out,
        "tokens": num_tokens,
        "context": loaded.context,
        "loss_per_token": total / num_tokens,
        "perplexity_per_token": exponential(total / num_tokens),
    }


_Read = tuple[str, int, int, Iterator[Batch]]
"""The name of the data, its samples, how many more are left out, and all in batches."""


def _pair_batches(loaded: LoadedSequence, data: str | None, target: str | None, progress: ShowProgress) -> _Read:
    given = pairs_for(loaded, data, target, progress)
    encode, end = loaded.tokenizer.encode, [loaded.specials.end]
    sides = [[np.array(encode(text) + end) for text in pair] for pair in given.pairs]
    short = sorted((pair for pair in sides if _longer(pair) <= loaded.context), key=_longer)
    if not short:
        raise DataError(f"{given.name}: has no pair of at most {loaded.context} tokens a side; see --context")
    rows = max(1, BATCH_TOKENS // _longer(short[-1]))

    def batches() -> Iterator[Batch]:
        for first in range(0, len(short), rows):
            part = short[first : first + rows]
            sources, targets = zip(*part, strict=True)
            yield sequence_batch(sources, targets, loaded.specials, Lengths(_longer(part[-1]), _longer(part[-1])))

    return given.name, len(short), len(sides) - len(short), batches()


def _longer(pair: list[np.ndarray]) -> int:
    return max(map(len, pair))


def _span_batches(loaded: LoadedSequence, data: str | None, target: str | None, progress: ShowProgress) -> _Read:
    stream = stream_for(loaded, data, progress)
    tokens = stream.tokens[1:]  # as training has them, without an end token in front
    samples = SpanSamples(tokens, loaded.specials, span_lengths(loaded.context), loaded.config.seed, stream.name)
    rows = max(1, BATCH_TOKENS // loaded.context)
    starts = range(0, len(samples), rows)
    batches = (samples.held_out(first, min(rows, len(samples) - first)) for first in starts)
    return stream.name, len(samples), 0, batches


def bleu(
    loaded: LoadedSequence, held_out: TextPairs, beam: Beam, samples: int | None = None, progress: ShowProgress = silent
) -> Facts:
    """Answer the sources of the first `samples` pairs (None: all), and compare with their targets: 0 to 100.

    `cut` in the result: sources longer than the context, of which the beginning was read.

    Raises ConfigError on a number of samples that is none, DataError without sacrebleu.
    """
    if samples is not None and samples < 1:
        raise ConfigError.of("--samples", samples, "asks for nothing", "1 or more")
    try:
        from sacrebleu.metrics import BLEU
    except ImportError as error:
        remedy = "pip install 'meshwright[translation]'"
        raise DataError(f"BLEU needs sacrebleu, which is not installed: {remedy}") from error
    pairs = held_out.pairs[:samples]
    whole = [source_ids(loaded, source) for source, _ in pairs]
    read = [ids if len(ids) <= loaded.context else [*ids[: loaded.context - 1], ids[-1]] for ids in whole]
    texts = [text_of(loaded, answer.tokens) for answer in answers(loaded, read, beam, progress=progress)]
    metric = BLEU()
    scored = metric.corpus_score(texts, [[target for _, target in pairs]])
    cut = sum(len(ids) > loaded.context for ids in whole)
    return {
        "data": held_out.name,
        "pairs": len(pairs),
        "cut": cut,
        "context": loaded.context,
        "beams": beam.beams,
        "length_penalty": beam.length_penalty,
        "bleu": scored.score,
        "brevity_penalty": scored.bp,
        "signature": str(metric.get_signature()),
    }
