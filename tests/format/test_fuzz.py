"""Damaged and forged files end in a HeadraceError, a verdict of `verify`, or the right data. Nothing else.

The mutations run in a child process (this file, run as a program) whose address space is limited, so that an
allocation the size of a forged number fails, and a crash shows as an exit code.
"""

import copy
import json
import random
import resource
import shutil
import subprocess
import sys
import tempfile
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

ROOM_BYTES = 256 * 2**20
FIELDS = {"tokens": "uint16[*]", "x": "float32[2]", "b": "bytes", "none": "int8[0]"}
LENGTHS = [[3, 0, 3, 1], [1, 5], []]
HUGE = (2**31, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64, 10**300)
ODD = (
    *(-1, 0, 1, 2, 7, 64, 63, 1.5, 3.0, float("nan"), float("inf"), True, None, "", "x", "uint16", "shard"),
    *("../x", "/etc/passwd", "..", ".", "a/b", "headrace.json", "\ud800", "x" * 10_000, "\x00", "0" * 32),
    *([], {}, [[]], [[[[1]]]], [2**62, 2**62], [2**62, 2**62, 0], [2**32, 2**32], [0] * 40, [-1, -1], [1.0]),
    *({"file": "x"}, {"stored": {"file": "../x"}}, {"stored": 3}, [None], [{"name": "tokens"}]),
)


def main(groups: list[str], every: int) -> int:
    """Try one in `every` of the mutations of some groups."""
    import headrace
    from tests import conftest

    failures = 0
    with tempfile.TemporaryDirectory() as name:
        original, damaged = Path(name) / "original", Path(name) / "damaged"
        conftest.write_dataset_at(
            original, FIELDS, [[_record(n) for n in part] for part in LENGTHS], tokenizer={"name": "t"}
        )
        shutil.copytree(original, damaged)
        truth = _read(headrace, original)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + ROOM_BYTES, used + ROOM_BYTES))
        for group in groups:
            mutations = GROUPS[group](original, random.Random(1), conftest.reseal_at)
            for number, (what, apply) in enumerate(islice(mutations, 0, None, every)):
                for path in _files(original):
                    shutil.copyfile(path, damaged / path.name)
                apply(damaged)
                problem = _attempt(headrace, damaged, truth, in_memory=bool(number % 2))
                if problem:
                    failures += 1
                    print(f"{group}: {what[:300]}: {problem}")
    return 1 if failures else 0


def _record(length):
    return {
        "tokens": range(length),
        "x": [length, 0.5],
        "b": b"hello"[:length],
        "none": np.empty(0, np.int8),
    }


def _read(headrace, directory, in_memory=False):
    dataset = headrace.open(directory, in_memory=in_memory)
    numbers = range(min(len(dataset), 50))
    records = [
        {
            name: (value.tolist() if isinstance(value, np.ndarray) else value)
            for name, value in dataset[i].items()
        }
        for i in numbers
    ]
    batch = dataset[list(numbers)]
    histograms = [[part.tolist() for part in dataset.length_histogram(name)] for name in ("tokens", "b")]
    return [len(dataset), records, batch["tokens"].values.tolist(), histograms, dataset.lengths.tolist()]


def _attempt(headrace, directory, truth, in_memory):
    """Why the outcome is wrong, or nothing."""
    right = refused = False
    try:
        right = _read(headrace, directory, in_memory) == truth
    except headrace.HeadraceError as error:
        refused = True
        if not str(error) or len(str(error)) > 2000:
            return f"a message of {len(str(error))} characters"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    try:
        verdicts = list(headrace.verify(directory))
    except headrace.HeadraceError:
        return None
    except BaseException as error:
        return f"verify: {type(error).__name__}: {error}"
    files = [verdict.file for verdict in verdicts]
    if len(set(files)) != len(files):
        return f"files reported twice: {files}"
    if right or refused or any(verdict.problem for verdict in verdicts):
        return None
    return "wrong data, and nobody noticed"


def _files(original):
    """The manifest, the index and the first shard."""
    first = json.loads((original / "headrace.json").read_bytes())["shards"][0]["file"]
    return [original / "headrace.json", *original.glob("index-*"), original / first]


def _put(name, content, seal=None):
    def apply(directory):
        (directory / name).write_bytes(content)
        if seal:
            seal(directory)

    return apply


def truncations(original, randomness, seal):
    for path in _files(original):
        content = path.read_bytes()
        sealable = path.suffix == ".hdrc"
        for length in range(0, len(content), 8 if sealable else 1):
            yield f"{path.name} cut to {length}", _put(path.name, content[:length])
        if sealable:  # the same with everything that states a size put right
            for length in range(64, len(content), 8):
                cut = content[:16] + length.to_bytes(8, "little") + content[24:length]
                yield f"{path.name} cut to {length}, sealed", _put(path.name, cut, seal)


def flips(original, randomness, seal):
    for path in _files(original):
        for number in range(300):
            content = bytearray(path.read_bytes())
            sealed = path.suffix == ".hdrc" and randomness.random() < 0.6
            # Sealed records are just other records: there only the header can be wrong.
            end = 64 + int.from_bytes(content[12:16], "little") if sealed else len(content)
            for _ in range(randomness.choice([1, 1, 2, 8])):
                place = randomness.randrange(end)
                if number % 2:
                    content[place] ^= 1 << randomness.randrange(8)
                else:
                    content[place] = randomness.randrange(256)
            yield f"{path.name} flipped ({number})", _put(path.name, bytes(content), seal if sealed else None)


def headers(original, randomness, seal):
    """Mutations of the header's JSON, with every checksum put right."""
    for path in _files(original)[1:]:
        content = path.read_bytes()
        size = 64 + int.from_bytes(content[12:16], "little")
        for what, mutated in _mutations(json.loads(content[64:size]), randomness, 500):
            body = json.dumps(mutated).encode()
            room = max(size - 64, -(-len(body) // 64) * 64)
            head = content[:12] + room.to_bytes(4, "little")
            rest = content[size:]
            total = (64 + room + len(rest)).to_bytes(8, "little")
            yield (
                f"{path.name}: {what}",
                _put(path.name, head + total + bytes(40) + body.ljust(room) + rest, seal),
            )


def manifests(original, randomness, seal):
    body = json.loads((original / "headrace.json").read_bytes())
    for what, mutated in _mutations(body, randomness, 900):

        def edit(held, mutated=mutated):
            held.clear()
            held.update(mutated)

        yield f"manifest: {what}", lambda directory, edit=edit: seal(directory, edit)
    for raw in (
        b"[]",
        b"3",
        b"null",
        b'"x"',
        b"[" * 100_000,
        b"{}" * 3,
        b'{"records": ' + b"9" * 5000 + b"}",
    ):
        yield f"manifest: {raw[:20]!r}", _put("headrace.json", raw)


def contents(original, randomness, seal):
    """Numbers inside offsets, order, histograms and the index table, with every checksum put right."""
    for path in _files(original)[1:]:
        content = path.read_bytes()
        size = 64 + int.from_bytes(content[12:16], "little")
        for section in json.loads(content[64:size])["sections"]:
            width = np.dtype(section["dtype"]).itemsize
            for number in range(int(np.prod(section["shape"]))):
                place = section["offset"] + number * width
                old = int.from_bytes(content[place : place + width], "little")
                for new in (old + 1, old - 1, 0, 2 ** (8 * width) - 1, 2 ** (8 * width - 1), 1000):
                    raw = (new % 2 ** (8 * width)).to_bytes(width, "little")
                    changed = content[:place] + raw + content[place + width :]
                    if not _legal(section, changed):
                        what = f"{path.name}: {section['name']}[{number}] = {new}"
                        yield what, _put(path.name, changed, seal)


def _legal(section, content):
    """Other data, or offsets of a bytes field that still ascend, make another dataset, not a damaged one."""
    if section["name"] == "b/offsets":
        offsets = np.frombuffer(content, "<u8", section["shape"][0], section["offset"])
        return offsets[0] == 0 and offsets[-1] == sum(LENGTHS[0]) and (offsets[1:] >= offsets[:-1]).all()
    return section["name"].endswith("/data")


GROUPS = {
    group.__name__: group for group in (truncations, flips, headers, manifests, contents)
}  # each yields (what was done, a function that does it to a directory)


def _mutations(body, randomness, count):
    for _ in range(count):
        mutated = copy.deepcopy(body)
        what = [_mutate(mutated, randomness) for _ in range(randomness.choice([1, 1, 1, 2, 3]))]
        yield "; ".join(what), mutated


def _mutate(body, randomness):
    """Change one random place of a JSON value, in place."""
    places = list(_places(body))
    if not places:
        return "nothing left"
    holder, key = randomness.choice(places)
    action = randomness.choice(["replace", "replace", "replace", "nudge", "delete", "double", "swap"])
    if action == "delete":
        del holder[key]
    elif action == "double" and isinstance(holder, list):
        holder.append(copy.deepcopy(holder[key]))
    elif action == "swap" and isinstance(holder, list):
        holder.reverse()
    elif action == "nudge" and type(holder[key]) is int:
        holder[key] += randomness.choice([-64, -1, 1, 64])
    else:
        holder[key] = copy.deepcopy(randomness.choice([*HUGE, *(-number for number in HUGE), *ODD, *ODD]))
    return f"{action} {key!r}"


def _places(value):
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key])


@pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_AS and /proc")
@pytest.mark.parametrize(
    ("groups", "every"),
    [(list(GROUPS), 7), *(pytest.param([group], 1, marks=pytest.mark.soak) for group in GROUPS)],
)
def test_no_mutation_gets_through(groups, every, child_environment):
    ran = subprocess.run(
        [sys.executable, "-m", "tests.format.test_fuzz", json.dumps(groups), str(every)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        env=child_environment,
    )
    assert (ran.returncode, ran.stdout[-3000:], ran.stderr[-3000:]) == (0, "", "")


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1]), int(sys.argv[2])))
