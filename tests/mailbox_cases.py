"""The bodies of test_mailbox, run on each rank of any transport, without asserts on the results."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshwright.ranks.comm import size_bytes
from meshwright.ranks.environment import Environment, Rendezvous
from meshwright.ranks.grid import Grid
from meshwright.ranks.mailbox import Mailbox, Message, TensorMeta, both_sides
from meshwright.ranks.mesh import Mesh, open_mesh

Answer = tuple[Any, dict[str, Tensor]]

FORMS: dict[str, tuple[TensorMeta, ...]] = {
    "one": (TensorMeta((1,), torch.float32),),
    "mixed": (
        TensorMeta((3, 5), torch.float64),
        TensorMeta((7,), torch.bfloat16),
        TensorMeta((), torch.int64),
        TensorMeta((2, 0), torch.float32),
        TensorMeta((1, 3), torch.uint8),
    ),
    "half": (TensorMeta((300, 257), torch.float16), TensorMeta((5,), torch.bfloat16)),
    "large": (TensorMeta((1 << 20,), torch.float32),),
    "nothing": (),
}
"""The tensors of a message, by the epoch's name."""

FAST = 50
"""Messages of a sender that runs ahead."""


def values(number: int, form: TensorMeta) -> Tensor:
    """Return the content of message `number`: small whole numbers, exact in every dtype."""
    count = max(1, torch.Size(form.shape).numel())
    x = (torch.arange(count) * (2 * number + 3) + 5 * number) % 61
    return x[: torch.Size(form.shape).numel()].to(form.dtype).view(form.shape)


def take(mailbox: Mailbox, count: int) -> list[Message]:
    """Return exactly `count` messages."""
    messages: list[Message] = []
    while len(messages) < count:
        messages += mailbox.wait()
    assert len(messages) == count, f"{len(messages)} instead of {count}"
    assert not mailbox.poll(), "more messages than there were"
    return messages


def ping_pong(mesh: Mesh) -> Answer:
    """Send three messages of each form there and back. Return rank 0's doubled tensors, by `form/index/tensor`."""
    mailbox = mesh.mailbox("pipe")
    results: dict[str, Tensor] = {}
    for epoch, (name, forms) in enumerate(FORMS.items()):
        first = mesh.index("pipe") == 0
        mailbox.open(epoch, both_sides(*forms), 0 if first else 3, 3 if first else 0)
        for index in range(3):
            if first:
                mailbox.send("after", index, [values(index, form).to(mesh.device) for form in forms])
            (message,) = take_one(mailbox)
            assert message.side == ("after" if first else "before"), message.side
            assert message.index == index, f"{message.index} instead of {index}"
            if first:
                results |= {f"{name}/{index}/{number}": x.clone().cpu() for number, x in enumerate(message.tensors)}
            else:
                mailbox.send("before", index, [x + x for x in message.tensors])
        mailbox.flush()
    return traffic(mesh), results


def take_one(mailbox: Mailbox) -> list[Message]:
    messages = mailbox.wait()
    assert len(messages) == 1, messages
    return messages


def traffic(mesh: Mesh) -> dict[str, int]:
    entry = mesh.ledger.traffic["pipe", "message"]
    return {"calls": entry.calls, "sent_bytes": entry.sent_bytes}


def there_and_back(rank: int, port: int) -> None:
    """Run ping_pong in a process for each GPU, and compare the results here."""
    torch.cuda.set_device(rank)
    environment, point = Environment(rank, 2, rank, 2, 0, "torchrun"), Rendezvous("127.0.0.1", port, hosted=False)
    with open_mesh(Grid((("pipe", 2),)), environment, "torch", torch.device("cuda", rank), point, ()) as mesh:
        _, results = ping_pong(mesh)
        for name, x in results.items():
            form, index, number = name.split("/")
            sent = values(int(index), FORMS[form][int(number)])
            assert torch.equal(x, sent + sent), name
        mesh.world.barrier()


def spawn_within(
    seconds: float, function: Callable[..., None], *arguments: Any, processes: int, start_method: str = "spawn"
) -> None:
    """Run function(index, *arguments) in `processes` processes.

    If a process raises, or has not ended after `seconds`, the caller fails, and the other processes are ended.
    """
    context = torch.multiprocessing.start_processes(
        function, arguments, processes, join=False, start_method=start_method
    )
    deadline = time.monotonic() + seconds
    try:
        while not context.join(timeout=max(0.0, deadline - time.monotonic())):
            waiting = [index for index, process in enumerate(context.processes) if process.is_alive()]
            assert time.monotonic() < deadline, f"{function.__name__} has not ended in {seconds} s on ranks {waiting}"
    finally:
        for process in context.processes:
            process.kill()
            process.join()


def asleep(index: int, seconds: float) -> None:
    """Sleep on rank 1 alone."""
    time.sleep(seconds if index == 1 else 0)


def out_of_step(mesh: Mesh) -> Answer:
    """Return the order and sums of a receiver that starts after the sender has sent and overwritten all messages.

    The barrier is between the two: a sender that waits for its receiver never ends.
    """
    mailbox, form = mesh.mailbox("pipe"), TensorMeta((30_000,), torch.float64)
    if mesh.index("pipe") == 0:
        mailbox.open(0, both_sides(form), 0, 0)
        x = torch.empty(form.shape, dtype=form.dtype)
        for index in range(FAST):
            mailbox.send("after", index, [x.fill_(index)])
        x.fill_(-1)
        mesh.comm("pipe").barrier()
        mailbox.flush()
        return None, {}
    mailbox.open(0, both_sides(form), FAST, 0)
    mesh.comm("pipe").barrier()
    messages = take(mailbox, FAST)
    sums = torch.stack([message.tensors[0].sum() for message in messages])
    return {"order": [message.index for message in messages]}, {"sums": sums}


def both_ways(mesh: Mesh) -> Answer:
    """Send three messages of 8 MB from each to each, all before any is taken."""
    mailbox, form = mesh.mailbox("pipe"), TensorMeta((1 << 20,), torch.float64)
    first = mesh.index("pipe") == 0
    mailbox.open(0, both_sides(form), 0 if first else 3, 3 if first else 0)
    for index in range(3):
        mailbox.send("after" if first else "before", index, [values(10 * mesh.rank + index, form).to(mesh.device)])
    messages = take(mailbox, 3)
    mailbox.flush()
    results = {str(message.index): message.tensors[0].cpu() for message in messages}
    return {"order": [message.index for message in messages]}, results


def epochs(mesh: Mesh) -> Answer:
    """End epoch 3 on rank 1 without taking messages; then run epoch 4, and epoch 5 with other forms."""
    mailbox, form, other = mesh.mailbox("pipe"), TensorMeta((9,), torch.float32), TensorMeta((4, 4), torch.bfloat16)
    seen, results = [], {}
    for epoch, sent, shape in ((3, 6, form), (4, 2, form), (5, 3, other)):
        if mesh.index("pipe") == 0:
            mailbox.open(epoch, both_sides(shape), 0, 0)
            for index in range(sent):
                mailbox.send("after", index, [values(10 * epoch + index, shape)])
        else:
            mailbox.open(epoch, both_sides(shape), sent, 0)
            if epoch == 3:
                continue
            for message in take(mailbox, sent):
                seen.append([epoch, message.index])
                results[f"{epoch}/{message.index}"] = message.tensors[0].clone()
        mailbox.flush()
    return seen, results


def relay(mesh: Mesh) -> Answer:
    """Send messages along the row and back, in any order of arrival, with a sum over data after each message.

    On the way there every stage adds its world rank; on the way back the stages between double. Return the first
    stage's received tensors.
    """
    mailbox, data, form = mesh.mailbox("pipe"), mesh.comm("data"), TensorMeta((2, 3), torch.float64)
    stage, last, count = mesh.index("pipe"), mesh.size("pipe") - 1, 5
    results, sums = {}, []
    for epoch in range(2):
        mailbox.open(epoch, both_sides(form), count * (stage > 0), count * (stage < last))
        if stage == 0:
            for index in range(count):
                mailbox.send("after", index, [values(index, form) + mesh.rank + 100 * epoch])
        handled = 0
        while handled < count * ((stage > 0) + (stage < last)):
            for message in mailbox.wait():
                handled += 1
                total = torch.ones(1000)
                data.all_reduce(total)
                sums.append(total.sum().item())
                (x,) = message.tensors
                if message.side == "after" and stage == 0:
                    results[f"{epoch}/{message.index}"] = x.clone()
                elif message.side == "after":
                    mailbox.send("before", message.index, [2 * x])
                else:
                    mailbox.send("after" if stage < last else "before", message.index, [x + mesh.rank])
        mailbox.flush()
    return traffic(mesh) | {"sums": sorted(set(sums)), "message_bytes": size_bytes(values(0, form))}, results
