"""Messages between neighbours are equal over gloo and MPI in any order of arrival; and tests without a transport."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.ranks.comm import RankGroup
from meshwright.ranks.environment import Environment, Rendezvous
from meshwright.ranks.grid import Grid
from meshwright.ranks.mailbox import (
    HEADER_BYTES,
    SUBJECT_BITS,
    CutForms,
    Mailbox,
    PackedMailbox,
    Packet,
    Packing,
    Side,
    TensorMeta,
    both_sides,
    header_of,
)
from meshwright.ranks.mailbox_torch import GlooMailbox
from meshwright.ranks.mesh import Mesh, open_mesh, solo_mesh
from meshwright.ranks.planned import PlannedMailbox, planned_mesh
from meshwright.ranks.transports import TransportName
from tests import mailbox_cases
from tests.mailbox_cases import FAST, FORMS, Answer, take, values
from tests.patience import PATIENCE_SECONDS
from tests.rehearsal.streams import on_streams
from tests.workers import free_port, run_ranks

PAIR = Grid((("pipe", 2),))
FORM = TensorMeta((3,), torch.float32)
HOST = torch.device("cpu")


@cache
def on_gloo(case: str) -> list[Answer]:
    return run_ranks(vars(mailbox_cases)[case], PAIR, transport="torch")


@cache
def on_threads(case: str) -> list[Answer]:
    return run_ranks(vars(mailbox_cases)[case], PAIR)


def streamed(mesh: Mesh, case: str) -> Answer:
    with on_streams(mesh) as there:
        answer: Answer = vars(mailbox_cases)[case](there)
        there.mailbox("pipe").shut()
        return answer


@cache
def between_gpus(case: str) -> list[Answer]:
    return run_ranks(streamed, PAIR, case, transport="torch")


LOCAL = {"gloo": on_gloo, "gpus": between_gpus, "threads": on_threads}


@pytest.fixture(params=["gloo", "gpus", "threads", "mpi"])
def answers(request: pytest.FixtureRequest) -> Callable[[str], list[Answer]]:
    """Return a function from a case's name to the answers of both ranks of one transport."""
    if request.param in LOCAL:
        return LOCAL[request.param]
    mpi: Callable[[int], dict[str, list[Answer]]] = request.getfixturevalue("mpi")
    return lambda case: mpi(2)[f"mailbox-{case}"]


@pytest.mark.parametrize("name", FORMS)
def test_there_and_back(answers: Callable[[str], list[Answer]], name: str) -> None:
    _, results = answers("ping_pong")[0]
    for index in range(3):
        for number, form in enumerate(FORMS[name]):
            sent = values(index, form)
            torch.testing.assert_close(results[f"{name}/{index}/{number}"], sent + sent, rtol=0, atol=0)


def test_ledger_counts_the_tensors(answers: Callable[[str], list[Answer]]) -> None:
    a_round = sum(form.size_bytes for forms in FORMS.values() for form in forms)
    for facts, _ in answers("ping_pong"):
        assert facts == {"calls": 3 * len(FORMS), "sent_bytes": 3 * a_round}


def test_a_sender_ends_before_its_receiver_begins(answers: Callable[[str], list[Answer]]) -> None:
    _, (receiver, results) = answers("out_of_step")
    assert receiver["order"] == list(range(FAST))
    assert results["sums"].tolist() == [30_000.0 * index for index in range(FAST)], "a send was not a copy"


def test_large_messages_pass_each_other(answers: Callable[[str], list[Answer]]) -> None:
    for rank, (facts, results) in enumerate(answers("both_ways")):
        assert facts["order"] == [0, 1, 2]
        for index in range(3):
            wanted = values(10 * (1 - rank) + index, TensorMeta((1 << 20,), torch.float64))
            assert torch.equal(results[str(index)], wanted), f"message {index} at rank {rank}"


def test_no_message_survives_its_epoch(answers: Callable[[str], list[Answer]]) -> None:
    seen, results = answers("epochs")[1]
    assert seen == [[4, 0], [4, 1], [5, 0], [5, 1], [5, 2]]
    for epoch, index in seen:
        form = TensorMeta((9,), torch.float32) if epoch == 4 else TensorMeta((4, 4), torch.bfloat16)
        assert torch.equal(results[f"{epoch}/{index}"], values(10 * epoch + index, form))


def check_relay(grid: Grid, answers: list[Answer]) -> None:
    """Compare relayed values: forward, each stage adds a rank; backward, each stage between the ends doubles."""
    size, count = grid.size("pipe"), 5
    for rank, (facts, results) in enumerate(answers):
        stage, row = grid.index(rank, "pipe"), grid.group(rank, "pipe")
        links = (stage > 0) + (stage < size - 1)
        assert facts["calls"] == 2 * count * links
        assert facts["sent_bytes"] == facts["calls"] * facts["message_bytes"]
        assert facts["sums"] == [1000.0 * grid.size("data")]
        assert len(results) == (2 * count if stage == 0 else 0)
        for name, x in results.items():
            epoch, index = map(int, name.split("/"))
            there = values(index, TensorMeta((2, 3), torch.float64)) + 100 * epoch + sum(row)
            assert torch.equal(x, there * 2 ** (size - 2)), f"{name} at rank {rank}"


@pytest.mark.parametrize("sizes", [(1, 3), (2, 3), (2, 4)], ids=["row", "two-rows", "two-rows-of-4"])
@pytest.mark.parametrize("transport", ["torch", "threads"])
def test_rows_beside_each_other(sizes: tuple[int, int], transport: TransportName) -> None:
    grid = Grid((("data", sizes[0]), ("pipe", sizes[1])))
    check_relay(grid, run_ranks(mailbox_cases.relay, grid, transport=transport))


@pytest.mark.parametrize("sizes", [pytest.param((1, 3), marks=pytest.mark.long), (2, 2)], ids=["row", "two-rows"])
def test_rows_beside_each_other_over_mpi(sizes: tuple[int, int], mpi: Callable[[int], dict[str, list[Answer]]]) -> None:
    grid = Grid((("data", sizes[0]), ("pipe", sizes[1])))
    check_relay(grid, mpi(grid.world_size)["mailbox-relay"])


def _leave(rank: int, port: int, answer: Connection) -> None:
    """Rank 1 dies after the first message; rank 0 waits for the second."""
    environment = Environment(rank, 2, rank, 2, 0, "torchrun")
    with open_mesh(PAIR, environment, "torch", HOST, Rendezvous("127.0.0.1", port, hosted=False), ()) as mesh:
        mailbox = mesh.mailbox("pipe")
        mailbox.open(0, both_sides(FORM), 0, 2 * (rank == 0))
        if rank == 1:
            mailbox.send("before", 0, [values(0, FORM)])
            mailbox.flush()
            os._exit(1)
        received = 0
        try:
            while received < 2:
                received += len(mailbox.wait())
        except ConnectionError as error:
            answer.send((received, str(error)))
            sys.exit(0)  # a rank with a dead neighbour raises: no rank is left to close with


def test_a_dead_neighbour_is_told() -> None:
    context = multiprocessing.get_context("fork")
    port = free_port()
    receiver, sender = context.Pipe(duplex=False)
    workers = [context.Process(target=_leave, args=(rank, port, sender), daemon=True) for rank in range(2)]
    for worker in workers:
        worker.start()
    try:
        assert receiver.poll(PATIENCE_SECONDS), "rank 0 waits for a dead neighbour"
        assert receiver.recv() == (1, "axis pipe: the link to rank 1 is broken")
        workers[0].join(PATIENCE_SECONDS)
        assert workers[0].exitcode == 0, "rank 0 did not come to its end"
    finally:
        for worker in workers:
            worker.kill()
            worker.join()


@pytest.mark.parametrize("forms", FORMS.values(), ids=FORMS)
def test_packing(forms: tuple[TensorMeta, ...]) -> None:
    packing, sent = Packing(forms), [values(3, form) for form in forms]
    buffer = torch.full((packing.size_bytes,), 255, dtype=torch.uint8)
    packing.pack(buffer, torch.tensor([7, 2**40]), sent)
    assert header_of(buffer).tolist() == [7, 2**40]
    for x, wanted in zip(packing.unpack(buffer), sent, strict=True):
        assert torch.equal(x, wanted)
        assert x.data_ptr() % 16 == 0
    assert packing.size_bytes < HEADER_BYTES + sum(form.size_bytes + 16 for form in forms) + 1


def test_tensors_with_gaps_and_gradients_are_sent_as_numbers() -> None:
    packing = Packing((TensorMeta((3, 2), torch.float64),))
    x = torch.arange(6.0, dtype=torch.float64, requires_grad=True)
    buffer = torch.empty(packing.size_bytes, dtype=torch.uint8)
    packing.pack(buffer, torch.tensor([0, 0]), [x.view(2, 3).t()])
    (received,) = packing.unpack(buffer)
    assert received.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert not received.requires_grad


class Slow(PackedMailbox):
    """A mailbox with messages that arrive only when the test lets a message in."""

    def __init__(self, ahead: int) -> None:
        super().__init__(RankGroup("pipe", (0, 1, 2), 1), HOST, ahead)
        self.waiting: list[tuple[Side, Tensor]] = []
        self.come: list[Packet] = []

    def _post(self, side: Side) -> None:
        self.waiting.append((side, self.new_buffer(side)))

    def let_in(self, epoch: int, index: int, subject: int = 0) -> None:
        side, buffer = self.waiting.pop(0)
        header = torch.tensor([epoch, index + (subject << SUBJECT_BITS)])
        self._packings[side][subject].pack(buffer, header, [values(index, FORM)])
        self.come.append(Packet(side, header_of(buffer), buffer))

    def _arrived(self) -> list[Packet]:
        come, self.come = self.come, []
        return come

    def _dispatch(self, to: Side, header: Tensor, buffer: Tensor) -> None: ...
    def _next_arrivals(self) -> list[Packet]:
        raise AssertionError("nothing comes")

    def _flush(self) -> None: ...
    def shut(self) -> None: ...


def test_receives_are_posted_ahead_and_never_too_many() -> None:
    mailbox = Slow(ahead=4)
    mailbox.open(1, both_sides(FORM), 6, 0)
    posted = []
    for index in range(6):
        posted.append(len(mailbox.waiting))
        mailbox.let_in(1, index)
        assert [message.index for message in mailbox.poll()] == [index]
    assert posted == [4, 4, 4, 3, 2, 1]
    assert not mailbox.waiting
    mailbox.open(2, both_sides(FORM), 2, 3)
    assert [side for side, _ in mailbox.waiting] == ["before"] * 2 + ["after"] * 3


def test_each_side_has_its_own_forms() -> None:
    mailbox, other = Slow(ahead=2), TensorMeta((100,), torch.float32)
    mailbox.open(1, {"before": {0: CutForms((FORM,), True)}, "after": {0: CutForms((other, FORM), False)}}, 1, 1)
    sizes = {side: buffer.numel() for side, buffer in mailbox.waiting}
    assert sizes == {"before": Packing((FORM,)).size_bytes, "after": Packing((other, FORM)).size_bytes}
    mailbox.send("after", 0, [torch.zeros(100), values(0, FORM)])
    with pytest.raises(AssertionError, match=r"sent .*100"):
        mailbox.send("before", 0, [torch.zeros(100), values(0, FORM)])
    mailbox.let_in(1, 3)
    (message,) = mailbox.poll()
    assert (message.side, [x.shape for x in message.tensors]) == ("before", [FORM.shape])


def test_subjects_of_a_side_have_messages_of_one_size() -> None:
    """A receive is posted before the subject of the message is known."""
    mailbox, other = Slow(ahead=2), TensorMeta((100,), torch.float32)
    subjects = {4: CutForms((FORM,), True), 7: CutForms((other, FORM), False)}
    mailbox.open(1, {"before": subjects, "after": {}}, 4, 0)
    assert {buffer.numel() for _, buffer in mailbox.waiting} == {Packing((other, FORM)).size_bytes}
    mailbox.let_in(1, 3, subject=4)
    (message,) = mailbox.poll()
    assert (message.subject, message.index, [x.shape for x in message.tensors]) == (4, 3, [FORM.shape])


def test_a_dropped_message_has_its_receive_posted_again() -> None:
    mailbox = Slow(ahead=1)
    mailbox.open(1, both_sides(FORM), 1, 0)
    mailbox.open(2, both_sides(FORM), 1, 0)
    assert len(mailbox.waiting) == 1
    mailbox.let_in(1, 0)
    assert mailbox.poll() == []
    mailbox.let_in(2, 5)
    (message,) = mailbox.wait()
    assert (message.side, message.index) == ("before", 5)


def test_our_own_mistakes() -> None:
    mailbox = Slow(ahead=2)
    mailbox.open(4, both_sides(FORM), 1, 0)
    with pytest.raises(AssertionError, match="epoch 4 after 4"):
        mailbox.open(4, both_sides(FORM), 1, 0)
    with pytest.raises(AssertionError, match="other forms"):
        mailbox.open(5, both_sides(TensorMeta((100,), torch.float32)), 1, 0)
    with pytest.raises(AssertionError, match=r"sent .*float64"):
        mailbox.send("after", 0, [torch.zeros(3, dtype=torch.float64)])
    mailbox.let_in(6, 0)
    with pytest.raises(AssertionError, match="before is in epoch 6, we in 4"):
        mailbox.poll()
    alone = GlooMailbox(RankGroup("pipe", (0,), 0), {})
    alone.open(0, both_sides(FORM), 0, 0)
    with pytest.raises(AssertionError, match="no message to wait for"):
        alone.wait()
    with pytest.raises(AssertionError, match="no neighbour after"):
        alone.send("after", 0, [values(0, FORM)])
    with pytest.raises(AssertionError, match="no neighbour before, 2 messages"):
        alone.open(1, both_sides(FORM), 2, 0)


def test_an_axis_of_one_rank() -> None:
    mailbox = solo_mesh(HOST, ("data", "pipe")).mailbox("pipe")
    assert vars(mailbox) == vars(Mailbox("pipe"))
    mailbox.open(0, both_sides(FORM), 0, 0)
    assert mailbox.poll() == []
    mailbox.flush()
    with pytest.raises(AssertionError, match="nobody is after"):
        mailbox.send("after", 0, [])
    with pytest.raises(AssertionError, match="3 and 0 messages from nobody"):
        mailbox.open(1, both_sides(FORM), 3, 0)


def test_a_plan_has_messages_at_once_and_an_answer_to_each() -> None:
    mesh = planned_mesh(Grid((("data", 2), ("pipe", 4))), 1, ("data",))
    mailbox: Any = mesh.mailbox("pipe")
    assert mesh.mailbox("pipe") is mailbox
    assert type(mailbox) is PlannedMailbox
    mailbox.open(0, both_sides(TensorMeta((2, 5), torch.bfloat16)), 2, 1)
    messages = take(mailbox, 2)
    assert [(message.side, message.index) for message in messages] == [("before", 0), ("before", 1)]
    assert all(message.tensors[0].is_meta and message.tensors[0].shape == (2, 5) for message in messages)
    with pytest.raises(AssertionError, match="no message to wait for"):
        mailbox.wait()
    mailbox.send("after", 0, messages[0].tensors)
    (answer,) = take(mailbox, 1)
    assert (answer.side, answer.index) == ("after", 0)
    assert mesh.ledger.sent_bytes() == {"pipe": 20}
    with pytest.raises(AssertionError, match="no message to wait for"):
        mailbox.wait()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL between two ranks needs two GPUs")
def test_gpus_pass_messages() -> None:
    mailbox_cases.spawn_within(120, mailbox_cases.there_and_back, free_port(), processes=2)


def test_a_hang_of_spawned_ranks_is_named() -> None:
    """test_gpus_pass_messages relies on this; here without GPUs."""
    mailbox_cases.spawn_within(60, mailbox_cases.asleep, 0.0, processes=2, start_method="fork")
    with pytest.raises(AssertionError, match=r"asleep has not ended in 1 s on ranks \[1\]"):
        mailbox_cases.spawn_within(1, mailbox_cases.asleep, 3600.0, processes=2, start_method="fork")
