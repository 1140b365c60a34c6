"""A Writer that fails at a chosen point and goes on: a program for tests of what it then holds.

A fault is a kind and a moment. "full" fails the so-manieth change to the disk as a full disk does, and some changes
after it; "memory" fails it for want of memory; "interrupt" raises a KeyboardInterrupt before the so-manieth
instruction of Headrace's code. One interpreter serves many faults; each happens in a fork of it.
"""

import errno
import json
import os
import random
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import headrace
import headrace.errors
import headrace.format.verify
import headrace.ingest.writer
from tests.ingest.deaths import call_at_changes, run_program
from tests.samples import kept_for_readers, named_in

SOURCE = str(Path(headrace.__file__).parent)
CHANGES_ON_A_FULL_DISK = 3
FIELDS = {"number": "int64", "tokens": "uint16[*]", "name": "bytes"}


def run(out: Path, kind: str, count: int, sequel: str) -> list[dict[str, Any]]:
    """For tests: one answer without a fault, and one for each of `count` faults, spread evenly over all moments."""
    return run_program("tests.ingest.faults", out, kind, count, sequel)


class Fault:
    def __init__(self, kind: str, moment: int) -> None:
        self.kind, self.moment, self.passed = kind, moment, 0
        self.hits = 0

    def at_change(self) -> None:
        if self.kind == "interrupt":
            return
        self.passed += 1
        length = CHANGES_ON_A_FULL_DISK if self.kind == "full" else 1
        if self.moment and self.moment <= self.passed < self.moment + length:
            self.hits += 1
            if self.kind == "memory":
                raise MemoryError
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def at_instruction(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(SOURCE):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            self.passed += 1
            if self.passed == self.moment:
                self.hits += 1
                raise KeyboardInterrupt
        return self.at_instruction

    @contextmanager
    def active(self) -> Iterator[None]:
        if self.kind == "interrupt":
            sys.settrace(self.at_instruction)
        try:
            yield
        finally:
            sys.settrace(None)


def record(number: int) -> dict[str, Any]:
    return {"number": number, "tokens": np.arange(number % 7), "name": f"record {number}"}


def columns(numbers: list[int]) -> dict[str, Any]:
    records = [record(number) for number in numbers]
    return {name: [each[name] for each in records] for name in FIELDS}


class Scenario:
    """Writes records in several ways. Whatever fails, `promised` is what the dataset must hold in the end."""

    def __init__(self, out: str, fault: Fault, sequel: str) -> None:
        self.out, self.fault, self.sequel = out, fault, sequel
        self.promised: list[int] = []
        self.writer: headrace.Writer | None = None
        self.attempts = 0

    def attempt(self, step: Callable[[], Any]) -> bool:
        """Whether a step was acknowledged."""
        self.attempts += 1
        assert self.attempts < 500, "nothing succeeds any more"
        try:
            with self.fault.active():
                step()
        except (OSError, MemoryError, KeyboardInterrupt):
            return False
        return True

    def open(self, resume: bool) -> headrace.Writer:
        def step() -> None:
            self.writer = headrace.Writer(self.out, fields=FIELDS, shard_bytes=300, resume=resume)

        self.writer = None
        while not self.attempt(step) or self.writer is None:
            resume = True
        return self.writer

    def add(self, numbers: list[int], way: str) -> None:
        writer = self.writer
        assert writer is not None
        steps = {
            "one": lambda: writer.write(record(numbers[0])),
            "many": lambda: writer.write([record(number) for number in numbers]),
            "columns": lambda: writer.write_columns(columns(numbers)),
        }
        acknowledged = self.attempt(steps[way])
        added = len(writer) - len(self.promised)
        # What was not acknowledged is there as a whole or not at all, and `len` says so.
        assert added == len(numbers) if acknowledged else added in (0, len(numbers)), added
        if added:
            self.promised += numbers
        if not acknowledged and self.sequel == "resume":
            self.resume()

    def resume(self) -> None:
        """Leave the writer as an error in its `with` block does, and go on with another."""
        assert self.writer is not None
        self.writer.__exit__(RuntimeError, RuntimeError(), None)
        writer = self.open(resume=True)
        safe = len(writer)
        assert safe <= len(self.promised)
        lost, self.promised = self.promised[safe:], self.promised[:safe]
        for number in lost:
            self.add([number], "one")

    def close(self) -> None:
        while not self.attempt(lambda: self.writer and self.writer.close()):
            if self.sequel == "resume" and not (Path(self.out) / "headrace.json").exists():
                self.resume()
            elif self.sequel == "go on":
                self.go_on_after_close()

    def go_on_after_close(self) -> None:
        number = 1000 + len(self.promised)
        try:
            self.add([number], "one")
        except headrace.errors.BuildError as error:
            assert "is closed" in str(error)

    def play(self) -> None:
        self.open(resume=False)
        number, draw = 0, random.Random(5)
        for _ in range(12):
            way = draw.choice(["one", "one", "many", "columns"])
            count = 1 if way == "one" else draw.randrange(1, 25)
            self.add(list(range(number, number + count)), way)
            number += count
        self.close()


def check(out: str, promised: list[int], may_stay: set[str]) -> None:
    dataset = headrace.open(out)
    assert [int(each["number"]) for each in dataset] == promised
    for each in dataset:
        assert each["tokens"].tolist() == list(range(int(each["number"]) % 7))
        assert each["name"] == f"record {each['number']}".encode()
    assert not [verdict for verdict in headrace.verify(out) if verdict.problem]
    left = {path.name for path in Path(out).iterdir()}
    belonging = named_in(Path(out) / "headrace.json") | kept_for_readers(Path(out))
    assert left - belonging - may_stay == {"headrace.json"}


def play_in_fork(out: str, kind: str, moment: int, sequel: str) -> dict[str, Any]:
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        with os.fdopen(writing, "w") as file:
            json.dump(play(out, Fault(kind, moment), sequel), file)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        answer: dict[str, Any] = json.load(file)
    os.waitpid(process, 0)
    return answer


def play(out: str, fault: Fault, sequel: str) -> dict[str, Any]:
    os.fsync = lambda _: None  # nobody pulls the plug here, and it takes most of the time
    if fault.kind != "interrupt":
        call_at_changes(fault.at_change)
    problem = ""
    try:
        scenario = Scenario(out, fault, sequel)
        scenario.play()
        # What could not be deleted either goes with the next writer.
        check(out, scenario.promised, {".lock", ".build"} if fault.kind == "full" else {".lock"})
    except BaseException:
        problem = traceback.format_exc()
    return {"moment": fault.moment, "moments": fault.passed, "hits": fault.hits, "problem": problem}


def main(out: str, kind: str, count: int, sequel: str) -> None:
    without = play_in_fork(f"{out}/without", kind, 0, sequel)
    print(json.dumps(without))
    for moment in sorted({1 + number * without["moments"] // count for number in range(count)}):
        print(json.dumps(play_in_fork(f"{out}/{moment}", kind, moment, sequel)))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
