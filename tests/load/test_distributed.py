"""Real ranks with torch.distributed: one is killed, the job resumes on another world size, and every row is counted."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.load.loader import Loader
from tests.load import streams

pytest.importorskip("torch", reason="needs torch")

LENGTHS = [(n * 7) % 40 + 1 for n in range(90)]
STEPS_A_CHECKPOINT = 3
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "PMI_", "OMPI_", "SLURM_", "MASTER_")

Rows = list[tuple[int, ...]]


class Launcher:
    """Runs jobs of several ranks; distributed_job.py says how."""

    def __init__(self, directory: Path, environment: dict[str, str]) -> None:
        self._directory, self._runs = directory, 0
        self._errors = (directory / "errors").open("w+")
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("distributed_job.py"))],
            env={name: value for name, value in environment.items() if not name.startswith(LAUNCHERS)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
        )

    def run(self, world_size: int, **job: Any) -> tuple[Path, list[int]]:
        """Where the ranks wrote, and their exit codes."""
        self._runs += 1
        out = self._directory / f"run-{self._runs}"
        out.mkdir()
        told = {"world_size": world_size, "out": str(out), "store": str(out / "store"), **job}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([{"rank": rank, **told} for rank in range(world_size)]) + "\n")
        self._process.stdin.flush()
        return out, json.loads(self._process.stdout.readline())

    def errors(self) -> str:
        self._errors.seek(0)
        return self._errors.read()[-3000:]

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
        self._errors.close()


@pytest.fixture(scope="module")
def launcher(
    tmp_path_factory: pytest.TempPathFactory, child_environment: dict[str, str]
) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path_factory.mktemp("runs"), child_environment)
    yield launcher
    launcher.close()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = streams.write_tokens(tmp_path_factory.mktemp("data") / "data", LENGTHS, shard_bytes=800)
    assert len(list(path.glob("shard-*"))) > 5
    return path


def _stream(data: Path) -> Rows:
    """Two epochs as one process reads them: every token of the dataset twice."""
    loader = Loader(data, batch_size=1, seq_len=16, epochs=2, seed=3)
    rows = [tokens for tokens, _ in streams.flat(map(streams.rows_of, loader))]
    assert sorted(token for row in rows for token in row) == sorted([*range(1, sum(LENGTHS) + 1)] * 2)
    return rows


def _rows(out: Path, steps: int | None = None) -> Rows:
    """Every row that any rank logged, in the order of the stream; up to some step."""
    logged = []
    for log in sorted(out.glob("rank-*.jsonl")):
        lines = map(json.loads, log.read_text().splitlines())
        logged.append([[tuple(row) for row in batch] for batch in lines])
    assert steps is not None or len({len(batches) for batches in logged}) == 1, "ranks had unequal steps"
    whole = zip(*(batches[:steps] for batches in logged), strict=True)
    return [row for step in whole for batch in step for row in batch]


def _last_common_checkpoint(out: Path, world_size: int) -> tuple[Path, int]:
    """The newest checkpoint that all ranks have, and its step: they saved the same."""
    steps = {int(path.name.split("-")[1]) for path in out.glob("state-*-*.json")}
    whole = [s for s in steps if all((out / f"state-{s}-{rank}.json").exists() for rank in range(world_size))]
    step = max(whole)
    states = {(out / f"state-{step}-{rank}.json").read_text() for rank in range(world_size)}
    assert len(states) == 1, "ranks saved different states"
    return out / f"state-{step}-0.json", step


def test_a_job_whose_ranks_are_killed_resumes_on_other_world_sizes_and_loses_no_row(
    data: Path, launcher: Launcher
) -> None:
    found: Rows = []
    state: str | None = None
    for world_size, batch_size, victim in ((4, 1, 2), (2, 3, 0)):
        dies = [victim, 2 * STEPS_A_CHECKPOINT - 1]
        out, codes = launcher.run(world_size, data=str(data), batch_size=batch_size, state=state, dies=dies)
        assert codes[victim] == -9, launcher.errors()
        saved, steps = _last_common_checkpoint(out, world_size)
        assert steps == STEPS_A_CHECKPOINT
        rows = _rows(out, steps)
        assert len(rows) == steps * world_size * batch_size
        found, state = found + rows, str(saved)
    out, codes = launcher.run(1, data=str(data), batch_size=5, state=state)
    assert codes == [0], launcher.errors()
    assert found + _rows(out) == _stream(data)


def test_ranks_of_a_mesh_that_share_a_data_rank_see_the_same_rows(data: Path, launcher: Launcher) -> None:
    out, codes = launcher.run(4, data=str(data), batch_size=16, mesh=[2, 2])
    assert codes == [0, 0, 0, 0], launcher.errors()
    logs = [(out / f"rank-{rank}.jsonl").read_text() for rank in range(4)]
    assert logs[0] == logs[1] != logs[2] == logs[3]
    for rank in (1, 3):
        (out / f"rank-{rank}.jsonl").unlink()
    assert _rows(out) == _stream(data)
    ends = [json.loads((out / f"end-{rank}.json").read_text()) for rank in range(4)]
    assert [end["world"] for end in ends] == [{"rank": rank // 2, "size": 2} for rank in range(4)]
    assert all(end["steps"] == end["promised"] == ends[0]["steps"] for end in ends)


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({"1": {"seed": 4}}, "on rank 1, seed is 4 instead of 3"),
        (
            {"0": {"shuffle": "none"}, "2": {"seed": 5}},
            "on rank 2, seed is 5 instead of 3, shuffle is 'global'",
        ),
        ({"2": {"batch_size": 3}}, "on rank 2, batch_size is 3 instead of 2"),
        ({"1": {"restart": True}}, "on rank 1, restart is True instead of False"),
        (
            {"0": {"position": 4}, "1": {"position": 4}, "2": {"position": 8}},
            "on rank 2, position is 8 instead of 4",
        ),
        ({"0": {}}, ""),
    ],
)
def test_ranks_that_load_different_things_are_all_told(
    launcher: Launcher, data: Path, own: dict[str, Any], said: str
) -> None:
    out, codes = launcher.run(3, data=str(data), batch_size=2, own=own)
    assert codes == [0, 0, 0], launcher.errors()
    errors = {json.loads((out / f"error-{rank}.json").read_text())["error"] for rank in range(3)}
    assert len(errors) == 1, "all ranks have the same error"
    assert said in errors.pop()


def test_ranks_that_share_their_data_are_not_compared(launcher: Launcher, data: Path) -> None:
    own = {str(rank): {"data_rank": 0, "data_world_size": 2, "seed": rank} for rank in range(3)}
    out, codes = launcher.run(3, data=str(data), batch_size=2, own=own)
    assert codes == [0, 0, 0], launcher.errors()
    assert all(json.loads((out / f"error-{rank}.json").read_text())["error"] == "" for rank in range(3))
