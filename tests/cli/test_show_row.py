"""`headrace show --row`: the packed row that a Loader would hand out, in words and as a picture."""

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

import headrace
from headrace.cli import row_picture
from headrace.cli.main import cli, main
from headrace.cli.row_picture import BACKGROUND, DPI, MOST_CELLS, attention_cells, draw_row, save_picture
from headrace.errors import SettingsError, StorageError
from headrace.load.settings import LoaderSettings
from headrace.rows.row_view import RowView, view_row

TEXTS = ["the wind", "a\nb\tc\\", "x" * 70, "\x1b[31mred", "水が流れる", "", "last one"]
TOKENIZER = {
    "kind": "bytes",
    "name": "bytes",
    "vocab_size": 257,
    "eos_id": 256,
    "special_tokens": {"<|end|>": 256},
}


@pytest.fixture(scope="module")
def directory(write_dataset: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("row") / "data"
    records = [{"tokens": [*text.encode(), 256], "label": 0} for text in TEXTS]
    notations = {"tokens": "uint16[*]", "label": "int64"}
    write_dataset(path, notations, [records[:4], records[4:]], tokenizer=TOKENIZER)
    return path


def run(*words: object) -> Result:
    return CliRunner().invoke(cli, ["show", *map(str, words)])


def show(*words: object) -> str:
    result = run(*words)
    assert result.exit_code == 0, result.output
    return result.stdout


def as_json(*words: object) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(show(*words, "--json"))
    return document


# The row itself


SETTINGS = st.fixed_dictionaries(
    {
        "seq_len": st.integers(2, 24),
        "packing": st.sampled_from(["best-fit", "windows", "pad"]),
        "shuffle": st.sampled_from(["none", "global", "block"]),
        "seed": st.integers(0, 5),
    }
)


@given(SETTINGS, st.lists(st.integers(1, 40), min_size=3, max_size=12), st.integers(0, 2), st.data())
def test_a_row_is_what_the_loader_hands_out_at_that_position(
    options: dict[str, Any], lengths: list[int], epoch: int, data: st.DataObject
) -> None:
    documents = np.split(np.arange(sum(lengths), dtype=np.uint16), np.cumsum(lengths)[:-1])
    dataset = headrace.from_arrays({"tokens": [*documents, np.arange(24, dtype=np.uint16)]})
    loader = headrace.Loader(dataset, batch_size=1, epochs=None, prefetch=0, **options)
    position = data.draw(st.integers(0, loader.rows_per_epoch - 1))
    loader.load_state_dict({**loader.state_dict(), "position": epoch * loader.rows_per_epoch + position})
    batch = next(iter(loader))
    view = view_row(dataset, LoaderSettings(batch_size=1, **options), position, epoch=epoch)
    assert (view.position, view.epoch, view.rows_per_epoch) == (position, epoch, loader.rows_per_epoch)
    tokens = np.concatenate([np.empty(0, np.int64), *(stretch.tokens for stretch in view.stretches)])
    assert batch.tokens[0, : view.tokens].tolist() == tokens.tolist()
    segments = [stretch.segment for stretch in view.stretches for _ in range(stretch.length)]
    assert batch.segment_ids[0].tolist() == segments + [0] * view.padding
    for stretch in view.stretches:
        assert stretch.record is not None
        record = dataset[stretch.record]["tokens"]
        assert stretch.record_length == len(record)
        assert stretch.tokens.tolist() == record[stretch.start : stretch.start + stretch.length].tolist()
        assert batch.tokens[0, stretch.place] == stretch.tokens[0]


def test_rows_without_boundaries_are_of_no_record() -> None:
    dataset = headrace.from_arrays({"tokens": [np.arange(n, dtype=np.uint8) for n in (5, 6)]})
    settings = LoaderSettings(batch_size=1, seq_len=8, packing="windows", boundaries=False, shuffle="none")  # type: ignore[arg-type]
    (stretch,) = view_row(dataset, settings, 0).stretches
    assert (stretch.record, stretch.record_length) == (None, None)
    assert stretch.tokens.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]


def test_a_row_of_a_mixture_names_its_source(directory: Path) -> None:
    other = headrace.from_arrays({"tokens": [np.arange(64, dtype=np.uint16)]})
    mixture = headrace.mix({"a": (directory, 0.5), "b": (other, 0.5)}, stop="all")
    settings = LoaderSettings(batch_size=1, seq_len=32, shuffle=False)  # type: ignore[arg-type]
    views = [view_row(mixture, settings, position) for position in range(4)]
    assert {view.source for view in views} == {"a", "b"}
    view = next(view for view in views if view.source == "b")
    assert view.stretches[0].tokens.tolist() == list(range(view.row * 32, view.row * 32 + 32))


# In words


def test_each_document_of_a_row_is_a_line_and_so_is_the_padding(directory: Path) -> None:
    count = as_json(directory, "--row", 0, "--seq-len", 64)["of"]
    documents = []
    for row in range(count):
        lines = show(directory, "--row", row, "--seq-len", 64).splitlines()
        described = as_json(directory, "--row", row, "--seq-len", 64)
        assert lines[0] == f"row {row} of {count}"
        share = f"{described['tokens'] / 64:.2%}"
        assert lines[1].startswith(f"  {described['tokens']} of 64 tokens used ({share})")
        bars = [line for line in lines if line.startswith("┃ ")]
        assert len(bars) == len(described["documents"])
        for line, document in zip(bars, described["documents"], strict=True):
            end = document["start"] + document["length"] - 1
            cells = line.split()
            assert cells[1] == str(document["segment"])
            assert cells[2] == f"{document['place']}–{document['place'] + document['length'] - 1}"
            assert cells[3:5] == [str(document["record"]), f"{document['start']}–{end}"]
            assert f" of {document['record_length']} " in line
        assert ("padding" in lines[-1]) == (described["padding"] > 0)
        documents += described["documents"]
    texts = {document["record"]: "" for document in documents}
    for document in sorted(documents, key=lambda each: int(each["start"])):
        texts[document["record"]] += document["text"]
    assert [texts[record] for record in sorted(texts)] == [f"{text}<|end|>" for text in TEXTS]


def test_texts_stay_on_their_line_and_escape_codes_stay_off_the_terminal(directory: Path) -> None:
    everything = "".join(show(directory, "--row", row, "--seq-len", 64) for row in range(2))
    assert "a\\nb\\tc\\\\<|end|>" in everything
    assert "\\x1b[31mred<|end|>" in everything
    assert "水が流れる<|end|>" in everything
    assert "\x1b" not in everything
    assert all(len(line) <= 80 for line in everything.splitlines())


def test_a_piece_shows_that_its_document_goes_on(directory: Path) -> None:
    rows = as_json(directory, "--row", 0, "--seq-len", 32)["of"]
    shown = [show(directory, "--row", row, "--seq-len", 32, "--limit", 4) for row in range(rows)]
    lines = [" ".join(line.split()) for text in shown for line in text.splitlines()]
    for piece, text in (("0–31 of 71", "xxxx …"), ("32–63 of 71", "… xxxx …"), ("64–70 of 71", "… xxxx …")):
        assert any(line.endswith(f" {piece} {text}") for line in lines), lines
    assert any(line.endswith(" 0–8 of 9 the …") for line in lines)


def test_shuffled_rows_say_their_number_in_the_plan(directory: Path) -> None:
    words = (directory, "--row", -1, "--seq-len", 16, "--shuffle", "global", "--seed", 3, "--epoch", 2)
    described = as_json(*words)
    assert described["row"] == described["of"] - 1
    first = (
        f"row {described['row']} of {described['of']}, epoch 2 (number {described['plan_row']} in the plan)"
    )
    assert show(*words).splitlines()[0] == first


def test_without_a_tokenizer_there_are_numbers(tmp_path: Path) -> None:
    np.array([5, 6, 7, 8, 9, 10], np.uint16).tofile(tmp_path / "raw.bin")
    shown = show(tmp_path / "raw.bin", "--row", 0, "--seq-len", 4, "--packing", "windows")
    assert shown.splitlines()[-1].endswith("  5 6 7 8 …")
    described = as_json(tmp_path / "raw.bin", "--row", 1, "--seq-len", 4, "--packing", "windows")
    assert (described["documents"][0]["tokens"], described["padding"]) == ([9, 10], 2)
    assert "text" not in described["documents"][0]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "either the number I of a record, or --row K"),
        (["0", "--row", "0", "--seq-len", "8"], "either the number I of a record, or --row K"),
        (["--row", "0"], "--row needs --seq-len"),
        (["0", "--seq-len", "8"], "--seq-len only applies to rows"),
        (["0", "--png", "x.png"], "--png only applies to rows"),
        (["--row", "0", "--seq-len", "8", "--field", "tokens"], "--token-field"),
        (["--row", "0", "--seq-len", "8", "--packing", "tight"], "'tight' is not one of"),
    ],
)
def test_what_does_not_go_together_is_said(directory: Path, words: list[str], expected: str) -> None:
    result = run(directory, *words)
    assert result.exit_code == 2
    assert expected in result.output


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["--row", "999", "--seq-len", "64"],
            "row 999: an epoch has 2 rows; give 0 to 1, or -1 for the last",
        ),
        (["--row", "-4", "--seq-len", "64"], "row -4: an epoch has 2 rows"),
        (["--row", "0", "--seq-len", "1"], "--seq-len=1: must be at least 2"),
        (["--row", "0", "--seq-len", "8", "--epoch", "-1"], "epoch=-1: must be at least 0"),
        (["--row", "0", "--seq-len", "8", "--token-field", "label"], "--token-field='label'"),
    ],
)
def test_mistakes_are_explained(
    directory: Path, capsys: pytest.CaptureFixture[str], words: list[str], expected: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["show", str(directory), *words])
    assert stop.value.code == 1
    assert expected in capsys.readouterr().err


def test_a_view_needs_rows(directory: Path) -> None:
    with pytest.raises(SettingsError, match="seq_len is missing"):
        view_row(directory, LoaderSettings(batch_size=1), 0)


# As a picture


@given(st.lists(st.integers(1, 9), max_size=6), st.integers(0, 5), st.data())
def test_the_mask_is_block_causal(lengths: list[int], padding: int, data: st.DataObject) -> None:
    seq_len = max(1, sum(lengths) + padding)
    segments = [number + 1 for number, length in enumerate(lengths) for _ in range(length)]
    segments += [0] * (seq_len - len(segments))
    mask = attention_cells(lengths, seq_len, seq_len)
    for asks in range(seq_len):
        for seen in range(seq_len):
            together = seen <= asks and segments[asks] == segments[seen]
            assert mask[asks, seen] == (segments[asks] if together else 0)
    cells = data.draw(st.integers(1, seq_len))
    places = [int((cell + 0.5) * seq_len / cells) for cell in range(cells)]
    assert attention_cells(lengths, seq_len, cells).tolist() == mask[np.ix_(places, places)].tolist()


def test_a_mask_of_no_cells_is_refused() -> None:
    with pytest.raises(SettingsError, match="cells=9: must be 1 to seq_len=8"):
        attention_cells([8], 8, 9)


def row_of(lengths: list[int], seq_len: int) -> RowView:
    """A row of these documents, which best fit puts into one row; a full document stands before it."""
    documents = [np.arange(length, dtype=np.uint16) for length in [*lengths, seq_len]]
    settings = LoaderSettings(batch_size=1, seq_len=seq_len, shuffle=False)  # type: ignore[arg-type]
    return view_row(headrace.from_arrays({"tokens": documents}), settings, 1)


PICTURES = [([50], 64), ([700, 500, 400, 250, 100], 2048), ([33] * 60, 2048), ([4, 3, 2], 11)]


@pytest.mark.parametrize(("lengths", "seq_len"), PICTURES)
def test_documents_boundaries_and_padding_are_drawn_where_they_are(lengths: list[int], seq_len: int) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    bar, mask = draw_row(row_of(lengths, seq_len), "data").axes
    starts = np.cumsum([0, *lengths]).tolist()
    assert [line.get_xdata()[0] for line in bar.lines] == starts[1:-1]
    bars = [patch for patch in bar.patches if patch.get_gid() != "padding"]
    assert [(patch.get_x(), patch.get_width()) for patch in bars] == list(
        zip(starts[:-1], lengths, strict=True)
    )
    assert all(one.get_facecolor() != two.get_facecolor() for one, two in zip(bars, bars[1:], strict=False))
    (padding,) = [patch for patch in bar.patches if patch.get_gid() == "padding"]
    assert (padding.get_x(), padding.get_width()) == (starts[-1], seq_len - starts[-1])
    (image,) = mask.images
    assert image.get_extent() == [0, seq_len, seq_len, 0]
    assert image.get_array().shape == (min(seq_len, MOST_CELLS),) * 2 + (3,)
    assert bar.get_xlim() == mask.get_xlim() == (0, seq_len)


@pytest.mark.parametrize(("lengths", "seq_len"), PICTURES)
def test_labels_lie_inside_their_documents_and_never_overlap(lengths: list[int], seq_len: int) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    agg = importlib.import_module("matplotlib.backends.backend_agg")
    view = row_of(lengths, seq_len)
    figure = draw_row(view, "a" * 60)
    renderer = agg.FigureCanvasAgg(figure).get_renderer()
    bar = figure.axes[0]
    assert len([text for text in bar.texts if "record" in text.get_text()]) == len(lengths)
    frame = bar.get_window_extent(renderer)
    boxes = sorted((text.get_window_extent(renderer) for text in bar.texts), key=lambda box: box.x0)
    for box in boxes:
        assert frame.x0 <= box.x0 < box.x1 <= frame.x1
        assert frame.y0 <= box.y0 < box.y1 <= frame.y1
    assert all(one.x1 <= two.x0 for one, two in zip(boxes, boxes[1:], strict=False))
    for text in figure.texts:
        assert text.get_window_extent(renderer).x1 <= figure.bbox.x1


def test_the_png_shows_each_document_in_its_columns(directory: Path, tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib.image", reason="needs matplotlib")
    lengths, seq_len = [700, 500, 400, 250, 100], 2048
    figure = draw_row(row_of(lengths, seq_len), "$data$ 水")
    save_picture(figure, tmp_path / "row.png")
    pixels = matplotlib.imread(tmp_path / "row.png")[:, :, :3]
    assert pixels.shape == (11 * DPI, 9 * DPI, 3)
    bar, mask = figure.axes
    to_rgb = importlib.import_module("matplotlib.colors").to_rgb
    height = pixels.shape[0]

    def at(axes: Any, x: float, y: float) -> list[float]:
        column, row = axes.transData.transform((x, y))
        return [round(float(value), 2) for value in pixels[height - 1 - int(row), int(column)]]

    start = 0
    for patch, length in zip(bar.patches, lengths, strict=False):
        colour = [round(value, 2) for value in to_rgb(patch.get_facecolor())]
        assert at(bar, start + 12, 0.9) == colour
        assert at(bar, start + length - 12, 0.9) == colour
        assert at(mask, start + 12, start + length - 12) == colour
        assert at(mask, start + length - 12, start + 12) == [round(v, 2) for v in to_rgb(BACKGROUND)]
        start += length


def test_the_command_draws(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    # A small picture is drawn sooner.
    monkeypatch.setattr(row_picture, "DPI", 20)
    target = tmp_path / "row.png"
    words = (directory, "--row", 1, "--seq-len", 64, "--png", target)
    assert show(*words).endswith(f"drawn in {target}\n")
    assert target.read_bytes().startswith(b"\x89PNG")
    assert as_json(*words)["png"] == str(target)


def test_a_picture_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    with pytest.raises(StorageError, match="cannot be written"):
        save_picture(draw_row(row_of([3], 8), "data"), tmp_path / "none" / "row.png")


def test_without_matplotlib_the_extra_is_named(
    directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit):
        main(["show", str(directory), "--row", "0", "--seq-len", "64", "--png", "row.png"])
    assert "--png needs matplotlib: pip install 'headrace[pictures]'" in capsys.readouterr().err
