"""Runs a function on the ranks of a grid: threads of this process, or processes forked from it, over gloo.

This process has torch imported, so a forked child is ready in milliseconds. This process computes on one thread, since
OpenMP's threads do not survive a fork. Ranks with several threads each are forked from a server that never computes.
"""

from __future__ import annotations

import copy
import importlib
import io
import multiprocessing
import os
import pickle
import resource
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import count
from multiprocessing import forkserver
from pathlib import Path
from types import FunctionType
from typing import Any, Literal
from unittest.mock import patch

import pytest
import torch
import torch._dynamo  # torch.optim imports it in every rank: a second each, unless the parent has done so

from meshwright.ranks.environment import Environment, Rendezvous
from meshwright.ranks.errors import LaunchError
from meshwright.ranks.grid import Grid
from meshwright.ranks.launch.threads import run_threads
from meshwright.ranks.mesh import open_mesh, open_mesh_in
from meshwright.ranks.thread_world import ThreadWorld
from meshwright.ranks.transports import TransportName
from tests.patience import PATIENCE_SECONDS

PORTS = 500
"""The number of ports of each process of tests."""

DEVICE = "TESTS_DEVICE"
"""The environment's name for the device of ranks that are threads: cpu, or cuda by `pytest --device cuda`."""

_NUMBERS = count()


def run_ranks(
    function: Callable[..., Any],
    grid: Grid,
    *arguments: Any,
    token_axes: tuple[str, ...] = ("data",),
    timeout: float = PATIENCE_SECONDS,
    threads: int = 1,
    transport: TransportName | Literal["nccl"] = "threads",
    forked: bool = False,
) -> list[Any]:
    """Run function(mesh, *arguments) on every rank of the grid; return the results in rank order.

    A failure fails the caller. Ranks are threads of this process. `forked`: ranks are threads of a new process, since
    the function patches, limits, measures or sets something; if DEVICE says cuda, all are on one GPU. With
    `transport="torch"`, and if an argument needs processes, ranks are processes over gloo; with `transport="nccl"`,
    over NCCL on one GPU if DEVICE says cuda. A process that sends nothing for `timeout` seconds after the previous
    result fails the caller, too. All processes are ended.

    A run's grid has a pipe axis: a grid without this axis has one stage. `threads`: CPU threads of each rank; with more
    than one, ranks are processes, and function and arguments are pickled.
    """
    grid = with_stages(grid)
    context = _context(threads)
    if transport == "threads" and threads == 1 and not any(map(needs_processes, arguments)):
        if not forked and os.environ.get(DEVICE, "cpu") == "cpu":
            before = {owner: attributes.copy() for owner, attributes in _patchable().items()}
            try:
                return _on_threads(function, grid, token_axes, arguments)
            except LaunchError as error:
                raise AssertionError(str(error)) from error
            finally:
                if changed := _changed(before):
                    pytest.fail(f"{function.__qualname__} leaves {', '.join(changed)} changed: run it with forked=True")
        on_cpu = os.environ.get(DEVICE, "cpu") == "cpu"
        if on_cpu and any(getattr(argument, "compile", "none") != "none" for argument in arguments):
            # 700 modules: 1.5 s of each forked process that compiles, if this one has not imported them.
            importlib.import_module("torch._inductor.compile_fx")
        (results,) = _answers(context, _work_threads, [(function, grid, token_axes, arguments)], timeout)
        return list(results)
    port = free_port()
    device = "cuda:0" if transport == "nccl" and os.environ.get(DEVICE, "cpu") == "cuda" else "cpu"
    works = [(function, grid, token_axes, rank, port, threads, arguments, device) for rank in range(grid.world_size)]
    return _answers(context, _work, works, timeout)


def _answers(context: Any, work: Callable[..., None], works: Sequence[tuple[Any, ...]], timeout: float) -> list[Any]:
    """Run work(pipe, *arguments) in a process for each of `works`; return the results sent through the pipes."""
    pipes = [context.Pipe(duplex=False) for _ in works]
    workers = [
        context.Process(target=work, args=(sender, *arguments), daemon=True)
        for (_, sender), arguments in zip(pipes, works, strict=True)
    ]
    for worker in workers:
        worker.start()
    results = []
    try:
        for rank, (receiver, _) in enumerate(pipes):
            assert receiver.poll(timeout), f"rank {rank} said nothing for {timeout} s"
            failed, result = pickle.loads(receiver.recv_bytes())  # noqa: S301 - from our own fork
            assert not failed, result
            results.append(result)
        for worker in workers:
            worker.join(timeout)
    finally:
        for worker in workers:
            worker.kill()  # a rank that waits for an ended rank waits in gloo, deaf to SIGTERM's handler
            worker.join()
    return results


def needs_processes(argument: Any) -> bool:
    """Return whether an argument is, or holds, a function, which plants a mistake in a rank's process."""
    if isinstance(argument, (list, tuple)):
        return any(map(needs_processes, argument))
    return isinstance(argument, FunctionType)


def _work_threads(
    pipe: Any, function: Callable[..., Any], grid: Grid, token_axes: tuple[str, ...], arguments: tuple[Any, ...]
) -> None:
    try:
        bytes_of_results = io.BytesIO()
        OnHost(bytes_of_results).dump((False, _on_threads(function, grid, token_axes, arguments)))
        pipe.send_bytes(bytes_of_results.getvalue())
    except BaseException:
        pipe.send_bytes(pickle.dumps((True, traceback.format_exc())))


def _on_threads(
    function: Callable[..., Any], grid: Grid, token_axes: tuple[str, ...], arguments: tuple[Any, ...]
) -> list[Any]:
    """Run all ranks as threads of this process, each with a copy of the arguments."""

    def work(environment: Environment, world: ThreadWorld) -> Any:
        own = copy.deepcopy(arguments)
        with open_mesh_in(world, grid, environment, token_axes) as mesh:
            return function(mesh, *own)

    return run_threads(work, grid.world_size, threads=1, device=os.environ.get(DEVICE, "cpu"))


@cache
def _owners(num_modules: int) -> dict[str, Mapping[str, Any]]:
    """Return the package's modules and classes, the torch modules in use, and the tables of tests' modules.

    Each has the attributes at the time of a look. `num_modules`: the number of imported modules; a greater number may
    have more owners.
    """
    modules = [module for name, module in sys.modules.copy().items() if name.partition(".")[0] == "meshwright"]
    found = {value for module in modules for value in vars(module).values() if isinstance(value, type)}
    classes = {value for value in found if value.__module__.partition(".")[0] == "meshwright"}
    torchs = (torch, torch.Tensor, torch.nn.functional, torch.distributed, torch.ops.aten, torch.ops.c10d)
    named = {each.__name__: vars(each) for each in (*modules, *torchs, time)}
    tests = [module for name, module in sys.modules.copy().items() if name.partition(".")[0] == "tests"]
    for module in tests:
        tables = {name: value for name, value in vars(module).items() if name.isupper() and type(value) is dict}
        named |= {f"{module.__name__}.{name}": table for name, table in tables.items()}
    return {**named, **{f"{each.__module__}.{each.__qualname__}": vars(each) for each in classes}}


def _patchable() -> dict[str, Any]:
    """Return everything that a test may patch, set or limit, by owner and name.

    Attributes are read at the time of a look; limits and settings are read now.
    """
    limits = {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")}
    process = {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "libraries": len(torch.library._impls),
        "directory": Path.cwd(),
    }
    set_or_limited = {"os.environ": {**os.environ}, "resource": limits, "this process": process}
    return {**_owners(len(sys.modules)), **set_or_limited}


def _changed(before: dict[str, dict[str, Any]]) -> list[str]:
    """Return the names of changed values. A value that was None, or Python's or pydantic's, is filled in lazily."""
    now = _patchable()
    changed = [
        f"{owner}.{name}"
        for owner, attributes in before.items()
        if not _same(attributes, now.get(owner, attributes))
        for name, value in attributes.items()
        if now.get(owner, attributes).get(name) is not value and value is not None and not str(name).startswith("__")
        if not (isinstance(value, str | int | tuple | Path) and now.get(owner, attributes).get(name) == value)
    ]
    return changed + [f"os.environ.{name}" for name in sorted(now["os.environ"].keys() - before["os.environ"].keys())]


def _same(before: dict[str, Any], now: Mapping[str, Any]) -> bool:
    """Return whether both hold the same values, or false in doubt.

    dict's comparison first tests whether values are the same object, and takes a third of the time of a loop.
    """
    try:
        return before == now
    except Exception:  # changed values without a truth of a comparison: tensors
        return False


class OnHost(pickle.Pickler):
    """A pickler that moves tensors to the host: a process that has used a GPU cannot fork ranks that use the GPU."""

    def reducer_override(self, value: Any) -> Any:
        on_gpu = isinstance(value, torch.Tensor) and value.is_cuda
        return value.detach().cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL) if on_gpu else NotImplemented


@cache
def block_of_ports() -> tuple[socket.socket, int]:
    """Find PORTS ports that no other process of tests has, also of another suite; return a socket and the first port.

    The socket holds the ports while this process lives.
    """
    for first in range(10_000, 32_768 - PORTS, PORTS):
        holder = socket.socket()
        with suppress(OSError):
            holder.bind(("127.0.0.1", first))
            holder.listen()
            return holder, first
        holder.close()
    raise AssertionError("more processes of tests than blocks of ports")


def free_port() -> int:
    """Return a port that is still free when rank 0 listens there, some milliseconds later.

    The system gives ports from 32768 on to connections of other tests, so this port is lower. Each process of tests has
    separate ports.
    """
    _, first = block_of_ports()
    for number in _NUMBERS:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", first + 1 + number % (PORTS - 1)))
            return first + 1 + number % (PORTS - 1)
    raise AssertionError("numbers do not end")


def _context(threads: int) -> Any:
    """Return the context that starts processes of `threads` threads each.

    A process that has looked for GPUs, as a backward pass on the host does, can fork no process that uses a GPU.
    """
    if threads == 1 and os.environ.get(DEVICE, "cpu") == "cpu":
        return multiprocessing.get_context("fork")
    context = multiprocessing.get_context("forkserver")
    # The server imports the modules of most tests' functions: each rank imports a missing module again.
    context.set_forkserver_preload(
        ["tests.workers", "tests.fuzz.check", "meshwright.strategies.data_parallel.gathering"]
    )
    with patch.dict(os.environ, OMP_WAIT_POLICY="passive"):  # ranks times threads are more than cores: do not spin
        forkserver.ensure_running()
    return context


def with_stages(grid: Grid) -> Grid:
    """Return the grid, with a pipe axis after the data axis if the grid has a data axis."""
    if "pipe" in grid.names or grid.names[:1] != ("data",):
        return grid
    return Grid((*grid.axes[:1], ("pipe", 1), *grid.axes[1:]))


def _work(
    pipe: Any,
    function: Callable[..., Any],
    grid: Grid,
    token_axes: tuple[str, ...],
    rank: int,
    port: int,
    threads: int,
    arguments: tuple[Any, ...],
    device: str,
) -> None:
    torch.set_num_threads(threads)
    if device != "cpu":  # ranks with equal ids are ranks of one host to NCCL, which may not share a GPU
        os.environ |= {"NCCL_HOSTID": f"rank {rank}", "NCCL_SOCKET_IFNAME": "lo"}
        torch.cuda.set_device(0)
    world = grid.world_size
    environment = Environment(rank, world, rank, world, 0, "torchrun")
    try:
        point = Rendezvous("127.0.0.1", port, hosted=False)
        with open_mesh(grid, environment, "torch", torch.device(device), point, token_axes) as mesh:
            bytes_of_results = io.BytesIO()
            OnHost(bytes_of_results).dump((False, function(mesh, *arguments)))
            pipe.send_bytes(bytes_of_results.getvalue())
            mesh.world.barrier()
    except BaseException:
        pipe.send_bytes(pickle.dumps((True, f"rank {rank}:\n{traceback.format_exc()}")))
