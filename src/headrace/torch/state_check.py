"""Whether a loader can go on from a state, asked before anything is changed.

In the middle of an epoch a state counts batches, so they must be the same batches: of as many samples, in the same
order, from a dataset of the same length. At the end of an epoch the next one begins, and all of that may change.
"""

from typing import Annotated, Any

import msgspec
from torch.utils.data import BatchSampler

from headrace.errors import StateError
from headrace.torch.progress import VERSION
from headrace.torch.random_states import Randomness, RandomStates
from headrace.torch.workers.job import is_iterable, is_stateful

_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
_Seed = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class _SamplerPlace(msgspec.Struct):
    drawn: _Count
    state: Any


class _WorkerState(msgspec.Struct):
    state: Any
    since: _Count | list[_Count]


class _State(msgspec.Struct):
    """The form of a state. What samplers and datasets keep is their own."""

    yielded: _Count
    finished: bool
    upto: _Count
    missing: list[_Count]
    sampler: _SamplerPlace
    epoch: int | None
    random: dict[str, Any]
    random_at_end: dict[str, Any] | None
    sampler_at_begin: Any
    sampler_at_end: Any
    dataset_at_end: Any
    base_seed: _Seed
    seeded_first: bool
    begun_twice: bool
    shared_seed: _Seed | None
    dataset_epoch: int | None
    num_workers: _Count
    next_worker: _Count
    workers: list[_WorkerState]
    len_called: _Count | None
    settings: dict[str, Any]


def keeps_worker_state(loader: Any) -> bool:
    """Whether a worker has more state than the number of its batch."""
    return is_iterable(loader._dataset_kind) or is_stateful(loader.dataset)


def settings_of(loader: Any) -> dict[str, Any]:
    """What decides which samples a batch has."""
    if is_iterable(loader._dataset_kind):
        return {"batch_size": loader.batch_size}
    index_sampler, batch_size = loader._index_sampler, None
    sampler = index_sampler
    if type(index_sampler) is BatchSampler:
        sampler, batch_size = index_sampler.sampler, index_sampler.batch_size
    return {
        "batch_size": batch_size,
        "sampler": type(sampler).__qualname__,
        # The length of anyone else's sampler may be different in each epoch.
        "indices": _length(sampler) if type(sampler).__module__.startswith("torch.utils.data.") else None,
        "samples": _length(loader.dataset),
    }


def _length(thing: Any) -> int | None:
    try:
        return len(thing)
    except Exception:
        return None


def check_state(loader: Any, state: Any) -> None:
    """Raise a StateError that says why the loader cannot go on from this state, if so."""
    _check_form(state)
    if bool(state["workers"]) != keeps_worker_state(loader) and state["yielded"]:
        had = "kept state in its workers" if state["workers"] else "kept no state"
        raise StateError(
            f"the dataset of this state {had}, but the dataset of this loader differs in that; use the same kind"
        )
    randomness = Randomness(loader.generator, loader._index_sampler)
    for part in ("random", "random_at_end"):
        if state[part] is not None:
            randomness.check(RandomStates.from_json(state[part]))
    if state["finished"]:
        return
    if state["workers"] and state["num_workers"] != loader.num_workers:
        raise StateError(
            f"num_workers={loader.num_workers}: each worker keeps its own state of the dataset, and the state was "
            f"saved with num_workers={state['num_workers']}; continue with the same number"
        )
    if state["yielded"] or state["upto"]:
        _check_settings(settings_of(loader), state)


def _check_form(state: Any) -> None:
    if not isinstance(state, dict) or "version" not in state:
        kind = type(state).__name__ if not isinstance(state, dict) else _described(state)
        raise StateError(f"state is {kind}: must come from state_dict() of a headrace.torch.DataLoader")
    if state["version"] != VERSION:
        raise StateError(
            f"state has version {state['version']!r}, but this version of headrace reads {VERSION}; load it with the "
            "version that saved it"
        )
    try:
        form = msgspec.convert(state, _State)
    except (msgspec.ValidationError, RecursionError) as error:
        raise _damaged(str(error)) from None
    if form.finished != (form.random_at_end is not None):
        raise _damaged("it is finished, but has no random states of the end, or the other way round")
    if "sampler" in form.settings and form.yielded > form.upto:
        raise _damaged(f"{form.yielded} batches were handed out, but only {form.upto} were drawn")
    if form.sampler.drawn > form.upto:
        raise _damaged(
            f"the sampler has drawn {form.sampler.drawn} batches, but only {form.upto} were handed out"
        )
    _check_needed(form)


def _check_needed(form: _State) -> None:
    """Batches are made again for the loop, or to bring a worker's dataset to its place. They must be among those that
    the sampler gives again, and not more than were handed out."""
    needed = [*form.missing]
    # Turns of an iterable that failed were not handed out.
    most = form.upto if "sampler" in form.settings else None
    for number, worker in enumerate(form.workers):
        if isinstance(worker.since, list):
            needed += worker.since
        elif most is not None and worker.since > most:
            raise _damaged(
                f"worker {number} made {worker.since} batches again, but only {most} were handed out"
            )
    if needed and max(needed) >= form.upto:
        raise _damaged(f"batch {max(needed)} is needed again, but only {form.upto} were handed out")
    if needed and min(needed) < form.sampler.drawn:
        raise _damaged(
            f"batch {min(needed)} is needed again, but the sampler is past {form.sampler.drawn} batches"
        )


def _damaged(why: str) -> StateError:
    return StateError(f"the state is damaged, or was changed: {why}; use another one")


def _described(state: dict[Any, Any]) -> str:
    return f"a dict with {', '.join(map(str, state))}"[:200] if state else "an empty dict"


def _check_settings(now: dict[str, Any], state: dict[str, Any]) -> None:
    then = state["settings"]
    if _counts_batches(state) and now["batch_size"] != then.get("batch_size"):
        raise StateError(
            f"batch_size={now['batch_size']}: the state was saved in the middle of an epoch with "
            f"batch_size={then.get('batch_size')}, and counts batches; continue with that, and change it after the "
            "epoch"
        )
    if now.get("sampler") != then.get("sampler"):
        raise StateError(
            f"the sampler is {now.get('sampler')}, but the state was saved in the middle of an epoch with "
            f"{then.get('sampler')}; use the same sampler (or shuffle=), and change it after the epoch"
        )
    for name, what in (("samples", "dataset"), ("indices", "sampler")):
        if now.get(name) != then.get(name):
            raise StateError(
                f"the {what} has {now.get(name)} samples, but the state was saved in the middle of an epoch over "
                f"{then.get(name)}; the rest of that epoch is not known for another number of samples: use the same "
                "dataset, or a state from the end of an epoch"
            )


def _counts_batches(state: dict[str, Any]) -> bool:
    """Not if the dataset is iterable and has kept its own place after the last batch: that counts no batches."""
    iterable = "sampler" not in state["settings"]
    return not iterable or any(each["state"] is None or each["since"] for each in state["workers"])
