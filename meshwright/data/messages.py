"""Samples of dialogues: several dialogues in a window, attention within each, labels only on the assistant's tokens.

A prepared folder of messages has one uint32 per token: the id, and two flags.

| bits | content                                                        |
|------|----------------------------------------------------------------|
| 0-29 | the id                                                         |
| 30   | 1 for a dialogue's first token                                 |
| 31   | 1 for a token of the assistant's text, also if only partly so  |

Dialogues fill windows in the order of the file; a window ends if the next dialogue does not fit. The rest of the window
is padding, a separate document without labels. Windows are shuffled as other samples are. A dialogue of n tokens takes
n - 1 places, since the last token is only a label.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from meshwright.data.chat import Spans, template_for
from meshwright.data.corpus import Corpus, source_identity, source_name, told_of
from meshwright.data.dialogue_records import SPEAKER, Dialogue
from meshwright.data.dialogues import claims_dialogues, read_dialogues
from meshwright.data.marks import UNASKED
from meshwright.data.marks_section import END
from meshwright.data.messages_section import MessagesData
from meshwright.data.packed import DIALOGUE, IDS, SAID, PackedCorpus
from meshwright.data.sampler import ShuffledSamples, document_entries
from meshwright.data.section import DataSection
from meshwright.data.split import Split
from meshwright.data.tokenizer import Tokenizer, load_tokenizer
from meshwright.ranks.errors import DataError

if TYPE_CHECKING:  # the launcher only counts samples, without torch
    from meshwright.compute.model import Batch, Samples
    from meshwright.config import Config

Overlong = Literal["drop", "cut"]
Turns = Literal["together", "last", "each"]


def dialogue_corpus(data: MessagesData) -> Corpus:
    """Return the rendered dialogues of a source: records of a text and, as JSON, the assistant's spans in the text."""
    template = template_for(data)

    def read() -> Iterator[tuple[str, ...]]:
        path = Path(data.tokenizer).expanduser()
        special = load_tokenizer(path, UNASKED).special_tokens if path.is_file() else (END,)
        for record in read_dialogues(data.source, special, data.picks):
            ignored.update(template.means_nothing(record.messages))
            for dialogue in samples_of(record, data.turns):
                text, spans = template.dialogue(dialogue)
                yield text, json.dumps(spans)

    ignored: set[str] = set()
    identity: list[object] = [
        "messages",
        source_identity(data.source, data.picks),
        template.text,
        dict(template.tokens),
    ]
    # Fields that version 0.1.0 did not have are left out at their defaults, so that its folders keep their identity.
    fields = {"turns": data.turns, "arguments": data.arguments}
    identity += [fields] if data.turns != "together" or data.arguments else []
    told = told_of(data.source, data.picks)
    return Corpus("messages", data.source, source_name(data.source), identity, read, *told, ignored=ignored)


def samples_of(dialogue: Dialogue, turns: Turns) -> Iterator[Dialogue]:
    """Yield the dialogues for training on a record.

    Some templates write only the thoughts of the last answer. So `each` yields a dialogue for every answer that ends
    with the answer, as in generation.
    """
    speaks = [at for at, message in enumerate(dialogue.messages) if message["role"] == SPEAKER]
    learned = [at for at in speaks if at not in dialogue.unlearned]
    if turns == "together":
        yield dialogue
        return
    for at in learned if turns == "each" else learned[-1:]:
        others = frozenset(speaks) - {at}
        yield replace(dialogue, messages=dialogue.messages[: at + 1], unlearned=others)


def flagged(tokenizer: Tokenizer, text: str, spans: Spans) -> np.ndarray:
    """Return a dialogue's tokens with flags, uint32 [n]."""
    ids, places = tokenizer.encode_placed(text, marked=True)
    tokens = np.array(ids, dtype=np.uint32)
    begins, ends = np.array(places, dtype=np.int64).reshape(-1, 2).T
    for begin, end in spans:
        # A token across the border of a span counts as the assistant's.
        tokens[(begins < end) & (ends > begin)] |= SAID
    tokens[:1] |= DIALOGUE
    return tokens


class DialogueSamples(ShuffledSamples):
    """Windows of one split's dialogues: `tokens`, `labels` and `document_entries`, int64 [B, T]."""

    def __init__(self, corpus: PackedCorpus, split: Split, sequence: int, overlong: Overlong, seed: int) -> None:
        """Make the samples.

        Args:
            corpus: the prepared folder.
            split: the split.
            sequence: tokens of a row.
            overlong: drop, or cut dialogues that are longer than a row.
            seed: of the order.

        Raises:
            DataError: no dialogue is left.
        """
        self._tokens, self._sequence, self._padding = corpus.tokens(split), sequence, corpus.header.end
        starts = np.flatnonzero(self._tokens & DIALOGUE)
        lengths = np.diff(np.append(starts, len(self._tokens)))
        longer = lengths > sequence + 1
        # The assistant's tokens after the cut do not count.
        taken = np.minimum(lengths, sequence + 1)
        learned = np.array(
            [np.count_nonzero(self._tokens[at + 1 : at + n] & SAID) for at, n in zip(starts, taken, strict=True)],
            dtype=np.int64,
        )
        mask = (learned > 0) & ~longer if overlong == "drop" else learned > 0
        if not mask.any():
            most = int(lengths.max(initial=0)) - 1
            raise DataError(
                f"{corpus.name(split)}: no dialogue fits data.sequence={sequence}; the longest takes {most}"
            )
        # n tokens are n - 1 inputs, since the last token is only a label.
        self._starts, self._counts = starts[mask], taken[mask] - 1
        self._windows = _filled(self._counts.tolist(), sequence)
        windows, num_kept, num_longer = len(self._windows) - 1, int(mask.sum()), int(longer.sum())
        places, left_out = windows * sequence, len(starts) - num_kept
        full, said = 100 * int(self._counts.sum()) / places, 100 * int(learned[mask].sum()) / places
        self.note = f"{num_kept} dialogues in {windows} windows, {full:.0f} % full, {said:.0f} % learned"
        if num_longer and overlong == "drop":
            self.note += f"; {num_longer} longer than data.sequence={sequence} left out (data.overlong=cut cuts them)"
        elif num_longer:
            lacking = f", {left_out} of them left out, whose beginnings have nothing of the assistant"
            self.note += f"; {num_longer} longer than data.sequence={sequence} cut{lacking if left_out else ''}"
        if corpus.header.ignored:
            self.note += f"; the template reads no {', '.join(corpus.header.ignored)} of a message"
        super().__init__(windows, seed)

    def read(self, rows: np.ndarray, draws: Sequence[str]) -> Batch:
        import torch

        from meshwright.compute.model import IGNORED

        shape = (len(rows), self._sequence)
        tokens, labels = np.full(shape, self._padding, dtype=np.int64), np.full(shape, IGNORED, dtype=np.int64)
        begins = np.zeros(shape, dtype=bool)
        for row, window in enumerate(rows.tolist()):
            offset = 0
            for dialogue in range(self._windows[window], self._windows[window + 1]):
                start, count = self._starts[dialogue], self._counts[dialogue]
                run = self._tokens[start : start + count + 1].astype(np.int64)
                inputs, following = run[:-1] & IDS, run[1:]
                tokens[row, offset : offset + count] = inputs
                labels[row, offset : offset + count] = np.where(following & SAID, following & IDS, IGNORED)
                begins[row, offset] = True
                offset += count
            # The padding is a separate document. In a full row the slice is empty.
            begins[row, offset : offset + 1] = True
        batch = {"tokens": torch.from_numpy(tokens), "labels": torch.from_numpy(labels)}
        return batch | document_entries(begins)


def _filled(counts: Sequence[int], most: int) -> np.ndarray:
    """Fill windows of at most `most` in order; returns the index of the first item of each window, then the number
    of items."""
    firsts, filled = [0], 0
    for at, count in enumerate(counts):
        if filled + count > most:
            firsts.append(at)
            filled = 0
        filled += count
    return np.array([*firsts, len(counts)], dtype=np.int64)


def dialogue_samples(data: MessagesData, config: Config, packed: PackedCorpus, split: Split) -> tuple[Samples, str]:
    """Return (windows of a split of a run's dialogues, note for the user).

    Raises:
        DataError: there are no windows.
    """
    dialogues = DialogueSamples(packed, split, data.sequence, data.overlong, config.seed)
    return dialogues, dialogues.note


def learned_dialogues(section: DataSection, source: str | None) -> MessagesData | None:
    """Return the section of dialogues for measuring a run on dialogues; None if a text is measured.

    `source`: the measured source; None: the run's source.
    """
    if not isinstance(section, MessagesData) or source is None:
        return section if isinstance(section, MessagesData) else None
    asked = section.model_copy(update={"source": source, "split": None})
    return asked if claims_dialogues({"source": source, "column": section.column}) else None
