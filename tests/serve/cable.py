"""A cable between two hosts: packets come late, in another order, or not at all.

    python -m tests.serve.cable 5 6

5 and 6 are descriptors of TUN devices: what one host sends is read from its device, and written to the device of the
other. Above that, everything is the kernel's: TCP notices losses, sends again, and slows down.

A line of input sets how the cable is from now on, {"seconds": 0.02, "loss": 0.01}; an empty one sets nothing. The
answer is a line with the number of packets that were lost so far. The end of the input is the end of the cable.
"""

import heapq
import json
import os
import random
import selectors
import sys
import time
from dataclasses import dataclass

PACKET_BYTES = 1500
LONGEST_QUEUE = 200
"""How many packets wait for a slow cable; more are lost, as in a switch."""


@dataclass(frozen=True, kw_only=True)
class Quality:
    """How a cable is, in both directions."""

    seconds: float = 0.0
    """How long a packet is under way."""
    jitter_seconds: float = 0.0
    """By how much that may be more or less."""
    loss: float = 0.0
    """The share of packets that never arrive."""
    bytes_per_second: float | None = None
    """None is as fast as this machine."""


PERFECT = Quality()
CUT = Quality(loss=1.0)


class Cable:
    def __init__(self, one: int, other: int) -> None:
        self.lost = 0
        self._other_end = {one: other, other: one}
        self._under_way: list[tuple[float, int, int, bytes]] = []
        """When each packet arrives, its number, where it arrives, and the packet."""
        self._random = random.Random(1)
        self._packets = 0
        self.become(PERFECT)

    def become(self, quality: Quality) -> None:
        """What is under way is lost, as when netem is changed: it must not hold up what comes after."""
        self.quality = quality
        self.lost += len(self._under_way)
        self._under_way.clear()
        self._waiting = dict.fromkeys(self._other_end, 0)
        self._free_at = dict.fromkeys(self._other_end, 0.0)
        """When the last packet from a device will have left it."""

    def accept(self, device: int) -> None:
        """Take all that a host has sent."""
        while (packet := _read(device)) is not None:
            self._packets += 1
            is_lost = self._random.random() < self.quality.loss
            if is_lost or self._waiting[device] >= LONGEST_QUEUE:
                self.lost += 1
                continue
            self._waiting[device] += 1
            arrival = self._arrival(device, len(packet))
            heapq.heappush(self._under_way, (arrival, self._packets, self._other_end[device], packet))

    def _arrival(self, device: int, count: int) -> float:
        quality = self.quality
        leaves = max(time.monotonic(), self._free_at[device])
        if quality.bytes_per_second is not None:
            leaves += count / quality.bytes_per_second
        self._free_at[device] = leaves
        jitter = self._random.uniform(-1, 1) * quality.jitter_seconds
        return leaves + max(0.0, quality.seconds + jitter)

    def deliver(self) -> float | None:
        """Hand over what has arrived; returns how long it takes until the next packet arrives."""
        now = time.monotonic()
        while self._under_way and self._under_way[0][0] <= now:
            _, _, device, packet = heapq.heappop(self._under_way)
            self._waiting[self._other_end[device]] -= 1
            os.write(device, packet)
        return max(0.0, self._under_way[0][0] - now) if self._under_way else None


def _read(device: int) -> bytes | None:
    try:
        return os.read(device, PACKET_BYTES)
    except BlockingIOError:
        return None


def main() -> None:
    one, other = (int(argument) for argument in sys.argv[1:])
    cable, selector = Cable(one, other), selectors.DefaultSelector()
    for descriptor in (one, other, sys.stdin.fileno()):
        selector.register(descriptor, selectors.EVENT_READ)
    while True:
        seconds = cable.deliver()
        for key, _ in selector.select(seconds):
            if key.fd in (one, other):
                cable.accept(key.fd)
            elif line := sys.stdin.readline():
                if settings := line.strip():
                    cable.become(Quality(**json.loads(settings)))
                print(cable.lost, flush=True)
            else:
                return


if __name__ == "__main__":
    main()
