"""PyTorch's own threads, which compete with worker processes for the same cores.

2 cores, 2 worker processes, torch.get_num_threads() == 2      ->  4 threads that compute, on 2 cores
"""

from headrace.observe import host
from headrace.observe.facts import Facts, RunFacts
from headrace.observe.findings import Evidence, Finding, Level, NotLooked, Outcome, Rule, outcome_of

BUSY_SHARE = 0.75
"""With less of the processor in use, the threads had room beside each other, however many they are.

Whoever uses it: on a machine that is busy with something else, the threads and workers of this loop get less of the
processor than they would use, and their own share proves nothing.
"""


def look(facts: Facts) -> Outcome | None:
    run = facts.run
    if facts.torch_threads is None or run is None:
        return None
    if not isinstance(run, RunFacts):
        return NotLooked(run)
    if not run.computes_here:
        return None
    if run.cpu_cores is None:
        return NotLooked("the use of the processor was not measured")
    cores = host.useful_cores()
    busy = max(run.cpu_cores * facts.ranks / cores, run.machine_cpu_share or 0.0)
    return outcome_of(torch_threads(facts.torch_threads, facts.worker_processes, cores, facts.ranks, busy))


RULE = Rule("torch-threads", "PyTorch's threads and the workers have a core each", look, Evidence.RUN)


def torch_threads(threads: int, workers: int, cores: float, ranks: int, busy: float) -> Finding | None:
    """`threads` and `workers` are those of one rank. In a worker process, PyTorch computes with one thread."""
    computing = ranks * (threads + workers)
    if computing <= cores or busy < BUSY_SHARE:
        return None
    beside = f" beside {workers} worker process{'' if workers == 1 else 'es'}" if workers else ""
    in_ranks = f" in each of {ranks} ranks" if ranks > 1 else ""
    fitting = max(1, int(cores / ranks) - workers)
    return Finding(
        "torch-threads",
        Level.WARNING,
        f"PyTorch computes with {threads} thread{'' if threads == 1 else 's'}{beside}{in_ranks}: {computing} that "
        f"compute on {cores:g} core{'' if cores == 1 else 's'}, {min(busy, 1.0):.0%} of which were in use, so they "
        "interrupt each other",
        f"Call torch.set_num_threads({fitting}) at the start of the script, or set OMP_NUM_THREADS={fitting}; if that "
        "is already so, give fewer workers",
    )
