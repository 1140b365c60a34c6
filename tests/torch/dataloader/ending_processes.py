"""A program for tests: processes with DataLoaders that end in every way, one after the other.

Each line that it reads says what to do, in JSON. It has imported torch by then, and forks: a fresh interpreter for each
would take seconds. The fork goes on below the loop, as a script would, and so it ends as one, with all that Python
does when it exits. It prints its own number and those of its workers; when it has ended, the program prints how.
"""

import json
import os
import signal
import sys
import time

from headrace.torch import DataLoader
from headrace.torch.workers import process
from tests.torch.dataloader.fault_datasets import Hanging, Numbered

while line := sys.stdin.readline():
    told = json.loads(line)
    pid = os.fork()
    if not pid:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
else:
    sys.exit()

os.setsid()
os.dup2(os.open(told["stderr"], os.O_WRONLY | os.O_CREAT), 2)
# Programs in the background are started with Ctrl-C turned off.
signal.signal(signal.SIGINT, signal.default_int_handler)
# A worker whose loader's process is gone does not wait for a dataset that hangs.
process._LEAVE_SECONDS = 600

dataset = Hanging if told["hangs"] else Numbered
loader = DataLoader(
    dataset(10**9),
    batch_size=2,
    num_workers=2,
    persistent_workers=told["persistent"],
    worker_kind=told["worker_kind"],
)
batches = iter(loader)
next(batches)
workers = batches._workers.pids() if told["worker_kind"] == "process" else []
print(os.getpid(), *workers, flush=True)
match told["ending"]:
    case "exception":
        raise ValueError("enough")
    case "sys.exit":
        sys.exit(3)
    case "signal":
        for _ in batches:
            time.sleep(0.001)
