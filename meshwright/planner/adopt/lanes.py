"""Seconds of an adopted step: kernels on streams, collectives on their groups' lanes, messages between ranks.

| lane              | is busy with                                                                              |
|-------------------|-------------------------------------------------------------------------------------------|
| host              | the issue of each kernel and collective (Device.issue); it waits if the script reads a value |
| a stream          | kernels and copies in the order of issue; it waits for awaited events and collectives     |
| a group of ranks  | collectives, one after the other, each after the stream that issued the collective        |

Seconds of kernels are the planner's (timing.py), seconds of collectives are the planner's network's (network.py).
Kernels take longer while collectives run, by Links.tax.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from meshwright.planner.adopt.recorder import Collective, Copy, Entry
from meshwright.planner.plan.cluster import Cluster
from meshwright.planner.plan.network import ClusterNetwork
from meshwright.planner.plan.recorder import Kernel
from meshwright.planner.plan.timing import Timer, slowed
from meshwright.ranks.errors import ConfigError
from meshwright.ranks.fake_world import RECEIVE, Sending
from meshwright.ranks.grid import Grid
from meshwright.ranks.ledger import MESSAGE


def grid_of(ranks: Sequence[int], world: int) -> tuple[Grid, str]:
    """Return a grid over all ranks and the joined axes that span the group.

    Raises ConfigError for ranks that no axes of a grid span.
    """
    strides: list[tuple[int, int]] = []
    rest = list(ranks)
    while len(rest) > 1:
        step = rest[1] - rest[0]
        count = next((n for n in range(1, len(rest)) if rest[n] - rest[n - 1] != step), len(rest))
        if len(rest) % count or step < 1:
            raise ConfigError.of("group", tuple(ranks), "is no group over axes of a grid", "ranks at equal distances")
        strides.append((step, count))
        rest = rest[::count]
    axes: list[tuple[str, int]] = []
    inner, names = 1, []
    for axis, (step, count) in enumerate(strides):
        axes += [(f"between{axis}", step // inner), (f"group{axis}", count)]
        names.append(f"group{axis}")
        inner = step * count
    axes.append(("outer", max(1, world // inner)))
    return Grid(tuple(reversed(axes))), "+".join(reversed(names))


class GroupNetwork:
    """Seconds of collectives of any groups of ranks."""

    def __init__(self, cluster: Cluster, world: int) -> None:
        self._cluster, self._world = cluster, world
        self._known: dict[tuple[int, ...], tuple[ClusterNetwork, str]] = {}

    def seconds(self, sending: Sending, rank: int) -> float:
        ranks = sending.ranks
        if sending.verb in (MESSAGE, RECEIVE):
            ranks = tuple(sorted({rank, rank if sending.root is None else sending.root}))
        if len(ranks) < 2:
            return 0.0
        if ranks not in self._known:
            grid, axes = grid_of(ranks, self._world)
            self._known[ranks] = ClusterNetwork(self._cluster, "torch", grid), axes
        network, axes = self._known[ranks]
        verb = "send" if sending.verb in (MESSAGE, RECEIVE) else sending.verb
        return network.collective(axes, verb, sending.payload_bytes)


@dataclass(frozen=True)
class Span:
    """A busy time of a lane, for the page."""

    lane: str
    label: str
    begin: float
    end: float


@dataclass
class StepTime:
    """The seconds of a step."""

    seconds: float = 0.0
    kernels: float = 0.0
    """Seconds of all kernels."""
    sending: float = 0.0
    """Seconds of all collectives and messages."""
    exposed: float = 0.0
    """Seconds in which streams wait for collectives."""
    host: float = 0.0
    """Seconds of the host's issuing."""
    spans: list[Span] = field(default_factory=list)


@dataclass
class _Lanes:
    """The clocks of one rank."""

    rank: int
    host: float = 0.0
    streams: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    groups: defaultdict[tuple[int, ...], float] = field(default_factory=lambda: defaultdict(float))
    events: dict[int, float] = field(default_factory=dict)
    done: dict[int, float] = field(default_factory=dict)
    expected: dict[int, int] = field(default_factory=dict)
    """Senders of receives, by the collective's number."""


Messages = defaultdict[tuple[int, int], deque[float]]
"""Arrivals of messages by sender and receiver."""


def step_times(
    programs: Mapping[int, Sequence[Entry]], names: Mapping[int, str], timer: Timer, network: GroupNetwork,
    cluster: Cluster,
) -> dict[int, StepTime]:  # fmt: skip
    """Return the seconds of a step for each recorded rank; ranks wait for each other's messages.

    Args:
        programs: Entries by rank.
        names: Paths of modules by number, for labels of rank 0's spans.
        timer: Times kernels.
        network: Times collectives.
        cluster: Gives the issue's seconds, the host link and the tax.
    """
    results = {rank: StepTime() for rank in programs}
    messages: Messages = defaultdict(deque)
    walks = {
        rank: _walk(entries, _Lanes(rank), results[rank], messages, set(programs), names, timer, network, cluster)
        for rank, entries in programs.items()
    }
    positions: dict[int, int] = {}
    while walks:
        before = dict(positions)
        for rank, walk in list(walks.items()):
            if (position := next(walk, None)) is None:
                del walks[rank]
                positions.pop(rank, None)
            else:
                positions[rank] = position
        if walks and positions == before:
            raise ConfigError.of("ranks", sorted(walks), "wait for messages that no recorded rank sends", "all stages")
    return results


def _walk(
    entries: Sequence[Entry], lanes: _Lanes, time: StepTime, messages: Messages, recorded: set[int],
    names: Mapping[int, str], timer: Timer, network: GroupNetwork, cluster: Cluster,
) -> Iterator[int]:  # fmt: skip
    """Play a rank's entries. Yields the position of an entry whose message has not been sent yet."""
    device = cluster.device
    issue = device.issue_seconds
    for position, entry in enumerate(entries):
        event, stream = entry.event, entry.stream
        if isinstance(event, Kernel | Copy):
            lanes.host += issue
            if isinstance(event, Kernel):
                seconds = event.times * timer.kernel_seconds(event)
                time.kernels += seconds
            else:
                seconds = event.payload_bytes / device.host_link_bytes_per_second
            begin = max(lanes.streams[stream], lanes.host)
            lanes.streams[stream] = begin + seconds
            label = f"{entry.phase} {names.get(entry.module, '')}"
            _span(time, f"stream {stream}", label, begin, begin + seconds)
        elif isinstance(event, Collective):
            lanes.host += issue
            sending = event.sending
            begin = max(lanes.groups[sending.ranks], lanes.streams[stream], lanes.host)
            seconds = network.seconds(sending, lanes.rank)
            time.sending += seconds
            if sending.verb == RECEIVE and sending.root in recorded:
                lanes.expected[event.number] = sending.root
                continue
            # A message that is sent holds up no later receive: batched messages run at once.
            lanes.groups[sending.ranks] = begin + seconds * (sending.verb != MESSAGE)
            lanes.done[event.number] = begin + seconds
            if sending.verb == MESSAGE and sending.root is not None:
                messages[lanes.rank, sending.root].append(begin + seconds)
            _span(time, "sends", f"{sending.verb} of {len(sending.ranks)}", begin, begin + seconds)
        elif event.kind == "record":
            lanes.events[event.number] = lanes.streams[stream]
        elif event.kind == "host":
            lanes.host = max([lanes.host, *lanes.streams.values()])
        else:
            if event.number in lanes.expected and event.kind == "wait":
                queue = messages[lanes.expected.pop(event.number), lanes.rank]
                while not queue:
                    yield position
                lanes.done[event.number] = queue.popleft()
            known = lanes.done if event.kind == "wait" else lanes.events
            until = max(lanes.streams[stream], known.get(event.number, 0.0))
            time.exposed += (until - lanes.streams[stream]) * (stream == 0 and event.kind == "wait")
            lanes.streams[stream] = until
    hidden = max(0.0, time.sending - time.exposed)
    time.host = lanes.host
    ends = [lanes.host, *lanes.streams.values(), *lanes.groups.values()]
    time.seconds = max(ends) + slowed(hidden, cluster.links["torch"].tax)


MOST_SPANS = 20000
"""The most spans that are kept of a rank."""


def _span(time: StepTime, lane: str, label: str, begin: float, end: float) -> None:
    """Keep a busy time; one that continues the last span of the lane with an equal label lengthens that span."""
    last = time.spans[-1] if time.spans else None
    if last is not None and (last.lane, last.label) == (lane, label):
        time.spans[-1] = Span(lane, label, last.begin, end)
    elif len(time.spans) < MOST_SPANS:
        time.spans.append(Span(lane, label, begin, end))
