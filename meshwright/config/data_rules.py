"""What a run reads must exist and suit its model: sources, tokens, and what an encoder-decoder learns of them."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from meshwright.config.schema import Config, Data
from meshwright.errors import Problem
from meshwright.models.section import T5, Bert, EncoderDecoder, ImageNetwork, TextTransformer
from meshwright.section import divisors, listed, rule
from meshwright.tensor.section import Megatron

STDLIB, DIGITS = "stdlib", "digits"
"""Sources that are names: the text of Python's standard library, scikit-learn's images of digits."""

GZIP = ".gz"
PREPARED = "header.json"
"""The file that makes a folder a prepared one."""

BERT_SPECIALS = 4
"""Tokens that BERT needs besides a text's: padding, the first one, a separator, the mask."""

SENTINELS = 100
"""Tokens that stand for spans cut out of a text (T5)."""

BUCKET_MULTIPLE = 8
"""Lengths that batches of pairs are padded to are multiples of this."""


def suffix(source: str) -> str:
    """What a file's name says about its form: .tsv for wmt.tsv.gz."""
    return Path(source.removesuffix(GZIP)).suffix.lower()


def objective_of(config: Config) -> Literal["pairs", "spans"]:
    """What an encoder-decoder learns; auto decided by its family and by what the source holds."""
    data = config.data
    if data.objective != "auto":
        return data.objective
    return "spans" if isinstance(config.model, T5) and not holds_pairs(data) else "pairs"


def holds_pairs(data: Data) -> bool:
    """Whether a source can be nothing but pairs of texts, as far as its form tells."""
    source = Path(data.source).expanduser()
    if data.target is not None or data.languages is not None or suffix(data.source) == ".tsv":
        return True
    if suffix(data.source) == ".jsonl":
        return bool({"source", "target", "translation"} & _first_keys(source))
    return (source / PREPARED).is_file() and '"kind": "pairs"' in (source / PREPARED).read_text(encoding="utf-8")


def _first_keys(path: Path) -> set[str]:
    """The keys of a jsonl file's first object; none where there is no such thing, which reading it will report."""
    if not path.is_file():  # a pipe would wait for its writer
        return set()
    try:
        with gzip.open(path) if path.suffix == GZIP else path.open("rb") as lines:
            first = json.loads(next((line for line in lines if line.strip()), b"0"))
    except (OSError, EOFError, ValueError):
        return set()
    return set(first) if isinstance(first, dict) else set()


def special_tokens(config: Config) -> tuple[int, str]:
    """How many tokens a model needs besides its tokenizer's, and what they are called.

    A tokenizer of its own may have some of them already.
    """
    model = config.model
    if isinstance(model, Bert):
        return BERT_SPECIALS, f"BERT's {BERT_SPECIALS}"
    if not isinstance(model, EncoderDecoder):
        return 0, ""
    added, names = (1, "padding") if isinstance(model, T5) else (2, "padding and start")
    if objective_of(config) == "spans":
        return added + SENTINELS, f"{names} and {SENTINELS} sentinels"
    return added, names


@rule("data.sequence", "model.positions")
def sequence_fits_positions(config: Config) -> Iterator[Problem]:
    sequence, model = config.data.sequence, config.model
    if isinstance(model, TextTransformer) and sequence > model.positions:
        rule_text = f"is longer than model.positions={model.positions}"
        yield Problem("data.sequence", sequence, rule_text, f"1 to {model.positions}")


@rule("data.source", "model.family")
def source_exists(config: Config) -> Iterator[Problem]:
    source, family = config.data.source, config.model.family
    reads_images = isinstance(config.model, ImageNetwork)
    if reads_images:
        valid = f"{DIGITS}, a folder of class folders of jpg and png files"
    else:
        valid = "stdlib, a text, jsonl or parquet file, a folder of these, a prepared folder"
    if source == (STDLIB if reads_images else DIGITS):
        yield Problem("data.source", source, f"is not what a {family} reads", valid)
    if source in (STDLIB, DIGITS):
        return
    path = Path(source).expanduser()
    if not source or not path.exists():
        yield Problem("data.source", source, "is no such file or folder", valid)
    elif not path.is_file() and not path.is_dir():
        yield Problem("data.source", source, "is a pipe or a device, which may never end", valid)
    elif reads_images and not path.is_dir():
        yield Problem("data.source", source, "is no folder", valid)


@rule("data.tokenizer", "model.vocabulary", "model.family", "data.objective", "data.source", "data.target")
def tokenizer_fits(config: Config) -> Iterator[Problem]:
    if not isinstance(config.model, TextTransformer):
        return
    tokenizer, vocabulary = config.data.tokenizer, config.model.vocabulary
    if tokenizer == "bytes":
        size = 257
    elif tokenizer.startswith("bpe:"):
        if not tokenizer[4:].isdigit() or int(tokenizer[4:]) < 257:
            yield Problem(
                "data.tokenizer", tokenizer, "does not name a vocabulary of 257 tokens or more", "bpe:257, bpe:4096 ..."
            )
            return
        size = int(tokenizer[4:])
    else:
        if not Path(tokenizer).expanduser().is_file():
            yield Problem("data.tokenizer", tokenizer, "is no such file", "bytes, bpe:SIZE, a tokenizer.json file")
        return
    rule_text = f"is smaller than the {size} tokens of data.tokenizer={tokenizer}"
    added, names = special_tokens(config)
    if added:
        size += added
        rule_text += f" and {names}"
    if size > vocabulary:
        yield Problem("model.vocabulary", vocabulary, rule_text, f"{size} or more")


@rule("model.family", "data.objective", "data.source", "data.target", "data.languages")
def pairs_have_a_form(config: Config) -> Iterator[Problem]:
    data = config.data
    if not isinstance(config.model, EncoderDecoder) or objective_of(config) == "spans" or data.source == DIGITS:
        return
    form = STDLIB if data.source == STDLIB else suffix(data.source)
    prepared = (Path(data.source).expanduser() / PREPARED).is_file()
    alone = form in (STDLIB, ".tsv", ".jsonl") or prepared
    if data.target is not None and alone:
        rule_text = f"has no effect: data.source={data.source} holds both texts of a pair"
        yield Problem("data.target", data.target, rule_text, "leave it out")
    elif data.target is not None and not Path(data.target).expanduser().is_file():
        yield Problem("data.target", data.target, "is no such file", "a text file, whose line i goes with line i")
    elif data.target is None and not alone and Path(data.source).expanduser().exists():
        valid = "stdlib, a tsv or jsonl file, a prepared folder, or a text file with data.target"
        yield Problem("data.source", data.source, "holds no pairs of texts", valid)
    if data.languages is not None and form != ".jsonl":
        named = f"[{', '.join(data.languages)}]"
        yield Problem("data.languages", named, "names keys of a jsonl file, which data.source is not", "leave it out")


@rule("data.buckets", "data.sequence")
def buckets_differ_in_length(config: Config) -> Iterator[Problem]:
    buckets, most = config.data.buckets, math.ceil(config.data.sequence / BUCKET_MULTIPLE)
    if buckets > most:
        rule_text = f"is more than the multiples of {BUCKET_MULTIPLE} up to data.sequence={config.data.sequence}"
        yield Problem("data.buckets", buckets, rule_text, f"1 to {most}")


@rule("data.buckets", "layout.pipeline.size")
def stages_send_one_shape(config: Config) -> Iterator[Problem]:
    buckets, size = config.data.buckets, config.layout.pipeline.size
    if buckets > 1 and size > 1:
        rule_text = f"makes batches of many lengths, and layout.pipeline.size={size} stages send messages of one"
        yield Problem("data.buckets", buckets, rule_text, "1, or layout.pipeline.size=1")


@rule("data.buckets", "layout.tensor")
def buckets_are_cut_evenly(config: Config) -> Iterator[Problem]:
    buckets, tensor = config.data.buckets, config.layout.tensor
    if buckets > 1 and isinstance(tensor, Megatron) and tensor.sequence_parallel and BUCKET_MULTIPLE % tensor.size:
        rule_text = f"does not divide the lengths of data.buckets={buckets}, as sequence_parallel asks"
        yield Problem("layout.tensor.size", tensor.size, rule_text, listed(divisors(BUCKET_MULTIPLE)))


DATA_RULES = (
    sequence_fits_positions,
    source_exists,
    tokenizer_fits,
    pairs_have_a_form,
    buckets_differ_in_length,
    stages_send_one_shape,
    buckets_are_cut_evenly,
)
