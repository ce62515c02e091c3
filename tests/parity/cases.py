"""The 32 planted mistakes and the 30 right programs of `python -m tests.parity`."""

from __future__ import annotations

from dataclasses import dataclass

from tests.parity.programs import Setting

DATA, TENSOR, BOTH = (("data", 2),), (("tp", 2),), (("data", 2), ("tp", 2))
ALL = "(all parameters)"


@dataclass(frozen=True)
class PlantedMistake:
    """A planted mistake.

    `modules`: The named module must be one of these paths, or inside one. `kinds`: The right names of the mistake.
    """

    wrong: str
    setting: Setting
    modules: tuple[str, ...]
    kinds: tuple[str, ...]


MISTAKES = (
    PlantedMistake(
        "g-missing@blocks.0.attention.out", Setting(TENSOR), ("blocks.0.attention",), ("missing reduction",)
    ),
    PlantedMistake(
        "g-missing@blocks.1.feed_forward.down", Setting(TENSOR), ("blocks.1.feed_forward",), ("missing reduction",)
    ),
    PlantedMistake("g-twice@blocks.0.attention.out", Setting(TENSOR), ("blocks.0.attention",), ("scaled",)),
    PlantedMistake("bias-each@blocks.0.feed_forward.down", Setting(TENSOR), ("blocks.0.feed_forward",), ("scaled",)),
    PlantedMistake(
        "f-missing@blocks.1.feed_forward.up", Setting(TENSOR), ("blocks.1.feed_forward",), ("missing reduction",)
    ),
    PlantedMistake(
        "f-missing@blocks.0.attention.qkv", Setting(TENSOR), ("blocks.0.attention",), ("missing reduction",)
    ),
    PlantedMistake("f-twice@blocks.1.feed_forward.up", Setting(TENSOR), ("blocks.1.feed_forward",), ("scaled",)),
    PlantedMistake("qkv-contiguous", Setting(TENSOR), ("blocks.0.attention",), ("wrong part", "wrong values")),
    PlantedMistake("same-slice", Setting(TENSOR), ("blocks.0.feed_forward.up",), ("wrong part",)),
    PlantedMistake(
        "sequence-no-norms", Setting(TENSOR, sequence=True), ("norm", "norm1", "norm2"), ("missing reduction",)
    ),
    PlantedMistake("sequence-no-bias", Setting(TENSOR, sequence=True), ("out", "down"), ("missing reduction",)),
    PlantedMistake("positions", Setting(TENSOR, sequence=True), ("positions",), ("wrong part", "wrong values")),
    PlantedMistake("vocabulary-mask", Setting(TENSOR, vocabulary=True), ("tokens",), ("wrong values",)),
    PlantedMistake("head-backward", Setting(TENSOR, vocabulary=True), ("head",), ("missing reduction",)),
    PlantedMistake(
        "softmax-local", Setting(TENSOR, vocabulary=True), ("(loss)",), ("wrong values", "missing reduction")
    ),
    PlantedMistake("data-none", Setting(DATA), (ALL,), ("missing reduction",)),
    PlantedMistake("data-no-biases", Setting(DATA), ("down", "out", "up", "qkv"), ("missing reduction",)),
    PlantedMistake("mean-for-sum", Setting(DATA), (ALL,), ("scaled",)),
    PlantedMistake("reduced-twice", Setting(DATA), (ALL,), ("scaled",)),
    PlantedMistake("mean-of-means", Setting(DATA), ("(loss)",), ("token counts",)),
    PlantedMistake("counts-ignored", Setting(DATA), ("(loss)",), ("token counts",)),
    PlantedMistake("micro-mean", Setting(DATA, micro=2), (ALL,), ("scaled",)),
    PlantedMistake("same-rows", Setting(DATA), ("(data)",), ("wrong data",)),
    PlantedMistake("not-zeroed", Setting(DATA), (ALL,), ("accumulated",)),
    PlantedMistake("clip-first", Setting(DATA, clip=0.1), (ALL,), ("clipping",)),
    PlantedMistake("clip-local", Setting(TENSOR, clip=0.5), (ALL,), ("clipping",)),
    PlantedMistake("wrong-axis", Setting(BOTH), (ALL,), ("missing reduction",)),
    PlantedMistake("tied-once", Setting(DATA, tied=True), ("tokens", "head"), ("incomplete sum",)),
    PlantedMistake("dropout", Setting(TENSOR, dropout=0.1), ("blocks.0", "dropout"), ("dropout",)),
    PlantedMistake("not-published", Setting(DATA, owners=True), ("blocks.1.norm2",), ("stale weights",)),
    PlantedMistake("stale-copy", Setting(DATA), (ALL,), ("stale weights",)),
    PlantedMistake("decay-on-all", Setting(TENSOR, optimizer="adam"), ("tokens", ALL), ("optimizer", "stale weights")),
)
"""`kinds` and `modules` were written before the first run, and the classifier was then mended until all matched. The
counts are no measure of unknown mistakes."""

RIGHT = (
    *(Setting(DATA, optimizer=name) for name in ("sgd", "adam", "adamw")),
    *(Setting(DATA, clip=clip, micro=micro) for clip in (None, 0.5) for micro in (2, 4)),
    *(Setting(DATA, tied=True, optimizer=name) for name in ("sgd", "adamw")),
    Setting(DATA, dropout=0.1), Setting(DATA, owners=True), Setting(DATA, owners=True, optimizer="adam", clip=0.5),
    *(Setting(TENSOR, optimizer=name) for name in ("sgd", "adam", "adamw")),
    Setting(TENSOR, clip=0.5), Setting(TENSOR, tied=True), Setting(TENSOR, dropout=0.1), Setting(TENSOR, micro=2),
    *(Setting(TENSOR, vocabulary=True, optimizer=name, clip=clip) for name, clip in (("sgd", None), ("adamw", 0.5))),
    *(Setting(TENSOR, sequence=True, optimizer=name, clip=clip)
      for name, clip in (("sgd", None), ("adamw", 0.5), ("adam", None))),
    Setting(TENSOR, sequence=True, micro=2),
    Setting(BOTH), Setting(BOTH, clip=0.5, optimizer="adamw"), Setting(BOTH, sequence=True),
    Setting(BOTH, vocabulary=True), Setting(BOTH, sequence=True, clip=0.5, micro=2),
)  # fmt: skip
