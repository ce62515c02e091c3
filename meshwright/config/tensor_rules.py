"""What tensor parallelism asks of a model and a batch: what it cuts must be divisible."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.config.layout import Megatron, Subgraph, Tesseract, Whole
from meshwright.config.lengths import lengths_of
from meshwright.config.models import EncoderDecoder, ResNeXt, TextTransformer, Vit
from meshwright.config.schema import Config
from meshwright.errors import Problem
from meshwright.section import divisors, listed, rule


def _cut(config: Config) -> tuple[str, int]:
    """The field that says into how many parts branches are dealt, and its value."""
    tensor = config.layout.tensor
    if isinstance(tensor, Megatron | Subgraph):
        return "layout.tensor.size", tensor.size
    return "layout.tensor.q", tensor.q if isinstance(tensor, Tesseract) else 1


def _cut_tables(config: Config) -> int:
    """Into how many parts hidden widths and tables are cut. A sub-graph's layers outside of branches are whole."""
    return 1 if isinstance(config.layout.tensor, Subgraph) else _cut(config)[1]


def _divides(config: Config, field: str, number: int, note: str = "") -> Iterator[Problem]:
    name, parts = _cut(config)
    if number % parts:
        yield Problem(name, parts, f"does not divide {field}={number}{note}", listed(divisors(number)))


@rule("layout.tensor", "model.heads", "model.paths")
def tensor_divides_branches(config: Config) -> Iterator[Problem]:
    yield from _divides(config, *config.model.branches)


@rule("layout.tensor", "model.hidden", "model.heads", "model.paths")
def tensor_divides_hidden(config: Config) -> Iterator[Problem]:
    model = config.model
    _, branches = model.branches
    if _cut_tables(config) > 1 and (branches % _cut(config)[1] or model.hidden % branches):
        yield from _divides(config, "model.hidden", model.hidden)


@rule("layout.tensor", "model.feed_forward")
def tensor_divides_feed_forward(config: Config) -> Iterator[Problem]:
    tensor, model = config.layout.tensor, config.model
    cuts = not isinstance(tensor, Subgraph) or tensor.branch == "block"
    if isinstance(model, EncoderDecoder) and cuts:
        yield from _divides(config, "model.feed_forward", model.inner)


@rule("layout.tensor", "model.vocabulary", "model.classes", "model.vocabulary_multiple", "model.positions")
def tensor_divides_tables(config: Config) -> Iterator[Problem]:
    parts = _cut_tables(config)
    model = config.model
    multiple = model.vocabulary_multiple
    rows = model.padded_vocabulary if isinstance(model, TextTransformer) else multiple
    small = model.family in ("bert", "vit", "resnext")  # whose small tables are padded alone
    if rows % parts or (small and multiple % parts):
        rule_text = f"is no multiple of {parts}, into which layout.tensor cuts the padded tables"
        yield Problem("model.vocabulary_multiple", multiple, rule_text, f"{parts * multiple}, any multiple of {parts}")
    if isinstance(model, TextTransformer) and parts > 1:
        yield from _divides(config, "model.positions", model.positions)


@rule("layout.tensor", "data.sequence", "data.objective", "data.source", "data.target", "model.image", "model.patch")
def tensor_divides_sequence(config: Config) -> Iterator[Problem]:
    tensor, model = config.layout.tensor, config.model
    if not isinstance(tensor, Megatron) or not tensor.sequence_parallel:
        return
    if isinstance(model, ResNeXt):
        rule_text = f"cuts the positions of an image, over which the norms of a {model.family} are taken"
        yield Problem("layout.tensor.sequence_parallel", True, rule_text, "false")
    elif isinstance(model, Vit):
        note = " (the patches of model.image and the class token), as sequence_parallel asks"
        yield from _divides(config, "the sequence", model.positions, note)
    else:
        yield from _divides(config, "data.sequence", config.data.sequence, ", as sequence_parallel asks")
    if isinstance(model, EncoderDecoder) and config.data.sequence % tensor.size == 0:
        note = " (spans of data.sequence, up to a multiple of 8), as sequence_parallel asks"
        yield from _divides(config, "the target", lengths_of(config).target, note)


@rule("layout.tensor", "batch.global", "batch.micro", "layout.data.size")
def tensor_divides_batch(config: Config) -> Iterator[Problem]:
    name, parts = _rows_cut(config)
    if config.replica_batch and config.micro % parts:
        what = f"is no multiple of {name}{parts}, over which a microbatch's samples are split"
        fitting = [micro for micro in divisors(config.replica_batch) if micro % parts == 0]
        field = "batch.global" if config.batch.micro == "auto" or not fitting else "batch.micro"
        valid = listed(fitting) if field == "batch.micro" else f"a multiple of {parts * config.layout.data.size}"
        yield Problem(field, config.batch.global_ if field == "batch.global" else config.micro, what, valid)


def _rows_cut(config: Config) -> tuple[str, int]:
    """What a microbatch's samples are split over, and into how many parts."""
    tensor = config.layout.tensor
    if isinstance(tensor, Tesseract):
        return "layout.tensor.d x q = ", tensor.d * tensor.q
    if isinstance(tensor, Subgraph) and tensor.common == "all":
        return "layout.tensor.size=", tensor.size
    return "", 1


@rule("layout.tensor")
def depth_is_at_most_q(config: Config) -> Iterator[Problem]:
    tensor = config.layout.tensor
    if isinstance(tensor, Tesseract) and tensor.d > tensor.q:
        rule_text = f"is more than layout.tensor.q={tensor.q}: beyond 3-D, layout.data.size does the same for less"
        yield Problem("layout.tensor.d", tensor.d, rule_text, f"1 to {tensor.q}")


@rule("layout.tensor", "layout.data.sync")
def sync_goes_with_tensor(config: Config) -> Iterator[Problem]:
    if config.layout.data.sync == "fsdp" and not isinstance(config.layout.tensor, Whole):
        rule_text = f"shards whole layers, and layout.tensor.kind={config.layout.tensor.kind} has cut them already"
        yield Problem(
            "layout.data.sync", "fsdp", rule_text, "zero1, allreduce, ring, rooted, server-gradient, server-loss"
        )


TENSOR_RULES = (
    tensor_divides_branches,
    tensor_divides_hidden,
    tensor_divides_feed_forward,
    tensor_divides_tables,
    tensor_divides_sequence,
    tensor_divides_batch,
    depth_is_at_most_q,
    sync_goes_with_tensor,
)
