"""Mixture of sources by weight: a pure function from a sample's number to a source.

Each source is packed once, separately, with a common tokenizer: `bpe:SIZE` is trained on the train splits of all
sources. A mixture's folder contains only mixture.json, which names the packed folders.

Weights are rounded to shares of BLOCK. Every block of BLOCK samples has exactly share k from source k, in a seeded
order that differs between blocks (a Permutation). So a sample's number determines the source, and the number of earlier
samples from that source, without stored counts. Resuming and layouts need only the number. Each source has epochs of
its own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from meshwright.config import Config
from meshwright.data.corpus import text_corpus
from meshwright.data.dataset import Opened, open_corpus, open_splits
from meshwright.data.files import DAMAGE_REMEDY, ShowProgress, folder_lock, staged_folder
from meshwright.data.packed import TOKENIZER, PackedCorpus, is_prepared, open_packed
from meshwright.data.packing import corpus_for, prepare_corpus
from meshwright.data.sampler import Permutation, ShuffledSamples
from meshwright.data.split import Split, plan_split, split_records
from meshwright.data.text_section import BLOCK, MIXTURE, MixedSection, shares_of
from meshwright.data.tokenizer import BPE_PREFIX, make_tokenizer
from meshwright.data.told import read_lines
from meshwright.ranks.environment import cache_folder
from meshwright.ranks.errors import DataError
from meshwright.ranks.foreign import read_json

if TYPE_CHECKING:  # the launcher needs no torch
    from meshwright.compute.model import Batch, Samples


@dataclass(frozen=True)
class MixturePart:
    """A packed source, and the source's share of every BLOCK samples."""

    packed: PackedCorpus
    share: int


def mixture_for(data: MixedSection, cache: Path, progress: ShowProgress) -> Path:
    """Prepare the config's mixture, packing sources that are not packed; return its folder. Raises DataError."""
    tokenizer = _common_tokenizer(data, cache, progress)
    packs = [
        corpus_for(data.model_copy(update={"source": source, "tokenizer": tokenizer, "mixture": ()}), cache, progress)
        for source in data.weights
    ]
    for source, packed in zip(data.weights, packs, strict=True):
        if packed.tokenizer.to_json() != packs[0].tokenizer.to_json():
            first = next(iter(data.weights))
            hint = "prepare all of them with one tokenizer.json file, or give the texts themselves"
            raise DataError(f"data.mixture: {source} was tokenized with another tokenizer than {first}; {hint}")
    shares = shares_of(data.weights)
    parts = [
        {
            # A name if the packed folder is next to the mixture's, else a path.
            "folder": packed.folder.name if packed.folder.parent == cache else str(packed.folder.absolute()),
            "share": share,
            "sha256": packed.header.sha256,
        }
        for packed, share in zip(packs, shares, strict=True)
    ]
    text = json.dumps({"parts": parts}, indent=2, sort_keys=True) + "\n"
    folder = cache / hashlib.sha256(text.encode()).hexdigest()[:16]
    with folder_lock(folder, progress):
        if not (folder / MIXTURE).is_file():
            with staged_folder(folder) as partial:
                (partial / MIXTURE).write_text(text, encoding="utf-8")
    return folder


def _common_tokenizer(data: MixedSection, cache: Path, progress: ShowProgress) -> str:
    """Return the tokenizer of all sources; a trained one is stored as a file in the cache."""
    corpora = [text_corpus(source, data.picks) for source in data.weights if not is_prepared(Path(source).expanduser())]
    if not data.tokenizer.startswith(BPE_PREFIX) or not corpora:
        return data.tokenizer
    facts = [[corpus.identity for corpus in corpora], data.tokenizer, data.validation]
    folder = cache / f"tokenizer-{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]}"
    with folder_lock(folder, progress):
        if not (folder / TOKENIZER).is_file():
            with staged_folder(folder) as partial:
                # Split each source first: held-out text must be new to the tokenizer and to the model.
                planned = ((corpus, plan_split(corpus, data.validation, progress)) for corpus in corpora)
                records = (record for corpus, plan in planned for record in split_records(corpus, plan))
                texts = (text for split, record in records if split == "train" for text in record)
                make_tokenizer(data.tokenizer, texts, progress).save(partial / TOKENIZER)
    return str(folder / TOKENIZER)


def open_mixture(folder: Path) -> list[MixturePart]:
    """Open the parts of a mixture's folder. Raises DataError if a part has changed since the mixing."""
    parts = []
    for entry in read_json(folder / MIXTURE)["parts"]:
        packed = open_packed(folder.parent / entry["folder"])
        if packed.header.sha256 != entry["sha256"]:
            raise DataError(f"{packed.folder}: holds other tokens than when it was mixed; {DAMAGE_REMEDY}")
        parts.append(MixturePart(packed, entry["share"]))
    return parts


def prepare_sources(data: MixedSection, config: Config, progress: ShowProgress) -> Path:
    """Prepare a run's mixture, or the only source, and check the model's vocabulary; return the folder.

    Raises DataError, ConfigError.
    """
    if not data.mixture:
        return prepare_corpus(data, config, progress)
    folder = mixture_for(data, cache_folder(), progress)
    open_mixture(folder)[0].packed.check_vocabulary(config.model.num_tokens)
    data.open(config, folder)
    return folder


def open_sources(data: MixedSection, config: Config, folder: Path) -> Opened:
    """Open the splits of a mixture, or of the only source. Raises DataError if a split is too small."""
    if not data.mixture:
        return open_corpus(data, config, folder)
    parts = open_mixture(folder)
    seen = config.steps * config.batch.global_ / BLOCK

    def samples(split: Split) -> tuple[Samples, str]:
        each: list[ShuffledSamples] = []
        for source in parts:
            source_samples, _ = data.samples(config, source.packed, split)
            assert isinstance(source_samples, ShuffledSamples), source_samples
            each.append(source_samples)
        epochs = [seen * source.share / len(source_samples) for source, source_samples in zip(parts, each, strict=True)]
        told = ", ".join(
            f"{source.packed.header.source} {source.share * 100 / BLOCK:g} % ({passes:.2g} epochs)"
            for source, passes in zip(parts, epochs, strict=True)
        )
        mixed = MixedSamples(each, [source.share for source in parts], config.seed)
        return mixed, told if split == "train" else ""

    opened = open_splits(config, samples, parts[0].packed.tokenizer)
    return replace(opened, notes=(*(line for source in parts for line in read_lines(source.packed)), *opened.notes))


class MixedSamples:
    """Samples of several sources, interleaved by share, each source in a shuffled order of its own."""

    def __init__(self, parts: Sequence[ShuffledSamples], shares: Sequence[int], seed: int) -> None:
        assert sum(shares) == BLOCK, shares
        self._parts, self._shares, self._seed = parts, np.array(shares), seed
        self._ends = np.cumsum(self._shares)

    def __len__(self) -> int:
        """Count the samples until every source has finished at least one epoch."""
        # A source of n samples with `share` samples in every BLOCK finishes an epoch after n * BLOCK / share samples.
        return max(
            -(-len(samples) * BLOCK // int(share)) for samples, share in zip(self._parts, self._shares, strict=True)
        )

    def places(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the source [count] of each sample, and the number [count] of earlier samples of that source."""
        numbers = np.arange(first, first + count, dtype=np.int64)
        blocks, slots = np.divmod(numbers, BLOCK)
        for block in np.unique(blocks).tolist():
            of_block = blocks == block
            # The sample's place in the block's seeded order gives the source: places ends[k-1] to ends[k] are source
            # k's.
            slots[of_block] = Permutation(BLOCK, self._seed, block)(slots[of_block])
        sources = np.searchsorted(self._ends, slots, side="right")
        # Each earlier block has exactly `share` samples of the source, so no count is needed.
        return sources, blocks * self._shares[sources] + slots - (self._ends - self._shares)[sources]

    def samples(self, first: int, count: int) -> Batch:
        return self._batch(first, count, "sample", lambda samples, earlier: samples.order.at(earlier))

    def held_out(self, first: int, count: int) -> Batch:
        return self._batch(first, count, "held out", lambda samples, earlier: earlier % len(samples))

    def _batch(
        self, first: int, count: int, draw: str, rows_of: Callable[[ShuffledSamples, np.ndarray], np.ndarray]
    ) -> Batch:
        """Read `count` samples from number `first` on.

        `rows_of`: rows_of(samples, earlier) returns the rows of a source for the given numbers of earlier samples.
        """
        import torch

        sources, earlier = self.places(first, count)
        batch: Batch = {}
        for source in np.unique(sources).tolist():
            places, samples = np.flatnonzero(sources == source), self._parts[source]
            draws = [f"{draw}/{first + position}" for position in places.tolist()]
            for name, x in samples.read(rows_of(samples, earlier[places]), draws).items():
                # Sources of one kind have equal entries and shapes: write each row to the position of its sample.
                whole = batch.setdefault(name, x.new_empty(count, *x.shape[1:]))
                whole[torch.from_numpy(places)] = x
        return batch
