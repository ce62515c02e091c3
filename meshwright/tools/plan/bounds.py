"""What a step takes at least under a layout, known before anything of it is recorded.

W: seconds that a microbatch takes all stages together, if every product ran at the best that the device reaches and
nothing were sent. With w_s the share of stage s of p in W, and f the part of it for which the next stage waits or which
waits for the next (all of it; where weight gradients fill waits, the forward pass's third), a step of m microbatches
takes T >= m w_s + f (w_0 + ... + w_(s-1)) for each s. The shares that make the greatest of these least make them all
equal, and add up to W where

    T = f W / (1 - (1 - f/m)^p)
"""

from __future__ import annotations

from meshwright.config import Config
from meshwright.families import family_of
from meshwright.tools.plan.cluster import Cluster
from meshwright.tools.plan.recordings import splits


def least_seconds(config: Config, cluster: Cluster) -> float:
    """Of a step, by its products (families.py) and its pipeline."""
    device, layout = cluster.device, config.layout
    reached = max(device.attention or 0.0, *(efficiency for _, efficiency in device.efficiency))
    rate = reached * device.peak.get(config.precision.dtype, max(device.peak.values()))
    ranks = layout.world_size // (layout.data.size * layout.pipeline.size)
    work = family_of(config).flops_per_sample(config) * config.micro / rate / ranks
    waits = 1 / 3 if splits(config) else 1.0
    return waits * work / (1 - (1 - waits / config.num_microbatches) ** layout.pipeline.size)
