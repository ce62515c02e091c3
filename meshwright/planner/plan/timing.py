"""Seconds of kernels and programs on a device.

A kernel: a roofline of measured rates (Williams et al., CACM 2009).

| kind      | seconds                                                                               |
|-----------|---------------------------------------------------------------------------------------|
| product   | max(flops / (peak of its dtype x efficiency at its side), bytes / bandwidth) + launch |
|           | on a CPU the sum of both: a core does not load and multiply at once                   |
| attention | max(flops / (peak of its dtype x attention's part at its side), bytes / bandwidth) +  |
|           | launch                                                                                |
| norms     | bytes / (bandwidth x norms' part) + launch; backward also the sums for weights'       |
|           | gradients: the longer of their bytes and of rows x Device.norm_row                    |
| special,  | bytes / bandwidth + elements x seconds of such an element + launch                    |
| random    |                                                                                       |
| mixed,    | max(bytes / bandwidth, elements x seconds of such an element) + launch                |
| strided   |                                                                                       |
| sum       | bytes / (bandwidth x sums' part) + launch                                             |
| others    | bytes / bandwidth + launch                                                            |

Efficiency and bandwidth are the device's curves: over the cube root of mnk, and over the bytes that a kernel touches.
On a GPU a batch of b products reaches the rate of one product with b times the mnk. On an H100 4 products of 1024 x
1024 x 2048 reach 626 Tflop/s, one of 2048 x 2048 x 2048 reaches 632, and one of 1024 x 1024 x 2048 alone 350
(github.com/openxla/xla, xla/service/gpu/model/matmul_interpolator_data.h, sm_90, bf16).

A program runs its kernels one after the other, with collectives in parallel as far as the links allow. A rank has three
lanes. The host issues kernels and collectives, each for `Device.issue`. The device runs a kernel once the kernel is
issued and the one before is done. Collectives run one after the other. Hence small kernels take the host's time, large
kernels the device's. A collective with an immediate wait takes its whole time. Of a collective that begins
earlier, the share `Links.overlaps` runs during kernels, which meanwhile take 1 + `Links.tax` times as long. Copies
between device and host are a fourth lane, over `Device.host_link`. On a CPU the host is the device: nothing is issued,
`launch` is part of a kernel, and `Device.part` is the time of Python and autograd for a pass through a part of the
chain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import reduce
from typing import NamedTuple, get_args

from meshwright.compute.tensor.fp8 import CAPABILITY
from meshwright.planner.plan.cluster import AttentionKernel, Cluster, interpolated
from meshwright.planner.plan.recorder import SOFTMAXES, HostCopy, Kernel, LowProducts, Program, Start, WaitFor
from meshwright.planner.plan.remembered import remembered
from meshwright.ranks.errors import ConfigError
from meshwright.ranks.ledger import VERBS

LOW = get_args(LowProducts)
HALVES = ("bf16", "fp16")

SHARED_COLUMNS = 12288
"""Columns of float32 in a block's shared memory; a softmax reads longer rows for the maximum, for the sum and
for the shares (torch, aten/src/ATen/native/cuda/SoftMax.cu)."""

Collective = Callable[[str, str, int], float]
"""collective(axes, verb, payload_bytes): seconds of a collective (ClusterNetwork.collective)."""


class Kernels(NamedTuple):
    """Consecutive kernels."""

    device: float = 0.0
    """Seconds of a device that never waits."""
    host: float = 0.0
    """Seconds of the host that issues the kernels."""
    both: float = 0.0
    """Seconds until the last kernel is done, on an idle device."""

    def then(self, later: Kernels) -> Kernels:
        return Kernels(
            self.device + later.device,
            self.host + later.host,
            # Max-plus: either the device is busy when the first row ends, or the device waited for the host in the
            # second row.
            max(self.both + later.device, self.host + later.both),
        )


Step = Kernels | Start | HostCopy | WaitFor
"""Kernels, the start of a collective or copy, or a wait."""


class Timer:
    """Times a rank's kernels and programs while `ranks_per_node` ranks compute on its node.

    Args:
        cluster: The cluster with the device.
        ranks_per_node: Ranks that compute on the node. `slowdown` is the factor over a rank with a core of its own
            (Cluster.oversubscription).
        tf32: precision.tf32.
        devices_per_host: Devices that one host process issues kernels for in turn.
        attention: The generation of a fused attention.
    """

    def __init__(
        self, cluster: Cluster, ranks_per_node: int, *, tf32: bool = False, devices_per_host: int = 1,
        attention: AttentionKernel | None = None,
    ) -> None:  # fmt: skip
        self._cluster, self._attention = cluster, attention
        self._issue = devices_per_host * cluster.device.issue_seconds
        self._tf32 = tf32
        self._steps: dict[int, tuple[Program, tuple[Step, ...]]] = {}
        self.ranks_per_node = ranks_per_node
        self.slowdown = cluster.oversubscription(ranks_per_node)
        self.part = self.slowdown * cluster.device.python_seconds_per_part
        """Seconds that a pass through a part of the chain takes beyond its program (Device.part)."""

    def gain(self, ranks: int) -> float:
        """Return the speed-up while only `ranks` of the node's ranks compute: the others leave their cores idle."""
        return self.slowdown / self._cluster.oversubscription(ranks)

    @remembered()
    def kernel_seconds(self, kernel: Kernel) -> float:
        """Return the seconds of one kernel of `times`. Raises ConfigError if the device has no peak for the dtype."""
        device = self._cluster.device
        launch = device.launch_seconds
        memory = kernel.touched_bytes / interpolated(device.bandwidth_bytes_per_second, kernel.touched_bytes)
        match kernel.kind:
            case "product":
                # On a GPU the tiles of all members of a batch run together; a core multiplies one member after the
                # other.
                side = kernel.side * (kernel.members ** (1 / 3) if device.kind == "cuda" else 1)
                launch = launch if device.product_launch_seconds is None else device.product_launch_seconds
                shares = device.efficiency
                if kernel.dtype in LOW:
                    shares = device.low_efficiency or shares
                elif kernel.dtype == "float32" and self._tf32:
                    shares = device.tf32_efficiency or shares
                peak = self._peak(kernel, tf32=self._tf32)
                products = kernel.flops / (peak * interpolated(shares, side))
                # A GPU loads the next tiles during the product; a core does either.
                work = products + memory if device.kind == "cpu" else max(products, memory)
            case "attention":
                efficiency = self._attention and device.attention_kernels.get(self._attention)
                if kernel.dtype == "float32":
                    efficiency = device.float32_attention_efficiency or efficiency
                attention = efficiency or device.attention_efficiency
                assert attention is not None, f"{self._cluster.name} has no fused attention: {kernel}"
                # A fused attention of float32 does not use TF32.
                peak = self._peak(kernel, tf32=False)
                work = max(kernel.flops / (peak * interpolated(attention, kernel.side)), memory)
                touched = device.attention_beside_bytes * kernel.elements
                if touched and kernel.dtype in HALVES and kernel.operation.endswith("_backward"):
                    work += touched / interpolated(device.bandwidth_bytes_per_second, touched)
            case "norm" | "norm back":
                work = memory / device.norms[kernel.kind == "norm back"]
                if kernel.kind == "norm back" and device.norm_row_seconds:
                    # Another kernel reads two of the three tensors again.
                    work += max(memory * 2 / 3, kernel.elements / kernel.side * device.norm_row_seconds)
            case "special" | "random":
                rereads = device.kind == "cuda" and kernel.operation in SOFTMAXES and kernel.side > SHARED_COLUMNS
                work = (1 + rereads) * memory + kernel.elements * device.seconds_per_element.get(kernel.kind, 0.0)
            case "mixed" | "strided":
                work = max(memory, kernel.elements * device.seconds_per_element.get(kernel.kind, 0.0))
            case "sum":
                work = memory / device.sums
            case "element" | "cast":
                work = memory
        return self.slowdown * (launch + work)

    def _peak(self, kernel: Kernel, *, tf32: bool) -> float:
        peak = self._cluster.device.peak_of(kernel.dtype, tf32=tf32)
        if peak is not None:
            return peak
        rule = f"is no dtype of which {self._cluster.name} says how fast it multiplies (device.peak)"
        if kernel.dtype in LOW:
            rule += f"; GPUs have such products from compute capability {'.'.join(map(str, CAPABILITY))} on"
            raise ConfigError.of("precision.products", kernel.dtype, rule, "stored")
        raise ConfigError.of(
            "precision.dtype", kernel.dtype, rule, ", ".join(self._cluster.device.peak_flops_per_second)
        )

    def seconds(self, program: Program, collective: Collective, overlaps: float, tax: float = 0.0) -> float:
        """Return the seconds from a program's beginning to its last kernel or wait. `overlaps`: the share of a
        collective that runs during kernels; `tax`: the share by which kernels take longer meanwhile."""
        return play(
            self._condensed(program),
            lambda start: start.times * collective(start.axes, start.verb, start.payload_bytes),
            overlaps,
            self.gain(self.ranks_per_node // program.leads) if program.leads > 1 else 1.0,
            self._issue,
            self._cluster.device.host_link_bytes_per_second,
            tax,
        )

    def computing(self, program: Program) -> float:
        """Return the seconds of a program's kernels alone."""
        every = reduce(Kernels.then, (step for step in self._condensed(program) if isinstance(step, Kernels)))
        return max(every.device, every.both)

    def _condensed(self, program: Program) -> tuple[Step, ...]:
        if id(program) not in self._steps:
            # Consecutive kernels become one step, once a program: a search plays a program many times.
            steps: list[Step] = []
            row = Kernels()
            for event in program.events:
                if isinstance(event, Kernel):
                    device, issue = self.kernel_seconds(event), self._issue
                    # The slower lane sets the pace of equal kernels: the device, or the host that issues them.
                    both = issue + device + (event.times - 1) * max(issue, device)
                    row = row.then(Kernels(event.times * device, event.times * issue, both))
                else:
                    steps += [row, event]
                    row = Kernels()
            self._steps[id(program)] = program, (*steps, row)  # the program is referenced, so its id is not reused
        return self._steps[id(program)][1]


def slowed(hidden: float, tax: float) -> float:
    """Return the seconds that kernels end later if collectives run for `hidden` seconds during them."""
    return hidden * tax / (1 + tax)


def play(
    steps: Iterable[Step],
    collective: Callable[[Start], float],
    overlaps: float,
    alone: float = 1.0,
    issue: float = 0.0,
    host_link: float = 1.0,
    tax: float = 0.0,
) -> float:
    """Return the moment at which the rank is done with all steps, from 0.

    Args:
        steps: The steps of a program.
        collective: Seconds of a collective.
        overlaps: The share of a collective that runs during kernels.
        alone: The rank's speed-up while the ranks that it leads wait (Program.leads).
        issue: The host's seconds for a collective.
        host_link: Bytes a second of copies between device and host.
        tax: As in Timer.seconds.
    """
    now, free, pace, host = 0.0, 0.0, alone, 0.0
    copied = 0.0
    under_way: dict[int, tuple[float, float, str | None]] = {}
    for step in steps:
        if isinstance(step, Kernels):
            device = step.device / pace
            device += slowed(min(max(0.0, free - now), (1 + tax) * device), tax)
            now = max(now + device, host + step.both) if step.host else now + device
            host += step.host
        elif isinstance(step, Start):
            seconds, host = collective(step), host + issue * step.times
            # Collectives run one after the other. The share that overlaps runs during kernels, the rest at the wait.
            free = max(now, free, host) + overlaps * seconds
            under_way[step.number] = free, (1 - overlaps) * seconds, step.verb
            # After a root's scatter the root's ranks compute again (cSub), so the root shares their cores.
            pace = 1.0 if VERBS[step.verb].direction == "from root" else pace
        elif isinstance(step, HostCopy):
            copied = max(now, copied) + step.times * step.payload_bytes / host_link
            under_way[step.number] = copied, 0.0, None
        else:
            hidden, rest, verb = under_way.pop(step.number)
            now = max(now, hidden) + rest
            free = max(free, now if rest else free)
            pace = alone if verb and VERBS[verb].direction == "to root" else pace
    return now
