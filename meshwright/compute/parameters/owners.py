"""Owners of matrices: under zero1 and zero2 an optimizer that steps whole matrices has each on one rank.

A reduce sums the gradient of a bucket's segment to its owner, which steps the segment and broadcasts the new values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshwright.compute.parameters.bucket import BucketKey

Segments = tuple[int, ...]
"""By rank, the first element of the segment that the rank owns; then the end of the last segment."""

DealtOver = Callable[[tuple[str, ...]], int]
"""dealt_over(axes): the number of ranks that share out the matrices of a bucket that is summed over these axes."""


def dealt(
    groups: Sequence[tuple[BucketKey, list[str]]], elements: Mapping[str, int], dealt_over: DealtOver
) -> list[tuple[BucketKey, list[str]]]:
    """Give each matrix of the groups an owner among the ranks that sum the matrix, with balanced loads.

    The matrices of a bucket are dealt out from the largest to the smallest, each to the rank with the fewest elements
    so far. In the bucket the matrices of an owner are neighbours.
    """
    loads: dict[tuple[str, ...], list[int]] = {}
    result = []
    for key, names in groups:
        if key.rule.by != "matrices":
            result.append((key, names))
            continue
        load = loads.setdefault(key.sum_axes, [0] * dealt_over(key.sum_axes))
        owned: list[list[str]] = [[] for _ in load]
        for name in sorted(names, key=lambda name: -elements[name]):
            owner = load.index(min(load))
            owned[owner].append(name)
            load[owner] += elements[name]
        ends = accumulate((sum(elements[name] for name in matrices) for matrices in owned), initial=0)
        result.append((replace(key, segments=tuple(ends)), [name for matrices in owned for name in matrices]))
    return result


def owners(segments: Segments) -> Iterator[tuple[int, int, int]]:
    """Yield each rank that owns a segment, with the segment's first element and its end.

    Ranks are numbered among the ranks that sum the bucket.
    """
    for owner, (start, stop) in enumerate(pairwise(segments)):
        if start < stop:
            yield owner, start, stop
