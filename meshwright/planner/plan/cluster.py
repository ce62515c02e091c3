"""A cluster as facts: devices, links, and how much of their peaks programs get. Read from configs/clusters or a file.

A device is what a rank runs on: a GPU, or on a CPU as many cores as a rank has threads. Curves are points (x, y) with
rising x, between which y is interpolated over log x; beyond them the first or last holds.

A file's keys have no units, and are what the docstrings name (`meshwright config cluster`); the fields that Python
reads say theirs: `memory` is `memory_bytes`.
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
"""The file that `meshwright calibrate` writes, unless it is told another."""

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
"""FlashAttention's generations (Dao et al., 2022; Dao, 2023; Shah et al., 2024), and kernels that were as fast then."""


# `0.45` is a curve that is as high everywhere.
Shares = Annotated[Curve, BeforeValidator(lambda value: ((1.0, value),) if type(value) in (int, float) else value)]
"""A share over the side of a product, or one that holds at all."""
Share = Annotated[float, Field(gt=0, le=1)]
if TYPE_CHECKING:
    Verb: TypeAlias = str
else:
    Verb = Literal[tuple(VERBS)]


class Device(Section):
    """A device: a GPU, or on a CPU the cores of a rank. Keys without a default that a file leaves out are borrowed from
    the cluster of `like` (borrowed.py)."""

    kind: Literal["cpu", "cuda"]
    """cuda: a GPU, with a host that issues kernels. cpu: cores."""
    capability: tuple[int, int] | None = None
    """A GPU's compute capability, [9, 0] of an H100, by which layers choose kernels (experts in one product); null: a
    device without any."""
    like: str | None = None
    """The shipped cluster whose device lends what is left out; by default one of its class, by the peak's dtypes."""
    memory_bytes: Size = Field(alias="memory")
    """Bytes of memory: 48e9, or 45G, which counts in 2^30. A data sheet's GB are 1e9 bytes."""
    reserved_bytes: Annotated[int, Field(ge=0)] = Field(default=0, alias="reserved")
    """Bytes that a process holds beyond its tensors, whatever its transport: its context on a GPU."""
    workspaces_bytes: Annotated[int, Field(ge=0)] = Field(default=0, alias="workspaces")
    """Bytes of libraries' workspaces, whatever the run."""
    staged_bytes: Annotated[int, Field(ge=0)] = Field(default=0, alias="staged")
    """Bytes more that a pipeline's rank holds on a CPU, where meta tensors run in Python to plan the stages."""
    unpredicted_share: Annotated[float, Field(ge=0)] = Field(default=0.1, alias="unseen")
    """The share that a process may hold beyond what is predicted, within which of `memory` a layout is tight."""
    peak_flops_per_second: dict[Multiplies, Rate] = Field(alias="peak")
    """Operations a second by dtype, dense: {bf16: 362e12, float32: 91.6e12}; tf32: float32 in tensor cores. A data
    sheet's number with sparsity is twice that."""
    efficiency: Shares
    """The share of the peak that a product of m x n x k gets, over the cube root of mnk; or one share."""
    low_efficiency: Shares | None = Field(default=None, alias="efficiency_low")
    """The shares of the peak that products in FP8 and MXFP8 reach, by side; null: as in half precision."""
    tf32_efficiency: Shares | None = Field(default=None, alias="efficiency_tf32")
    """The shares of the peak that products in TF32 reach, by side; null: as in half precision."""
    attention_efficiency: Shares | None = Field(default=None, alias="attention")
    """The same of torch's fused attention, over the cube root of queries x keys x width of a head, of a causal one half
    the products counted; null: it attends step by step."""
    attention_beside_bytes: Annotated[float, Field(ge=0)] = Field(default=0.0, alias="attention_beside")
    """Bytes an element of a query that kernels beside a backward pass touch, if shares are of main kernels alone."""
    float32_attention_efficiency: Shares | None = Field(default=None, alias="attention_float32")
    """The shares of float32's peak that torch's fused attention of float32 reaches; null: as in half precision."""
    attention_kernels: dict[AttentionKernel, Shares] = Field(default_factory=dict, alias="attentions")
    """The shares of the peak that attention kernels of other generations than torch's reach; without one: torch's."""
    norms: tuple[Share, Share] = (1.0, 1.0)
    """The shares of the memory's pace that torch's norms reach, forward and backward."""
    norm_row_seconds: _Seconds = Field(default=0.0, alias="norm_row")
    """Seconds of a row in the sums for the gradients of a torch norm's weights, of which a block of threads adds 32
    columns row by row; 0: these sums are in the backward share."""
    sums: Share = 1.0
    """The share of the memory's pace that sums of rows reach, as biases' gradients are."""
    bandwidth_bytes_per_second: Curve = Field(alias="bandwidth")
    """Bytes a second of memory: a data sheet's number, such as 864e9, or points (bytes that a kernel touches, bytes a
    second as measured)."""
    launch_seconds: _Seconds = Field(default=0.0, alias="launch")
    """Seconds before a kernel begins that has been issued."""
    product_launch_seconds: _Seconds | None = Field(default=None, alias="launch_product")
    """The same of a product, if its library launches more than one kernel; null: as of others."""
    issue_seconds: _Seconds = Field(default=0.0, alias="issue")
    """Seconds of the host to issue a kernel, from Python and op by op; 0 where the host is the device."""
    python_seconds_per_part: _Seconds = Field(default=0.0, alias="part")
    """The host's seconds for a pass through a layer or the head beyond the kernels: Python, autograd."""
    seconds_per_element: dict[PacedKind, _Seconds] = Field(default_factory=dict, alias="elements")
    """Seconds of an element: on top of its bytes in exponentials (special) and random numbers; at least, in kernels of
    several dtypes (mixed), and if their operands are repeated or not contiguous (strided)."""
    host_link_bytes_per_second: Rate = Field(alias="host_link")
    """Bytes a second between the device's memory and the host's, each way."""
    disk_bytes_per_second: Rate = Field(default=1e9, alias="disk")
    """Bytes a second to the disk, for memory.offload.to=disk."""

    def peak_of(self, dtype: str, *, tf32: bool) -> float | None:
        """The flops a second of products in a dtype; `tf32`: float32 ones may run in TF32 (precision.tf32)."""
        peak = self.peak_flops_per_second
        name = "tf32" if tf32 and dtype == "float32" and "tf32" in peak else dtype
        return next((rate for known, rate in peak.items() if known == name), None)


class Level(Section):
    """Links between units: devices at the innermost level, at the next ones what the level before has joined."""

    joins: Positive | None = None
    """How many units make one of the next level; null, on the last level: any number."""
    latency_seconds: _Seconds = Field(alias="latency")
    """Seconds of a message; without it 3e-6 at the innermost level, 8e-6 at others: a step of NCCL, an assumption."""
    bandwidth_bytes_per_second: Rate = Field(alias="bandwidth")
    """Bytes a second out of a unit, each way, as programs get them, shared by all its devices that send at once. 400
    Gb/s are 50e9; InfiniBand gives 0.92 of it."""
    device_bandwidth_bytes_per_second: Rate | None = Field(default=None, alias="device_bandwidth")
    """The most of it that one device gets (its own network card's); null: all."""
    kind: Literal["ring", "mesh", "switch"] = "switch"
    """ring: a unit's links lead to two neighbours, and all-to-all goes the long way; mesh: an equal part of them to
    each other unit, so that fewer units than `joins` have less; switch: any pair at full bandwidth."""

    def share(self, num_senders: int, num_units: int, num_devices: int) -> float:
        """Bytes a second out of a unit for one of so many senders at once: a group in so many units, with so many
        devices in each."""
        shared = self.bandwidth_bytes_per_second / num_senders
        if self.kind == "mesh" and self.joins is not None:
            # A group of two on four pairwise linked GPUs has only its own link of three; a ring would say too little
            # here, a switch too much.
            shared *= (num_units - 1) / (self.joins - 1)
        card = self.device_bandwidth_bytes_per_second
        return shared if card is None else min(shared, num_devices * card)


class Measured(Section):
    """A verb among neighbours, as `meshwright calibrate` has timed it."""

    verb: Verb
    """The collective, or the message."""
    ranks: Annotated[int, Field(ge=2)]
    """Among how many neighbours."""
    points: Curve
    """Points (bytes of the whole payload, seconds)."""


class Links(Section):
    """The links of a transport."""

    levels: Annotated[tuple[Level, ...], Field(min_length=1)]
    """Innermost first."""
    measured: tuple[Measured, ...] = ()
    """Where there is any of a verb, it is taken for what it was timed with; the rest goes by the levels."""
    overlaps: Annotated[float, Field(ge=0, le=1)] = 1.0
    """The part of a collective that goes on while its rank computes."""
    tax: Annotated[float, Field(ge=0)] = 0.0
    """The share by which kernels take longer while a collective goes on, which takes multiprocessors and bandwidth."""
    channels: Annotated[int, Field(ge=0)] = 0
    """Channels of a communicator of NCCL, each of which has buffers (process.py); 0: it needs none."""
    reserved_bytes: Annotated[int, Field(ge=0)] | None = Field(default=None, alias="reserved")
    """Bytes that a process on a CPU holds beyond its tensors when it has made a step over this transport: interpreter,
    libraries, and what a step is the first to load; null: the device's."""

    @field_validator("levels")
    @classmethod
    def nested(cls, levels: tuple[Level, ...]) -> tuple[Level, ...]:
        if any(level.joins is None for level in levels[:-1]):
            raise ValueError("has a level before the last that does not say how many units it joins")
        if any(level.kind == "mesh" and (level.joins or 1) < 2 for level in levels):
            raise ValueError("has a mesh that does not say how many units it joins")
        return levels


class KnownError(Section):
    """How far predictions were from measured rows of such a cluster."""

    rows: Positive
    """How many rows."""
    error: Rate
    """The mean error in seconds, as a share."""
    of: str
    """Whose rows."""
    hidden: tuple[Positive, Positive]
    """The least and the greatest width of their models."""
    fitted: bool = False
    """Whether a figure of the cluster was chosen by these very rows."""


class Cluster(Section):
    """A cluster file: a node's devices, and the links of each transport."""

    name: str
    """The cluster's name; without it the file's."""
    source: str = ""
    """The source of the figures."""
    checked: KnownError | None = None
    """How far predictions were from what was measured; null: nobody has compared them."""
    device: Device
    """The device of a rank."""
    devices_per_node: Positive
    """Devices of a node."""
    host_memory_bytes: Size | None = Field(default=None, alias="host_memory")
    """Bytes of a node's host memory beside its GPUs, which its ranks share; null: no layout is refused for it."""
    cores: Positive | None = None
    """How many ranks of a node compute at once; more take turns. null: each rank has a device of its own."""
    turns: Curve | None = None
    """Points (ranks of a node, how many times as long the work of each takes as that of a lone rank), where ranks share
    cores and meet every few milliseconds; null: as if cores were dealt out without loss."""
    links: dict[TransportName, Links]
    """By transport: torch, which can carry every run, and mpi."""

    @property
    def domain_devices(self) -> int:
        """Devices that reach each other as fast as those of a node: its own, or all of a larger NVLink domain."""
        levels, units = self.links["torch"].levels, 1
        inside = levels[0].bandwidth_bytes_per_second
        for level in levels[:-1]:
            each = level.device_bandwidth_bytes_per_second or level.bandwidth_bytes_per_second / units
            if each < inside or level.joins is None:
                break
            units *= level.joins
        return max(self.devices_per_node, units)

    def oversubscription(self, ranks_per_node: int) -> float:
        """The slowdown of a rank where ranks share cores: no less than the number of ranks to a core."""
        if self.cores is None:
            return 1.0
        shared = max(1.0, ranks_per_node / self.cores)
        # Ranks that share cores and meet often lose more than their share: 2.3 in place of 2 was measured.
        if self.turns is None or ranks_per_node < 2:
            return shared
        # A rank alone has a core of its own, also where nobody measured one.
        lone = () if self.turns[0][0] <= 1 else ((1.0, 1.0),)
        # More ranks than were measured take turns in proportion.
        beyond = max(1.0, ranks_per_node / self.turns[-1][0])
        return max(shared, beyond * interpolated((*lone, *self.turns), ranks_per_node))

    @field_validator("links")
    @classmethod
    def some_link(cls, links: dict[TransportName, Links]) -> dict[TransportName, Links]:
        if "torch" not in links:
            raise ValueError("has no torch, which can carry every run")
        return links


def load_cluster(name: str) -> Cluster:
    """A cluster that comes with the package by its name, or from a file.

    Raises ConfigError with all mistakes at once, or with the names where there is no such cluster.
    """
    # A name never reads a file of the folder that one happens to be in.
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
    """y at x, over log x: on a line between points, beyond them the first's or the last's y. `power`: for what is a
    power of x, as seconds are of bytes: on a line over both logarithms, beyond the last in proportion to x."""
    after = bisect_left(points, x, key=lambda point: point[0])
    if after == 0:
        return points[0][1]
    x0, y0 = points[after - 1]
    if after == len(points):
        return y0 * x / x0 if power else y0
    x1, y1 = points[after]
    rise = (log(y1 / y0) if power else y1 - y0) * log(x / x0) / log(x1 / x0)
    return y0 * exp(rise) if power else y0 + rise
