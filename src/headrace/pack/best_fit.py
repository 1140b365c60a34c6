"""Best-fit-decreasing packing, on the histogram of lengths instead of on the documents.

Best fit takes documents from the longest to the shortest and puts each into the open row with the smallest space
that still holds it. Documents of one length are interchangeable, and so are rows with the same space, so whole groups
move at once. A row of space s takes m = s // L documents of length L one after another: after the first it has the
space s - L, the smallest that fits, unless that is less than L.

Each move is a node of a tree: some rows of the parent's group, from `first` on, take `per_row` documents of one
length each, beginning with the `offset`-th document of that length. Rows are the leaves. For rows of 10 tokens
and two documents of 6, one of 4 and three of 2 there are four moves:

    A  two new rows take one 6 each        spaces 4, 4
    B  the first row of A takes one 4      spaces 0, 4
    C  the second row of A takes two 2s    spaces 0, 0
    D  one new row takes one 2             space 8

Row 1 is then leaf C: documents 0 and 1 of length 2 and, through its parent A, document 1 of length 6. A billion
documents need a few thousand nodes, and nothing is stored for a single document.
"""

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import SettingsError

_NO_PARENT = -1
MOST_TOKENS = 2**62
"""More than any dataset has, and few enough for sums of int64."""


@dataclass(frozen=True)
class PackedRows:
    """Documents in rows: document i is the `position[i]`-th of length `length[i]`, in row `row[i]` of those asked for.

    The documents of a row are next to each other, the longest first.
    """

    row: NDArray[np.int64]
    length: NDArray[np.int64]
    position: NDArray[np.int64]


@dataclass(frozen=True)
class BestFit:
    """A packing of all documents of a histogram, made by `plan_best_fit` and read with `documents_of(rows)`."""

    seq_len: int
    tokens: int
    parent: NDArray[np.int64]
    first: NDArray[np.int64]
    length: NDArray[np.int64]
    per_row: NDArray[np.int64]
    offset: NDArray[np.int64]
    leaf_node: NDArray[np.int64]
    leaf_first: NDArray[np.int64]
    leaf_start: NDArray[np.int64]
    """The number of the first row of each leaf, and at the end the number of all rows."""

    @property
    def rows(self) -> int:
        return int(self.leaf_start[-1])

    @property
    def efficiency(self) -> float:
        """The share of places that hold tokens: 1.0 if there is no padding."""
        return self.tokens / (self.rows * self.seq_len) if self.rows else 1.0

    @cached_property
    def rows_by_content(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """For each kind of row, how many documents and tokens it holds, and how many such rows there are."""
        node, leaf = self.leaf_node, np.arange(len(self.leaf_node))
        documents, tokens = np.zeros((2, len(node)), dtype=np.int64)
        while len(leaf):
            documents[leaf] += self.per_row[node]
            tokens[leaf] += self.per_row[node] * self.length[node]
            node = self.parent[node]
            leaf, node = leaf[node != _NO_PARENT], node[node != _NO_PARENT]
        return documents, tokens, np.diff(self.leaf_start)

    def leaf_per_row(self) -> "BestFit":
        """The same plan, with a leaf for each row."""
        rows = np.diff(self.leaf_start)
        numbers = np.arange(self.rows + 1)
        within = numbers[:-1] - np.repeat(self.leaf_start[:-1], rows)
        return replace(
            self,
            leaf_node=np.repeat(self.leaf_node, rows),
            leaf_first=np.repeat(self.leaf_first, rows) + within,
            leaf_start=numbers,
        )

    def documents_of(self, rows: Any) -> PackedRows:
        """The documents of any rows, found by walking from the leaves up to the root, all rows at once."""
        numbers = np.asarray(rows, dtype=np.int64)
        if numbers.size and (numbers.min() < 0 or numbers.max() >= self.rows):
            raise SettingsError(
                f"rows from {numbers.min()} to {numbers.max()}: must be inside the {self.rows} rows"
            )
        leaf = np.searchsorted(self.leaf_start, numbers, side="right") - 1
        node, place = self.leaf_node[leaf], self.leaf_first[leaf] + numbers - self.leaf_start[leaf]
        asked = np.arange(len(numbers))
        levels: list[tuple[NDArray[np.int64], ...]] = []
        while len(asked):
            levels.append((asked, node, place))
            place = self.first[node] + place
            node = self.parent[node]
            inner = node != _NO_PARENT
            asked, node, place = asked[inner], node[inner], place[inner]
        return self._expand(levels)

    def _expand(self, levels: list[tuple[NDArray[np.int64], ...]]) -> PackedRows:
        if not levels:
            none = np.empty(0, dtype=np.int64)
            return PackedRows(none, none, none)
        # From the root down, because a move never has longer documents than the moves above it.
        row, node, place = (np.concatenate(parts) for parts in zip(*reversed(levels), strict=True))
        together = np.argsort(row, kind="stable")
        row, node, place = row[together], node[together], place[together]
        count = self.per_row[node]
        within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        position = np.repeat(self.offset[node] + place * count, count) + within
        return PackedRows(np.repeat(row, count), np.repeat(self.length[node], count), position)


def plan_best_fit(lengths: Any, counts: Any, seq_len: int) -> BestFit:
    """Pack `counts[i]` documents of length `lengths[i]`, each from 1 to `seq_len`, into rows of `seq_len` tokens."""
    lengths, counts = longest_first(lengths, counts, seq_len)
    packing = _Packer(seq_len)
    for length, count in zip(lengths.tolist(), counts.tolist(), strict=True):
        packing.add(length, count)
    return packing.finish(int(lengths @ counts))


PlanBestFit = Callable[[NDArray[np.int64], NDArray[np.int64], int], BestFit]
"""`plan_best_fit`, or a compiled function that makes the same plans."""


def longest_first(lengths: Any, counts: Any, seq_len: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """A histogram in the order in which best fit takes its documents, if they can be packed into rows at all."""
    lengths, counts = np.asarray(lengths, dtype=np.int64), np.asarray(counts, dtype=np.int64)
    if not 1 <= seq_len <= MOST_TOKENS:
        raise SettingsError(f"seq_len={seq_len}: must be at least 1, and at most {MOST_TOKENS}")
    if lengths.ndim != 1 or lengths.shape != counts.shape:
        raise SettingsError(
            f"lengths of shape {lengths.shape} and counts of shape {counts.shape}: must be two lists of equal length"
        )
    if not len(lengths):
        return lengths, counts
    if not 1 <= lengths.min() <= lengths.max() <= seq_len:
        raise SettingsError(
            f"lengths from {lengths.min()} to {lengths.max()}: must be 1 to seq_len={seq_len}"
        )
    if counts.min() < 0:
        raise SettingsError(f"counts from {counts.min()} to {counts.max()}: must be at least 0")
    tokens = float(lengths.astype(np.float64) @ counts)
    if tokens > MOST_TOKENS:
        raise SettingsError(f"documents of {tokens:.3g} tokens: must be at most {MOST_TOKENS}")
    order = np.argsort(-lengths, kind="stable")
    return lengths[order], counts[order]


class _Packer:
    """Groups of rows by the space they have left, while documents of shorter and shorter lengths are added."""

    def __init__(self, seq_len: int) -> None:
        self._seq_len = seq_len
        self._nodes: list[tuple[int, int, int, int, int]] = []
        self._open: dict[int, list[tuple[int, int, int]]] = {}
        """Space -> (node, first row of it, number of rows)."""
        self._spaces: list[int] = []

    def add(self, length: int, count: int) -> None:
        """Put `count` documents of one length into the smallest spaces that hold them."""
        offset = 0
        while offset < count:
            smallest = bisect_left(self._spaces, length)
            if smallest == len(self._spaces):
                offset += self._fill(_NO_PARENT, 0, count, self._seq_len, length, offset, count - offset)
            else:
                space = self._spaces[smallest]
                node, first, rows = self._take(space)
                offset += self._fill(node, first, rows, space, length, offset, count - offset)

    def _fill(self, node: int, first: int, rows: int, space: int, length: int, offset: int, left: int) -> int:
        """Put up to `left` documents into `rows` equal rows; the other rows stay open. Returns how many were put."""
        per_row = space // length
        full = min(rows, left // per_row)
        if full:
            self._move(node, first, full, space, length, per_row, offset)
        done = full * per_row
        rest = left - done if full < rows and left - done < per_row else 0
        if rest:
            self._move(node, first + full, 1, space, length, rest, offset + done)
            full += 1
        if node != _NO_PARENT and full < rows:
            self._put(space, (node, first + full, rows - full))
        return done + rest

    def _move(
        self, node: int, first: int, rows: int, space: int, length: int, per_row: int, offset: int
    ) -> None:
        self._nodes.append((node, first, length, per_row, offset))
        self._put(space - per_row * length, (len(self._nodes) - 1, 0, rows))

    def _take(self, space: int) -> tuple[int, int, int]:
        groups = self._open[space]
        group = groups.pop()
        if not groups:
            del self._open[space]
            del self._spaces[bisect_left(self._spaces, space)]
        return group

    def _put(self, space: int, group: tuple[int, int, int]) -> None:
        if space not in self._open:
            self._open[space] = []
            insort(self._spaces, space)
        self._open[space].append(group)

    def finish(self, tokens: int) -> BestFit:
        nodes = np.array(self._nodes, dtype=np.int64).reshape(-1, 5).T
        groups = [group for space in sorted(self._open) for group in self._open[space]]
        node, first, rows = np.array(groups, dtype=np.int64).reshape(-1, 3).T
        starts = np.concatenate([[0], np.cumsum(rows)]).astype(np.int64)
        parent, parent_first, length, per_row, offset = nodes
        return BestFit(
            seq_len=self._seq_len,
            tokens=tokens,
            parent=parent,
            first=parent_first,
            length=length,
            per_row=per_row,
            offset=offset,
            leaf_node=node,
            leaf_first=first,
            leaf_start=starts,
        )
