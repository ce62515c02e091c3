"""The answer of a search in sentences: the best layout, the time and price of a whole training, the error of
predictions, and the changes that would alter the answer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshwright.compute.models.chain import chain_of
from meshwright.planner.plan.cluster import Cluster, Links, load_cluster
from meshwright.planner.plan.fp8 import in_other_format
from meshwright.planner.plan.memory import bytes_text, verdict
from meshwright.ranks.errors import ConfigError

if TYPE_CHECKING:
    from meshwright.planner.plan.estimate import Estimates
    from meshwright.planner.plan.predict import Prediction

TOKENS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_DAY, _HOUR, _MINUTE = 86400, 3600, 60


@dataclass(frozen=True)
class Training:
    """A whole training: `tokens`, and `price` in dollars for a device and hour. None: not given."""

    tokens: float | None = None
    price: float | None = None

    def seconds(self, best: Prediction) -> float | None:
        """Seconds of all steps."""
        tokens_per_step = chain_of(best.config).tokens_per_sample(best.config) * best.config.batch.global_
        return None if self.tokens is None else self.tokens / tokens_per_step * best.seconds

    def dollars(self, best: Prediction) -> float | None:
        """Return the price of all devices for these seconds."""
        seconds = self.seconds(best)
        if seconds is None or self.price is None:
            return None
        return seconds / _HOUR * best.config.layout.world_size * self.price


def parse_tokens(text: str | None) -> float | None:
    """Convert `100B`, `100e9` or `100,000,000,000` to 1e11. Raises ConfigError for other text."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:E\+?\d+)?)\s*([KMBT]?)", re.sub("[,_]", "", text.strip().upper()))
    if match is None or float(match[1]) == 0:
        raise ConfigError.of("--tokens", text, "is no number of tokens", "300M, 100B, 1.5T")
    return float(match[1]) * TOKENS[match[2]]


def answer(best: Prediction, layout: str, training: Training) -> str:
    """`megatron: data 8 (zero1), tensor 4; micro 2: 1.75 s a step, 62.03 GB of 85.52 GB (fits); 3 days and 2 hours for
    100 B tokens, $4,100 at $2.50 a GPU-hour.`"""
    memory, device = best.fullest, best.cluster.device
    text = (
        f"{layout}: {seconds_text(best.seconds)} a step, {bytes_text(memory.total)} of "
        f"{bytes_text(device.memory_bytes)} ({verdict(memory, best.cluster)})"
    )
    seconds, dollars = training.seconds(best), training.dollars(best)
    if seconds is not None and training.tokens is not None:
        text += f"; {duration_text(seconds)} for {tokens_text(training.tokens)} tokens"
    if dollars is not None:
        text += f", ${dollars:,.0f} at ${training.price:.2f} a {'GPU' if device.kind == 'cuda' else 'device'}-hour"
    return f"{text}."


def sureness(cluster: Cluster, hidden: int) -> str:
    """Return a sentence on the error of predictions for a cluster, measured on models of this or other widths."""
    known, more = cluster.checked, cluster.device.unpredicted_share
    memory = f"processes may hold {more:.0%} more memory than is predicted"
    if known is None:
        lender = None if cluster.device.like is None else load_cluster(cluster.device.like)
        lent = ""
        if lender is not None:
            error = (
                f"predictions for it were met to {lender.checked.error:.0%}" if lender.checked else "as little known"
            )
            lent = f"; curves that its file leaves out are of {lender.name}'s device ({error}), scaled to its peaks"
        return f"Nobody has compared predictions for {cluster.name} with measured steps{lent}; {memory}."
    fitting = "fitted to these rows" if known.fitted else "nothing fitted"
    least, most = known.hidden
    wide = f"at hidden {least:,}" + (f" to {most:,}" if most > least else "")
    compared = f"{known.rows} measured rows of {known.of} {wide} were met to {known.error:.0%} on average ({fitting})"
    if not least <= hidden <= most:
        compared += f", which says little of hidden {hidden:,}" + (
            ": small kernels are predicted too fast" if hidden < least and cluster.device.kind == "cuda" else ""
        )
    return f"How sure: {compared}; {memory}."


def is_difference(share: float, cluster: Cluster) -> bool:
    """Return whether a share of a step's seconds exceeds the error of predictions for the cluster."""
    return cluster.checked is None or abs(share) > cluster.checked.error


NO_DIFFERENCE = "no difference that this prediction can tell"


def tight_sentence(tight: Prediction, best: Prediction, layout: str) -> str:
    """Return a sentence on a faster layout that may not fit: its gain, and the share at which memory runs out."""
    gain, cluster = 1 - tight.seconds / best.seconds, best.cluster
    worth = f"{gain:.1%} less" + ("" if is_difference(gain, cluster) else f", {NO_DIFFERENCE}")
    return (
        f"Tight: {layout}: {seconds_text(tight.seconds)} ({worth}), {bytes_text(tight.worst_memory)}: it does not fit "
        f"if processes hold {cluster.device.unpredicted_share:.0%} more than is predicted."
    )


def alike_sentence(predictions: Sequence[Prediction]) -> str | None:
    """Return a sentence on the number of fastest layouts within the error of the first; None if there is no other."""
    best = predictions[0]
    if best.cluster.checked is None:
        return f"How small a difference between layouts is real on {best.cluster.name} nobody has measured."
    alike = sum(not is_difference(prediction.seconds / best.seconds - 1, best.cluster) for prediction in predictions)
    # A count of one is the first layout itself.
    if alike < 2:
        return None
    error = best.cluster.checked.error
    return f"Between the first {alike} there is {NO_DIFFERENCE}: measured rows were met to {error:.0%}."


def seconds_text(seconds: float) -> str:
    """`12.3 s`, `4.56 ms`."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def duration_text(seconds: float) -> str:
    """`3 days and 2 hours`, `4 hours and 10 minutes`, `50 minutes`."""
    counts = [(max(1, round(seconds / _MINUTE)), "minute")]
    for size, unit, step, smaller in ((_HOUR, "hour", _MINUTE, "minute"), (_DAY, "day", _HOUR, "hour")):
        # Rounding precedes the comparison, so 23.99 hours are one day and not 24 hours.
        if round(seconds / step) * step >= size:
            whole, rest = divmod(round(seconds / step), size // step)
            counts = [(whole, unit), (rest, smaller)] if rest and whole < 100 else [(whole, unit)]
    return " and ".join(f"{count:,} {unit}{'s' * (count != 1)}" for count, unit in counts)


def tokens_text(tokens: float) -> str:
    """`100 B`."""
    unit, size = next((unit, size) for unit, size in reversed(TOKENS.items()) if tokens >= size or size == 1)
    return f"{tokens / size:g} {unit}".strip()


@dataclass(frozen=True)
class Change:
    """The step's seconds under one change of the cluster."""

    what: str
    seconds: float


def changes(best: Prediction, models: Estimates) -> tuple[Change, ...]:
    """Predict the best layout under changes: links of twice the bandwidth, devices of twice the speed and, on devices
    with FP8, the other format (bf16 or FP8)."""
    cluster = best.cluster
    device = cluster.device
    peaks = {dtype: 2 * peak for dtype, peak in device.peak_flops_per_second.items()}
    quick = device.model_copy(update={"peak_flops_per_second": peaks})
    variants = {
        "links of twice the bandwidth": cluster.model_copy(
            update={"links": {name: _doubled(links) for name, links in cluster.links.items()}}
        ),
        "devices that multiply twice as fast": cluster.model_copy(update={"device": quick}),
    }
    found = []
    for what, variant in variants.items():
        found.append(Change(what, models.planner.on(variant).predict(best.config).seconds))
    planner = models.planner.on(cluster)
    if planner.software.products == "stored" and (reformatted := in_other_format(best.config, cluster)) is not None:
        found.append(Change(reformatted[0], planner.predict(reformatted[1]).seconds))
    return tuple(found)


def _doubled(links: Links) -> Links:
    levels = tuple(
        level.model_copy(
            update={
                "bandwidth_bytes_per_second": 2 * level.bandwidth_bytes_per_second,
                "device_bandwidth_bytes_per_second": None
                if level.device_bandwidth_bytes_per_second is None
                else 2 * level.device_bandwidth_bytes_per_second,
            }
        )
        for level in links.levels
    )
    measured = tuple(
        each.model_copy(update={"points": tuple((size, seconds / 2) for size, seconds in each.points)})
        for each in links.measured
    )
    return links.model_copy(update={"levels": levels, "measured": measured})
