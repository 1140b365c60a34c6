"""What comes out of a build: every document once, in order, whatever the inputs look like."""

import gzip
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

import headrace
from headrace.errors import BuildError, DirectoryInUseError, FieldError, SettingsError, StorageError
from headrace.store.locks import directory_lock
from tests.samples import decoded, documents, tree


def test_each_file_is_a_document_and_empty_files_are_kept(
    write_texts: Callable[..., Path], tmp_path: Path
) -> None:
    texts = documents(50)
    assert "" in texts
    report = headrace.build(write_texts(texts), tmp_path / "out")
    dataset = headrace.open(tmp_path / "out")
    assert decoded(dataset) == texts
    assert all(record["tokens"][-1] == 256 for record in dataset)
    assert report.records == len(texts)
    assert report.tokens == dataset.num_tokens == sum(len(text.encode()) + 1 for text in texts)


def test_the_number_of_workers_does_not_change_a_byte(
    write_texts: Callable[..., Path], tmp_path: Path
) -> None:
    # Where tasks begin depends on the files' names, and those on the directory of this test: 200 kB are many anywhere.
    folder = write_texts([text * 10 for text in documents(100)])
    headrace.build(folder, tmp_path / "one", workers=1, shard_bytes=4096)
    report = headrace.build(folder, tmp_path / "many", workers=3, shard_bytes=4096)
    assert report.built > 3
    assert tree(tmp_path / "one") == tree(tmp_path / "many")


def _rows(texts: list[str]) -> list[dict[str, object]]:
    return [{"id": number, "body": text} for number, text in enumerate(texts)]


@pytest.fixture(params=["jsonl", "jsonl.gz", "jsonl.zst", "csv", "parquet", "arrow"])
def table(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, list[str]]:
    """The same documents in each format, in one file large enough to be cut."""
    texts = [text.replace(" stone", '\n"stone",') for text in documents(300)]
    path = tmp_path / f"table.{request.param}"
    columns = pa.table({"id": list(range(300)), "body": texts})
    lines = "".join(json.dumps(row) + "\n" for row in _rows(texts)).encode()
    if request.param == "jsonl":
        path.write_bytes(lines)
    elif request.param == "jsonl.gz":
        path.write_bytes(gzip.compress(lines))
    elif request.param == "jsonl.zst":
        path.write_bytes(zstandard.compress(lines[:1000]) + zstandard.compress(lines[1000:]))
    elif request.param == "csv":
        import csv

        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, ["id", "body"])
            writer.writeheader()
            writer.writerows(_rows(texts))
    elif request.param == "parquet":
        pq.write_table(columns, path, row_group_size=20)
    else:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, columns.schema) as writer:
            writer.write_table(columns, max_chunksize=20)
    return path, texts


def test_every_format_gives_the_same_documents(table: tuple[Path, list[str]], tmp_path: Path) -> None:
    path, texts = table
    workers = 2 if path.suffix == ".parquet" else 1
    report = headrace.build(
        path, tmp_path / "out", tokenizer="bytes", text_field="body", shard_bytes=4096, workers=workers
    )
    assert decoded(headrace.open(tmp_path / "out")) == texts
    if not path.name.endswith((".gz", ".zst")):
        assert report.built > 3


def test_tables_without_a_tokenizer_become_records(tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).normal(size=(500, 3)), np.arange(500)
    arrays = {
        "x": pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), 3),
        "y": y,
        "name": [f"n{i}" for i in y],
    }
    pq.write_table(pa.table(arrays), tmp_path / "t.parquet", row_group_size=50)
    headrace.build(tmp_path / "t.parquet", tmp_path / "out", shard_bytes=4096, workers=1)
    dataset = headrace.open(tmp_path / "out")
    assert {name: field.notation for name, field in dataset.fields.items()} == {
        "x": "float64[3]",
        "y": "int64",
        "name": "bytes",
    }
    batch = dataset[:]
    assert np.array_equal(batch["x"], x)
    assert np.array_equal(batch["y"], y)
    assert batch["name"][7] == b"n7"
    headrace.build(tmp_path / "t.parquet", tmp_path / "some", columns=["y"])
    assert list(headrace.open(tmp_path / "some").fields) == ["y"]
    headrace.build(tmp_path / "t.parquet", tmp_path / "typed", columns={"y": "float32", "name": None})
    typed = headrace.open(tmp_path / "typed")
    assert {name: field.notation for name, field in typed.fields.items()} == {"y": "float32", "name": "bytes"}
    assert typed[7]["y"] == 7.0
    with pytest.raises(FieldError, match="'x', 'y', 'name'"):
        headrace.build(tmp_path / "t.parquet", tmp_path / "none", columns=["z"])


def test_arrays_become_fields(tmp_path: Path) -> None:
    values = np.random.default_rng(1).integers(0, 255, size=(40, 4, 5)).astype(np.uint8)
    np.save(tmp_path / "a.npy", values[:25])
    np.save(tmp_path / "b.npy", values[25:])
    headrace.build([tmp_path / "b.npy", tmp_path / "a.npy"], tmp_path / "out")
    assert np.array_equal(headrace.open(tmp_path / "out")[:]["data"], values)


def test_lines_and_separators(tmp_path: Path) -> None:
    texts = [text for text in documents(100) if text]
    (tmp_path / "lines.txt").write_text("\n".join(texts) + "\n", encoding="utf-8")
    headrace.build(tmp_path / "lines.txt", tmp_path / "lines", split="line", shard_bytes=4096, workers=1)
    assert decoded(headrace.open(tmp_path / "lines")) == texts
    (tmp_path / "parts.txt").write_text("<END>".join(texts), encoding="utf-8")
    headrace.build(tmp_path / "parts.txt", tmp_path / "parts", separator="<END>", shard_bytes=4096, workers=2)
    assert decoded(headrace.open(tmp_path / "parts")) == texts


def test_standard_input(tmp_path: Path) -> None:
    texts = documents(20)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    arguments = [
        "build",
        "-",
        "--format",
        "jsonl",
        "--tokenizer",
        "bytes",
        "--out",
        str(tmp_path / "out"),
        "--json",
    ]
    for built in (1, 0):
        done = subprocess.run(
            [sys.executable, "-m", "headrace", *arguments],
            input=lines,
            capture_output=True,
            text=True,
            check=True,
        )
        assert json.loads(done.stdout)["built"] == built
        assert decoded(headrace.open(tmp_path / "out")) == texts


def test_directories_take_known_files_and_included_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "in"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.txt").write_text("a")
    (folder / "deep" / "b.py").write_text("b")
    headrace.build(folder, tmp_path / "known")
    assert decoded(headrace.open(tmp_path / "known")) == ["a"]
    assert "b.py" in caplog.text
    headrace.build(folder, tmp_path / "included", include=["*.py"])
    assert decoded(headrace.open(tmp_path / "included")) == ["b"]


def test_a_glob_and_a_file_named_twice_count_once(write_texts: Callable[..., Path], tmp_path: Path) -> None:
    folder = write_texts(["x", "y"])
    headrace.build([folder, str(folder / "*.txt"), folder / "0000.txt"], tmp_path / "out")
    assert decoded(headrace.open(tmp_path / "out")) == ["x", "y"]


def test_shuffling_keeps_every_document_and_depends_on_the_seed_alone(
    write_texts: Callable[..., Path], tmp_path: Path
) -> None:
    texts = [f"{number} {text}" for number, text in enumerate(documents(100))]
    folder = write_texts(texts)
    settings = {"shuffle": True, "shard_bytes": 4096}
    for name, seed, workers in (("a", 1, 1), ("b", 1, 2), ("c", 2, 1)):
        headrace.build(folder, tmp_path / name, seed=seed, workers=workers, **settings)
    first, third = (decoded(headrace.open(tmp_path / name)) for name in "ac")
    assert sorted(first) == sorted(third) == sorted(texts)
    assert first != texts
    assert first != third
    assert tree(tmp_path / "a") == tree(tmp_path / "b")
    assert len(list((tmp_path / "a").glob("shard-*"))) > 1
    again = headrace.build(folder, tmp_path / "a", seed=1, workers=1, **settings)
    assert again.built == 0
    (folder / "new.txt").write_text("new")
    with pytest.raises(BuildError, match="rebuild=True"):
        headrace.build(folder, tmp_path / "a", seed=1, workers=1, **settings)
    assert decoded(headrace.open(tmp_path / "a")) == first


def test_nothing_to_build_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(BuildError, match="no documents"):
        headrace.build(tmp_path / "empty.jsonl", tmp_path / "out", tokenizer="bytes")
    assert not (tmp_path / "out" / "headrace.json").exists()
    with pytest.raises(SettingsError, match="no file matches"):
        headrace.build(str(tmp_path / "*.nothing"), tmp_path / "out")
    with pytest.raises(StorageError, match="no such file"):
        headrace.build(tmp_path / "missing.txt", tmp_path / "out")


def test_a_directory_in_use_is_refused(write_texts: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with (
        directory_lock(tmp_path / "out", "headrace build"),
        pytest.raises(DirectoryInUseError, match="in use by"),
    ):
        headrace.build(write_texts(["x"]), tmp_path / "out")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"workers": 0}, "workers=0"),
        ({"workers": "2"}, "workers='2': must be a whole number"),
        ({"max_bad_records": 0.5}, "max_bad_records=0.5: must be a whole number"),
        ({"split": "word"}, "split='word'"),
        ({"split": None}, "split=None: must be one of"),
        ({"format": "xls"}, "format='xls'"),
        ({"split": "separator"}, "do not go together"),
        ({"shard_bytes": 1}, "shard_bytes=1"),
        ({"shard_bytes": "64MB"}, "shard_bytes='64MB': must be a whole number or None"),
        ({"workers": 1.5}, "workers=1.5: must be a whole number"),
        ({"max_bad_records": None}, "max_bad_records=None: must be a whole number"),
        ({"seed": -1}, "seed=-1: must be from 0"),
        ({"seed": "x", "shuffle": True}, "seed='x': must be a whole number"),
        ({"seed": 2**64, "shuffle": True}, "must be from 0 to 2"),
        ({"drop_previous": "yes"}, "drop_previous='yes': must be True or False"),
        ({"max_bad_records": -1}, "max_bad_records=-1"),
        ({"tokenizer": "no-such.json"}, "no such file"),
        ({"columns": ["a"]}, "columns= can only be given for a dataset of records"),
    ],
)
def test_impossible_settings_say_what_to_do(
    arguments: dict[str, object], message: str, write_texts: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(SettingsError, match=message):
        headrace.build(write_texts(["x"]), tmp_path / "out", **arguments)  # type: ignore[arg-type]
    assert not (tmp_path / "out" / "headrace.json").exists()


def test_inputs_that_cannot_be_meant_are_explained(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("fine")
    with pytest.raises(SettingsError, match="also the output directory"):
        headrace.build(tmp_path / "in", tmp_path / "in")
    with pytest.raises(SettingsError, match="inputs is empty"):
        headrace.build([], tmp_path / "out")
    headrace.build(tmp_path / "in", tmp_path / "data")
    with pytest.raises(SettingsError, match="already a Headrace dataset"):
        headrace.build(tmp_path / "data", tmp_path / "out")


def test_bad_records_stop_the_build_or_are_counted(tmp_path: Path) -> None:
    lines = [json.dumps({"text": "fine"}), "{broken", json.dumps({"text": 5}), json.dumps({"text": "good"})]
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(headrace.HeadraceError, match=r"in\.jsonl, line 2, byte 17.*max_bad_records=N"):
        headrace.build(tmp_path / "in.jsonl", tmp_path / "out", tokenizer="bytes")
    report = headrace.build(tmp_path / "in.jsonl", tmp_path / "out", tokenizer="bytes", max_bad_records=2)
    assert report.bad_count == 2
    assert [record.where for record in report.bad] == ["line 2, byte 17", "line 3, byte 25"]
    assert decoded(headrace.open(tmp_path / "out")) == ["fine", "good"]
    with pytest.raises(headrace.HeadraceError, match="2 records could not be read, and max_bad_records is 1"):
        headrace.build(tmp_path / "in.jsonl", tmp_path / "out", tokenizer="bytes", max_bad_records=1)


def test_files_that_are_not_utf8_are_bad_records(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "b.txt").write_text("fine")
    with pytest.raises(headrace.HeadraceError, match=r"a\.txt, line 1, byte 0: not UTF-8"):
        headrace.build(tmp_path, tmp_path / "out", workers=2)
    assert headrace.build(tmp_path, tmp_path / "out", max_bad_records=1).records == 1


def test_the_manifest_says_what_the_dataset_was_made_from(
    write_texts: Callable[..., Path], tmp_path: Path
) -> None:
    folder = write_texts(["alpha", "beta"])
    headrace.build(folder, tmp_path / "out", tokenizer="bytes")
    manifest = headrace.open(tmp_path / "out").manifest
    assert manifest is not None
    assert manifest.tokenizer is not None
    assert manifest.tokenizer["name"] == "bytes"
    assert len(manifest.tokenizer["fingerprint"]) == 32
    assert manifest.settings is not None
    assert manifest.settings["split"] == "file"
    assert manifest.written_by == f"headrace {headrace.__version__}"
    assert manifest.provenance is not None
    provenance = json.loads((tmp_path / "out" / manifest.provenance.file).read_text())
    assert [(entry["path"], entry["bytes"]) for entry in provenance["inputs"]] == [
        (str(folder / "0000.txt"), 5),
        (str(folder / "0001.txt"), 4),
    ]
    assert all(len(entry["fingerprint"]) == 32 for entry in provenance["inputs"])


def test_build_can_be_called_from_a_script_without_a_main_guard(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(20):
        (folder / f"{number}.txt").write_text("x" * 1000)
    script.write_text(
        "import headrace\n"
        f"report = headrace.build({str(folder)!r}, {str(tmp_path / 'out')!r}, workers=2, shard_bytes=4096)\n"
        "print(report.built)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 1
    assert io.StringIO(done.stderr).read() == ""


def test_columns_of_types_that_make_no_field_can_be_left_out(tmp_path: Path) -> None:
    import datetime

    pq.write_table(
        pa.table({"x": [1, 2], "when": [datetime.datetime(2020, 1, 1)] * 2}), tmp_path / "t.parquet"
    )
    with pytest.raises(SettingsError, match="columns="):
        headrace.build(tmp_path / "t.parquet", tmp_path / "out")
    headrace.build(tmp_path / "t.parquet", tmp_path / "out", columns=["x"])
    assert headrace.open(tmp_path / "out")[:]["x"].tolist() == [1, 2]
