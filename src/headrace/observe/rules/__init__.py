"""What is known to slow training down: one module for each rule, listed in the order in which they are reported."""

from collections.abc import Mapping

from headrace.observe.facts import Facts
from headrace.observe.findings import Outcome, Rule
from headrace.observe.rules import (
    batch_size,
    blocking_copies,
    copied_data,
    cpu_use,
    in_ram,
    network,
    padding,
    pageable_copies,
    pickled_maps,
    pinned_memory,
    random_reads,
    remote_cache,
    remote_mixing,
    remote_packing,
    remote_shuffle,
    sample_by_sample,
    server_network,
    servers,
    streamed,
    torch_threads,
    waiting,
    workers,
)

RULES: Mapping[str, Rule] = {
    module.RULE.name: module.RULE
    for module in (
        waiting,
        servers,
        server_network,
        network,
        batch_size,
        workers,
        torch_threads,
        cpu_use,
        pageable_copies,
        blocking_copies,
        pinned_memory,
        padding,
        pickled_maps,
        copied_data,
        random_reads,
        sample_by_sample,
        streamed,
        in_ram,
        remote_shuffle,
        remote_packing,
        remote_mixing,
        remote_cache,
    )
}


def examine(facts: Facts) -> dict[str, Outcome]:
    """What every rule finds; rules that do not apply to this loader are left out."""
    outcomes = {name: rule.look(facts) for name, rule in RULES.items()}
    return {name: outcome for name, outcome in outcomes.items() if outcome is not None}
