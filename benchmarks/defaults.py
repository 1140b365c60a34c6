"""What do the defaults cost, in speed and in processor time?

asking    a loop that does nothing but ask: the default beside `prefetch=0`, which makes each batch in the loop,
          and beside one and two threads
stepping  the same with a pause of 2 ms a step, as if an accelerator computed
tensors   the PyTorch Loader beside the plain one; each field is used as a trainer uses it, once a batch
fields    seven fields made for everyone, beside only what the loop uses, found out by the Loader itself
functions a function of 4 ms on every batch that waits, computes without the interpreter's lock, or holds it: the
          default beside given numbers of threads
late      one batch in ten takes 20 ms to make, with a copy to a device one batch ahead: how long the steps of 5 ms wait

Candidates take turns in short turns, round after round, and are compared by the median of the ratios within a round.
"""

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from limit import limit_copy, map_tokens
from loading import ALL_FIELDS, document_lengths
from machine import arguments, describe, print_table, ratio, spread, write_results

from headrace import Loader, Ragged, Writer

BATCH_SIZE, SEQ_LEN = 32, 2048
CASES: dict[str, dict[str, Any]] = {
    "windows, tokens": {"packing": "windows", "fields": ("tokens",)},
    "packed, tokens": {"packing": "best-fit", "fields": ("tokens",)},
    "packed, tokens and labels": {"packing": "best-fit", "fields": ("tokens", "labels")},
    "packed, all fields": {"packing": "best-fit", "fields": ALL_FIELDS},
}
STEP_SECONDS = 0.002
FUNCTION_SECONDS = 0.004


@dataclass(frozen=True)
class Cost:
    """Of one turn: seconds of the clock, and of the processor, for each batch."""

    seconds: float
    cpu: float


class Candidate:
    """A loop that can be taken up again and again."""

    def __init__(self, batches: Iterator[Any], fields: tuple[str, ...] = (), step: float = 0.0) -> None:
        self._batches, self._fields, self._step = batches, fields, step

    def turn(self, seconds: float) -> Cost:
        count, cpu, begun = 0, time.process_time(), time.perf_counter()
        while (passed := time.perf_counter() - begun) < seconds:
            for _ in range(8):
                batch = next(self._batches)
                for name in self._fields:
                    batch[name]
                if self._step:
                    time.sleep(self._step)
            count += 8
        return Cost(passed / count, (time.process_time() - cpu) / count)

    def close(self) -> None:
        getattr(self._batches, "close", lambda: None)()


def main() -> None:
    parser = arguments(__doc__ or "", "defaults")
    parser.add_argument("--tokens", type=int, help="tokens of the dataset (50 million)")
    parser.add_argument("--rounds", type=int, help="rounds (15)")
    parser.add_argument("--seconds", type=float, help="length of a turn (0.3)")
    parser.add_argument("--only", choices=("asking", "stepping", "tensors", "fields", "functions", "late"))
    options = parser.parse_args()
    tokens = options.tokens or (400_000 if options.quick else 50_000_000)
    rounds = options.rounds or (1 if options.quick else 15)
    seconds = options.seconds or (0.005 if options.quick else 0.3)
    turns = Turns(rounds, seconds)
    threads = (2,) if options.quick else (2, 4, 8)
    body: dict[str, Any] = {"machine": describe(), "tokens": tokens, "rounds": rounds, "seconds": seconds}
    with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
        data = write_data(Path(folder), tokens)
        questions: dict[str, Callable[[], Any]] = {
            "asking": lambda: asking(data, turns, step=0.0),
            "stepping": lambda: asking(data, turns, step=STEP_SECONDS),
            "tensors": lambda: tensors(data, turns),
            "fields": lambda: used_fields(data, turns),
            "functions": lambda: functions(data, turns, threads),
            "late": lambda: late(turns),
        }
        for name, ask in questions.items():
            if options.only in (None, name):
                body[name] = ask()
    body["targets"] = {
        "asking and stepping, default to prefetch=0": "speed at least 0.95, processor time at most 1.3",
        "tensors to arrays": "at least 0.95",
    }
    write_results(options, "defaults", body)


def write_data(folder: Path, tokens: int) -> Path:
    lengths, random = document_lengths(tokens, 500), np.random.default_rng(1)
    with Writer(folder / "data", {"tokens": "uint16[*]"}, shard_bytes=1) as writer:
        for part in np.array_split(lengths, 8):
            offsets = np.concatenate([[0], np.cumsum(part)])
            values = random.integers(0, 2**16, offsets[-1], dtype=np.uint16)
            writer.write_columns({"tokens": Ragged(values, offsets)})
            with open(folder / "tokens.bin", "ab") as flat:
                values.tofile(flat)
    return folder / "data"


class Turns:
    def __init__(self, rounds: int, seconds: float) -> None:
        self.rounds, self.seconds = rounds, seconds

    def take(self, title: str, candidates: Mapping[str, Callable[[], Candidate]]) -> dict[str, Any]:
        """Speed and processor time of all, to the first of them."""
        with contextlib.ExitStack() as stack:
            begun = {
                name: stack.enter_context(contextlib.closing(start())) for name, start in candidates.items()
            }
            for candidate in begun.values():
                candidate.turn(self.seconds / 3)
            costs: dict[str, list[Cost]] = {name: [] for name in begun}
            for turn in range(self.rounds):
                names = list(begun)
                for name in names[turn % len(names) :] + names[: turn % len(names)]:
                    _wait_until_idle()
                    costs[name].append(begun[name].turn(self.seconds))
        first = next(iter(costs.values()))
        found = {name: _compared(each, first) for name, each in costs.items()}
        header = ["", "us a batch", "us of processor", "speed to the first", "processor to the first"]
        rows = [
            [name, *(1e6 * each[unit]["median"] for unit in ("seconds", "cpu_seconds")), *_medians(each)]
            for name, each in found.items()
        ]
        print_table(title, header, rows)
        return found


def _wait_until_idle() -> None:
    """The threads of the candidate before still fill their buffers, and would do it in the next one's turn."""
    deadline = time.monotonic() + 2.0
    busy = True
    while busy and time.monotonic() < deadline:
        before = time.process_time()
        time.sleep(0.005)
        busy = time.process_time() - before > 0.001


def _compared(costs: list[Cost], first: list[Cost]) -> dict[str, Any]:
    return {
        "seconds": spread([cost.seconds for cost in costs]),
        "cpu_seconds": spread([cost.cpu for cost in costs]),
        "speed_to_first": ratio([cost.seconds for cost in first], [cost.seconds for cost in costs]),
        "cpu_to_first": ratio([cost.cpu for cost in costs], [cost.cpu for cost in first]),
    }


def _medians(found: Mapping[str, Any]) -> list[float]:
    return [found["speed_to_first"]["median"], found["cpu_to_first"]["median"]]


def asking(data: Path, turns: Turns, step: float) -> dict[str, Any]:
    found = {}
    for case, settings in CASES.items():
        starts = {
            "prefetch=0": {"prefetch": 0},
            "default": {},
            "workers=1": {"workers": 1},
            "workers=2": {"workers": 2},
        }
        title = f"{case}, {f'steps of {1e3 * step:g} ms' if step else 'nothing but asking'}"
        found[case] = turns.take(
            title,
            {name: _starter(Loader, data, step, {**settings, **more}) for name, more in starts.items()}
            | (
                {"limit: a plain copy": lambda: _limit(data)}
                if case == "windows, tokens" and not step
                else {}
            ),
        )
    return found


def _limit(data: Path) -> Candidate:
    copy = limit_copy(map_tokens(data.parent / "tokens.bin"), "int64", seq_len=SEQ_LEN)
    return Candidate(iter(copy, None))


def _starter(
    kind: Any, data: Path, step: float, settings: Mapping[str, Any], used: tuple[str, ...] | None = None
) -> Callable[[], Candidate]:
    fields = settings.get("fields") if used is None else used

    def start() -> Candidate:
        loader = kind(data, batch_size=BATCH_SIZE, seq_len=SEQ_LEN, epochs=None, **settings)
        return Candidate(iter(loader), fields or (), step)

    return start


def tensors(data: Path, turns: Turns) -> dict[str, Any]:
    try:
        import torch

        import headrace.torch
    except ImportError:
        print("left out: torch is not installed")
        return {}
    torch.set_num_threads(1)
    found = {}
    for case, settings in CASES.items():
        kinds = {"arrays": Loader, "tensors": headrace.torch.Loader}
        found[case] = turns.take(
            f"{case}, as arrays and as tensors",
            {name: _starter(kind, data, 0.0, settings) for name, kind in kinds.items()},
        )
    return found


def used_fields(data: Path, turns: Turns) -> dict[str, Any]:
    found = {}
    for used in (("tokens",), ("tokens", "labels"), ALL_FIELDS):
        told = {"packing": "best-fit", "fields": ALL_FIELDS}
        found_out = {"packing": "best-fit"}
        asked = {"packing": "best-fit", "fields": used}
        found[", ".join(used)] = turns.take(
            f"the loop uses {', '.join(used)}",
            {
                "all seven are made": _starter(Loader, data, 0.0, told, used),
                "default: found out": _starter(Loader, data, 0.0, found_out, used),
                "fields= says which": _starter(Loader, data, 0.0, asked, used),
            },
        )
    return found


def functions(data: Path, turns: Turns, threads: Sequence[int]) -> dict[str, Any]:
    found = {}
    for kind, work in WORK.items():
        candidates: dict[str, Callable[[], Candidate]] = {}
        for name, more in (("prefetch=0", {"prefetch": 0}), ("default", {}), ("workers=1", {"workers": 1})):
            candidates[name] = _mapped(data, turns, work, more)
        for workers in threads:
            candidates[f"workers={workers}"] = _mapped(data, turns, work, {"workers": workers})
        found[kind] = turns.take(f"a function that {kind}", candidates)
    return found


def _mapped(
    data: Path, turns: "Turns", work: Callable[..., Any], settings: Mapping[str, Any]
) -> Callable[[], Candidate]:
    def start() -> Candidate:
        loader = Loader(
            data, batch_size=BATCH_SIZE, seq_len=SEQ_LEN, fields=("tokens",), epochs=None, **settings
        ).map(work, per="batch")
        candidate = Candidate(iter(loader))
        # Time to find out how many threads help.
        candidate.turn(10 * turns.seconds)
        return candidate

    return start


def waits(columns: dict[str, Any]) -> dict[str, Any]:
    time.sleep(FUNCTION_SECONDS)
    return columns


def computes(columns: dict[str, Any]) -> dict[str, Any]:
    np.sort(columns["tokens"][:16], axis=None)
    return columns


def holds_the_lock(columns: dict[str, Any]) -> dict[str, Any]:
    sum(number * number for number in range(50_000))
    return columns


WORK = {"waits": waits, "computes without the lock": computes, "holds the lock": holds_the_lock}


def late(turns: Turns) -> dict[str, Any]:
    """Steps of 5 ms on a simulated device, beside a loader whose every tenth batch takes 20 ms to make."""
    try:
        from headrace.torch.device import CopyAhead
    except ImportError:
        print("left out: torch is not installed")
        return {}

    class Host:
        """Batches that are made ahead by one thread, two of them; every tenth late."""

        def __init__(self) -> None:
            def make(number: int) -> dict[str, Any]:
                time.sleep(0.020 if number % 10 == 9 else 0.001)
                return {"x": np.full(8, number)}

            from headrace.workers.prefetch import Prefetch

            self._made = Prefetch(make, count=None, depth=2, threads=1, timeout_seconds=60, stage="benchmark")

        def __next__(self) -> dict[str, Any]:
            return dict(next(self._made))

        def is_ready(self) -> bool:
            return self._made.is_ready()

        def close(self) -> None:
            self._made.close()

    class WaitsForTheNext(Host):
        """As a copy ahead that insists on the batch after the one that is due."""

        def is_ready(self) -> bool:
            return True

    kinds = {"copies ahead what is ready": Host, "waits for the batch after the one due": WaitsForTheNext}
    waited: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(turns.rounds):
        for name, kind in kinds.items():
            waited[name].append(_mean_wait(CopyAhead(kind(), _NoDevice()), steps=40))
    print_table(
        "one batch in ten late: how long a step waits on average",
        ["", "ms"],
        [[name, 1e3 * statistics.median(seconds)] for name, seconds in waited.items()],
    )
    return {"mean_wait_seconds": {name: spread(seconds) for name, seconds in waited.items()}}


def _mean_wait(batches: Any, steps: int) -> float:
    next(batches)
    waited = 0.0
    for _ in range(steps):
        time.sleep(0.005)
        begun = time.perf_counter()
        next(batches)
        waited += time.perf_counter() - begun
    batches.close()
    return waited / steps


class _NoDevice:
    """Streams of a device that copies at once."""

    def allocate(self, count: int) -> Any:
        return np.empty(count, dtype=np.uint8)

    def pin(self, tensor: Any) -> Any:
        return tensor

    def beside(self) -> Any:
        return contextlib.nullcontext()

    def copy(self, tensor: Any) -> Any:
        return tensor.clone()

    def mark(self) -> Any:
        return _Done()

    def wait(self, event: Any) -> None:
        pass

    def keep(self, tensor: Any) -> None:
        pass


class _Done:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
