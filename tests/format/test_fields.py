import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import FormatError, SettingsError
from headrace.format.fields import DTYPES, Field, FieldKind, parse_fields

SHAPES = st.lists(st.integers(0, 9), max_size=5).map(tuple)
FIELDS = st.one_of(
    st.builds(Field, st.sampled_from(["fixed", "ragged"]), st.sampled_from(DTYPES), SHAPES),
    st.just(Field(FieldKind.BYTES, "uint8")),
)


@given(FIELDS)
def test_notation_and_json_are_inverse(field):
    assert Field.parse(field.notation) == field
    assert Field.from_json(field.to_json()) == field
    assert Field.parse(field) is field


@pytest.mark.parametrize(
    ("notation", "kind", "dtype", "shape"),
    [
        ("int64", "fixed", "int64", ()),
        ("float32[3, 32,32]", "fixed", "float32", (3, 32, 32)),
        ("uint16[*]", "ragged", "uint16", ()),
        ("float32[*,80]", "ragged", "float32", (80,)),
        ("bool[0]", "fixed", "bool", (0,)),
        (" bytes ", "bytes", "uint8", ()),
        (np.dtype("float16"), "fixed", "float16", ()),
    ],
)
def test_notations(notation, kind, dtype, shape):
    field = Field.parse(notation)
    assert (field.kind, field.dtype, field.shape) == (kind, dtype, shape)
    assert field.variable == (kind != "fixed")
    assert field.numpy_dtype.str[0] in "<|"


@pytest.mark.parametrize(
    ("notation", "message"),
    [
        ("float", "must be one of bool, int8"),
        ("float32[3", "write it like"),
        ("float32[3,*]", "only the first may be"),
        ("float32[3,,4]", "sizes must be whole numbers"),
        ("float32[-1]", "sizes must be whole numbers"),
        ("float32[1.5]", "sizes must be whole numbers"),
        ("float32[٣]", "sizes must be whole numbers"),
        ("int8[" + "9" * 5000 + "]", "sizes must be whole numbers"),
        ("int8[999999999999999]", "each of size 0 to"),
        ("int8[" + ",".join("1" * 17) + "]", "at most 16 dimensions"),
        ("int8[4294967296,4294967296]", "more than 2\\^48 bytes"),
        ("int8[4294967296,4294967296,0]", "more than 2\\^48 bytes"),
        ("", "write it like"),
        (None, "write it like"),
        (5, "must be one of"),
    ],
)
def test_bad_notations_are_refused(notation, message):
    with pytest.raises(SettingsError, match=message):
        Field.parse(notation)


@pytest.mark.parametrize(
    "arguments",
    [
        ("other", "int8"),
        (None, "int8"),
        ("fixed", np.dtype("int8")),
        ("fixed", ["int8"]),
        ("fixed", "int8", (True,)),
        ("fixed", "int8", (1.0,)),
        ("fixed", "int8", (-1,)),
        ("bytes", "int8"),
        ("bytes", "uint8", (3,)),
    ],
)
def test_bad_fields_are_refused(arguments):
    with pytest.raises(SettingsError):
        Field(*arguments)


def test_a_field_takes_a_list_as_shape():
    assert Field("fixed", "int8", [2, 3]) == Field(FieldKind.FIXED, "int8", (2, 3))


@pytest.mark.parametrize(
    "value",
    [
        *(None, 3, "int8", [], {}, {"kind": "fixed", "dtype": "int8"}),
        {"kind": "fixed", "dtype": "int8", "shape": 3},
        {"kind": "fixed", "dtype": "int8", "shape": [True]},
        {"kind": "fixed", "dtype": "int8", "shape": [2**62, 2**62]},
        {"kind": ["fixed"], "dtype": "int8", "shape": []},
        {"kind": "fixed", "dtype": ["int8"], "shape": []},
        {"kind": "fixed", "dtype": "int8", "shape": [], "codec": "zstd"},
    ],
)
def test_damaged_descriptions_are_format_errors(value):
    with pytest.raises(FormatError, match="damaged field description"):
        Field.from_json(value)


def test_names_are_free_within_reason():
    names = ["x", "with space", "größe", "日本", "a.b-c", "x" * 255]
    assert list(parse_fields(dict.fromkeys(names, "int8"))) == names
    for name in ("", "a/b", "a\nb", "\x00", "\x7f", "\ud800", "x" * 256, 3, None):
        with pytest.raises(SettingsError, match="field name"):
            parse_fields({name: "int8"})
    for fields in ({}, None, ["x"]):
        with pytest.raises(SettingsError, match="at least one field"):
            parse_fields(fields)
