"""What a user meets first: the import, the names, the command."""

import subprocess
import sys

import pytest

import headrace
from headrace.cli.main import COMMANDS
from tests.cli.commands import run_here

FRAMEWORKS = [
    "torch",
    "jax",
    "ray",
    "pyarrow",
    "tokenizers",
    "tiktoken",
    "gigatoken",
    "awkward",
    "rich",
    "numpy",
]


def test_the_exported_names_are_these() -> None:
    assert headrace.__all__ == [
        "Batch",
        "Dataset",
        "Field",
        "HeadraceError",
        "Loader",
        "Ragged",
        "RemoteLoader",
        "Shuffle",
        "Writer",
        "build",
        "copy",
        "from_arrays",
        "mix",
        "monitor",
        "open",
        "silence",
        "stream",
        "trace",
        "tune",
        "verify",
    ]
    for name in headrace.__all__:
        assert getattr(headrace, name) is not None
        assert name in dir(headrace)
    with pytest.raises(AttributeError, match="no_such_name"):
        headrace.no_such_name  # noqa: B018


def test_the_rooms_of_frameworks_are_there_without_an_import_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("torch", reason="needs torch")
    monkeypatch.delattr(headrace, "torch", raising=False)
    assert headrace.torch.Loader.__module__ == "headrace.torch.loader"


def test_importing_loads_no_framework() -> None:
    program = f"import sys, headrace; print([name for name in {FRAMEWORKS} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_help_loads_neither_numpy_nor_a_command() -> None:
    program = (
        "import sys\nfrom headrace.cli.main import cli\n"
        "try:\n    cli.main(['--help'])\nexcept SystemExit:\n    pass\n"
        f"print([name for name in {FRAMEWORKS} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    for command in COMMANDS:
        assert f"  {command} " in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str) -> None:
    done = run_here(command, "--help")
    assert done.returncode == 0
    assert "--json" in done.stdout
    assert f"headrace {command} " in done.stdout


def test_an_unknown_command_and_a_missing_dataset_are_one_line_errors() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "headrace", "inspect", "no/such/place"], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "no/such/place: no such dataset" in done.stderr
    assert done.stderr.count("\n") == 1
    assert subprocess.run([sys.executable, "-m", "headrace", "nonsense"], capture_output=True).returncode == 2


def test_ctrl_c_before_a_command_listens_for_it_ends_with_the_shell_s_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("headrace.measure.running.targets.find_target", interrupt)
    done = run_here("bench", "data")
    assert done.returncode == 130
    assert done.stderr.strip() == "headrace: interrupted"
