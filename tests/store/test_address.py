"""What a text that names a place means: a path, an address, or a mistake."""

from pathlib import Path

import pytest

import headrace
from headrace.errors import SettingsError
from headrace.store.address import local_path, open_output, open_store, split_place
from headrace.store.local import LocalStore


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("s3:/bucket/x", "s3://bucket/x"),
        ("s3//bucket/x", "s3://bucket/x"),
        ("S3:/bucket/x", "S3://bucket/x"),
        ("gs:/bucket/x", "gs://bucket/x"),
        ("https:/host/x", "https://host/x"),
        ("memory:/x", "memory://x"),
    ],
)
def test_a_mistyped_address_is_not_a_folder(written, meant, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for use in (open_store, open_output, split_place, headrace.open):
        with pytest.raises(SettingsError, match=f"^{written}: did you mean {meant}\\?$"):
            use(written)
    with pytest.raises(SettingsError, match=f"did you mean {meant}"):
        headrace.Writer(written, {"x": "int64"})
    with pytest.raises(SettingsError, match=f"did you mean {meant}"):
        headrace.stream(f"{written}/*.txt", seed=1)
    assert list(tmp_path.iterdir()) == []


def test_an_address_that_went_through_a_path():
    with pytest.raises(SettingsError, match="did you mean s3://bucket/x"):
        open_store(Path("s3://bucket/x"))


def test_a_mistyped_address_with_a_password():
    with pytest.raises(SettingsError) as error:
        open_store("https:/user:geheim@host/x")
    assert "geheim" not in str(error.value)
    assert str(error.value).startswith("https:/[hidden]@host/x: did you mean https://[hidden]@host/x")


def test_folders_that_look_a_little_like_addresses(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gs").mkdir()
    for path in ("gs//data", "s3", "s3/data", "s3x:/data", "./s3:/data", "C:/data", "a//b"):
        assert isinstance(open_store(path), LocalStore)


@pytest.mark.parametrize("place", ["s3://bucket/x", Path("s3://bucket/x"), "s3:/bucket/x"])
def test_an_output_that_must_be_a_local_file(place):
    with pytest.raises(SettingsError, match="^s3://bucket/x: must be a local path"):
        local_path(place)
    assert local_path("a/b.png") == Path("a/b.png")


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_what_can_only_be_read_is_refused_as_an_output(scheme, tmp_path):
    place = f"{scheme}://127.0.0.1:1/x"
    with headrace.Writer(tmp_path / "data", {"x": "int64"}) as writer:
        writer.write({"x": 1})
    with pytest.raises(SettingsError, match=f"^{place}: can only be read over HTTP; write to s3://"):
        headrace.copy(tmp_path / "data", place)
    with pytest.raises(SettingsError, match="can only be read over HTTP"):
        headrace.Writer(place, {"x": "int64"})
    with pytest.raises(SettingsError, match="can only be read over HTTP"):
        headrace.build(str(tmp_path / "a.txt"), place, tokenizer="bytes")
