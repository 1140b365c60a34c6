"""NumPy files, and numbers into dtypes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import FieldError, FormatError, HeadraceError, SettingsError
from headrace.format.fields import DTYPES, parse_fields
from headrace.readers import npy, numbers
from headrace.readers.formats import InputFormat
from headrace.readers.raw_file import LocalRawFile
from headrace.readers.reader import ReadOptions
from tests.readers.places import infer


@pytest.fixture
def save(tmp_path):
    def save_array(array):
        np.save(tmp_path / "a.npy", array)
        return tmp_path / "a.npy"

    return save_array


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [*((dtype, (7, 2, 3)) for dtype in DTYPES), ("int16", (7,)), ("int16", (0, 2))],
)
def test_all_dtypes_come_back(save, gather, dtype, shape):
    array = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    path = save(array)
    fields = infer(path)
    assert fields == parse_fields({"data": infer(path)["data"]})
    assert (fields["data"].dtype, fields["data"].shape) == (dtype, shape[1:])
    got = gather(path, 20, fields=fields, block_bytes=10)
    assert got.columns.get("data", []) == array.tolist()
    assert got.where == [f"row {row}" for row in range(len(array))]
    assert got.input_bytes == array.nbytes
    assert all(block.columns["data"].dtype == fields["data"].numpy_dtype for block in got.blocks)


def test_big_endian_is_converted(save, gather):
    path = save(np.arange(5, dtype=">i4"))
    got = gather(path, fields=infer(path))
    assert got.columns == {"data": [0, 1, 2, 3, 4]}
    assert got.blocks[0].columns["data"].dtype == np.dtype("<i4")


def test_a_structured_array_has_a_field_a_column(save, gather):
    array = np.zeros(4, dtype=[("x", "<f4", (2, 3)), ("label", ">u2"), ("flag", "?")])
    array["x"] = np.arange(24).reshape(4, 2, 3)
    array["label"] = [1, 2, 3, 4]
    path = save(array)
    fields = infer(path)
    assert {name: field.notation for name, field in fields.items()} == {
        "x": "float32[2,3]",
        "label": "uint16",
        "flag": "bool",
    }
    got = gather(path, 30, fields=fields)
    assert got.columns == {"x": array["x"].tolist(), "label": [1, 2, 3, 4], "flag": [False] * 4}
    assert gather(path, fields=parse_fields({"label": "int64"})).columns == {"label": [1, 2, 3, 4]}


@given(st.integers(0, 50), st.integers(1, 100), st.integers(1, 100))
def test_ranges_cover_the_rows(tmp_path_factory, gather, rows, target_bytes, block_bytes):
    path = tmp_path_factory.mktemp("rows") / "a.npy"
    np.save(path, np.arange(rows, dtype="<u2"))
    got = gather(path, target_bytes, fields=parse_fields({"data": "uint16"}), block_bytes=block_bytes)
    assert got.columns.get("data", []) == list(range(rows))
    assert all(len(block) <= max(1, block_bytes // 2) for block in got.blocks)


def test_values_that_do_not_convert_are_bad_records(save, gather):
    path = save(np.array([[1.0, 2.0], [1.5, 2.0], [3.0, np.nan], [4.0, 300.0], [5.0, 6.0]]))
    got = gather(path, fields=parse_fields({"data": "uint8[2]"}))
    assert got.columns == {"data": [[1, 2], [5, 6]]}
    assert got.where == ["row 0", "row 4"]
    assert got.bad == [
        ("row 1", "'data' holds 1.5, which is not uint8"),
        ("row 2", "'data' holds nan, which is not uint8"),
        ("row 3", "'data' holds 300.0, which is not uint8"),
    ]


@pytest.mark.parametrize(
    "settings", [{"data": "int64[3]"}, {"data": "int64[*]"}, {"data": "bytes"}, {"other": "int64"}]
)
def test_fields_that_are_not_there(save, gather, settings):
    with pytest.raises(FieldError, match="a.npy: .*columns="):
        gather(save(np.arange(4)), fields=parse_fields(settings))


def test_a_npy_file_holds_no_text_and_complex_numbers_stay_complex(save, gather):
    with pytest.raises(FieldError, match="holds numbers, not text"):
        gather(save(np.arange(4)), text_field="text")
    with pytest.raises(FieldError, match="complex128, which cannot become float64"):
        gather(save(np.arange(4) * 1j), fields=parse_fields({"data": "float64"}))


def test_fingerprints_follow_the_content_of_the_range(save):
    array = np.arange(40)
    first = [npy.fingerprint(LocalRawFile(save(array)), n, n + 10) for n in range(0, 40, 10)]
    array[25] = -1
    second = [npy.fingerprint(LocalRawFile(save(array)), n, n + 10) for n in range(0, 40, 10)]
    assert [a == b for a, b in zip(first, second, strict=True)] == [True, True, False, True]
    assert npy.fingerprint(LocalRawFile(save(array.view(np.uint64))), 0, 10) != first[0]
    structured = np.zeros((3, 2), dtype=[("a", "<i4"), ("b", "<f8", (2,))])
    raw = LocalRawFile(save(structured))
    assert npy.fingerprint(raw, 0, 3) != npy.fingerprint(raw, 0, 2)


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (np.asfortranarray(np.ones((3, 4))), "Fortran order.*ascontiguousarray"),
        (np.array(5), "a single number"),
        (np.array(["a", "b"]), "dtype <U1, which no field can hold"),
        (np.array(["2020-01-01"], dtype="datetime64[D]"), "which no field can hold"),
        (np.array([1, None], dtype=object), "Python objects"),
        (np.zeros(3, dtype=[("a", [("b", "<i4")])]), "'a' has dtype"),
    ],
)
def test_arrays_that_cannot_be_read_say_why(save, array, said):
    with pytest.raises(SettingsError, match=f"a.npy: .*{said}"):
        infer(save(array))


def test_damaged_files_are_told(save, tmp_path):
    content = save(np.arange(1000)).read_bytes()
    path = tmp_path / "bad.npy"
    header = content[:10] + content[10:128].replace(b"descr", b"\xff\xff(((")
    for damaged in (b"", content[:-1], content[:50], b"garbage" * 100, header + content[128:], content[:6]):
        path.write_bytes(damaged)
        with pytest.raises(FormatError, match="bad.npy: not a complete .npy file: .*copied completely"):
            npy.plan(LocalRawFile(path), 100, ReadOptions())
    np.savez(tmp_path / "z.npz", a=np.arange(3))
    path.write_bytes((tmp_path / "z.npz").read_bytes())
    with pytest.raises(FormatError, match=r"a zip of arrays \(.npz\)"):
        infer(path)
    with pytest.raises(HeadraceError, match="is a directory"):
        infer(tmp_path, InputFormat.NPY)


INTEGERS = [dtype for dtype in DTYPES if "int" in dtype]
EDGES = [
    0,
    1,
    -1,
    *(
        sign * 2**bits + step
        for bits in (7, 8, 15, 16, 31, 32, 63)
        for sign in (1, -1)
        for step in (-1, 0, 1)
    ),
]


@pytest.mark.parametrize("source", INTEGERS)
@pytest.mark.parametrize("target", [*INTEGERS, "bool"])
def test_whole_numbers_are_kept_or_marked(source, target):
    limits = np.iinfo(source)
    values = [value for value in [*EDGES, 2**64 - 1] if limits.min <= value <= limits.max]
    converted, bad = numbers.cast(np.array(values, dtype=source), np.dtype(target))
    bad = np.zeros(len(values), dtype=bool) if bad is None else bad
    for value, new, wrong in zip(values, converted.tolist(), bad.tolist(), strict=True):
        fits = value in (0, 1) if target == "bool" else np.iinfo(target).min <= value <= np.iinfo(target).max
        assert wrong != fits
        assert wrong or new == value


@pytest.mark.parametrize("target", INTEGERS)
@given(st.lists(st.floats() | st.sampled_from([float(edge) for edge in EDGES]), max_size=10))
def test_floats_become_whole_numbers_only_if_they_are(target, values):
    converted, bad = numbers.cast(np.array(values, dtype=np.float64), np.dtype(target))
    bad = np.zeros(len(values), dtype=bool) if bad is None else bad
    limits = np.iinfo(target)
    for value, new, wrong in zip(values, converted.tolist(), bad.tolist(), strict=True):
        fits = value.is_integer() and limits.min <= int(value) <= limits.max
        assert wrong != fits
        assert wrong or new == value


def test_floats_round_but_do_not_overflow():
    converted, bad = numbers.cast(np.array([0.1, 1e300, np.inf, np.nan]), np.dtype("float32"))
    assert converted[0] == np.float32(0.1)
    assert bad is not None
    assert bad.tolist() == [False, True, False, False]
