"""How many servers a step needs: measured as far as there are servers, and beyond that estimated.

2 servers make 160 batches a second, and a step of 4 ms takes 250 of them:    about 4 servers
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

from headrace.measure.running.run import Run
from headrace.measure.running.server_figures import in_flight, servers_in, serving_times_of
from headrace.observe.serving import ServingTimes
from headrace.observe.stats import is_waiting


@dataclass(frozen=True, kw_only=True)
class ServedTrial:
    """What servers did while one setting was measured."""

    servers: int
    """Those that were there at the end."""
    slots: int
    """How many batches they can make at once, all together."""
    in_flight: int
    """How many batches were asked for ahead."""
    batches_per_second: float
    step_seconds: float
    """Of a step alone; 0 if there was none."""
    times: ServingTimes

    @property
    def is_saturated(self) -> bool:
        """Whether the servers had all the requests that they can work on at once."""
        return self.in_flight >= self.slots

    @property
    def each_per_second(self) -> float:
        """How many batches a server can make in a second."""
        if self.is_saturated or not self.times.made:
            return self.batches_per_second / self.servers
        return self.slots / self.times.made / self.servers

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "times": self.times._asdict()}


@dataclass(frozen=True, kw_only=True)
class ServersNeeded:
    """For a step that does not wait."""

    count: int | None
    """None if it cannot be told, or if no number of servers would do."""
    is_estimate: bool
    said: str


def served_trial(run: Run) -> ServedTrial | None:
    """None if servers have made no batches in this run."""
    up = [each for each in servers_in(run).values() if each.state == "up"]
    times = serving_times_of(run)
    if not up or times is None or not run.batches_per_second:
        return None
    return ServedTrial(
        servers=len(up),
        slots=sum(each.slots for each in up),
        in_flight=in_flight(run) or 0,
        batches_per_second=run.batches_per_second,
        step_seconds=run.compute_seconds / run.batches,
        times=times,
    )


def servers_needed(
    trial: ServedTrial, wait_share: float, fewer: tuple[int, float] | None = None
) -> ServersNeeded:
    """Judged by the best settings that were found. `fewer` servers were tried as well: how many, and how much the loop
    waited then."""
    if not trial.step_seconds:
        said = "how many servers are needed depends on the step; give one"
        return ServersNeeded(count=None, is_estimate=False, said=said)
    there = _servers(trial.servers)
    if not is_waiting(wait_share):
        verb = "is" if trial.servers == 1 else "are"
        step = f"a step of {_ms(trial.step_seconds)}"
        said = f"{there} {verb} enough for {step}, which then waits {wait_share:.0%} of the time"
        if fewer is not None:
            said += f"; with {_servers(fewer[0])} it waits {fewer[1]:.0%}"
        return ServersNeeded(count=trial.servers, is_estimate=False, said=said)
    if not trial.times.is_mostly_servers:
        return ServersNeeded(count=None, is_estimate=False, said=_why_others_would_not_help(trial.times))
    needed = 1 / trial.step_seconds
    each = trial.each_per_second
    count = max(trial.servers + 1, math.ceil(needed / each))
    made = f"{_ms(trial.times.made)} to make one, {_at_once(trial)}"
    said = (
        f"about {_servers(count)} like these would be needed for a step of {_ms(trial.step_seconds)} without waiting. "
        f"This is an estimate: a server makes {each:,.1f} batches a second ({made}), and the step takes {needed:,.1f}; "
        f"{there} could be measured"
    )
    return ServersNeeded(count=count, is_estimate=True, said=said)


def _why_others_would_not_help(times: ServingTimes) -> str:
    where = (
        f"a batch spends {_ms(times.network)} on its way and {_ms(times.on_servers)} on a server"
        if times.is_mostly_network
        else f"a batch takes {_ms(times.here)} in the process of the loop, and {_ms(times.on_servers)} on a server"
    )
    return f"more servers would hardly help: {where}"


def _at_once(trial: ServedTrial) -> str:
    slots = trial.slots / trial.servers
    return f"{slots:.3g} at once"


def _servers(count: int) -> str:
    return "1 server" if count == 1 else f"{count} servers"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f} ms"
