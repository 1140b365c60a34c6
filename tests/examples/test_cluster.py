"""The examples for batch schedulers do what they say, with the variables that a scheduler sets."""

import os
import subprocess
import sys
from pathlib import Path

import yaml

import headrace
from tests.samples import documents, tree

EXAMPLES = Path(__file__).parents[2] / "examples" / "cluster"


def _texts(folder: Path) -> Path:
    folder.mkdir()
    for number, text in enumerate(documents(12)):
        (folder / f"{number}.txt").write_text(text * 50)
    return folder


def _environment(folder: Path, **more: str) -> dict[str, str]:
    places = {
        "HEADRACE_INPUTS": str(folder / "texts"),
        "HEADRACE_OUT": str(folder / "data"),
        "HEADRACE_TOKENIZER": "bytes",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    return {**os.environ, **places, **more}


def test_a_slurm_array_and_the_job_that_finishes(tmp_path: Path) -> None:
    _texts(tmp_path / "texts")
    script = ["bash", str(EXAMPLES / "build.slurm")]
    for number in (5, 6):
        array = {
            "SLURM_ARRAY_TASK_ID": str(number),
            "SLURM_ARRAY_TASK_MIN": "5",
            "SLURM_ARRAY_TASK_COUNT": "2",
        }
        environment = _environment(tmp_path, **array, SLURM_CPUS_PER_TASK="1")
        subprocess.run([*script, "--part", "auto"], env=environment, check=True, capture_output=True)
    subprocess.run([*script, "--finish"], env=_environment(tmp_path), check=True, capture_output=True)
    headrace.build(tmp_path / "texts", tmp_path / "whole", tokenizer="bytes")
    assert tree(tmp_path / "data") == tree(tmp_path / "whole")


def test_the_jobs_of_kubernetes_are_parts_of_one_build(tmp_path: Path) -> None:
    """Both Jobs name the same build, and as many parts as there are pods."""
    parts, finish = yaml.safe_load_all((EXAMPLES / "build-job.yaml").read_text())
    commands = [job["spec"]["template"]["spec"]["containers"][0]["command"] for job in (parts, finish)]
    assert parts["spec"]["completionMode"] == "Indexed"
    assert commands[0][-1] == f"--part=auto/{parts['spec']['completions']}"
    assert commands[1][-1] == "--finish"
    assert commands[0][:-1] == commands[1][:-1]
    assert finish["spec"]["suspend"]
    requests = [
        job["spec"]["template"]["spec"]["containers"][0]["resources"]["requests"] for job in (parts, finish)
    ]
    assert all(f"--workers={request['cpu']}" in commands[0] for request in requests)
    _run_as_pods(commands, _texts(tmp_path / "texts"), tmp_path)


def _run_as_pods(commands: list[list[str]], texts: Path, folder: Path) -> None:
    """The commands of the Jobs, with local places instead of the bucket's, and one pod instead of 16."""
    replaced = {
        "s3://bucket/texts": str(texts),
        "--include=*.parquet": "--include=*.txt",
        "--tokenizer=/opt/headrace/tokenizer.json": "--tokenizer=bytes",
        "--out=s3://bucket/data": f"--out={folder / 'pods'}",
        "--workers=8": "--workers=1",
        "--part=auto/16": "--part=auto/1",
    }
    for command in commands:
        local = [replaced.get(word, word) for word in command]
        environment = _environment(folder, JOB_COMPLETION_INDEX="0")
        subprocess.run(local, env=environment, check=True, capture_output=True)
    assert len(headrace.open(folder / "pods")) == 12
