"""A packed row as a picture: a bar of its documents, and below it which token attends to which."""

import importlib
import warnings
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headrace.cli.terminal import counted
from headrace.errors import MissingExtraError, SettingsError, StorageError, how_to_install

if TYPE_CHECKING:
    from headrace.rows.row_view import RowStretch, RowView

# The colours of Okabe and Ito without black and yellow: neighbours differ for every kind of colour vision.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
_LIGHT_TEXT = ("#0072B2", "#009E73", "#D55E00")
BACKGROUND, INK, QUIET, PADDING, HATCH = "#FFFFFF", "#222222", "#767676", "#E4E4E4", "#A8A8A8"

DPI = 150
MOST_CELLS = 1024
"""The mask is drawn with at most this many cells on each side."""
_WIDTH, _HEIGHT = 9.0, 11.0
_LEFT, _ROW_WIDTH, _BAR_HEIGHT = 0.09, 0.86, 0.085
_POINTS = _WIDTH * _ROW_WIDTH * 72
"""The width of the row on paper, in points, as fonts are measured."""
_BAR_POINTS = _HEIGHT * _BAR_HEIGHT * 72
_LEAST_ROOM = 8.5
"""A document that is narrower than this on paper gets no label."""
_CHARACTER = 0.62
_BOLD_CHARACTER = 0.7
"""The average width of a character, relative to its size."""


def draw_row(view: "RowView", name: str) -> Any:
    """A figure with two axes, 'row' and 'mask', whose unit is a place in the row. Nothing is written yet."""
    figure = _matplotlib("figure").Figure(figsize=(_WIDTH, _HEIGHT), dpi=DPI, facecolor=BACKGROUND)
    square = _ROW_WIDTH * _WIDTH / _HEIGHT
    bar = figure.add_axes((_LEFT, 0.825, _ROW_WIDTH, _BAR_HEIGHT), label="row")
    mask = figure.add_axes((_LEFT, 0.06, _ROW_WIDTH, square), label="mask", sharex=bar)
    _title(figure, view, name)
    _draw_bar(bar, view)
    _draw_mask(mask, view)
    return figure


def save_picture(figure: Any, path: Path) -> None:
    with warnings.catch_warnings():
        # Characters that the font lacks are drawn as boxes, which is not worth a warning.
        warnings.filterwarnings("ignore", message="Glyph .* missing", category=UserWarning)
        try:
            figure.savefig(path, format="png", dpi=DPI)
        except OSError as error:
            raise StorageError(f"{path} cannot be written ({error.strerror or error})") from error


def attention_cells(lengths: Sequence[int], seq_len: int, cells: int) -> NDArray[np.int64]:
    """For each place (down) and each place that it attends to (across), the number of their document, from 1; else 0.

    Both sides are sampled at `cells` places; with `seq_len` cells, this is the mask itself.
    """
    if not 1 <= cells <= seq_len:
        raise SettingsError(f"cells={cells}: must be 1 to seq_len={seq_len}")
    segments = np.zeros(seq_len, dtype=np.int64)
    used = sum(lengths)
    segments[:used] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    places = ((np.arange(cells) + 0.5) * seq_len / cells).astype(np.int64)
    asks, answers = segments[places][:, None], segments[places][None, :]
    causal = places[:, None] >= places[None, :]
    return np.where((asks == answers) & causal, asks, 0)


def _matplotlib(module: str) -> Any:
    try:
        return importlib.import_module(f"matplotlib.{module}")
    except ImportError:
        raise MissingExtraError(f"--png needs matplotlib: {how_to_install('pictures')}") from None


def _title(figure: Any, view: "RowView", name: str) -> None:
    documents = counted(len(view.stretches), "document")
    epoch = f", epoch {view.epoch:,}" if view.epoch else ""
    short = name if len(name) <= 40 else f"{name[:39]}…"
    facts = (
        f"{documents}, {view.tokens:,} of {view.seq_len:,} tokens used ({view.efficiency:.2%}), "
        f"{view.padding:,} padded"
    )
    heading = f"{short}: row {view.position:,} of {view.rows_per_epoch:,}{epoch}"
    # The name of a dataset may contain a dollar sign, which would begin a formula.
    size = min(15.0, _POINTS / (len(heading) * _BOLD_CHARACTER))
    figure.text(_LEFT, 0.966, heading, size=size, weight="bold", color=INK, parse_math=False)
    figure.text(_LEFT, 0.943, facts, size=10.5, color=QUIET, parse_math=False)


def _colour(stretch: "RowStretch") -> str:
    return PALETTE[(stretch.segment - 1) % len(PALETTE)]


def _draw_bar(axes: Any, view: "RowView") -> None:
    patches = _matplotlib("patches")
    for stretch in view.stretches:
        colour = _colour(stretch)
        axes.add_patch(
            patches.Rectangle((stretch.place, 0), stretch.length, 1, facecolor=colour, edgecolor="none")
        )
        _label(axes, view, stretch, BACKGROUND if colour in _LIGHT_TEXT else INK)
    for before, after in pairwise(view.stretches):
        # A line as wide as a short document would hide it.
        shorter = min(before.length, after.length) / view.seq_len * _POINTS
        axes.axvline(after.place, color=BACKGROUND, linewidth=min(1.5, shorter / 5), gid="boundary")
    if view.padding:
        axes.add_patch(_padding(view.tokens, 0, view.padding, 1))
        if _fits("padding", view.padding / view.seq_len * _POINTS, 8):
            _text(
                axes,
                view.tokens + view.padding / 2,
                "padding",
                8,
                INK,
                0,
                box={"facecolor": PADDING, "lw": 0},
            )
    axes.set(xlim=(0, view.seq_len), ylim=(0, 1), yticks=[])
    axes.tick_params(labelbottom=False, bottom=False)
    _frame(axes)


def _label(axes: Any, view: "RowView", stretch: "RowStretch", colour: str) -> None:
    """Write the number of the record: along the bar if there is room, or else across it, or else not at all."""
    room = stretch.length / view.seq_len * _POINTS
    record = "tokens" if stretch.record is None else f"record {stretch.record:,}"
    tokens = counted(stretch.length, "token")
    middle = stretch.place + stretch.length / 2
    long = f"{record}\n{tokens}"
    if _fits(long, room, 9):
        _text(axes, middle, long, 9, colour, 0)
    elif _fits(record, room, 8):
        _text(axes, middle, record, 8, colour, 0)
    elif room >= _LEAST_ROOM:
        size = min(8.0, room * 0.7)
        number = record.removeprefix("record ")
        _text(axes, middle, record if _fits(record, _BAR_POINTS, size) else number, size, colour, 90)


def _fits(text: str, room: float, size: float) -> bool:
    return max(map(len, text.split("\n"))) * size * _CHARACTER + 4 <= room


def _text(axes: Any, x: float, text: str, size: float, colour: str, rotation: int, box: Any = None) -> None:
    axes.text(
        x,
        0.5,
        text,
        size=size,
        color=colour,
        ha="center",
        va="center",
        rotation=rotation,
        linespacing=1.35,
        bbox=box,
    )


def _draw_mask(axes: Any, view: "RowView") -> None:
    colours = _matplotlib("colors")
    lengths = [stretch.length for stretch in view.stretches]
    mask = attention_cells(lengths, view.seq_len, min(view.seq_len, MOST_CELLS))
    shades = np.array(
        [colours.to_rgb(BACKGROUND), *(colours.to_rgb(_colour(each)) for each in view.stretches)]
    )
    axes.imshow(
        shades[mask],
        extent=(0, view.seq_len, view.seq_len, 0),
        interpolation="nearest",
        aspect="auto",
    )
    if view.padding:
        axes.add_patch(_padding(view.tokens, 0, view.padding, view.tokens))
        axes.add_patch(_padding(0, view.tokens, view.seq_len, view.padding))
    _number_places((axes.xaxis, axes.yaxis), view.seq_len)
    axes.set(xlim=(0, view.seq_len), ylim=(view.seq_len, 0))
    axes.set_title(
        "Attention: each token (row) attends to itself and to earlier tokens of its own document (columns)",
        loc="left",
        size=10.5,
        color=INK,
        pad=8,
    )
    axes.set_xlabel("token of the row", size=9, color=QUIET)
    axes.set_ylabel("token of the row", size=9, color=QUIET)
    axes.tick_params(colors=QUIET, labelsize=8, length=3)
    _frame(axes)


def _number_places(both: Sequence[Any], seq_len: int) -> None:
    """Number the eighths of the row where they are whole numbers, as the length is mostly a power of two."""
    ticker = _matplotlib("ticker")
    for axis in both:
        if seq_len % 8 == 0:
            axis.set_major_locator(ticker.MultipleLocator(seq_len // 8))
        else:
            axis.set_major_locator(ticker.MaxNLocator(8, integer=True))
        axis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))


def _padding(x: float, y: float, width: float, height: float) -> Any:
    return _matplotlib("patches").Rectangle(
        (x, y), width, height, facecolor=PADDING, edgecolor=HATCH, hatch="///", linewidth=0, gid="padding"
    )


def _frame(axes: Any) -> None:
    for spine in axes.spines.values():
        spine.set(color=HATCH, linewidth=0.8)
