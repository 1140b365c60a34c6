"""Rows filled by the compiled loop against NumPy, what it refuses, and what happens without it."""

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace.rows import reference
from tests.properties import examples
from tests.rows.compiled import compiled_kernel

compiled: Any = compiled_kernel()

PIECES = ("row", "length", "address", "type", "more")
OUTPUTS = ("tokens", "labels", "position_ids", "segment_ids", "loss_mask", "bounds")
ARGUMENTS = (
    *("rows", "seq_len", "first", "begin", "end"),
    *PIECES,
    *("shifted", "pad", "ignore"),
    *OUTPUTS,
)
GUARD = 16
IN_ROWS = st.integers(1, 12).flatmap(
    lambda seq_len: st.tuples(
        st.just(seq_len), st.lists(st.lists(st.integers(1, seq_len), max_size=4), max_size=5)
    )
)


def stored(rng: np.random.Generator, code: int, count: int, ignore: int) -> NDArray[Any]:
    """Tokens of any value, at an odd address."""
    dtype = np.dtype(reference.TYPES[code])
    memory = rng.integers(0, 256, count * dtype.itemsize + 1, dtype=np.uint8)
    array = memory[1:].view(dtype)
    if dtype.itemsize >= 4:
        # So that they fit into an int32 too; others are refused.
        array &= dtype.type(2**31 - 1)
    array[array.astype(np.int64) == ignore] = 7
    return array


def pieces_of(
    rng: np.random.Generator, seq_len: int, wanted: list[list[int]], ignore: int = -100
) -> tuple[dict[str, Any], list[Any]]:
    """The arguments of `fill` that describe pieces of such lengths, as far as they fit, and their memory."""
    row: list[int] = []
    length: list[int] = []
    for number, lengths in enumerate(wanted):
        room = seq_len
        for each in lengths:
            if each <= room:
                row, length, room = [*row, number], [*length, each], room - each
    codes = rng.integers(0, len(reference.TYPES), len(row))
    memory = [stored(rng, c, n + 1, ignore) for c, n in zip(codes.tolist(), length, strict=True)]
    return {
        "row": np.array(row, dtype=np.int64),
        "length": np.array(length, dtype=np.int64),
        "address": np.array([each.ctypes.data for each in memory], dtype=np.uint64),
        "type": codes.astype(np.uint8),
        "more": rng.integers(0, 2, len(row)).astype(bool),
    }, memory


def outputs_of(rows: int, seq_len: int, pieces: int, dtype: str, positions: str) -> dict[str, NDArray[Any]]:
    """Outputs in the middle of longer arrays, so that a write beyond them shows."""
    dtypes = {"position_ids": positions, "segment_ids": "int32", "loss_mask": "bool", "bounds": "int32"}
    whole = {}
    for name in OUTPUTS:
        count = pieces + rows + 1 if name == "bounds" else rows * seq_len
        whole[name] = np.full(count + 2 * GUARD, 1 if name == "loss_mask" else 99, dtypes.get(name, dtype))
    return whole


def inner(whole: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    return {name: array[GUARD : len(array) - GUARD] for name, array in whole.items()}


def call_fill(fill: Callable[..., tuple[int, int]], arguments: dict[str, Any]) -> tuple[int, int]:
    return fill(*(arguments[name] for name in ARGUMENTS))


@examples(100)
@given(
    IN_ROWS,
    st.sets(st.sampled_from(OUTPUTS)),
    st.booleans(),
    st.sampled_from(["int32", "int64"]),
    st.sampled_from(["int32", "int64"]),
    st.sampled_from([-100, -1, 3]),
    st.integers(0, 3),
    st.integers(0, 2**32),
)
def test_rows_are_filled_as_numpy_fills_them(
    case: tuple[int, list[list[int]]],
    missing: set[str],
    shifted: bool,
    dtype: str,
    positions: str,
    ignore: int,
    first: int,
    seed: int,
) -> None:
    seq_len, wanted = case
    rng = np.random.default_rng(seed)
    pieces, memory = pieces_of(rng, seq_len, wanted, ignore)
    # Pieces of other rows stand before and after those asked for.
    first = min(first, len(wanted))
    begin, end = (int(np.searchsorted(pieces["row"], row)) for row in (first, max(first, len(wanted) - 1)))
    rows = max(first, len(wanted) - 1) - first
    arguments = pieces | {"rows": rows, "seq_len": seq_len, "first": first, "begin": begin, "end": end}
    arguments |= {"shifted": shifted, "pad": 5, "ignore": ignore}
    made = []
    for fill in (compiled.fill, reference.fill):
        whole = outputs_of(rows, seq_len, end - begin, dtype, positions)
        given_ = {name: None if name in missing else array for name, array in inner(whole).items()}
        count, longest = call_fill(fill, arguments | given_)
        made.append((count, longest, whole))
    assert made[0][1] == made[1][1]
    for name in OUTPUTS:
        if name == "bounds" and name not in missing:
            assert made[0][0] == made[1][0]
            last = GUARD + made[0][0]
            assert made[0][2][name][:last].tolist() == made[1][2][name][:last].tolist()
            assert (made[0][2][name][-GUARD:] == 99).all()
        else:
            assert made[0][2][name].tolist() == made[1][2][name].tolist(), name
    del memory


@pytest.mark.parametrize(
    ("dtype", "token"), [("uint32", 2**31), ("uint64", 2**40), ("int64", 2**31), ("int64", -(2**31) - 1)]
)
@pytest.mark.parametrize("place", [0, 2])
def test_tokens_that_do_not_fit_are_refused_by_both(dtype: str, token: int, place: int) -> None:
    memory = np.array([5, 3, 5], dtype=dtype)
    memory[place] = token
    for fill in (compiled.fill, reference.fill):
        arguments = one_piece(memory)
        call_fill(fill, arguments)
        narrow = {name: arguments[name].astype(np.int32) for name in ("tokens", "labels")}
        with pytest.raises(OverflowError, match="int32"):
            call_fill(fill, arguments | narrow)


def test_a_token_that_looks_like_the_ignored_label_counts_in_both() -> None:
    memory = np.array([5, 3, 5], dtype=np.int64)
    masks = []
    for fill in (compiled.fill, reference.fill):
        arguments = one_piece(memory)
        call_fill(fill, arguments | {"ignore": 3})
        masks.append(arguments["loss_mask"].tolist())
    assert masks[0] == masks[1]


def one_piece(memory: NDArray[Any], rows: int = 2, seq_len: int = 4) -> dict[str, Any]:
    """Arguments that are right: a piece of three tokens in the first of two rows."""
    code = reference.TYPES.index(memory.dtype.name)
    arguments: dict[str, Any] = {"rows": rows, "seq_len": seq_len, "first": 0, "begin": 0, "end": 1}
    arguments |= {
        "row": np.array([0], dtype=np.int64),
        "length": np.array([3], dtype=np.int64),
        "address": np.array([memory.ctypes.data], dtype=np.uint64),
        "type": np.array([code], dtype=np.uint8),
        "more": np.array([False]),
    }
    arguments |= {"shifted": True, "pad": 0, "ignore": -100}
    return arguments | inner(outputs_of(rows, seq_len, 1, "int64", "int64"))


def two_pieces(memory: NDArray[Any]) -> dict[str, Any]:
    arguments = one_piece(memory) | {"end": 2, "bounds": np.zeros(5, dtype=np.int32)}
    return arguments | {name: np.repeat(arguments[name], 2) for name in PIECES}


Edit = Callable[[dict[str, Any]], dict[str, Any]]


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    array = array.copy()
    array.setflags(write=False)
    return array


WRONG: dict[str, Edit] = {
    **{f"{name} longer": lambda a, n=name: {n: np.append(a[n], a[n])} for name in PIECES},  # type: ignore[misc]
    **{f"{name} empty": lambda a, n=name: {n: a[n][:0]} for name in PIECES},  # type: ignore[misc]
    **{f"{name} missing": lambda a, n=name: {n: None} for name in PIECES},  # type: ignore[misc]
    **{f"{name} of 16 bytes": lambda a, n=name: {n: a[n].astype("c16")} for name in PIECES},  # type: ignore[misc]
    "pieces with gaps": lambda a: {name: np.repeat(a[name], 4)[::2] for name in PIECES},
    **{f"{name} too short": lambda a, n=name: {n: a[n][:-1]} for name in OUTPUTS},  # type: ignore[misc]
    **{f"{name} read-only": lambda a, n=name: {n: _read_only(a[n])} for name in OUTPUTS},  # type: ignore[misc]
    **{f"{name} with gaps": lambda a, n=name: {n: np.repeat(a[n], 2)[::2]} for name in OUTPUTS},  # type: ignore[misc]
    **{f"{name} int16": lambda a, n=name: {n: a[n].astype("int16")} for name in OUTPUTS},  # type: ignore[misc]
    "tokens longer": lambda a: {"tokens": np.append(a["tokens"], 0)},
    "int32 tokens and int64 labels": lambda a: {"tokens": a["tokens"].astype("int32")},
    "segment_ids int64": lambda a: {"segment_ids": a["segment_ids"].astype("int64")},
    "no such row": lambda a: {"row": np.array([2])},
    "a row before the first": lambda a: {"first": 1},
    "a row below zero": lambda a: {"row": np.array([-1])},
    "a row far below zero": lambda a: {"row": np.array([-(2**63)]), "first": -(2**62)},
    "longer than its row": lambda a: {"length": np.array([5])},
    "far longer than its row": lambda a: {"length": np.array([2**62])},
    "no length": lambda a: {"length": np.array([0])},
    "length below zero": lambda a: {"length": np.array([-3])},
    "no such type": lambda a: {"type": np.array([8], dtype=np.uint8)},
    "begin below zero": lambda a: {"begin": -1},
    "end before begin": lambda a: {"begin": 1, "end": 0},
    "end beyond the pieces": lambda a: {"end": 2},
    "rows below zero": lambda a: {"rows": -1},
    "seq_len of zero": lambda a: {"seq_len": 0},
    "seq_len below zero": lambda a: {"seq_len": -4},
    "rows beyond memory": lambda a: {"rows": 2**62, "seq_len": 2**62},
    "more rows than arrays hold": lambda a: {"rows": 3},
}


@pytest.mark.parametrize("name", WRONG)
def test_arguments_that_do_not_fit_are_refused_and_nothing_beyond_is_written(name: str) -> None:
    memory = np.arange(4, dtype=np.uint16)
    whole = outputs_of(2, 4, 1, "int64", "int64")
    arguments = one_piece(memory) | inner(whole)
    call_fill(compiled.fill, arguments)
    with pytest.raises(ValueError):
        call_fill(compiled.fill, arguments | WRONG[name](arguments))
    for guarded in OUTPUTS:
        edge = 1 if guarded == "loss_mask" else 99
        assert (whole[guarded][:GUARD] == edge).all()
        assert (whole[guarded][-GUARD:] == edge).all()


@pytest.mark.parametrize(
    ("row", "length"),
    [([1, 0], [1, 1]), ([0, 0], [3, 2]), ([0, 2], [1, 1]), ([1, 1], [4, 1]), ([0, 0], [4, 2**63 - 1])],
)
def test_pieces_out_of_order_or_too_long_together_are_refused(row: list[int], length: list[int]) -> None:
    memory = np.arange(8, dtype=np.uint16)
    arguments = two_pieces(memory) | {"row": np.array(row), "length": np.array(length)}
    with pytest.raises(ValueError, match="out of order, empty, or longer"):
        call_fill(compiled.fill, arguments)


@pytest.mark.parametrize("name", ["row", "length"])
def test_numbers_with_a_fraction_are_no_rows_or_lengths(name: str) -> None:
    memory = np.arange(4, dtype=np.uint16)
    arguments = one_piece(memory)
    with pytest.raises(ValueError):
        call_fill(compiled.fill, arguments | {name: arguments[name].astype(np.float64)})


@pytest.mark.parametrize("name", ["tokens", "labels", "position_ids"])
def test_tokens_are_not_written_into_numbers_with_a_fraction(name: str) -> None:
    memory = np.arange(4, dtype=np.uint16)
    arguments = one_piece(memory)
    with pytest.raises(ValueError):
        call_fill(compiled.fill, arguments | {name: arguments[name].astype(np.float64)})


# Without the extension

LOADS = """
    import json, sys, logging
    {before}
    import numpy as np
    import headrace
    from headrace.rows import kernel
    rng = np.random.default_rng(0)
    documents = [rng.integers(1, 99, n).astype(np.uint16) for n in rng.integers(0, 40, 120)]
    data = headrace.from_arrays({{"tokens": documents}})
    digests = []
    for options in (
        dict(packing="best-fit"), dict(packing="windows"), dict(packing="windows", align_documents=True),
        dict(packing="pad", overlong="truncate"), dict(labels="unshifted", dtype="int32", cu_seqlens="row"),
    ):
        for batch in headrace.Loader(data, seq_len=16, batch_size=4, epochs=2, drop_last=False, **options):
            digests.append([np.asarray(batch[name]).tolist() for name in sorted(batch)])
    x = headrace.from_arrays({{"x": rng.random((9, 3)), "t": documents[:9]}})
    for batch in headrace.Loader(x, batch_size=4, fields=["x"]):
        digests.append(batch.x.tolist())
    print(json.dumps([kernel.COMPILED, digests]))
"""


def _load(before: str, environment: dict[str, str]) -> tuple[bool, list[Any], str]:
    script = textwrap.dedent(LOADS).format(before=before)
    done = subprocess.run(
        [sys.executable, "-c", script],
        check=True,
        capture_output=True,
        text=True,
        timeout=100,
        env=environment,
    )
    was_compiled, digests = json.loads(done.stdout)
    return was_compiled, digests, done.stderr


def test_without_the_extension_the_same_batches_come_with_a_warning(
    child_environment: dict[str, str],
) -> None:
    with_it = _load("", child_environment)
    without = _load("sys.modules['headrace.rows._kernel'] = None", child_environment)
    assert (with_it[0], without[0]) == (True, False)
    assert with_it[1] == without[1]
    assert len(with_it[1]) > 50
    assert with_it[2] == ""
    assert "without its compiled kernel" in without[2]
