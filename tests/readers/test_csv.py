"""CSV: quotes and newlines as Python's csv module reads them, and bad records named."""

import csv as python_csv
import gzip
import io
import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.errors import FieldError, FormatError, HeadraceError, SettingsError
from headrace.format.fields import parse_fields
from headrace.readers import csv, quotes
from headrace.readers.raw_file import LocalRawFile
from headrace.readers.reader import ReadOptions
from tests.readers.places import byte_of, infer, place

PIECES = st.sampled_from(["a", "é", '"', '""', ",", "\n", "\r\n", "x,y", '"q"', ',"', '",', " ", "\t", "1"])
RAW = st.lists(PIECES, max_size=40).map("".join)
CELLS = st.lists(st.sampled_from(["a", "é", '"', ",", "\n", "\r\n", " ", "null", "NA", ""]), max_size=5).map(
    "".join
)
ROWS = st.lists(st.tuples(CELLS, CELLS, CELLS), max_size=12)
SIZES = {"target_bytes": st.integers(1, 60), "block_bytes": st.integers(1, 60)}


def written(rows, **dialect) -> bytes:
    text = io.StringIO(newline="")
    python_csv.writer(text, **dialect).writerows(rows)
    return text.getvalue().encode()


@given(rows=ROWS, quoting=st.sampled_from([0, 1]), end=st.sampled_from(["\n", "\r\n"]), **SIZES)
def test_texts_are_what_was_written(gather, write, rows, quoting, end, target_bytes, block_bytes):
    content = written([("id", "text", "more"), *rows], quoting=quoting, lineterminator=end)
    got = gather(write("a.csv", content), target_bytes, text_field="text", block_bytes=block_bytes)
    assert got.columns.get("text", []) == [row[1].encode() for row in rows]
    assert got.bad == []
    assert got.input_bytes == len(content)
    zipped = gather(write("a.csv.gz", gzip.compress(content, 1)), text_field="text", block_bytes=block_bytes)
    assert zipped.columns.get("text", []) == [row[1].encode() for row in rows]
    assert zipped.where == got.where
    for where, row in zip(got.where, rows, strict=True):
        record = next(python_csv.reader(io.StringIO(content[byte_of(where) :].decode(), newline="")))
        assert record == list(row)


@given(raw=RAW, **SIZES)
@example(raw='a,5" disk\nb,"c\nd"\n', target_bytes=5, block_bytes=5)
@example(raw='"a"x""y,b\nc,"d\n"\n', target_bytes=5, block_bytes=5)
@example(raw='a,"b\nc,d\n', target_bytes=5, block_bytes=5)
def test_any_bytes_are_read_as_python_reads_them(gather, write, raw, target_bytes, block_bytes):
    content = "l,r\n" + raw
    rows = [row for row in python_csv.reader(io.StringIO(content, newline="")) if row][1:]
    scanner = quotes.QuoteScanner(b",")
    scanner.advance(np.frombuffer(content.encode(), dtype=np.uint8))
    if scanner.inside:
        rows.pop()  # an open quote swallows the rest of the file, which we report
    got = gather(write("b.csv", content.encode()), target_bytes, text_field="r", block_bytes=block_bytes)
    assert got.columns.get("r", []) == [row[1].encode() for row in rows if len(row) == 2]
    assert len(got.bad) == sum(len(row) != 2 for row in rows) + scanner.inside


@given(RAW, st.lists(st.integers(1, 7), min_size=1))
def test_the_quote_scanner_does_not_depend_on_the_pieces(raw, steps):
    content = np.frombuffer(raw.encode(), dtype=np.uint8)
    whole = quotes.QuoteScanner(b",").outside_newlines(content).tolist()
    scanner, found, position = quotes.QuoteScanner(b","), [], 0
    while position < len(content):
        for step in steps:
            found += (scanner.outside_newlines(content[position : position + step]) + position).tolist()
            position += step
    assert found == whole


def test_large_files_are_cut_outside_quotes(gather, write, monkeypatch):
    monkeypatch.setattr(quotes, "_SCAN_BYTES", 1000)
    rows = [(str(n), "line\n" * (n % 7) + '"', "x" * (n % 50)) for n in range(2000)]
    content = written([("n", "text", "x"), *rows])
    path = write("c.csv", content)
    ranges = csv.plan(LocalRawFile(path), 5000, ReadOptions(text_field="text"))
    assert len(ranges) > 10
    assert all(5000 <= stop - start < 5200 for start, stop in ranges[:-1])
    got = gather(path, 5000, fields=parse_fields({"n": "int16", "text": "bytes"}), block_bytes=700)
    assert got.columns == {"n": list(range(2000)), "text": [row[1].encode() for row in rows]}
    assert max(block.input_bytes for block in got.blocks) < 2000


def test_fields_and_bad_records(gather, write):
    lines = [
        *(
            "i,f,b,s,u",
            "1,0.5,true,one,5",
            "2,,False,,255",
            "x,1,true,two,1",
            "3,1,maybe,three,1",
            "4.5,1,1,four,1",
        ),
        *(
            ",1,1,five,1",
            "5,1,0,six,256",
            "6,1,0,seven",
            "7,nan,0,eight,-1",
            "8,1e3,1,nine,9",
            "9,abc,1,ten,9",
        ),
    ]
    content = "\n".join(lines).encode()
    fields = parse_fields({"s": "bytes", "i": "int32", "f": "float32", "b": "bool", "u": "uint8"})
    got = gather(write("a.csv", content), fields=fields)
    assert got.columns["s"] == [b"one", b"", b"nine"]
    assert got.columns["i"] == [1, 2, 8]
    assert got.columns["b"] == [True, False, True]
    assert got.columns["u"] == [5, 255, 9]
    assert got.columns["f"][0] == 0.5
    assert math.isnan(got.columns["f"][1])
    assert [block.columns["f"].dtype for block in got.blocks] == [np.dtype("float32")]
    positions = {line: place(content, content.index(line.encode())) for line in lines}
    reasons = dict(got.bad)
    assert reasons.pop(positions["x,1,true,two,1"]) == "'i' holds 'x', which is not int64"
    assert reasons.pop(positions["3,1,maybe,three,1"]) == "'b' holds 'maybe', which is not bool"
    assert reasons.pop(positions["4.5,1,1,four,1"]) == (
        "'i' holds 4.5, a float where int64 is expected; if the column holds floats, "
        "choose float64 for it with columns="
    )
    assert reasons.pop(positions[",1,1,five,1"]).startswith("'i' is empty; only a float can be missing")
    assert reasons.pop(positions["5,1,0,six,256"]) == "'u' holds 256, which is not uint8"
    assert reasons.pop(positions["6,1,0,seven"]) == "4 values, but the header names 5 columns"
    assert reasons.pop(positions["7,nan,0,eight,-1"]) == "'u' holds -1, which is not uint8"
    assert reasons.pop(positions["9,abc,1,ten,9"]) == "'f' holds 'abc', which is not double"
    assert reasons == {}


def test_what_happens_to_a_record_does_not_depend_on_its_neighbours(gather, write):
    good = [f"{n},t{n}" for n in range(100)]
    lines = ["i,t", *good[:37], "bad,x", *good[37:80], "1,2,3", *good[80:]]
    got = gather(write("a.csv", "\n".join(lines).encode()), fields=parse_fields({"i": "int64", "t": "bytes"}))
    assert got.columns["i"] == list(range(100))
    assert len(got.bad) == 2


def test_text_that_is_not_utf8_is_bad_but_bytes_may_be_anything(gather, write):
    path = write("a.csv", b"t,u\nfine,\xff\n\xff,2\n")
    assert gather(path, text_field="t").columns == {"t": [b"fine"]}
    assert gather(path, text_field="t").bad[0][0] == "line 3, byte 11"
    assert gather(path, fields=parse_fields({"t": "bytes"})).columns == {"t": [b"fine", b"\xff"]}


def test_tabs_and_byte_order_mark(gather, write):
    content = b'\xef\xbb\xbf"a, b"\ttext\n1\tx,y\n'
    for path in (write("a.tsv", content), write("a.tsv.gz", gzip.compress(content))):
        assert gather(path, text_field="text").columns == {"text": [b"x,y"]}
        assert gather(path, text_field="a, b").columns == {"a, b": [b"1"]}
        assert {name: field.notation for name, field in infer(path).items()} == {
            "a, b": "int64",
            "text": "bytes",
        }


def test_a_quote_that_is_never_closed_is_told(gather, write):
    got = gather(write("a.csv", b't\none\n"two\nthree\n'), text_field="t")
    assert got.columns == {"t": [b"one"]}
    assert got.bad == [
        (
            "line 3, byte 6",
            "a quote is opened but never closed; everything up to the end of the file is left out",
        )
    ]


def test_missing_and_doubled_columns(gather, write):
    path = write("a.csv", b"a,b,b\n1,2,3\n")
    with pytest.raises(FieldError, match="no column 'c'; the columns are: a, b, b.*text_field=NAME"):
        gather(path, text_field="c")
    with pytest.raises(FieldError, match="several columns are named 'b'"):
        gather(path, fields=parse_fields({"b": "int64"}))
    assert gather(path, fields=parse_fields({"a": "int64"})).columns == {"a": [1]}
    with pytest.raises(FieldError, match="one value for each record"):
        gather(path, fields=parse_fields({"a": "int64[*]"}))


def test_infer(write):
    content = b"i,f,b,s,d,n,h\n1,1,true,x,2020-01-01,,1\n2,0.5,false,,2020-01-02,,x\n3,4\n"
    notations = {name: field.notation for name, field in infer(write("a.csv", content)).items()}
    assert notations == {
        "i": "int64",
        "f": "float64",
        "b": "bool",
        "s": "bytes",
        "d": "bytes",
        "n": "bytes",
        "h": "bytes",
    }
    assert [field.notation for field in infer(write("h.csv", b"a,b\n")).values()] == ["bytes", "bytes"]


def test_infer_passes_over_bad_records(write):
    content = b'i,s\n1,x\n\xff\n2,y,z\n3,"\xff"\n"4'
    assert [field.notation for field in infer(write("a.csv", content)).values()] == ["int64", "bytes"]
    assert [field.notation for field in infer(write("a.csv", b'i,"s')).values()] == ["bytes", "bytes"]
    with pytest.raises(SettingsError, match="several columns are named 'a'"):
        infer(write("a.csv", b"a,a\n1,2\n"))


@pytest.mark.parametrize("block_bytes", [1, 1000])
def test_a_byte_order_mark_in_the_middle_is_text(gather, write, block_bytes):
    path = write("a.csv", b"t,u\na,1\n\xef\xbb\xbfb,2\nc,3\n")
    assert gather(path, text_field="t", block_bytes=block_bytes).columns["t"] == [
        b"a",
        b"\xef\xbb\xbfb",
        b"c",
    ]


def test_a_carriage_return_in_the_header_or_a_record_is_told(gather, write):
    with pytest.raises(FormatError, match="contains a carriage return"):
        infer(write("a.csv", b"a\rb\n1\n"))
    got = gather(write("a.csv", b"a\n1\r2\n3\n"), text_field="a")
    assert got.columns == {"a": [b"3"]}
    assert got.bad == [("line 2, byte 2", "a carriage return without a newline, outside quotes")]


def test_empty_files(gather, write):
    for content in (b"", b"\n\r\n", b"t\n", b"t"):
        assert gather(write("a.csv", content), text_field="t").where == []
    with pytest.raises(HeadraceError, match="fields cannot be inferred"):
        infer(write("a.csv", b""))


def test_a_header_that_is_not_utf8_is_told(write):
    with pytest.raises(FormatError, match="the header row cannot be read"):
        infer(write("a.csv", b"\xff,b\n1,2\n"))
