"""A cluster as facts: devices, links, and the shares of peaks that programs reach. Read from configs/clusters or a
file.

A rank runs on a device: a GPU, or on a CPU a core for each of the rank's threads. Curves are points (x, y) with rising
x. Between points y is interpolated over log x; beyond them the first or last y is constant.

A file's keys have no units and are described in the docstrings (`meshwright config cluster`). Python's fields have
units in their names: `memory` is `memory_bytes`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from math import exp, log
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, field_validator

from meshwright.config.load import read_yaml
from meshwright.config.messages import problems_of
from meshwright.config.section import Positive, Section, Size
from meshwright.configs import shipped
from meshwright.planner.plan.borrowed import completed
from meshwright.ranks.errors import ConfigError
from meshwright.ranks.ledger import VERBS
from meshwright.ranks.transports import TransportName

CALIBRATED = Path("cluster.yaml")
"""The file that `meshwright calibrate` writes by default."""

_Seconds = Annotated[float, Field(ge=0)]
Rate = Annotated[float, Field(gt=0)]


def _check_rising(curve: tuple[tuple[float, float], ...]) -> tuple[tuple[float, float], ...]:
    if any(after <= before for (before, _), (after, _) in pairwise(curve)):
        raise ValueError("has points whose first numbers do not rise")
    return curve


Curve = Annotated[tuple[tuple[Rate, Rate], ...], Field(min_length=1), AfterValidator(_check_rising)]
Multiplies = Literal["float32", "tf32", "float64", "bf16", "fp16", "fp8", "mxfp8"]
PacedKind = Literal["special", "random", "mixed", "strided"]
AttentionKernel = Literal["flash-1", "flash-2", "flash-3"]
"""FlashAttention's generations (Dao et al., 2022; Dao, 2023; Shah et al., 2024), and kernels of equal speed."""


# `0.45` is a constant curve.
Shares = Annotated[Curve, BeforeValidator(lambda value: ((1.0, value),) if type(value) in (int, float) else value)]
"""A share over the side of a product, or a constant share."""
Share = Annotated[float, Field(gt=0, le=1)]
if TYPE_CHECKING:
    Verb: TypeAlias = str
else:
    Verb = Literal[tuple(VERBS)]


class Device(Section):
    """A device: a GPU, or on a CPU the cores of a rank. A missing key without a default has the value of the cluster
    `like` (borrowed.py)."""

    kind: Literal["cpu", "cuda"]
    """cuda: a GPU, with a host that issues kernels. cpu: cores."""
    capability: tuple[int, int] | None = None
    """A GPU's compute capability, [9, 0] of an H100, which determines kernels (experts in one product); null: a device
    without one."""
    like: str | None = None
    """The shipped cluster whose device gives missing keys; by default one of the same class, by the peak's dtypes."""
    memory_bytes: Size = Field(alias="memory")
    """Bytes of memory: 48e9, or 45G, which counts in 2^30. A data sheet's GB are 1e9 bytes."""
    reserved_bytes: Annotated[int, Field(ge=0)] = Field(default=0, alias="reserved")
    """Bytes that a process holds beyond its tensors, with any transport: on a GPU the context."""
    workspaces_bytes: Annotated[int, Field(ge=0)] = Field(default=0, alias="workspaces")
    """Bytes of libraries' workspaces in any run."""
    staged_bytes: Annotated[int, Field(ge=0)] = Field(default=0, alias="staged")
    """Additional bytes of a pipeline's rank on a CPU, since meta tensors run in Python to plan the stages."""
    unpredicted_share: Annotated[float, Field(ge=0)] = Field(default=0.1, alias="unseen")
    """The share that a process may hold beyond the prediction; a layout within this share of `memory` is tight."""
    peak_flops_per_second: dict[Multiplies, Rate] = Field(alias="peak")
    """Operations a second by dtype, dense: {bf16: 362e12, float32: 91.6e12}; tf32: float32 in tensor cores. A data
    sheet's number with sparsity is twice the dense one."""
    efficiency: Shares
    """The share of the peak that a product of m x n x k reaches, over the cube root of mnk; or one share."""
    low_efficiency: Shares | None = Field(default=None, alias="efficiency_low")
    """The shares of the peak that products in FP8 and MXFP8 reach, by side; null: as in half precision."""
    tf32_efficiency: Shares | None = Field(default=None, alias="efficiency_tf32")
    """The shares of the peak that products in TF32 reach, by side; null: as in half precision."""
    attention_efficiency: Shares | None = Field(default=None, alias="attention")
    """The share of the peak that torch's fused attention reaches, over the cube root of queries x keys x width of a
    head. A causal one counts half of the products. null: attention is not fused."""
    attention_beside_bytes: Annotated[float, Field(ge=0)] = Field(default=0.0, alias="attention_beside")
    """Bytes that additional kernels of a backward pass touch for each element of a query, if shares are of main kernels
    alone."""
    float32_attention_efficiency: Shares | None = Field(default=None, alias="attention_float32")
    """The shares of float32's peak that torch's fused attention of float32 reaches; null: as in half precision."""
    attention_kernels: dict[AttentionKernel, Shares] = Field(default_factory=dict, alias="attentions")
    """The shares of the peak that attention kernels of other generations than torch's reach; if missing, torch's."""
    norms: tuple[Share, Share] = (1.0, 1.0)
    """The shares of the memory's pace that torch's norms reach, forward and backward."""
    norm_row_seconds: _Seconds = Field(default=0.0, alias="norm_row")
    """Seconds of a row in the sums for the gradients of a torch norm's weights: a block of threads adds 32 columns row
    by row. 0: these sums are in the backward share."""
    sums: Share = 1.0
    """The share of the memory's pace that sums of rows reach, such as biases' gradients."""
    bandwidth_bytes_per_second: Curve = Field(alias="bandwidth")
    """Bytes a second of memory: a data sheet's number, such as 864e9, or points (bytes that a kernel touches, measured
    bytes a second)."""
    launch_seconds: _Seconds = Field(default=0.0, alias="launch")
    """Seconds between the issue of a kernel and its begin."""
    product_launch_seconds: _Seconds | None = Field(default=None, alias="launch_product")
    """`launch` of a product, if its library launches more than one kernel; null: `launch`."""
    issue_seconds: _Seconds = Field(default=0.0, alias="issue")
    """Seconds of the host to issue a kernel, from Python and op by op; 0 if the host is the device."""
    python_seconds_per_part: _Seconds = Field(default=0.0, alias="part")
    """The host's seconds for a pass through a layer or the head beyond the kernels: Python, autograd."""
    seconds_per_element: dict[PacedKind, _Seconds] = Field(default_factory=dict, alias="elements")
    """Seconds of an element: added to its bytes in exponentials (special) and random numbers; at least, in kernels of
    several dtypes (mixed), and if operands are repeated or not contiguous (strided)."""
    host_link_bytes_per_second: Rate = Field(alias="host_link")
    """Bytes a second between the device's memory and the host's, each way."""
    disk_bytes_per_second: Rate = Field(default=1e9, alias="disk")
    """Bytes a second to the disk, for memory.offload.to=disk."""

    def peak_of(self, dtype: str, *, tf32: bool) -> float | None:
        """Return the flops a second of products in a dtype. `tf32`: whether float32 products may run in TF32
        (precision.tf32)."""
        peak = self.peak_flops_per_second
        name = "tf32" if tf32 and dtype == "float32" and "tf32" in peak else dtype
        return next((rate for known, rate in peak.items() if known == name), None)


class Level(Section):
    """Links between units: devices at the innermost level, groups joined by the level before at the others."""

    joins: Positive | None = None
    """The number of units that form one unit of the next level; null, on the last level: any number."""
    latency_seconds: _Seconds = Field(alias="latency")
    """Seconds of a message; by default 3e-6 at the innermost level and 8e-6 at others: a step of NCCL, an assumption.
    """
    bandwidth_bytes_per_second: Rate = Field(alias="bandwidth")
    """Bytes a second out of a unit, each way, as programs reach, shared by all its devices that send at once. 400 Gb/s
    are 50e9; InfiniBand gives 0.92 of this."""
    device_bandwidth_bytes_per_second: Rate | None = Field(default=None, alias="device_bandwidth")
    """The most bytes a second of one device (its network card's); null: all."""
    kind: Literal["ring", "mesh", "switch"] = "switch"
    """ring: a unit has links to two neighbours, and all-to-all takes the long way; mesh: an equal share of links to
    each other unit, so fewer units than `joins` have less; switch: any pair at full bandwidth."""

    def share(self, num_senders: int, num_units: int, num_devices: int) -> float:
        """Return the bytes a second out of a unit for one of `num_senders` simultaneous senders, in a group of
        `num_units` units with `num_devices` devices each."""
        shared = self.bandwidth_bytes_per_second / num_senders
        if self.kind == "mesh" and self.joins is not None:
            # A group of two on four pairwise linked GPUs has one link of three. A ring would give too few bytes a
            # second, a switch too many.
            shared *= (num_units - 1) / (self.joins - 1)
        card = self.device_bandwidth_bytes_per_second
        return shared if card is None else min(shared, num_devices * card)


class Measured(Section):
    """Times of a verb among neighbours, measured by `meshwright calibrate`."""

    verb: Verb
    """The collective, or the message."""
    ranks: Annotated[int, Field(ge=2)]
    """The number of neighbours."""
    points: Curve
    """Points (bytes of the whole payload, seconds)."""


class Links(Section):
    """The links of a transport."""

    levels: Annotated[tuple[Level, ...], Field(min_length=1)]
    """Innermost first."""
    measured: tuple[Measured, ...] = ()
    """Times of verbs, which replace the levels for these verbs."""
    overlaps: Annotated[float, Field(ge=0, le=1)] = 1.0
    """The share of a collective that runs while its rank computes."""
    tax: Annotated[float, Field(ge=0)] = 0.0
    """The share by which kernels take longer during a collective, which uses multiprocessors and bandwidth."""
    channels: Annotated[int, Field(ge=0)] = 0
    """Channels of a communicator of NCCL, with buffers each (process.py); 0: no buffers."""
    reserved_bytes: Annotated[int, Field(ge=0)] | None = Field(default=None, alias="reserved")
    """Bytes that a process on a CPU holds beyond its tensors after a step over this transport: interpreter, libraries,
    and memory first used in a step; null: the device's."""

    @field_validator("levels")
    @classmethod
    def nested(cls, levels: tuple[Level, ...]) -> tuple[Level, ...]:
        if any(level.joins is None for level in levels[:-1]):
            raise ValueError("has a level before the last that does not say how many units it joins")
        if any(level.kind == "mesh" and (level.joins or 1) < 2 for level in levels):
            raise ValueError("has a mesh that does not say how many units it joins")
        return levels


class KnownError(Section):
    """The error of predictions against measured rows of such a cluster."""

    rows: Positive
    """The number of rows."""
    error: Rate
    """The mean error in seconds, as a share."""
    of: str
    """The source of the rows."""
    hidden: tuple[Positive, Positive]
    """The least and the greatest width of the models."""
    fitted: bool = False
    """Whether a figure of the cluster was fitted to these rows."""


class Cluster(Section):
    """A cluster file: a node's devices, and the links of each transport."""

    name: str
    """The cluster's name; by default the file's."""
    source: str = ""
    """The source of the figures."""
    checked: KnownError | None = None
    """The error of predictions; null: no prediction has been compared."""
    device: Device
    """The device of a rank."""
    devices_per_node: Positive
    """Devices of a node."""
    host_memory_bytes: Size | None = Field(default=None, alias="host_memory")
    """Bytes of a node's host memory, shared by its ranks; null: no layout is refused for host memory."""
    cores: Positive | None = None
    """The number of ranks of a node that compute at once; more ranks take turns. null: each rank has a device."""
    turns: Curve | None = None
    """Points (ranks of a node, slowdown over a lone rank), if ranks share cores and synchronise every few milliseconds;
    null: cores are shared without loss."""
    links: dict[TransportName, Links]
    """By transport: torch, which can carry every run, and mpi."""

    @property
    def domain_devices(self) -> int:
        """The number of devices connected as fast as a node's: of a node, or of a larger NVLink domain."""
        levels, units = self.links["torch"].levels, 1
        inside = levels[0].bandwidth_bytes_per_second
        for level in levels[:-1]:
            each = level.device_bandwidth_bytes_per_second or level.bandwidth_bytes_per_second / units
            if each < inside or level.joins is None:
                break
            units *= level.joins
        return max(self.devices_per_node, units)

    def oversubscription(self, ranks_per_node: int) -> float:
        """Return the slowdown of a rank if ranks share cores: at least the number of ranks to a core."""
        if self.cores is None:
            return 1.0
        shared = max(1.0, ranks_per_node / self.cores)
        # Ranks that share cores and synchronise often lose more than their share: 2.3 in place of 2 was measured.
        if self.turns is None or ranks_per_node < 2:
            return shared
        # A lone rank has a core, even without a measurement.
        lone = () if self.turns[0][0] <= 1 else ((1.0, 1.0),)
        # More ranks than measured take turns in proportion.
        beyond = max(1.0, ranks_per_node / self.turns[-1][0])
        return max(shared, beyond * interpolated((*lone, *self.turns), ranks_per_node))

    @field_validator("links")
    @classmethod
    def some_link(cls, links: dict[TransportName, Links]) -> dict[TransportName, Links]:
        if "torch" not in links:
            raise ValueError("has no torch, which can carry every run")
        return links


def load_cluster(name: str) -> Cluster:
    """Load a shipped cluster by its name, or a file.

    Raises:
        ConfigError: All mistakes of the file at once, or the known names if there is no such cluster.
    """
    # A name never reads a file of the current folder.
    path = Path(name) if name.endswith((".yaml", ".yml")) else shipped("clusters").get(name)
    if path is None or not path.is_file():
        raise ConfigError.of(
            "--cluster", name, "is no cluster that we have, and no file", ", ".join(shipped("clusters"))
        )
    try:
        return Cluster.model_validate(
            completed(read_yaml(path), path, lambda like: load_cluster(like).device.model_dump(by_alias=True))
        )
    except ValidationError as error:
        raise ConfigError(problems_of(error, [], Cluster)) from error


def interpolated(points: Sequence[tuple[float, float]], x: float, *, power: bool = False) -> float:
    """Return y at x, interpolated linearly over log x; beyond the points y is constant.

    Args:
        points: (x, y) with rising x.
        x: The place.
        power: Whether y is a power of x, as seconds are of bytes: interpolate over both logarithms, and extrapolate
            beyond
            the last point in proportion to x.
    """
    after = bisect_left(points, x, key=lambda point: point[0])
    if after == 0:
        return points[0][1]
    x0, y0 = points[after - 1]
    if after == len(points):
        return y0 * x / x0 if power else y0
    x1, y1 = points[after]
    rise = (log(y1 / y0) if power else y1 - y0) * log(x / x0) / log(x1 / x0)
    return y0 * exp(rise) if power else y0 + rise
