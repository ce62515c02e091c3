"""What the one mpiexec of each world size runs, for whichever test asks first."""

from __future__ import annotations

from tests.mpi_workers import Case

SIZES = (2, 3, 4)
SYNCS = ("server-loss", "server-gradient", "rooted", "allreduce", "ring", "zero1")
"""Every sync but fsdp, which runs inside torch.distributed."""


def cases(num_ranks: int) -> list[Case]:
    """All cases of a world size."""
    data = (("data", num_ranks),)
    listed = [Case("verbs", "tests.comm_cases:run_verbs", (), data)]
    if num_ranks == 4:
        listed.append(Case("subgroups", "tests.comm_cases:run_subgroups", (), (("outer", 2), ("inner", 2))))
    for sync in SYNCS:
        listed.append(Case(sync, "tests.data_parallel.test_equality_mpi:train_for_files", (sync, num_ranks), data))
    return listed
