"""A launcher and the training job that it runs on every rank, for test_distributed.py.

It reads one run a line, a list of what each rank is told, and answers with the exit codes of the ranks:

    [{"rank": 0, "world_size": 2, "data": "...", "out": "...", "store": "..."}, {"rank": 1, ...}]
    [0, 0]

Each rank is a process of its own, forked, since importing what it needs takes longer than the job. When one of them
dies, the others are killed, as torchrun does it. A rank logs every row that it was given, and saves checkpoints.
"""

import json
import os
import signal
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import headrace
from headrace.load.loader import Loader

STEPS_A_CHECKPOINT = 3


def launch(jobs: list[dict[str, Any]]) -> list[int]:
    ranks: dict[int, int] = {}
    for job in jobs:
        pid = os.fork()
        if pid == 0:
            work_and_exit(job)
        ranks[pid] = job["rank"]
    codes = [0] * len(jobs)
    alive = set(ranks)
    while alive:
        pid, status = os.wait()
        alive.discard(pid)
        codes[ranks[pid]] = os.waitstatus_to_exitcode(status)
        if status and len(alive) == len(jobs) - 1:
            for other in alive:
                os.kill(other, signal.SIGTERM)
    return codes


def work_and_exit(job: dict[str, Any]) -> None:
    code = 1
    try:
        work(job)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def work(job: dict[str, Any]) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{job['store']}",
        rank=job["rank"],
        world_size=job["world_size"],
        timeout=timedelta(seconds=100),
    )
    out, where = Path(job["out"]), {}
    if job.get("mesh"):
        mesh = init_device_mesh("cpu", tuple(job["mesh"]), mesh_dim_names=("dp", "tp"))
        where = {"mesh": mesh, "mesh_dim": "dp"}
    own = job.get("own", {}).get(str(job["rank"]), {})
    position = own.pop("position", None)
    options = {"batch_size": job["batch_size"], "epochs": 2, "seed": 3, "drop_last": False, **own}
    loader = Loader(job["data"], seq_len=16, **options, **where)
    if job.get("state"):
        loader.load_state_dict(json.loads(Path(job["state"]).read_text()))
    if job.get("own"):
        error = error_of(loader)
        if position is not None:
            # Later than the first comparison.
            loader.load_state_dict({**loader.state_dict(), "position": position})
            error = error_of(loader)
        save(out / f"error-{job['rank']}.json", {"error": error})
        dist.barrier()
        return
    promised, steps = len(loader), 0
    with (out / f"rank-{job['rank']}.jsonl").open("a") as log:
        for batch in loader:
            log.write(json.dumps(rows_of(batch)) + "\n")
            log.flush()
            os.fsync(log.fileno())
            steps += 1
            if [job["rank"], steps] == job.get("dies"):
                os.kill(os.getpid(), signal.SIGKILL)
            # A training step: every rank waits for all.
            dist.all_reduce(torch.ones(1))
            if steps % STEPS_A_CHECKPOINT == 0:
                save(out / f"state-{steps}-{job['rank']}.json", loader.state_dict())
                dist.barrier()
    save(out / f"end-{job['rank']}.json", {"steps": steps, "promised": promised, "world": vars(loader.world)})
    dist.barrier()
    dist.destroy_process_group()


def error_of(loader: Loader) -> str:
    """Why an iteration cannot begin; nothing if it can."""
    try:
        iter(loader)
    except headrace.HeadraceError as error:
        return str(error)
    return ""


def rows_of(batch: headrace.Batch) -> list[list[int]]:
    return [
        tokens[segments > 0].tolist()
        for tokens, segments in zip(batch.tokens, batch.segment_ids, strict=True)
    ]


def save(path: Path, content: dict[str, Any]) -> None:
    path.with_suffix(".part").write_text(json.dumps(content))
    path.with_suffix(".part").rename(path)


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(launch(json.loads(line))), flush=True)
