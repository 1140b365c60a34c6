"""The plan: every byte of every input in exactly one task, and a change in one file changes one task."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from headrace.ingest import plan as planning
from headrace.ingest.plan import BuildTask, make_plan
from headrace.readers.formats import InputFormat
from headrace.readers.inputs import InputFile
from headrace.readers.reader import ReadOptions

FILES = st.dictionaries(st.text("abcdefgh", min_size=1, max_size=4), st.integers(0, 3000), max_size=40)


class _PretendReader:
    """Cuts by size without a file: the plan must not care what a reader reads."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self._sizes = sizes

    def plan(self, path: Path, target_bytes: int, options: ReadOptions) -> list[tuple[int, int]]:
        size = self._sizes[str(path)]
        starts = list(range(0, max(size, 1), target_bytes))
        return [(start, min(start + target_bytes, size)) for start in starts]


def _plan(sizes: dict[str, int]) -> list[BuildTask]:
    files = sorted(InputFile(path, InputFormat.TEXT, size) for path, size in sizes.items())
    original = planning.reader_for
    planning.reader_for = lambda _: _PretendReader(sizes)  # type: ignore[assignment, return-value]
    try:
        return list(make_plan(files, 1000, ReadOptions()))
    finally:
        planning.reader_for = original


@given(FILES)
def test_every_range_is_in_exactly_one_task_and_in_order(sizes: dict[str, int]) -> None:
    slices = [piece for task in _plan(sizes) for piece in task.slices]
    assert slices == sorted(slices, key=lambda piece: (piece.path, piece.start))
    for path, size in sizes.items():
        covered = [(piece.start, piece.stop) for piece in slices if piece.path == path]
        assert covered[0][0] == 0
        assert covered[-1][1] == size
        assert all(a[1] == b[0] for a, b in zip(covered, covered[1:], strict=False))


def test_an_added_or_removed_file_leaves_nearly_all_tasks_as_they_were() -> None:
    sizes = {f"{number:05d}": 50 + number % 7 for number in range(2000)}
    before = {task.slices for task in _plan(sizes)}
    assert len(before) > 80
    for number in range(0, 2000, 307):
        added = {task.slices for task in _plan({**sizes, f"{number:05d}b": 10})}
        removed = {task.slices for task in _plan({p: s for p, s in sizes.items() if p != f"{number:05d}"})}
        assert len(before - added) <= 3
        assert len(before - removed) <= 3


def test_groups_are_about_as_large_as_asked() -> None:
    tasks = _plan({f"{number:05d}": 50 for number in range(10_000)})
    mean = sum(task.input_bytes for task in tasks) / len(tasks)
    assert 700 < mean < 1400
    assert max(task.input_bytes for task in tasks) <= 4 * 1000 + 100
