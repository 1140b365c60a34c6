"""Sizes of dictionaries, against files that were written with known ones."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.readers.parquet_pages import dictionary_bytes
from tests.properties import examples


def first_page(path: Path) -> int:
    column = pq.ParquetFile(path).metadata.row_group(0).column(0)
    return int(column.dictionary_page_offset or column.data_page_offset)


@examples(30)
@given(
    st.lists(st.text(max_size=200), min_size=1, max_size=30, unique=True),
    st.sampled_from(["none", "snappy", "gzip", "zstd", "lz4"]),
    st.sampled_from(["1.0", "2.0"]),
)
def test_the_size_of_a_dictionary(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], compression: str, version: str
) -> None:
    path = tmp_path_factory.mktemp("pages") / "a.parquet"
    pq.write_table(pa.table({"t": texts * 3}), path, compression=compression, data_page_version=version)
    # Each text is stored once, after its length in four bytes.
    size = sum(4 + len(text.encode()) for text in texts)
    assert dictionary_bytes(path.read_bytes(), first_page(path)) == size


def test_a_page_that_is_no_dictionary(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"t": ["a", "b"]}), path, use_dictionary=False)
    assert dictionary_bytes(path.read_bytes(), first_page(path)) is None


@given(st.binary(max_size=40))
def test_any_bytes_have_a_size_or_none(content: bytes) -> None:
    size = dictionary_bytes(content, 0)
    assert size is None or 0 <= size < 2**34
