"""A reader written from docs/format.md alone, against datasets that Headrace wrote.

Nothing here comes from headrace but the writer (a fixture) that makes the files to read, and the size of its units.
"""

import json
import re
import struct
import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from headrace.format import units
from tests.properties import examples

PAGE = Path(__file__).parents[2] / "docs" / "format.md"


def demand(condition, what):
    if not condition:
        raise ValueError(what)


class Container:
    def __init__(self, directory, stored, kind):
        demand(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}", stored["file"]), "file name")
        self.raw = (directory / stored["file"]).read_bytes()
        demand(len(self.raw) == stored["bytes"], "size")
        demand(xxhash.xxh3_128_hexdigest(self.raw) == stored["checksum"], "checksum")
        head = self.raw[: stored["header_bytes"]]
        demand(xxhash.xxh3_64_hexdigest(head) == stored["header_checksum"], "header checksum")
        magic, version, header_bytes, total = struct.unpack_from("<8sIIQ", self.raw)
        demand((magic, version, total) == (b"HEADRACE", 1, len(self.raw)), "preamble")
        demand(header_bytes % 64 == 0 and 64 + header_bytes == stored["header_bytes"], "header size")
        demand(self.raw[24:64] == bytes(40), "reserved bytes")
        self.header = json.loads(head[64:])
        demand(self.header["kind"] == kind, "kind")
        self.sections = {}
        end = stored["header_bytes"]
        for section in self.header["sections"]:
            count = 1
            for size in section["shape"]:
                count *= size
            dtype = np.dtype(section["dtype"]).newbyteorder("<")
            offset = section["offset"]
            demand(offset % 64 == 0 and offset >= end, "section order")
            demand(self.raw[end:offset] == bytes(offset - end), "gap")
            end = offset + count * dtype.itemsize
            demand(end <= len(self.raw), "section in file")
            values = np.frombuffer(self.raw, dtype, count, offset)
            demand(section["name"] not in self.sections, "unique names")
            self.sections[section["name"]] = values.reshape(section["shape"])
        demand(self.raw[end:] == bytes(len(self.raw) - end), "bytes after the last section")
        self.offsets = {section["name"]: section["offset"] for section in self.header["sections"]}
        demand(list(self.sections)[-1] == "blocks", "blocks come last")
        covered = self.raw[: self.offsets["blocks"]]
        blocks = [covered[start : start + 16384] for start in range(0, len(covered), 16384)]
        demand(
            self.sections["blocks"].tolist() == [xxhash.xxh3_64_intdigest(each) for each in blocks], "blocks"
        )


class SpecReader:
    def __init__(self, directory):
        raw = (directory / "headrace.json").read_bytes()
        first, rest = raw.split(b"\n", 1)
        digest = re.fullmatch(rb'\{"checksum": "([0-9a-f]{32})",', first)[1].decode()
        demand(xxhash.xxh3_128_hexdigest(rest) == digest, "manifest checksum")
        self.manifest = json.loads(raw)
        demand((self.manifest["format"], self.manifest["version"]) == ("headrace", 1), "format and version")
        self.fields = {field["name"]: field for field in self.manifest["fields"]}
        self.shards = [Container(directory, entry, "shard") for entry in self.manifest["shards"]]
        self.index = Container(directory, self.manifest["index"], "index")
        (units,) = (entry for entry in self.manifest["further"] if entry["purpose"] == "units")
        self.units = Container(directory, units, "units")
        demand(int(self.units.sections["index/blocks"][0]) == self.index.offsets["blocks"], "index/blocks")
        check = xxhash.xxh3_64_intdigest(self.index.sections["blocks"].tobytes())
        demand(int(self.units.sections["index/check"][0]) == check, "index/check")
        for entry, shard in zip(self.manifest["shards"], self.shards, strict=True):
            demand(shard.header["records"] == entry["records"], "records")
            demand(shard.header["fields"] == self.manifest["fields"], "fields")
            for name in self.fields:
                demand(len(shard.sections[f"{name}/data"]) == entry["elements"][name], "elements")
        ragged = [name for name, field in self.fields.items() if field["kind"] == "ragged"]
        demand(self.index.header["fields"] == ragged, "fields of the index")

    def __iter__(self):
        for shard in self.shards:
            for number in range(shard.header["records"]):
                yield {name: self.value(shard, name, number) for name in self.fields}

    def value(self, shard, name, number):
        data = shard.sections[f"{name}/data"]
        if self.fields[name]["kind"] == "fixed":
            return data[number]
        start, stop = map(int, shard.sections[f"{name}/offsets"][number : number + 2])
        demand(start <= stop <= len(data), "offsets")
        return bytes(data[start:stop]) if self.fields[name]["kind"] == "bytes" else data[start:stop]

    def from_units(self, name):
        """The values of a field, read from checked pieces of the shards' bytes, without the shards' headers."""
        units, kind = self.units.sections, self.fields[name]["kind"]
        dtype = np.dtype(self.fields[name]["dtype"]).newbyteorder("<")
        shape = self.fields[name]["shape"]
        width = dtype.itemsize * int(np.prod(shape, dtype=int))
        counted = units["first_record" if kind == "fixed" else f"{name}/first_element"].astype(int)
        records, first_unit = units["first_record"].astype(int), units["first_unit"].astype(int)
        for shard in range(len(self.shards)):
            start_of_shard = first_unit[shard]
            for unit in range(first_unit[shard], first_unit[shard + 1]):
                first, last = counted[[unit, unit + 1]] - counted[start_of_shard]
                more = int(kind == "ragged" and not shape)
                last_read = min(last + more, counted[first_unit[shard + 1]] - counted[start_of_shard])
                data = self.piece(shard, unit, f"{name}/data", first * width, last_read * width)
                data = data[: (last - first) * width]
                values = np.frombuffer(data, dtype) if width else np.empty(0, dtype)
                values = values.reshape([last - first, *shape])
                if kind == "fixed":
                    yield from values
                    continue
                begin, end = records[[unit, unit + 1]] - records[start_of_shard]
                offsets = self.piece(shard, unit, f"{name}/offsets", begin * 8, (end + 1) * 8)
                for start, stop in pairwise((np.frombuffer(offsets, "<u8").astype(int) - first).tolist()):
                    yield bytes(values[start:stop]) if kind == "bytes" else values[start:stop]

    def piece(self, shard, unit, section, first, last):
        units, raw = self.units.sections, self.shards[shard].raw
        start, stop = (
            int(units[f"{section}/offset"][shard]) + first,
            int(units[f"{section}/offset"][shard]) + last,
        )
        blocks = raw[: int(units["blocks/offset"][shard])]
        touched = range(start // 16384, (stop - 1) // 16384 + 1) if stop > start else ()
        sums = [
            xxhash.xxh3_64_digest(blocks[number * 16384 : (number + 1) * 16384])[::-1] for number in touched
        ]
        check = int(units[f"{section}/check"][unit])
        demand(xxhash.xxh3_64_intdigest(b"".join(sums)) == check, "check of a piece")
        return raw[start:stop]

    def histogram(self, name):
        starts = self.index.sections[f"{name}/starts"].tolist()
        counts = [b - a for a, b in pairwise(starts)]
        return dict(zip(self.index.sections[f"{name}/lengths"].tolist(), counts, strict=True))

    def find(self, name, length, j):
        """The number of the j-th record of a length."""
        lengths, starts, order = (
            self.index.sections[f"{name}/{part}"] for part in ("lengths", "starts", "order")
        )
        return int(order[int(starts[lengths.tolist().index(length)]) + j])


FIELDS = {"tokens": "uint16[*]", "x": "float32[3]", "b": "bytes", "wide": "int8[*,2]", "none": "bool[0]"}


def records_of(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [
        {
            "tokens": rng.integers(0, 2**16, length).astype(np.uint16),
            "x": rng.random(3, np.float32),
            "b": rng.bytes(int(rng.integers(0, 9))),
            "wide": rng.integers(-128, 128, (int(rng.integers(0, 3)), 2)).astype(np.int8),
            "none": np.empty(0, bool),
        }
        for length in lengths
    ]


@examples(25)
@given(
    st.lists(st.lists(st.integers(0, 6) | st.integers(5000, 20000), max_size=12), max_size=5),
    st.integers(0, 99),
    st.sampled_from([60, 20_000, units.UNIT_BYTES]),
)
def test_reads_what_headrace_writes(write_dataset, lengths, seed, unit_bytes):
    shards = [records_of(part, seed + number) for number, part in enumerate(lengths)]
    with tempfile.TemporaryDirectory() as path, pytest.MonkeyPatch.context() as patch:
        patch.setattr(units, "UNIT_BYTES", unit_bytes)
        write_dataset(Path(path), FIELDS, shards)
        reader = SpecReader(Path(path))
    read = list(reader)
    written = [record for shard in shards for record in shard]
    assert reader.manifest["records"] == len(read) == len(written)
    for got, want in zip(read, written, strict=True):
        assert got.keys() == want.keys()
        assert got["b"] == want["b"]
        for name in ("tokens", "x", "wide", "none"):
            assert got[name].dtype == want[name].dtype
            np.testing.assert_array_equal(got[name], want[name])
    for name in FIELDS:
        for got, want in zip(reader.from_units(name), written, strict=True):
            np.testing.assert_array_equal(got, want[name])
    for name in ("tokens", "wide"):
        by_length = {}
        for number, record in enumerate(written):
            by_length.setdefault(len(record[name]), []).append(number)
        assert reader.histogram(name) == {length: len(found) for length, found in by_length.items()}
        for length, found in by_length.items():
            assert [reader.find(name, length, j) for j in range(len(found))] == found


def test_other_stored_files_have_no_header():
    assert xxhash.xxh3_64_hexdigest(b"") == "2d06800538d394c2"
    assert "`2d06800538d394c2`" in PAGE.read_text()


def undump(text):
    """Bytes from the output of `hexdump -C`."""
    content, last, repeat = b"", b"", False
    for line in text.splitlines():
        if line == "*":
            repeat = True
            continue
        offset = int(line[:8], 16)
        if repeat:
            content += last * ((offset - len(content)) // 16)
        assert len(content) == offset
        last, repeat = bytes.fromhex(line[8:58]), False
        content += last
    return content


@pytest.fixture
def example(write_dataset, tmp_path):
    shards = [[[7, 8, 9], [], [5, 6, 4]], [[1], [2, 3, 2], []]]
    write_dataset(tmp_path, {"t": "uint16[*]"}, [[{"t": tokens} for tokens in part] for part in shards])
    return SpecReader(tmp_path)


def test_the_page_shows_the_bytes_of_its_example(example):
    page = PAGE.read_text()
    dump = re.search(r"<!-- shard 0 -->\n```\n(.*?)\n```", page, re.DOTALL)[1]
    assert undump(dump) == example.shards[0].raw
    assert f"`{example.manifest['shards'][0]['checksum']}`" in page
    assert f"`{example.manifest['shards'][0]['header_checksum']}`" in page


def test_the_page_shows_the_index_of_its_example(example):
    page = PAGE.read_text()
    for part in ("lengths", "starts", "order"):
        listed = " ".join(map(str, example.index.sections[f"t/{part}"].tolist()))
        assert f"| `t/{part}` | {listed} |" in page
    assert example.find("t", 3, 2) == 4
    assert example.value(example.shards[1], "t", 1).tolist() == [2, 3, 2]
