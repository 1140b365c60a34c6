"""How many servers there should be, by how much their clients wait. Pure: no clock, no Ray.

    seconds    servers   clients wait   workers are busy
       0..5          1           50 %              100 %    2 would do: servers deliver half of what is wanted
       9..14         2            0 %               95 %    stays: one would not be enough
     300..360        2            0 %               20 %    1: there was room for all of the work on one for a minute

Waiting is what servers are there to prevent, so they become more within seconds, and as many as the share of waiting
says. They become fewer one at a time, after a long rest, and only if the others will not be full with what it did.
"""

import math
from collections import deque
from dataclasses import dataclass

from headrace.checks import whole_number
from headrace.errors import SettingsError


@dataclass(frozen=True, kw_only=True)
class Autoscale:
    """Between how many servers, and when they become more or fewer."""

    least: int
    most: int
    grow_share: float = 0.08
    """More servers, if the client that waits most waits more than this share of its time,"""
    grow_seconds: float = 5.0
    """for so long,"""
    grow_busy: float = 0.5
    """and workers are busy for this share of their time at least: otherwise others would not help."""
    shrink_share: float = 0.01
    """Fewer servers, if no client waits more than this share of its time,"""
    shrink_seconds: float = 60.0
    """for so long,"""
    shrink_busy: float = 0.6
    """and the workers that stay would be busy for this share of their time at most."""

    def __post_init__(self) -> None:
        whole_number("autoscale: MIN", self.least, 1)
        whole_number("autoscale: MAX", self.most, 1)
        if self.most < self.least:
            raise SettingsError(f"autoscale={self.least}:{self.most}: MAX must be at least MIN")


def parse_autoscale(text: str) -> Autoscale:
    """'1:8' -> between 1 and 8 servers."""
    least, colon, most = text.partition(":")
    if not colon or not least.isdecimal() or not most.isdecimal():
        raise SettingsError(f"autoscale={text!r}: must be MIN:MAX, such as 1:8")
    return Autoscale(least=int(least), most=int(most))


@dataclass(frozen=True)
class Seen:
    """What the servers have said at one time."""

    ready: int
    """How many of them answer."""
    waited: float
    """The share of its time in which the client that waits most has waited lately."""
    busy: float
    """The share of their workers that make a batch."""


class Autoscaler:
    def __init__(self, settings: Autoscale, wanted: int) -> None:
        self._settings = settings
        self.wanted = min(max(wanted, settings.least), settings.most)
        self._looks: deque[tuple[float, Seen]] = deque()
        """What was seen since the number of servers changed, as far back as it matters."""

    def decide(self, now: float, seen: Seen) -> int:
        """How many servers there should be, given what is seen at a time in seconds."""
        settings = self._settings
        if self._looks and self._looks[-1][1].ready != seen.ready:
            # What clients met with other servers says nothing about these.
            self._looks.clear()
        self._looks.append((now, seen))
        longest = max(settings.grow_seconds, settings.shrink_seconds)
        while len(self._looks) > 1 and now - self._looks[1][0] >= longest:
            self._looks.popleft()
        wanted = self._more(now, seen) or self._fewer(now, seen) or self.wanted
        if wanted != self.wanted:
            self.wanted = wanted
            self._looks.clear()
        return self.wanted

    def _more(self, now: float, seen: Seen) -> int | None:
        settings = self._settings
        if not self.wanted <= seen.ready or self.wanted >= settings.most:
            # Those that were asked for may not have started yet.
            return None
        means = self._means(now, settings.grow_seconds)
        if means is None or means.waited <= settings.grow_share or means.busy < settings.grow_busy:
            return None
        # A client that waits half of its time would take twice as many batches.
        enough = math.ceil(self.wanted / max(0.5, 1 - means.waited))
        return min(max(enough, self.wanted + 1), settings.most)

    def _fewer(self, now: float, seen: Seen) -> int | None:
        settings = self._settings
        if not seen.ready or self.wanted <= settings.least:
            return None
        means = self._means(now, settings.shrink_seconds)
        if means is None or means.waited > settings.shrink_share:
            return None
        staying = min(seen.ready, self.wanted - 1)
        fits = means.busy * seen.ready <= settings.shrink_busy * staying
        return self.wanted - 1 if fits else None

    def _means(self, now: float, seconds: float) -> Seen | None:
        """What was seen on average in the last seconds, or None if nothing was seen for so long yet."""
        begin = now - seconds
        if self._looks[0][0] > begin:
            return None
        lately = [seen for at, seen in self._looks if at >= begin]
        waited = sum(seen.waited for seen in lately) / len(lately)
        busy = sum(seen.busy for seen in lately) / len(lately)
        return Seen(lately[-1].ready, waited, busy)
