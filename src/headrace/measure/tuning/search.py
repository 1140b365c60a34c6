"""The best setting for this machine and this step, by a short guided search.

    as given: num_workers=0                     80 samples/s, waits 70 %
    num_workers=1                              160            +100 %
    num_workers=2                              310             +94 %
    num_workers=4                              312              +1 %   -> stop adding workers
    worker_kind='thread', num_workers=2        305                     -> stay
    prefetch_factor=4                          311                     -> stay
    as given, then num_workers=2, again         81, 309        confirmed: 3.8 times

One setting is changed at a time, and only as long as it helps: workers (twice as many, or half as many if that does
not help), then threads or processes, then the prefetch depth, then the batch size. Between equally fast settings, the
one with fewer workers wins, so that repeated searches agree. Whatever is recommended has been measured again, in
turns with what was given, several times if the budget allows it. A search says why it ended: either no other setting is
likely to help, and the rest of the budget is not needed, or the budget does not allow for another try.

If servers make the batches, what is looked for is how many are in flight, and then the fewest servers with which the
loop is as fast; `servers.py` says how many the step needs.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.errors import SettingsError
from headrace.measure.running.knobs import KINDS, Knobs
from headrace.measure.tuning.servers import ServedTrial, ServersNeeded, servers_needed
from headrace.observe.host import allowed_cores

WORTH = 0.05
"""A smaller gain is treated as noise."""
_LITTLE_HEADROOM = 0.03
"""With less headroom than this, a loop is as fast as its step."""
_MOST_WORKERS = 64
_LARGEST_BATCH = 8
"""The largest batch size to try, as a multiple of the given one."""
_MOST_AHEAD = 64
_CONFIRMATIONS = 5
"""At most, as the budget allows; more would hardly tell more."""
_MUCH_LEFT_SHARE = 0.25
"""A search that leaves more of its budget than this says so."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One setting, measured once."""

    settings: Mapping[str, Any]
    """The settings that differ from the given ones."""
    rate: float | None
    """Samples per second; None if the trial failed."""
    wait_share: float | None = None
    headroom: float | None = None
    cpu_cores: float | None = None
    network: Mapping[str, float] = field(default_factory=dict)
    """What was fetched of remote data, as `headrace bench` names it; empty if all data is on this machine."""
    served: ServedTrial | None = None
    """What servers did, if they make the batches."""
    is_warm: bool = True
    """False if remote data was still arriving when batches began to be counted."""
    cost_seconds: float = 0.0
    error: str | None = None
    why: str = ""

    @property
    def name(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.settings.items()) or "as given"

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "served": None if self.served is None else self.served.to_json()}


@dataclass
class Tuning:
    """The result of a search. `recommended` is empty if the given settings should stay."""

    baseline: Trial
    trials: list[Trial] = field(default_factory=list)
    recommended: dict[str, Any] = field(default_factory=dict)
    gain: dict[str, float] | None = None
    """How many times as fast, over the confirmations; None if there was nothing to confirm."""
    why: list[str] = field(default_factory=list)
    """Why the recommended settings are better, or why the given ones should stay."""
    servers: ServersNeeded | None = None
    """How many servers the step needs, if servers make the batches."""
    ended: str = ""
    """Why the search ended."""
    seconds: float = 0.0
    interrupted: bool = False

    def to_json(self) -> dict[str, Any]:
        return {
            "recommended": self.recommended,
            "gain": self.gain,
            "why": self.why,
            "servers": None if self.servers is None else vars(self.servers),
            "ended": self.ended,
            "seconds": self.seconds,
            "interrupted": self.interrupted,
            "baseline": self.baseline.to_json(),
            "trials": [trial.to_json() for trial in self.trials],
        }


Measure = Callable[[Mapping[str, Any]], Trial]
"""Measures the target with some settings changed."""


class OutOfTime(Exception):
    """The budget does not allow for another trial and its confirmation."""


class Search:
    def __init__(
        self,
        measure: Measure,
        budget_seconds: float,
        tell: Callable[[Trial], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 0 < budget_seconds < float("inf"):
            raise SettingsError(f"budget={budget_seconds}: must be a positive, finite number of seconds")
        self._measure, self._tell, self._clock = measure, tell or (lambda trial: None), clock
        self._begun = clock()
        self._budget_seconds = budget_seconds
        self._deadline = self._begun + budget_seconds
        self._known: dict[str, Trial] = {}
        self._found: list[str] = []
        """What the changes so far have brought; it holds only if they are confirmed."""

    def run(self, baseline: Trial, knobs: Knobs) -> Tuning:
        """`baseline` is the first trial, with the given settings; measuring it has found the `knobs`."""
        self._knobs, self._now = knobs, dict(knobs.now or {})
        self._tuning = Tuning(baseline, [baseline])
        self._best = baseline
        self._known[_key({})] = baseline
        self._tell(baseline)
        if not baseline.rate:
            self._tuning.why.append(f"the given settings cannot be measured: {baseline.error}")
            return self._finished()
        try:
            is_complete = self._search_in_time()
            self._confirm()
            self._tuning.ended = self._why_it_ended() if is_complete else self._why_the_budget_ended_it()
        except KeyboardInterrupt:
            self._tuning.interrupted = True
            self._tuning.ended = "it was interrupted"
        return self._finished()

    @property
    def seconds_left(self) -> float:
        return self._deadline - self._clock()

    def _search_in_time(self) -> bool:
        """Whether the search came to its end before the budget did."""
        try:
            self._search()
        except OutOfTime:
            return False
        return True

    def _why_the_budget_ended_it(self) -> str:
        cost = statistics.median(trial.cost_seconds for trial in self._tuning.trials)
        return (
            f"a measurement takes {cost:.1f} s, and the budget does not allow for the three that another setting "
            "needs: one to try it, two to confirm it; a larger budget may find better settings"
        )

    def _why_it_ended(self) -> str:
        count = len(self._known)
        if not self._best.settings and self._is_at_ceiling:
            ended = "no other setting is likely to help"
        elif self._is_at_ceiling:
            ended = f"with {self._best.name}, {_hardly_faster(self._best)}"
        else:
            tried = "the given settings were" if count == 1 else f"{count} combinations of settings were"
            ended = f"{tried} measured, and no other is likely to help"
        left = self.seconds_left
        if left > _MUCH_LEFT_SHARE * self._budget_seconds:
            ended += f", so {left:.0f} s of the budget were not needed"
        return ended

    def _finished(self) -> Tuning:
        chosen = self._best if self._tuning.recommended else self._tuning.baseline
        if chosen.served is not None:
            fewer = self._tried_with_fewer_than(chosen.served.servers)
            self._tuning.servers = servers_needed(chosen.served, chosen.wait_share or 0.0, fewer)
        self._tuning.seconds = self._clock() - self._begun
        return self._tuning

    def _tried_with_fewer_than(self, servers: int) -> tuple[int, float] | None:
        """The largest number of servers below this that was measured, and how much the loop waited then."""
        tried = [
            (trial.served.servers, trial.wait_share)
            for trial in self._known.values()
            if trial.served is not None and trial.wait_share is not None and trial.served.servers < servers
        ]
        return max(tried, default=None)

    # The search

    def _search(self) -> None:
        looks = (self._look_at_workers, self._look_at_kinds, self._look_ahead, self._look_at_batches)
        for look in looks:
            if self._is_at_ceiling:
                break
            look()
        self._look_at_servers()

    @property
    def _is_at_ceiling(self) -> bool:
        """Whether a loader that costs nothing would hardly be faster than the best one so far.

        Each trial is judged by its own step: when the machine is busy, the step is slower than in another trial.
        """
        return self._best.headroom is not None and self._best.headroom < _LITTLE_HEADROOM

    def _look_at_workers(self) -> None:
        name = self._knobs.count
        if name is None:
            return
        given = self._setting(name)
        try:
            self._climb_workers(name)
        finally:
            found = self._setting(name)
            if (found or 0) > (given or 0):
                self._found.append(f"{name}={found} is faster than {_shown(given)}")
            elif found != given:
                self._found.append(f"{name}={found} is as fast as {_shown(given)}")

    def _climb_workers(self, name: str) -> None:
        given = int(self._setting(name) or 0)
        if not self._try_more_workers(name, given):
            self._try_fewer_workers(name, given)

    def _try_more_workers(self, name: str, given: int) -> bool:
        """Whether any larger number of workers was faster."""
        most = min(_MOST_WORKERS, max(4 * allowed_cores(), 2 * given))
        count, helped, misses_in_a_row = 2 * given or 1, False, 0
        # One number that does not help proves nothing: a single process may be no faster than none.
        while count <= most and misses_in_a_row < 2:
            if self._try({name: count}, "more workers"):
                helped, misses_in_a_row = True, 0
            else:
                misses_in_a_row += 1
            count *= 2
        return helped

    def _try_fewer_workers(self, name: str, given: int) -> None:
        """Fewer workers that are as fast are better: each one costs memory and takes CPU time from the step."""
        needs_a_worker = name == "workers" and self._knobs.kind is None
        least = 1 if needs_a_worker else 0
        count = given
        while count > least:
            count = max(least, count // 2)
            if not self._try({name: count}, "fewer workers", at_least=1 - WORTH / 2):
                break

    def _look_at_kinds(self) -> None:
        name, count = self._knobs.kind, self._knobs.count
        if name is None or count is None:
            return
        other = next(kind for kind in KINDS if kind != self._setting(name))
        workers = max(1, int(self._setting(count) or 0))
        # Also try more of them: with few workers, the two kinds may be equally fast.
        for many in (workers, 2 * workers):
            if self._try({name: other, count: many}, "threads" if other == "thread" else "processes"):
                self._found.append(f"{name}={other!r} is faster than {self._now.get(name)!r}")
                self._look_at_workers()
                return

    def _look_ahead(self) -> None:
        name, count = self._knobs.depth, self._knobs.count
        if name is None or (count is not None and not self._setting(count)):
            return
        depth = self._setting(name)
        if depth is None:
            # The loader has chosen it.
            served = self._best.served
            depth = 2 if served is None else served.in_flight
        depth = int(depth)
        try:
            while (depth := max(2, 2 * depth)) <= _MOST_AHEAD and self._try({name: depth}, "further ahead"):
                pass
        finally:
            if self._setting(name) != self._now.get(name):
                self._found.append(f"{name}={self._setting(name)} evens out slow batches")

    def _look_at_servers(self) -> None:
        """The fewest that are as fast: those that are left can work for others."""
        name = self._knobs.servers
        if name is None:
            return
        given = enough = int(self._setting(name))
        too_few = 0
        while enough - too_few > 1:
            count = (enough + too_few) // 2
            if self._try({name: count}, "fewer servers", at_least=1 - WORTH / 2):
                enough = count
            else:
                too_few = count
        if enough < given:
            self._found.append(f"{name}={enough} is as fast as {given}")

    def _look_at_batches(self) -> None:
        name = self._knobs.batch
        if name is None:
            return
        size, most = int(self._setting(name)), _LARGEST_BATCH * int(self._now[name])
        try:
            while (size := 2 * size) <= most and self._try({name: size}, "larger batches"):
                pass
        finally:
            if self._setting(name) != self._now[name]:
                self._found.append(
                    f"{name}={self._setting(name)} gives more samples per second, but it also changes the training"
                )

    def _setting(self, name: str) -> Any:
        return self._best.settings.get(name, self._now.get(name))

    def _try(self, changes: Mapping[str, Any], why: str, at_least: float = 1 + WORTH) -> bool:
        """Measure the best settings with these changes, and return whether the result is the new best."""
        settings = {**self._best.settings, **changes}
        settings = {name: value for name, value in settings.items() if value != self._now.get(name)}
        trial = self._known.get(_key(settings))
        if trial is None:
            # One trial, and the two measurements of a confirmation.
            if not self._time_for(3):
                raise OutOfTime
            trial = self._trial(settings, why)
        if trial.rate is None or trial.rate < at_least * (self._best.rate or 0.0):
            return False
        self._best = trial
        return True

    def _trial(self, settings: Mapping[str, Any], why: str) -> Trial:
        measured = self._measure(settings)
        trial = Trial(**{**vars(measured), "settings": dict(settings), "why": why})
        self._known[_key(settings)] = trial
        self._tuning.trials.append(trial)
        self._tell(trial)
        return trial

    def _time_for(self, trials: int) -> bool:
        costs = [trial.cost_seconds for trial in self._tuning.trials]
        return self._clock() + trials * statistics.median(costs) <= self._deadline

    # The proof

    def _confirm(self) -> None:
        """Measure the given and the best settings again, in turns: only a gain that holds is recommended."""
        if not self._best.settings:
            self._tuning.why.append(self._why_nothing_was_found())
            return
        ratios = self._repeated_gains()
        if not ratios:
            return
        self._tuning.gain = {
            "median": statistics.median(ratios),
            "lowest": min(ratios),
            "highest": max(ratios),
        }
        self._recommend(self._tuning.gain, ratios)

    def _why_nothing_was_found(self) -> str:
        if self._is_at_ceiling:
            return _hardly_faster(self._best)
        if len(self._known) == 1:
            return "no other settings were measured"
        return "nothing that was measured is faster than the given settings"

    def _repeated_gains(self) -> list[float]:
        """How many times as fast the best settings were, in each confirmation; empty if one of them failed."""
        ratios: list[float] = []
        for number in range(_CONFIRMATIONS):
            if number and not self._time_for(2):
                break
            before = self._trial({}, "confirmation")
            after = self._trial(self._best.settings, "confirmation")
            if not before.rate or not after.rate:
                error = before.error or after.error
                self._tuning.why.append(f"{self._best.name} was not confirmed: {error}")
                return []
            ratios.append(after.rate / before.rate)
        return ratios

    def _recommend(self, gain: Mapping[str, float], ratios: Sequence[float]) -> None:
        best, tuning = self._best, self._tuning
        is_faster = gain["lowest"] > 1 and gain["median"] >= 1 + WORTH
        is_as_fast = gain["lowest"] >= 1 - WORTH
        if is_faster or (is_as_fast and self._is_cheaper(best)):
            tuning.recommended = dict(best.settings)
            tuning.why += self._found
        else:
            tuning.why.append(f"{best.name} was faster when it was tried, but {_compared(ratios)}")

    def _is_cheaper(self, trial: Trial) -> bool:
        name = self._knobs.count or self._knobs.servers
        if name is None or set(trial.settings) != {name}:
            return False
        return int(trial.settings[name]) < int(self._now.get(name) or 0)


def _key(settings: Mapping[str, Any]) -> str:
    return repr(sorted(settings.items(), key=lambda item: item[0]))


def _shown(count: int | None) -> str:
    return "the number that the loader chooses" if count is None else str(count)


def _hardly_faster(trial: Trial) -> str:
    reached = 1 - max(0.0, trial.headroom or 0.0)
    return (
        f"a loader that costs nothing would hardly be faster: the loop reaches {reached:.0%} of the speed of the step "
        "alone"
    )


def _compared(ratios: Sequence[float]) -> str:
    """What the confirmations of settings that are not recommended have shown."""
    faster = sum(ratio > 1 for ratio in ratios)
    if faster == len(ratios):
        gain = statistics.median(ratios) - 1
        return f"gained only {gain:.1%} when both were measured again, which may be chance"
    times = "once" if len(ratios) == 1 else f"{len(ratios)} times"
    won = {0: "not faster", 1: "faster only once"}.get(faster, f"faster only {faster} times")
    return f"{won} when both were measured again {times}"
