"""The size of a head's chunks of logits on GPUs (`memory.logits`), chosen by a plan.

Each chunk reads and writes the gradient of the whole table, so large chunks are faster, and a chunk needs memory while
the last stage holds activations. A plan tries three kinds of sizes:

| size                  | tried                                  | chosen                                   |
|-----------------------|----------------------------------------|------------------------------------------|
| auto (1 GiB)          | always                                 | unless another size is                   |
| SMALLER, down to 64 M | if the layout does not fit or is tight | the largest with a better verdict        |
| LARGER, up to 4 G     | for the answer's first layout          | the smallest within WORTH of the fastest |

A chosen size is a field of the answer, and in the answer's words. So all ranks and every resumed run have the same
chunks, whatever memory the devices have. A size in the user's words is never changed, equal bits have one size for all
runs, and other programs have no such field.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from meshwright.compute.tensor.cross_entropy import CHUNK_BYTES
from meshwright.config import Config
from meshwright.config.section import with_field
from meshwright.planner.plan.memory import lacks_host, verdict
from meshwright.planner.plan.space import SearchJob, is_fixed

if TYPE_CHECKING:
    from meshwright.planner.plan.memory import Memory
    from meshwright.planner.plan.predict import Planner, Prediction

FIELD = "memory.logits"

SMALLER = tuple(2**power for power in (29, 28, 27, 26))
"""Sizes below that of auto, the largest first."""

LARGER = (2**31, 2**32)
"""Sizes above that of auto, the smallest first."""

FREED = 2
"""The most bytes that a rank frees for each byte of a smaller chunk: the allocator's cache may hold the byte again."""

WORTH = 0.01
"""The least share of a step's seconds that a larger size must save: a smaller gain is worth no field."""


def may_choose(config: Config, job: SearchJob) -> bool:
    """Return whether a plan may choose the size: on GPUs, for our own program, if the field has an effect and the run
    leaves the size open."""
    free = config.memory.logits == "auto" and not is_fixed(FIELD, job.fixed)
    return free and job.cluster.device.kind == "cuda" and not job.known and not config.bits.layout_free


def with_smaller_chunks(config: Config, memory: Memory, job: SearchJob) -> Iterator[Config]:
    """Yield a layout with smaller chunks of logits, if smaller chunks can free the bytes that the layout lacks.

    Args:
        config: The layout.
        memory: The memory of the layout's fullest rank, which does not fit or is tight.
        job: The search.
    """
    whole, most = CHUNK_BYTES["cuda"], job.cluster.device.memory_bytes
    if verdict(memory, job.cluster) == "tight":
        most = int(most / (1 + job.cluster.device.unpredicted_share))
    if may_choose(config, job) and not lacks_host(memory, job.cluster):
        frees = ((size, FREED * (whole - size)) for size in SMALLER)
        yield from (with_field(config, FIELD, size) for size, freed in frees if memory.total - most <= freed)


def with_larger_chunks(prediction: Prediction, planner: Planner, job: SearchJob) -> Prediction:
    """Return the prediction with larger chunks of logits, if these save WORTH of the seconds and the layout still
    fits; else the prediction itself."""
    if not may_choose(prediction.config, job) or verdict(prediction.fullest, job.cluster) != "fits":
        return prediction
    tried = [planner.predict(with_field(prediction.config, FIELD, size)) for size in LARGER]
    fitting = [each for each in tried if verdict(each.fullest, job.cluster) == "fits"]
    least = min((each.seconds for each in fitting), default=prediction.seconds)
    if least > (1 - WORTH) * prediction.seconds:
        return prediction
    return next(each for each in fitting if each.seconds <= (1 + WORTH) * least)
