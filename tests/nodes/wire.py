"""A long and lossy cable: `python wire.py A B DELAY_SECONDS LOSS` joins two TAP devices, with the delay and loss of
netem.

Some kernels lack netem. Frames wait here in order of arrival, each for the delay, and a share is lost, by a generator
of a fixed seed.
"""

from __future__ import annotations

import fcntl
import os
import random
import select
import struct
import sys
import time
from collections import deque
from contextlib import suppress

_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
_LARGEST_FRAME = 65536


def open_tap(name: str) -> int:
    """Make the TAP device, which ends with this process."""
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return tap


def carry(ends: tuple[int, int], delay: float, loss: float) -> None:
    """Move frames between both ends, until killed."""
    chance = random.Random(1)
    under_way: deque[tuple[float, int, bytes]] = deque()
    while True:
        patience = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        readable, _, _ = select.select(ends, [], [], patience)
        for end in readable:
            frame = os.read(end, _LARGEST_FRAME)
            if chance.random() >= loss:
                under_way.append((time.monotonic() + delay, ends[1 - ends.index(end)], frame))
        while under_way and under_way[0][0] <= time.monotonic():
            _, end, frame = under_way.popleft()
            with suppress(OSError):  # the device is not up yet
                os.write(end, frame)


if __name__ == "__main__":
    carry((open_tap(sys.argv[1]), open_tap(sys.argv[2])), float(sys.argv[3]), float(sys.argv[4]))
