"""Which tests fail now and then: the ordinary run, five times in fresh clones, and every test file alone.

    python -m tests.flaky                       everything
    python -m tests.flaky tests/load --runs random --seed 7 --times 1

Only what is committed is tested. Each clone has an environment of its own, in which the clone is installed; the
libraries are those of the Python that runs this.
"""

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from sysconfig import get_path

from tests.outcomes import ORDINARY, Outcome, environment_of_its_own, run_pytest

ROOT = Path(__file__).parents[1]
TIMES = {"quiet": 1, "busy": 2, "random": 2, "alone": 1}
FILES_AT_ONCE = 2

BUSY_LOOP = """
import os
parent = os.getppid()
while os.getppid() == parent:  # so that none outlives us, even if we are killed
    for _ in range(1_000_000):
        pass
"""


@dataclass
class Runs:
    """Everything that was run so far."""

    lines: list[str] = field(default_factory=list)
    failures: dict[str, list[str]] = field(default_factory=dict)

    def add(self, name: str, outcome: Outcome) -> None:
        self.lines.append(f"{name}: {outcome}")
        print(self.lines[-1], flush=True)
        for test in outcome.failed:
            self.failures.setdefault(test, []).append(name)


def main() -> int:
    arguments = parse_arguments()
    # Being terminated is an exception too: what was started is ended on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if _git("status", "--porcelain"):
        print("There are changes that are not committed; they are not tested.")
    runs = Runs()
    with tempfile.TemporaryDirectory(prefix="flaky-") as directory:
        for kind in dict.fromkeys(arguments.runs):
            for number in range(1, (arguments.times or TIMES[kind]) + 1):
                print(f"\n== {kind} {number}", flush=True)
                clone = Path(directory) / f"{kind}-{number}"
                python = make_clone(clone)
                if kind == "alone":
                    run_files_alone(python, clone, arguments, runs)
                else:
                    run_together(kind, number, python, clone, arguments, runs)
    return summarize(runs)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.flaky",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = ", ".join(f"{kind} ({times})" for kind, times in TIMES.items())
    parser.add_argument(
        "--runs",
        nargs="+",
        choices=TIMES,
        default=list(TIMES),
        help=f"which kinds of run, and how often: {kinds}",
    )
    parser.add_argument("--times", type=int, help="run each kind this often")
    parser.add_argument("--seed", type=int, help="of the first run in random order; later ones count up")
    parser.add_argument("--busy-loops", type=int, default=6, help="how many stand beside the busy runs")
    parser.add_argument("paths", nargs="*", default=["tests"], help="tests to run; all of them by default")
    arguments = parser.parse_args()
    if arguments.seed is None:
        arguments.seed = random.randrange(2**31)
    return arguments


def run_together(
    kind: str, number: int, python: Path, clone: Path, arguments: argparse.Namespace, runs: Runs
) -> None:
    """The ordinary run, beside what its kind asks for."""
    name, options = f"{kind} {number}", [*ORDINARY, *arguments.paths]
    if kind == "random":
        seed = arguments.seed + number - 1
        name += f" (--seed {seed})"
        options += ["-p", "randomly", f"--randomly-seed={seed}"]
    with busy_loops(arguments.busy_loops if kind == "busy" else 0):
        runs.add(name, run_pytest(python, clone, options))


def run_files_alone(python: Path, clone: Path, arguments: argparse.Namespace, runs: Runs) -> None:
    """Every test file in a pytest of its own."""
    files: set[Path] = set()
    for path in arguments.paths:
        found = clone / path
        files.update([found] if found.is_file() else found.rglob("test_*.py"))

    def run_alone(file: Path) -> None:
        name = str(file.relative_to(clone))
        outcome = run_pytest(python, clone, ["-m", "not soak", name], keep_output=True)
        if outcome.failed:
            print(outcome.output, flush=True)
        runs.add(f"alone {name}", outcome)

    started = time.monotonic()
    with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        list(pool.map(run_alone, sorted(files)))
    print(f"{len(files)} files alone: {time.monotonic() - started:.0f} s", flush=True)


def make_clone(clone: Path) -> Path:
    """Clone what is committed and install it in an environment of the clone's own; returns its Python."""
    _git("clone", "--quiet", str(ROOT), str(clone))
    environment = clone / ".venv"
    python = environment / "bin" / "python"
    _run(sys.executable, "-m", "venv", "--without-pip", str(environment))
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--quiet", "--disable-pip-version-check"]
    _run(*pip, "install", "--no-deps", "--editable", str(clone))
    # The libraries come after the clone's own sources, and are shared: installing them again would take minutes.
    packages = Path(_run(str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"))
    libraries = {get_path("purelib"), get_path("platlib")}
    (packages / "zz_libraries.pth").write_text("\n".join(libraries) + "\n")
    tested = _run(str(python), "-c", "import headrace; print(headrace.__file__)")
    if not Path(tested).is_relative_to(clone.resolve()):
        raise SystemExit(f"the clone would not test its own sources, but {tested}")
    return python


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    loops = []
    try:
        for _ in range(count):
            loops.append(subprocess.Popen([sys.executable, "-c", BUSY_LOOP]))
        yield
    finally:
        for loop in loops:
            loop.kill()
        for loop in loops:
            loop.wait()


def summarize(runs: Runs) -> int:
    files_alone = [line for line in runs.lines if line.startswith("alone ")]
    print("\n== Summary")
    for line in runs.lines:
        if line not in files_alone:
            print(line)
    if files_alone:
        print(f"alone: {len(files_alone)} files")
    for test, where in sorted(runs.failures.items(), key=lambda item: -len(item[1])):
        print(f"failed {len(where)} times: {test}: {', '.join(where)}")
    if not runs.failures:
        print("No test failed in any run.")
    return 1 if runs.failures else 0


def _git(*words: str) -> str:
    return _run("git", "-C", str(ROOT), *words)


def _run(*command: str) -> str:
    done = subprocess.run(command, env=environment_of_its_own(), capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
