"""What a data-parallel strategy does with a stage's gradients: its buckets, and the programs that sum and publish them.

The programs are the policies' own (data_parallel/), run on buckets without numbers.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

import torch

from meshwright.build import bucket_bytes
from meshwright.config import Config
from meshwright.data_parallel.strategy import Policy
from meshwright.errors import ConfigError
from meshwright.model import Batch
from meshwright.models.chain import chain_of
from meshwright.parameters.bucket import Bucket, Kind, arranged, gradient_dtype
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from meshwright.ranks.planned import planned_mesh
from meshwright.registry import entries, load
from meshwright.tools.plan.program import Program
from meshwright.tools.plan.recorder import Recorder
from meshwright.tools.plan.recordings import Parameter


@dataclass(frozen=True)
class PlannedBucket:
    """`names`: of its parameters; `num_elements`: with its padding; `stepped_elements`: those that this rank's
    optimizer steps; `blocks`: it is summed behind the backward pass; `summed_in`: its gradients' type."""

    kind: Kind
    summed_in: torch.dtype
    names: tuple[str, ...]
    num_elements: int
    stepped_elements: int
    blocks: bool
    reduce: Program
    publish: Program

    @property
    def size_bytes(self) -> int:
        return self.num_elements * self.kind.dtype.itemsize

    @property
    def gradient_bytes(self) -> int:
        return self.num_elements * self.summed_in.itemsize


@dataclass
class Buckets:
    """Plans buckets, and remembers the programs of those that are alike."""

    _programs: dict[Hashable, tuple[int, Program, Program]] = field(default_factory=dict)

    def of(self, config: Config, rank: int, parameters: Sequence[Parameter], tied: set[str]) -> list[PlannedBucket]:
        """A rank's, in the order in which they leave. `tied`: parameters that another stage holds too.

        Raises ConfigError for strategies that are more than sums of buckets.
        """
        sync, unplanned = config.layout.data.sync, config.layout.data.strategy.unplanned
        if unplanned:
            planned = ", ".join(name for name, entry in entries("syncs").items() if not entry.unplanned)
            raise ConfigError.of("layout.data.sync", sync, f"is not planned: it {unplanned}", planned)
        recorder = Recorder()
        mesh = planned_mesh(Grid(config.layout.axes), rank, config.layout.token_axes, "cpu", recorder.started)
        specs = {
            parameter.name: replace(parameter.spec, tied=True) if parameter.name in tied else parameter.spec
            for parameter in parameters
        }
        sizes = {parameter.name: parameter.num_elements for parameter in parameters}
        items = [(parameter.name, parameter.num_elements, parameter.dtype) for parameter in parameters]
        policy = load(config.layout.data.strategy.policy)()
        buckets = []
        for kind, names in arranged(items, specs, mesh, bucket_bytes(config)):
            num_elements = kind.padded(sum(sizes[name] for name in names), mesh)
            index = mesh.comm(*kind.sum_axes).index  # a root does more than the others
            summed_in = gradient_dtype(kind.dtype, config.widens_gradients)
            key = sync, kind.dtype, summed_in, kind.sum_axes, index, num_elements, config.layout.axes
            if key not in self._programs:
                self._programs[key] = _programs(policy, kind, summed_in, num_elements, mesh, recorder)
            stepped, *programs = self._programs[key]
            buckets.append(
                PlannedBucket(kind, summed_in, tuple(names), num_elements, stepped, policy.blocks, *programs)
            )
        return buckets


def share_program(config: Config) -> Program:
    """How rank 0 gets its part of a step's batch: from itself, or where it is the server, which scatters it."""
    recorder = Recorder()
    mesh = planned_mesh(Grid(config.layout.axes), 0, config.layout.token_axes, "cpu", recorder.started)
    sync = config.layout.data.strategy
    shapes = chain_of(config).sample_shapes(config)

    def load_rows(first: int, count: int) -> Batch:
        return {name: torch.empty(count, *shape, dtype=torch.long, device="meta") for name, shape in shapes.items()}

    with recorder.program(mesh.ledger) as made:
        load(sync.synchroniser)([], mesh, load(sync.policy)()).share(load_rows, config.replica_batch)
    return made()


def _programs(
    policy: Policy, kind: Kind, summed_in: torch.dtype, num_elements: int, mesh: Mesh, recorder: Recorder
) -> tuple[int, Program, Program]:
    """How many elements this rank steps, and what it does to sum and to publish."""
    values = torch.empty(num_elements, dtype=kind.dtype, device=mesh.device)
    gradients = torch.empty_like(values, dtype=summed_in)
    bucket = Bucket(values, gradients, (), (), kind.matrix, kind.sum_axes, kind.cut_axes)
    comm = mesh.comm(*kind.sum_axes)
    start, stop = policy.owned(bucket, comm)
    with recorder.program(mesh.ledger) as made:
        policy.reduce(bucket, comm).wait()
    reduce = made()
    with recorder.program(mesh.ledger) as made:
        policy.publish(bucket, comm).wait()
    return stop - start, reduce, made()
