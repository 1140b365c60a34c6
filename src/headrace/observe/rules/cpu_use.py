"""A processor that has no time left to launch kernels."""

from headrace.observe import host
from headrace.observe.facts import Facts, RunFacts
from headrace.observe.findings import Evidence, Finding, Level, NotLooked, Outcome, Rule, outcome_of

CPU_NOTE, CPU_ALARM = 0.40, 0.75


def look(facts: Facts) -> Outcome | None:
    run = facts.run
    if not isinstance(run, RunFacts):
        return None if run is None else NotLooked(run)
    if run.cpu_cores is None:
        return NotLooked("the use of the processor was not measured")
    if not run.has_step:
        return NotLooked("a loop without a step runs as fast as it can; give --compute-ms or --step")
    if run.computes_here:
        return NotLooked("the step computes on the processor itself")
    return outcome_of(cpu_use(run.cpu_cores * facts.ranks / host.useful_cores()))


RULE = Rule("cpu-use", "the processor has time to launch kernels", look, Evidence.RUN, needs_accelerator=True)


def cpu_use(share: float) -> Finding | None:
    if share <= CPU_NOTE:
        return None
    found = (
        f"The processor is {share:.0%} busy: the thread that launches kernels has to wait for a core; stay below "
        f"{CPU_NOTE:.0%}"
    )
    is_alarm = share > CPU_ALARM
    if is_alarm:
        found += f", and never go above {CPU_ALARM:.0%}"
    remedy = "Give fewer workers, move preprocessing into the build, or spread the job over more cores"
    return Finding("cpu-use", Level.ALARM if is_alarm else Level.NOTE, found, remedy)
