"""The data sections of masked texts, of spans, and of images. No torch here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from meshwright.data.section import DIGITS, SENTINELS, DataSection, Lengths, source_exists
from meshwright.data.text_section import MixedSection
from meshwright.environment import cache_folder
from meshwright.models.images_section import ImageNetwork
from meshwright.models.section import Bert
from meshwright.section import Rule

if TYPE_CHECKING:
    from meshwright.config import Config
    from meshwright.data.dataset import Opened
    from meshwright.data.files import ShowProgress
    from meshwright.data.packed import PackedCorpus
    from meshwright.data.split import Split
    from meshwright.model import Samples


class MaskedData(MixedSection):
    """Two texts, of which some tokens are masked."""

    kind: Literal["masked"]
    gives: ClassVar[str] = "masked"

    def samples(self, config: Config, packed: PackedCorpus, split: Split) -> tuple[Samples, str]:
        from meshwright.data.masked import MaskedSamples
        from meshwright.data.specials import specials_of

        model = config.model
        assert isinstance(model, Bert), model
        specials = specials_of(packed.tokenizer)
        packed.check_vocabulary(model.vocabulary, specials.vocabulary_size, " with BERT's")
        return MaskedSamples(
            packed.tokens(split), specials, self.sequence, config.seed,
            next_sentence=model.next_sentence, name=packed.name(split),
        ), ""  # fmt: skip


class SpanData(MixedSection):
    """Spans cut out of a text, to be written by an encoder-decoder."""

    kind: Literal["spans"]
    gives: ClassVar[str] = "sequences"
    sentinels: ClassVar[int] = SENTINELS

    @property
    def lengths(self) -> Lengths:
        from meshwright.data.span_window import span_lengths

        return span_lengths(self.sequence)

    def samples(self, config: Config, packed: PackedCorpus, split: Split) -> tuple[Samples, str]:
        from meshwright.data.spans import SpanSamples
        from meshwright.data.specials import specials_for

        specials = specials_for(config, packed.tokenizer)
        return SpanSamples(packed.tokens(split), specials, self.lengths, config.seed, packed.name(split)), ""


class ImageData(DataSection):
    """Images: digits, or a folder of class folders."""

    kind: Literal["images"]
    gives: ClassVar[str] = "images"
    source_names: ClassVar[tuple[str, ...]] = (DIGITS,)
    source_forms: ClassVar[str] = "a folder of class folders of jpg and png files"
    reads_folders_alone: ClassVar[bool] = True
    header: ClassVar[str] = "images.json"
    rules: ClassVar[tuple[Rule, ...]] = (source_exists,)

    def prepare(self, config: Config, progress: ShowProgress) -> Path:
        from meshwright.data.images import images_for

        assert isinstance(config.model, ImageNetwork), config.model
        packed = images_for(self, config.model, cache_folder(), progress)
        self.open(config, packed.folder)
        return packed.folder

    def open(self, config: Config, folder: Path) -> Opened:
        from meshwright.data.dataset import open_splits
        from meshwright.data.images import ImageSamples, open_images

        packed = open_images(folder)
        return open_splits(config, lambda split: (ImageSamples(packed, split, config.seed), ""))
