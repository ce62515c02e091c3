"""The variables of each launcher, with values of real launchers, are read into one form."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.ranks.environment import (
    Environment,
    Rendezvous,
    cache_folder,
    early_errors_folder,
    enter_local_rank,
    first_host,
    import_variables,
    mpi_worker_variables,
    read_environment,
    rendezvous,
    restore_python_path,
    server_variables,
)
from meshwright.ranks.errors import LaunchError

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "MASTER_ADDR": "host0",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "6",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "node[07-09,12]",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-7@1",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}


@pytest.mark.parametrize(
    "variables, expected",
    [
        ({}, Environment(0, 1, 0, 1, 0, "none")),
        (TORCHRUN, Environment(5, 8, 1, 4, 2, "torchrun")),
        (SLURM, Environment(6, 7, 0, 1, 0, "slurm")),
        (OPEN_MPI, Environment(1, 2, 1, 2, 0, "mpi")),
        ({**OPEN_MPI, "MESHWRIGHT_ATTEMPT": "3"}, Environment(1, 2, 1, 2, 3, "mpi")),
        (MPICH, Environment(1, 2, 0, 1, 0, "mpi")),
        # mpirun and MPICH's mpiexec inside a Slurm step: the step's numbers describe the MPI daemons
        ({**SLURM, **OPEN_MPI}, Environment(1, 2, 1, 2, 0, "mpi")),
        ({**SLURM, **MPICH}, Environment(1, 2, 0, 1, 0, "mpi")),
        # srun --mpi=pmi2 sets PMI_RANK but not the local rank
        ({**SLURM, "PMI_RANK": "6", "PMI_SIZE": "7"}, Environment(6, 7, 0, 1, 0, "slurm")),
        # an interactive shell or a batch script: no launcher has started several ranks
        ({**SLURM, "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, Environment(0, 1, 0, 1, 0, "none")),
        ({**SLURM, "SLURM_STEP_ID": "4294967291"}, Environment(0, 1, 0, 1, 0, "none")),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, Environment(0, 1, 0, 1, 0, "none")),
    ],
)
def test_each_launcher(variables: dict[str, str], expected: Environment) -> None:
    assert read_environment(variables) == expected


def without(variables: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in names}


PAIR = {"RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    "variables, expected",
    [
        # one rank a node: no variable says that this node has more ranks
        (PAIR, (2, 4, 0, 1)),
        ({**PAIR, "LOCAL_WORLD_SIZE": "1"}, (2, 4, 0, 1)),
        ({**PAIR, "GROUP_RANK": "2", "GROUP_WORLD_SIZE": "4"}, (2, 4, 0, 1)),
        ({**PAIR, "LOCAL_RANK": "0", "GROUP_WORLD_SIZE": "4"}, (2, 4, 0, 1)),
        (without(PAIR, "MASTER_ADDR"), (2, 4, 0, 1)),
        # all ranks are here
        ({**PAIR, "MASTER_ADDR": "localhost"}, (2, 4, 2, 4)),
        ({**PAIR, "MASTER_ADDR": "127.0.0.1"}, (2, 4, 2, 4)),
        ({**PAIR, "MASTER_ADDR": "::1", "LOCAL_RANK": "2"}, (2, 4, 2, 4)),
        ({**PAIR, "LOCAL_WORLD_SIZE": "4"}, (2, 4, 2, 4)),
        ({**PAIR, "GROUP_WORLD_SIZE": "1"}, (2, 4, 2, 4)),
        # alone
        ({"WORLD_SIZE": "1"}, (0, 1, 0, 1)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, (0, 1, 0, 1)),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, (0, 1, 0, 1)),
        # a script exports the names that torch reads; srun or mpirun sets the remaining variables
        ({**SLURM, "RANK": "6", "WORLD_SIZE": "7"}, (6, 7, 0, 1)),
        ({**SLURM, "WORLD_SIZE": "7"}, (6, 7, 0, 1)),
        ({**SLURM, "RANK": "6"}, (6, 7, 0, 1)),
        ({**SLURM, "LOCAL_RANK": "0"}, (6, 7, 0, 1)),
        ({**OPEN_MPI, "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node0"}, (1, 2, 1, 2)),
        ({**OPEN_MPI, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, (1, 2, 1, 2)),
        # Slurm's own variables that follow from others
        (without(SLURM, "SLURM_LOCALID"), (6, 7, 0, 1)),
        ({**without(SLURM, "SLURM_STEP_TASKS_PER_NODE"), "SLURM_STEP_NUM_NODES": "7"}, (6, 7, 0, 1)),
        (
            {**without(SLURM, "SLURM_STEP_TASKS_PER_NODE", "SLURM_LOCALID"), "SLURM_STEP_NUM_NODES": "1"},
            (6, 7, 6, 7),
        ),
        # MPI's
        (without(OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK"), (1, 2, 1, 2)),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, (0, 1, 0, 1)),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, (0, 1, 0, 1)),
        # names that shells and batch scripts export
        ({"MASTER_ADDR": "node0", "MASTER_PORT": "29500"}, (0, 1, 0, 1)),
        ({"GROUP_RANK": "1"}, (0, 1, 0, 1)),
    ],
)
def test_a_missing_variable_is_derived_where_one_value_is_possible(
    variables: dict[str, str], expected: tuple[int, int, int, int]
) -> None:
    place = read_environment(variables, terminal=False)
    assert (place.rank, place.world_size, place.local_rank, place.local_world_size) == expected


def test_the_shell_of_a_pty_is_alone_and_what_it_starts_is_not() -> None:
    shell = {**SLURM, "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_PTY_PORT": "40001"}
    assert read_environment(shell, terminal=True) == Environment(0, 1, 0, 1, 0, "none")
    assert read_environment(shell, terminal=False).world_size == 7
    assert read_environment(SLURM, terminal=True).world_size == 7


@pytest.mark.parametrize("port", ["0", "65536", "x", "-1"])
def test_a_port_that_is_none_is_named(port: str) -> None:
    with pytest.raises(LaunchError, match=f"MASTER_PORT={port} is no"):
        rendezvous({**TORCHRUN, "MASTER_PORT": port})


def test_a_lone_rank_of_a_launcher_needs_no_port() -> None:
    assert rendezvous({"RANK": "0", "WORLD_SIZE": "1"}) == Rendezvous("127.0.0.1", 0, hosted=False)


def test_slurm_falls_back_on_the_requested_tasks_per_node() -> None:
    variables = {k: v for k, v in SLURM.items() if k != "SLURM_STEP_TASKS_PER_NODE"}
    assert read_environment({**variables, "SLURM_NTASKS_PER_NODE": "2"}).local_world_size == 2


@pytest.mark.parametrize(
    "variables, message",
    [
        ({**TORCHRUN, "RANK": "x"}, "RANK=x is not a count"),
        ({**TORCHRUN, "RANK": "8"}, "rank 8 of 8 ranks"),
        ({**TORCHRUN, "WORLD_SIZE": "-8"}, "WORLD_SIZE=-8 is not a count"),
        ({**TORCHRUN, "LOCAL_RANK": "1.0"}, r"LOCAL_RANK=1\.0 is not a count"),
        ({**TORCHRUN, "RANK": ""}, "RANK= is not a count"),
        ({**TORCHRUN, "RANK": "\u0663"}, "is not a count"),
        ({**TORCHRUN, "RANK": "9"}, r"rank 9 of 8 ranks \(RANK, WORLD_SIZE\): set RANK to 0 to 7"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE=0 is no number of ranks"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0 is no number of ranks"),
        (
            {**TORCHRUN, "LOCAL_RANK": "7", "LOCAL_WORLD_SIZE": "2"},
            r"LOCAL_RANK=7 is no rank of this host's 2 \(LOCAL_WORLD_SIZE\): set LOCAL_RANK to 0 to 1, or ",
        ),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, "LOCAL_RANK=4 is no rank of this host's 4"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "0"}, "LOCAL_RANK=1 is no rank of this host's 0"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE=9 is more than all ranks, WORLD_SIZE=8"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "2"}, "OMPI_COMM_WORLD_LOCAL_RANK=2 is no rank of this host's 2"),
        ({**MPICH, "MPI_LOCALRANKID": "1"}, "MPI_LOCALRANKID=1 is no rank of this host's 1"),
        ({**SLURM, "SLURM_LOCALID": "1"}, "SLURM_LOCALID=1 is no rank of this host's 1"),
        (
            {"WORLD_SIZE": "4"},
            "WORLD_SIZE=4 is set, and RANK is not: set RANK to each process's number, 0 to 3, or unset",
        ),
        ({"WORLD_SIZE": "4", "LOCAL_RANK": "0"}, "WORLD_SIZE=4 is set, and RANK is not"),
        ({"RANK": "0"}, "RANK=0 is set, and WORLD_SIZE is not"),
        ({"RANK": "3", "WORLD_SIZE": "1"}, "rank 3 of 1 ranks"),
        ({"LOCAL_RANK": "0"}, "LOCAL_RANK=0 is set, and RANK and WORLD_SIZE are not"),
        ({"LOCAL_WORLD_SIZE": "2"}, "LOCAL_WORLD_SIZE=2 is set, and RANK and WORLD_SIZE are not"),
        (
            {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"},
            "LOCAL_RANK is not set, and LOCAL_WORLD_SIZE=2: set LOCAL_RANK to the process's number on its host, 0 to 1",
        ),
        ({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, "LOCAL_RANK=1 is set, and LOCAL_WORLD_SIZE is not"),
        (
            {"RANK": "1", "WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2"},
            "GROUP_WORLD_SIZE=2 is set, and LOCAL_WORLD_SIZE is",
        ),
        ({**SLURM, "WORLD_SIZE": "8"}, "WORLD_SIZE=8, and slurm says 7 for this process: unset WORLD_SIZE"),
        ({**OPEN_MPI, "RANK": "0"}, "RANK=0, and mpi says 1 for this process: unset RANK"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "MPI_LOCALRANKID is not set"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "two"}, "is not of the form"),
        ({**SLURM, "SLURM_NODEID": "4"}, "has 4 nodes"),
    ],
)
def test_broken_variables_are_named(variables: dict[str, str], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        read_environment(variables)


def test_rendezvous_given() -> None:
    assert rendezvous(TORCHRUN) == Rendezvous("host0", 29500, hosted=True)
    assert rendezvous({**OPEN_MPI, "MASTER_ADDR": "h", "MASTER_PORT": "1"}) == Rendezvous("h", 1, hosted=False)
    assert rendezvous({}) == Rendezvous("127.0.0.1", 0, hosted=False)


def test_rendezvous_derived() -> None:
    slurm = rendezvous(SLURM)
    assert (slurm.address, slurm.hosted) == ("node07", False)
    assert 20000 <= slurm.port < 32000
    assert rendezvous({**SLURM, "SLURM_PROCID": "1", "SLURM_NODEID": "0"}) == slurm
    assert rendezvous({**SLURM, "SLURM_JOB_ID": "78"}).port != slurm.port
    assert rendezvous(OPEN_MPI).address == "127.0.0.1"


def test_rendezvous_over_hosts_needs_an_address() -> None:
    with pytest.raises(LaunchError, match="MASTER_ADDR is not set"):
        rendezvous({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4"})


@pytest.mark.parametrize(
    "node_list, host",
    [
        ("node1", "node1"),
        ("a,b", "a"),
        ("node[07-09,12]-ib,gpu1", "node07-ib"),
        ("r[1-2]n[3,5]", "r1n3"),
        ("gpu1,node[1-2]", "gpu1"),
    ],
)
def test_first_host(node_list: str, host: str) -> None:
    assert first_host(node_list) == host


def test_cache_folder() -> None:
    assert cache_folder({"MESHWRIGHT_CACHE": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert cache_folder({"XDG_CACHE_HOME": "/b"}) == Path("/b/meshwright")
    assert cache_folder({}) == Path.home() / ".cache" / "meshwright"


def test_mpi_worker_variables_keep_what_is_there_and_are_read_back() -> None:
    variables = mpi_worker_variables(2, 3, 4567, ["", "/x"], Path("/s"), {"HOME": "/h", "OMP_NUM_THREADS": "9"})
    assert variables["TMPDIR"] == "/s"
    assert variables["HOME"] == "/h"
    assert variables["OMP_NUM_THREADS"] == "3"
    assert variables["PYTHONPATH"] == ".:/x"
    assert variables["PYTHONSAFEPATH"] == "1"
    assert read_environment({**variables, **OPEN_MPI}).attempt == 2
    assert rendezvous({**variables, **OPEN_MPI}) == Rendezvous("127.0.0.1", 4567, hosted=False)


@pytest.mark.parametrize("own", [None, "/plugins:/more"])
def test_a_rank_is_given_the_users_python_path_back(own: str | None) -> None:
    users = {} if own is None else {"PYTHONPATH": own}
    started = {**users, **import_variables(["/venv/bin", "/lib"], users)}
    assert started["PYTHONPATH"] == "/venv/bin:/lib"
    restore_python_path(started)
    assert started == {**users, "PYTHONSAFEPATH": "1"}  # the rank's children leave out the current folder as well


def test_a_fork_servers_variables_are_gone_when_it_has_started(tmp_path: Path) -> None:
    variables = {"PYTHONPATH": "/plugins"}
    with server_variables(tmp_path, ["/lib"], variables):
        assert variables["PYTHONPATH"] == "/lib"
        assert early_errors_folder(variables) == tmp_path
    assert variables == {"PYTHONPATH": "/plugins"}


def test_a_local_rank_reads_what_it_was_made() -> None:
    variables: dict[str, str] = {}
    enter_local_rank(1, 3, 2, 4567, variables)
    assert read_environment(variables) == Environment(1, 3, 1, 3, 2, "torchrun")
    assert rendezvous(variables) == Rendezvous("127.0.0.1", 4567, hosted=True)
