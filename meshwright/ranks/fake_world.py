"""One process as a rank of a world that does not exist: torch's fake process group under any asked backend.

A script that is only recorded calls `init_process_group("nccl")` and gets the group `fake`, which sends nothing and
returns at once. Objects that ranks exchange (`all_gather_object`) are this rank's own. `collective_of` reads the verb,
the payload and the ranks of a dispatched operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import device_mesh, distributed_c10d
from torch.nn.parallel import distributed as ddp

from meshwright.ranks.ledger import MESSAGE

RECEIVE = "receive"
"""The name of a message's other end, next to the ledger's verbs."""

_VERBS = {
    "allreduce_": "all_reduce", "allreduce_coalesced_": "all_reduce", "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce", "all_reduce_coalesced": "all_reduce", "all_reduce_coalesced_": "all_reduce",
    "_reduce_scatter_base_": "reduce_scatter", "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter", "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_out": "reduce_scatter", "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "_allgather_base_": "all_gather", "allgather_": "all_gather", "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather", "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather", "all_gather_into_tensor_coalesced": "all_gather",
    "alltoall_base_": "all_to_all", "alltoall_": "all_to_all", "all_to_all_single": "all_to_all",
    "broadcast_": "broadcast", "broadcast": "broadcast", "reduce_": "reduce", "gather_": "gather",
    "scatter_": "scatter", "send": MESSAGE, "recv_": RECEIVE, "isend": MESSAGE, "irecv": RECEIVE,
}  # fmt: skip
"""The ledger's verb of each operation of c10d and of its functional form; barriers have none."""


@dataclass(frozen=True)
class Sending:
    """A collective or message of this rank."""

    verb: str
    payload_bytes: int
    """Bytes of the whole tensor, as in ledger.py."""
    ranks: tuple[int, ...]
    """The group's ranks."""
    root: int | None = None
    """Rank of the root, or of the other end of a message."""


def collective_of(op: Any, args: Sequence[Any], result: Any) -> Sending | None:
    """Return the collective of an operation's call; None for an operation that sends nothing."""
    space, _, name = op._schema.name.partition("::")
    if space not in ("c10d", "_c10d_functional") or name not in _VERBS:
        return None
    named = dict(zip((argument.name for argument in op._schema.arguments), args, strict=False))
    if space == "c10d":
        ranks = dist.get_process_group_ranks(dist.ProcessGroup.unbox(named["process_group"]))
    else:
        group = named["group_name"]
        resolved: Any = distributed_c10d._resolve_process_group(group) if isinstance(group, str) else group  # type: ignore[arg-type]
        ranks = dist.get_process_group_ranks(resolved)
    root = named.get("root_rank", named.get("src", named.get("dst")))
    # A collective's larger side is the whole tensor: the result of a gather, the argument of a scatter.
    tensors = [tensor for value in args for tensor in _inside(value)]
    given = sum(x.numel() * x.element_size() for x in tensors)
    made = sum(x.numel() * x.element_size() for x in _inside(result)) if space != "c10d" else 0
    payload = max(given, made)
    if space == "c10d" and _VERBS[name] in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"):
        # Both sides are arguments.
        payload = max(sum(x.numel() * x.element_size() for x in _inside(value)) for value in args[:2])
    return Sending(_VERBS[name], payload, tuple(ranks), ranks[root] if isinstance(root, int) else None)


def _inside(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _inside(inner)


def number_work(result: Any, work_id: int) -> None:
    """Write a number into the Work of an operation's result, which a wait reads."""
    for value in result if isinstance(result, tuple) else (result,):
        if isinstance(value, torch.ScriptObject):
            work: Any = dist.distributed_c10d.Work.unbox(value)
            work.seq_id = work_id


@dataclass
class _World:
    """The functions that replace torch's in a fake world."""

    rank: int
    size: int
    noted: Callable[[str], None]
    backend: str = "nccl"
    """The backend that the script asked for."""
    begin: Callable[..., None] = dist.init_process_group
    make_group: Callable[..., Any] = dist.new_group

    def join(self, backend: Any = None, *_: Any, **options: Any) -> None:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        self.backend = str(backend or "nccl")
        self.begin("fake", rank=self.rank, world_size=self.size, store=FakeStore())

    def group(self, ranks: Any = None, *rest: Any, **options: Any) -> Any:
        supported = {name: options[name] for name in ("use_local_synchronization", "group_desc") if name in options}
        return self.make_group(ranks, **supported)

    def exchange_values(self, out: list[Any], value: Any, *_: Any, **options: Any) -> None:
        self.noted("ranks exchange Python objects: those of the other ranks are taken to equal this rank's")
        out[:] = [value] * len(out)

    def exchange_at_root(self, value: Any, out: list[Any] | None = None, *_: Any, **options: Any) -> None:
        if out is not None:
            self.exchange_values(out, value)

    def keep_values(self, objects: list[Any], *_: Any, **options: Any) -> None:
        self.noted("rank 0 sends Python objects: this rank keeps its own")

    def spawn(
        self, function: Callable[..., Any], args: tuple[Any, ...] = (), nprocs: int = 1, *_: Any, **__: Any
    ) -> None:
        self.noted(f"the script starts {nprocs} processes: only process {self.rank} is followed, in this process")
        function(self.rank, *args)


def sum_bucket(group: Any, bucket: dist.GradBucket) -> Any:
    """Sum a bucket of DDP. DDP waits for all sums when the backward pass is over."""
    done = dist.all_reduce(bucket.buffer(), group=group, async_op=True)

    def wait() -> None:
        done.wait()

    torch.autograd.Variable._execution_engine.queue_callback(wait)
    future: Any = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


# torch compares the classes of the annotations.
sum_bucket.__annotations__.update({"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]})


@contextmanager
def fake_world(rank: int, size: int, waited: Callable[[int], None], noted: Callable[[str], None]) -> Iterator[None]:
    """Make each process group of this process a fake one in a context.

    Args:
        rank: This process's rank.
        size: The number of ranks of the world.
        waited: Called with the number of a Work (`number_work`) when the script waits for the Work.
        noted: Called with a sentence about other processes that a script would start or ask.
    """
    world, work, replica = _World(rank, size, noted), torch._C._distributed_c10d.FakeWork, ddp.DistributedDataParallel
    wait, build, register = work.wait, replica.__init__, replica.register_comm_hook

    def waits(self: Any, *args: Any) -> bool:
        waited(self.seq_id)
        return bool(wait(self, *args))

    def replicated(self: Any, *args: Any, **options: Any) -> None:
        build(self, *args, **options)
        register(self, self.process_group, sum_bucket)

    def hooked(self: Any, state: object, hook: Callable[..., Any]) -> None:
        noted(f"DDP's hook {hook}: sums of whole gradients are recorded in its place")

    with ExitStack() as stack:
        for owners, name, value in (
            ((dist, distributed_c10d, device_mesh), "init_process_group", world.join),
            ((dist, distributed_c10d, device_mesh), "new_group", world.group),
            ((dist,), "get_backend", lambda group=None: world.backend), ((dist,), "is_nccl_available", lambda: True),
            ((dist,), "all_gather_object", world.exchange_values), ((dist,), "gather_object", world.exchange_at_root),
            ((dist,), "broadcast_object_list", world.keep_values),
            ((dist,), "monitored_barrier", lambda *_, **__: None),
            ((torch.multiprocessing,), "spawn", world.spawn), ((work,), "wait", waits),
            ((replica,), "__init__", replicated), ((replica,), "register_comm_hook", hooked),
            # Shapes of parameters are compared through memory that meta tensors have not.
            ((ddp,), "_verify_param_shape_across_processes", lambda *_, **__: None),
        ):  # fmt: skip
            for owner in owners:
                stack.enter_context(patch.object(owner, name, value))
        try:
            yield
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
