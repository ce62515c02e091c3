"""The rules that join fields. A rule is a generator of problems; it names the fields it reads, so that it can be
left out when one of these is itself mistaken, and every other mistake is still reported in the same message.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Set

from meshwright.config.data_rules import DATA_RULES
from meshwright.config.layout_rules import LAYOUT_RULES
from meshwright.config.memory_rules import MEMORY_RULES
from meshwright.config.models import T5, ImageNetwork, ResNeXt, Transformer, Vit
from meshwright.config.pipeline_rules import PIPELINE_RULES
from meshwright.config.schema import Config
from meshwright.config.tensor_rules import TENSOR_RULES
from meshwright.errors import Problem
from meshwright.section import divisors, listed, rule


@rule("model.hidden", "model.heads")
def heads_divide_hidden(config: Config) -> Iterator[Problem]:
    model = config.model
    if not isinstance(model, Transformer) or isinstance(model, T5):  # T5's heads have a width of their own
        return
    hidden, heads = model.hidden, model.heads
    if hidden % heads:
        yield Problem("model.heads", heads, f"does not divide model.hidden={hidden}", listed(divisors(hidden)))


@rule("model.hidden", "model.paths")
def paths_divide_hidden(config: Config) -> Iterator[Problem]:
    model = config.model
    if isinstance(model, ResNeXt) and model.hidden % model.paths:
        rule_text = f"does not divide model.hidden={model.hidden}: norms have a group for each path"
        yield Problem("model.paths", model.paths, rule_text, listed(divisors(model.hidden)))


@rule("model.distance_buckets", "model.distance_max")
def distances_have_buckets(config: Config) -> Iterator[Problem]:
    model = config.model
    if not isinstance(model, T5):
        return
    buckets, most = model.distance_buckets, model.distance_max
    near = buckets // 2
    if buckets < 4:
        rule_text = "is not enough for near and far, ahead and behind"
        yield Problem("model.distance_buckets", buckets, rule_text, "4 or more")
    elif most <= near:
        rule_text = f"is among the {near} distances that model.distance_buckets={buckets} tells apart exactly"
        yield Problem("model.distance_max", most, rule_text, f"{near + 1} or more")


@rule("batch.global", "layout.data.size")
def replicas_divide_batch(config: Config) -> Iterator[Problem]:
    batch, size = config.batch.global_, config.layout.data.size
    if batch % size:
        yield Problem("layout.data.size", size, f"does not divide batch.global={batch}", listed(divisors(batch)))


@rule("batch.global", "batch.micro", "layout.data.size")
def microbatches_divide_replica(config: Config) -> Iterator[Problem]:
    batch, size = config.batch.global_, config.layout.data.size
    if batch % size == 0 and config.replica_batch % config.micro:
        part = f"a replica's {config.replica_batch} sequences (batch.global={batch} / layout.data.size={size})"
        yield Problem("batch.micro", config.micro, f"does not divide {part}", listed(divisors(config.replica_batch)))


@rule("model.image", "model.patch")
def patches_divide_image(config: Config) -> Iterator[Problem]:
    if isinstance(config.model, Vit) and config.model.image % config.model.patch:
        image, patch = config.model.image, config.model.patch
        yield Problem("model.patch", patch, f"does not divide model.image={image}", listed(divisors(image)))


@rule("model.channels")
def channels_are_grey_or_colours(config: Config) -> Iterator[Problem]:
    if isinstance(config.model, ImageNetwork) and config.model.channels not in (1, 3):
        yield Problem("model.channels", config.model.channels, "is neither grey nor red, green and blue", "1, 3")


@rule("precision.level", "precision.dtype")
def dtype_fits_level(config: Config) -> Iterator[Problem]:
    level, dtype = config.precision.level, config.precision.dtype
    valid = ("float32", "float64") if level == "O0" else ("bf16", "fp16")
    if dtype not in valid:
        yield Problem("precision.dtype", dtype, f"does not go with precision.level={level}", ", ".join(valid))


@rule("layout.transport")
def transport_is_installed(config: Config) -> Iterator[Problem]:
    if config.layout.transport == "mpi" and importlib.util.find_spec("mpi4py") is None:
        hint = "torch, auto; or mpi after pip install 'meshwright[mpi]'"
        yield Problem("layout.transport", "mpi", "needs mpi4py, which is not installed", hint)


@rule("layout.transport", "layout.data.sync")
def transport_carries_sync(config: Config) -> Iterator[Problem]:
    if config.layout.transport == "mpi" and config.layout.data.sync == "fsdp":
        rule_text = "runs inside torch.distributed, which layout.transport=mpi does not start"
        yield Problem("layout.data.sync", "fsdp", rule_text, "layout.transport=torch or auto, or sync=zero1")


@rule("layout.data.size", "layout.data.sync")
def there_is_something_to_shard(config: Config) -> Iterator[Problem]:
    size, sync = config.layout.data.size, config.layout.data.sync
    if sync == "fsdp" and size == 1:
        yield Problem(
            "layout.data.size", size, "leaves layout.data.sync=fsdp nothing to shard", "2 or more, or sync=allreduce"
        )


@rule("layout.transport", "device")
def transport_reaches_device(config: Config) -> Iterator[Problem]:
    if config.layout.transport == "mpi" and config.device == "cuda":
        yield Problem("layout.transport", "mpi", "moves host memory only, and device=cuda", "torch, auto")


@rule("steps", "optimizer.schedule.warmup")
def warmup_fits(config: Config) -> Iterator[Problem]:
    warmup = config.optimizer.schedule.warmup
    if warmup > config.steps:
        yield Problem(
            "optimizer.schedule.warmup", warmup, f"is longer than steps={config.steps}", f"0 to {config.steps}"
        )


RULES = (
    heads_divide_hidden,
    paths_divide_hidden,
    distances_have_buckets,
    replicas_divide_batch,
    microbatches_divide_replica,
    patches_divide_image,
    channels_are_grey_or_colours,
    dtype_fits_level,
    transport_is_installed,
    transport_carries_sync,
    there_is_something_to_shard,
    transport_reaches_device,
    warmup_fits,
    *DATA_RULES,
    *TENSOR_RULES,
    *PIPELINE_RULES,
    *MEMORY_RULES,
    *LAYOUT_RULES,
)


def broken_rules(config: Config, mistaken: Set[str] = frozenset()) -> list[Problem]:
    """Every problem of every rule that reads nothing of the mistaken fields and sections."""
    sound = [rule for rule in RULES if not any(_within(read, field) for read in rule.reads for field in mistaken)]
    return [problem for rule in sound for problem in rule.check(config)]


def _within(field: str, section: str) -> bool:
    return field == section or field.startswith(section + ".")
