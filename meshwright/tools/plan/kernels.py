"""Seconds of a kernel on a device: a roofline over what such kernels reach (Williams et al., CACM 2009).

| kind      | seconds                                                                               |
|-----------|---------------------------------------------------------------------------------------|
| product   | max(flops / (peak of its dtype x efficiency at its side), bytes / bandwidth) + launch |
| attention | max(flops / (peak of its dtype x attention's part), bytes / bandwidth) + launch       |
| others    | bytes / bandwidth + elements x seconds of such an element + launch                    |

Efficiency and bandwidth are the device's curves: over the cube root of mnk, and over the bytes that a kernel touches.
"""

from __future__ import annotations

from meshwright.errors import ConfigError
from meshwright.tools.plan.cluster import Cluster, interpolated
from meshwright.tools.plan.program import Kernel


class Kernels:
    """Kernels of a rank while `ranks_per_node` ranks compute on its node. `turns`: how many times as long everything
    takes as on a core of one's own: with more ranks than the node has cores, they take turns.
    """

    def __init__(self, cluster: Cluster, ranks_per_node: int) -> None:
        self._cluster = cluster
        self._seconds: dict[Kernel, float] = {}
        self.ranks_per_node = ranks_per_node
        self.turns = turns(cluster, ranks_per_node)

    def gain(self, ranks: int) -> float:
        """How much faster they go while only so many of the node's ranks compute: the others leave them their cores."""
        return self.turns / turns(self._cluster, ranks)

    def seconds(self, kernel: Kernel) -> float:
        """Of one of its `times`. Raises ConfigError where nobody knows the device's peak in the kernel's dtype."""
        known = self._seconds.get(kernel)
        if known is None:
            known = self._seconds[kernel] = self.turns * (self._cluster.device.launch + self._work(kernel))
        return known

    def _work(self, kernel: Kernel) -> float:
        device = self._cluster.device
        memory = kernel.touched_bytes / interpolated(device.bandwidth, kernel.touched_bytes)
        match kernel.kind:
            case "product":
                return max(kernel.flops / (self._peak(kernel) * interpolated(device.efficiency, kernel.side)), memory)
            case "attention":
                assert device.attention is not None, f"{self._cluster.name} has no fused attention: {kernel}"
                return max(kernel.flops / (self._peak(kernel) * device.attention), memory)
            case "special" | "random":
                return memory + kernel.elements * device.elements.get(kernel.kind, 0.0)
            case "element":
                return memory

    def _peak(self, kernel: Kernel) -> float:
        for dtype, peak in self._cluster.device.peak.items():
            if dtype == kernel.dtype:
                return peak
        rule = f"is no dtype of which {self._cluster.name} says how fast it multiplies (device.peak)"
        raise ConfigError.of("precision.dtype", kernel.dtype, rule, ", ".join(self._cluster.device.peak))


def turns(cluster: Cluster, ranks_per_node: int) -> float:
    """How many times as long as a lone rank one takes, where ranks share cores: no less than their share of these."""
    if cluster.cores is None:
        return 1.0
    dealt = max(1.0, ranks_per_node / cluster.cores)
    if cluster.turns is None or ranks_per_node < 2:
        return dealt
    lone = () if cluster.turns[0][0] <= 1 else ((1.0, 1.0),)
    beyond = max(1.0, ranks_per_node / cluster.turns[-1][0])
    return max(dealt, beyond * interpolated((*lone, *cluster.turns), ranks_per_node))
