"""A task's program for a microbatch of any size, from recordings of it at two sizes.

The operations do not depend on the microbatch's size; the flops, bytes, elements and payload of each are those of its
samples plus those of its weights, which two recordings tell apart. So are the repetitions of one that goes through
samples in pieces. A product's side grows as the cube root of its flops. Where two recordings differ in more than that,
nothing is known.
"""

from __future__ import annotations

from meshwright.tools.plan.recorder import Event, Kernel, Program, Start


def interpolated_program(small: Program, large: Program, share: float) -> Program:
    """The program at `share` of the way from the small one to the large one, or beyond; empty where they differ."""
    if len(small.events) != len(large.events):
        return Program()
    events = []
    for one, other in zip(small.events, large.events, strict=True):
        event = _interpolated_event(one, other, share)
        if event is None:
            return Program()
        events.append(event)
    return Program(tuple(events))


def _interpolated_event(one: Event, other: Event, share: float) -> Event | None:
    """None for events of two kinds."""

    def between(small: float, large: float) -> float:
        return max(0.0, small + share * (large - small))

    if type(one) is not type(other):
        return None
    if isinstance(one, Kernel) and isinstance(other, Kernel):
        if (one.kind, one.dtype) != (other.kind, other.dtype):
            return None
        return Kernel(
            one.kind,
            between(one.flops, other.flops),
            round(between(one.touched_bytes, other.touched_bytes)),
            round(between(one.elements, other.elements)),
            one.dtype,
            between(one.side**3, other.side**3) ** (1 / 3),
            max(1, round(between(one.times, other.times))),
        )
    if isinstance(one, Start) and isinstance(other, Start):
        if (one.axes, one.verb) != (other.axes, other.verb):
            return None
        payload = round(between(one.payload_bytes, other.payload_bytes))
        return Start(one.number, one.axes, one.verb, payload, one.root, max(1, round(between(one.times, other.times))))
    return one
