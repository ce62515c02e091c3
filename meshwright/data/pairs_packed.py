"""Pairs as a packed corpus: a source and its target in turn, each a document with its end token behind it.

Which pairs are held out is decided as for documents (split.py): by content, so that a pair that comes twice falls on
one side. One tokenizer is trained on both sides of the train split together.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from meshwright.config.schema import Data
from meshwright.data.format import PackedCorpus
from meshwright.data.packed import Material, pack
from meshwright.data.pairs_source import PairSource, pair_source
from meshwright.data.progress import ShowProgress
from meshwright.data.split import Plan, Split, check_unchanged, plan_texts
from meshwright.errors import DataError


def prepare_pairs(
    source: str,
    target: str | None,
    languages: tuple[str, str] | None,
    tokenizer: str,
    out: Path,
    validation: float,
    progress: ShowProgress,
) -> PackedCorpus:
    """As `prepare` (packed.py), of pairs of texts. Raises DataError also where `source` holds none."""
    material = pair_material(Data(source=source, target=target, languages=languages))
    return pack(material, tokenizer, out, validation, progress)


def pair_material(data: Data) -> Material:
    """The pairs that a config names. Raises DataError where there are none, or too few to hold out a share."""
    source = pair_source(data)
    return Material(
        kind="pairs",
        source=source.where,
        name=source.name,
        identity=source.identity,
        plan=lambda validation, progress: _plan(source, validation, progress),
        texts=lambda plan: _texts(source, plan),
    )


def _plan(source: PairSource, validation: float, progress: ShowProgress) -> Plan:
    joined = (f"{pair.source}\t{pair.target}" for pair in source.read())
    plan = plan_texts(joined, source.where, validation, progress)
    if plan.tail_of is not None:
        has = f"has {plan.num_documents} pairs, too few to hold out data.validation={validation} of them"
        raise DataError(f"{source.where}: {has}; give more pairs, or a larger share")
    return plan


def _texts(source: PairSource, plan: Plan) -> Iterator[tuple[Split, str]]:
    number = 0
    for number, pair in enumerate(source.read(), start=1):
        split: Split = "validation" if number - 1 in plan.held_out else "train"
        yield split, pair.source
        yield split, pair.target
    check_unchanged(source.where, plan, number)
