"""The sections of encoder-decoders: the original Transformer and T5. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from meshwright.compute.models.section import Length, TextTransformer
from meshwright.config.section import Layers, Positive, Rule, Share, rule
from meshwright.ranks.errors import Problem

if TYPE_CHECKING:
    from meshwright.config import Config


class EncoderDecoder(TextTransformer):
    """Sequence to sequence: `layers` encoder blocks that read the source, then `layers` decoder blocks."""

    reads: ClassVar[str] = "sequences"
    data_kind: ClassVar[str] = "pairs"
    measured_by: ClassVar[str] = "meshwright.families.seq2seq.perplexity:measure"
    generated_by: ClassVar[str] = "meshwright.families.seq2seq.sequence:answer"
    special_tokens: ClassVar[tuple[str, ...]] = ("<pad>", "<s>")
    """Padding first; the last name begins a target."""

    width_fields: ClassVar[tuple[str, ...]] = ("hidden", "feed_forward")
    positions: Positive = 512
    feed_forward: Positive = 2048
    """N: the inner width of a feed-forward."""
    label_smoothing: Share = 0.0
    """The share of the target that all classes have in equal parts (Szegedy et al., arXiv 1512.00567, section 7)."""

    @property
    def inner(self) -> int:
        return self.feed_forward

    @property
    def num_blocks(self) -> int:
        return 2 * self.layers

    def sequences(self, config: Config) -> Iterator[Length]:
        yield from super().sequences(config)
        note, reads = " (spans of data.sequence, up to a multiple of 8)", ("data.sequence", "data.kind")
        yield Length("the target", config.data.lengths.target, note, reads)


class Attentional(EncoderDecoder):
    """The original Transformer (Vaswani et al., 2017): one table for source, target and output."""

    family: Literal["transformer"]
    chain: ClassVar[str] = "meshwright.families.seq2seq.transformer:TransformerModel"
    layers: Layers = 6
    hidden: Positive = 512
    heads: Positive = 8
    vocabulary: Positive = 37000
    label_smoothing: Share = 0.1


@rule("model.distance_buckets", "model.distance_max")
def distances_have_buckets(config: Config) -> Iterator[Problem]:
    model = config.model
    assert isinstance(model, T5), model
    buckets, most = model.distance_buckets, model.distance_max
    near = buckets // 2
    # Half of the buckets for each direction, half of these exact: below four a half would be empty.
    if buckets < 4:
        rule_text = "is not enough for near and far, ahead and behind"
        yield Problem("model.distance_buckets", buckets, rule_text, "4 or more")
    elif most <= near:
        rule_text = f"is among the {near} distances that model.distance_buckets={buckets} tells apart exactly"
        yield Problem("model.distance_max", most, rule_text, f"{near + 1} or more")


class T5(EncoderDecoder):
    """T5 (Raffel et al., 2020): norms without a mean, linears without biases, positions as a bias on attention."""

    rules: ClassVar[tuple[Rule, ...]] = (distances_have_buckets,)  # heads have a width of their own

    family: Literal["t5"]
    chain: ClassVar[str] = "meshwright.families.seq2seq.t5:T5Model"
    branches_in_ends: ClassVar[bool] = True  # biases of heads
    data_kind: ClassVar[str] = "spans"
    special_tokens: ClassVar[tuple[str, ...]] = ("<pad>",)
    layers: Layers = 6
    hidden: Positive = 512
    heads: Positive = 8
    head_width: Positive = 64
    """E: the width of an attention head."""
    vocabulary: Positive = 32128
    norm_epsilon: Annotated[float, Field(gt=0)] = 1e-6
    distance_buckets: Positive = 32
    """Buckets of distances between two tokens: half for one distance each, the others for ranges in powers."""
    distance_max: Positive = 128
    """From here on all distances are in the last bucket."""
