"""All intents of a job composed into one specification: which version each task runs, and why.

`compose` is a function of what is wanted, of the tasks and of the time: it does not matter in
which order the intents were written. Its promises, in this order (docs/intents.md):

- under a hold every task keeps the version that it has, and the job its size;
- exactly `part_of(share, size)` tasks, or the given number, run what is pushed, fewer only where
  canaries need them;
- canary tasks are taken from those that run the version before, and count for no push;
- as few tasks as possible change their version; a smaller size takes tasks of all versions away
  in proportion.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import chain
from operator import attrgetter

from control_plane.api.intents import CanaryIntent, Dimension, PushIntent, SizeIntent, part_of

NOWHERE, ILL, SILENT, SERVES = range(4)
"""How much removing a task would cost: it runs nowhere, is known not to serve, is unreachable
because its machine does not answer, or serves."""


NEXT_PUSH = "it enters with the next push"


class Why(StrEnum):
    """Why a task should run its version."""

    PUSH = "it is part of the push"
    STABLE = "the push does not include it"
    CANARY = "it is a canary"
    HOLD = "the job is held"


@dataclass(frozen=True, slots=True)
class Pushed:
    """What is pushed, on which part of the tasks, and what the others run."""

    target: int
    stable: int = 0
    """0: no earlier version is known; all tasks run the target."""
    share: float = 1.0
    runtime: str = ""
    tasks: int | None = None
    """This number of tasks, instead of a share."""

    @property
    def intent(self) -> PushIntent:
        """Return the push as it is stored."""
        return PushIntent(version=self.target, share=self.share, tasks=self.tasks)


@dataclass(frozen=True, slots=True)
class JobWants:
    """The intents of a job, one per dimension."""

    push: Pushed
    size: SizeIntent
    canary: CanaryIntent | None = None
    """A variant for some tasks."""
    canary_ends_at: float | None = None
    runtime: str = ""
    """The runtime that operators want for the next push."""
    held_until: float | None = None
    size_in_force: int | None = None
    """Wanted number of tasks while the job is held; None: as many as there are."""


@dataclass(frozen=True, slots=True)
class TaskSeen:
    """One task of the job in its present state."""

    index: int
    version: int
    """The version that it runs, or is being updated to."""
    missed: int = SERVES
    rank: int = 0
    """Among tasks with equal `missed` the lowest rank is removed first, then the highest index."""


@dataclass(frozen=True, slots=True)
class Infrastructure:
    """Facts about the machines of the tasks."""

    machine_types: Mapping[int, str] = field(default_factory=dict)
    """Task → type of its machine; no entry: it has no machine, or one of unknown type."""
    leaving: frozenset[int] = frozenset()
    """Tasks that must leave their machine."""
    taken: frozenset[int] = frozenset()
    """Indexes of tasks that are being removed, or that replace others for a while."""


@dataclass(frozen=True, slots=True)
class Assigned:
    """The version that one task should run."""

    version: int
    why: Why


@dataclass(frozen=True, slots=True)
class UnifiedSpec:
    """What the scheduler carries out."""

    size: int
    tasks: Mapping[int, Assigned]
    """By index: the tasks that stay and those that are to be added."""
    removed: frozenset[int] = frozenset()
    runtime: str = ""
    """The runtime of this push; another one waits for the next push."""
    waits: Mapping[Dimension, str] = field(default_factory=dict)
    """Dimension → why it is not fully in force."""


def compose(
    wanted: JobWants, tasks: Sequence[TaskSeen], infrastructure: Infrastructure, now: float
) -> UnifiedSpec:
    """Return what the intents make of the tasks at this moment; `now` is in seconds since 1970."""
    tasks = sorted(tasks, key=attrgetter("index"))
    waits = dict[Dimension, str]()
    runtime = wanted.push.runtime
    if wanted.runtime and wanted.runtime != runtime:
        waits[Dimension.INFRASTRUCTURE] = NEXT_PUSH
    if wanted.held_until is not None and now < wanted.held_until:
        held = _held(wanted, tasks, infrastructure.taken, runtime)
        free = compose(replace(wanted, held_until=None), tasks, infrastructure, now)
        return replace(held, waits={**free.waits, **_postponed(wanted, held, free)})
    size, canary = wanted.size.wanted, wanted.canary
    if wanted.canary_ends_at is not None and now >= wanted.canary_ends_at:
        canary = None
    removed = frozenset[int]()
    if size < len(tasks):
        removed = _removed(wanted.push, canary, tasks, size)
        tasks = [task for task in tasks if task.index not in removed]
    new = _new(tasks, size, infrastructure.taken)
    canaries = _canaries(canary, wanted.push, tasks, new, size, infrastructure)
    if canary is not None and len(canaries) < (most := _most(canary, size)):
        waits[Dimension.CANARY] = _lacks(canary, most - len(canaries))
    spec = _versions(wanted.push, tasks, new, canaries, size)
    if canary is not None:
        spec |= dict.fromkeys(sorted(canaries), Assigned(canary.version, Why.CANARY))
    return UnifiedSpec(size, spec, removed, runtime, waits)


def _held(
    wanted: JobWants, tasks: Sequence[TaskSeen], taken: frozenset[int], runtime: str
) -> UnifiedSpec:
    """Return the specification under a hold: only a resize that began before it is finished."""
    size = len(tasks) if wanted.size_in_force is None else wanted.size_in_force
    removed = frozenset[int]()
    if size < len(tasks):
        removed = _removed(wanted.push, wanted.canary, tasks, size)
        tasks = [task for task in tasks if task.index not in removed]
    held = {v: Assigned(v, Why.HOLD) for v in {task.version for task in tasks}}
    spec = {task.index: held[task.version] for task in tasks}
    new = Assigned(wanted.push.stable or wanted.push.target, Why.HOLD)
    spec |= dict.fromkeys(_new(tasks, size, taken), new)
    return UnifiedSpec(size, spec, removed, runtime)


def _postponed(wanted: JobWants, held: UnifiedSpec, free: UnifiedSpec) -> dict[Dimension, str]:
    """Return the dimensions whose versions the hold keeps from being in force."""
    canary, found = wanted.canary.version if wanted.canary is not None else None, set[Dimension]()
    for index in held.tasks.keys() & free.tasks.keys():
        now, then = held.tasks[index].version, free.tasks[index].version
        if now != then:
            found.add(Dimension.CANARY if canary in (now, then) else Dimension.PUSH)
    return dict.fromkeys(found, Why.HOLD)


# -- how many


def _most(canary: CanaryIntent | None, size: int) -> int:
    if canary is None:
        return 0
    wanted = canary.tasks if canary.share is None else max(1, part_of(canary.share, size))
    return min(size, wanted)


def _targets(push: Pushed, size: int) -> int:
    return push.intent.of(size) if push.stable else size


def _new(tasks: Sequence[TaskSeen], size: int, taken: frozenset[int]) -> list[int]:
    """Return the lowest free indexes for the tasks that are missing."""
    missing = size - len(tasks)
    if missing <= 0:
        return []
    known, new, index = taken | {task.index for task in tasks}, list[int](), 0
    while len(new) < missing:
        if index not in known:
            new.append(index)
        index += 1
    return new


def _kept(push: Pushed, now: int, of: int, size: int) -> int:
    """Return how many of `now` tasks of the target stay when `of` tasks become `size`.

    As many as the share says. A push that has not reached its share keeps its present
    proportion, so that a smaller size does not advance it (the article's figure 4).
    """
    most = _targets(push, size)
    return most if now >= _targets(push, of) else min(most, part_of(now / of, size))


# -- which tasks are removed


def _removed(
    push: Pushed, canary: CanaryIntent | None, tasks: Sequence[TaskSeen], size: int
) -> frozenset[int]:
    """Return the tasks to remove: the least missed first, equal ones in proportion to versions."""
    trial = canary.version if canary is not None else None
    target, on_trial = 0, 0
    for task in tasks:
        target += task.version == push.target
        on_trial += task.version == trial
    stay_on_trial = min(on_trial, _most(canary, size))
    stay = min(_kept(push, target, len(tasks), size), size - stay_on_trial)
    rest = size - stay - stay_on_trial
    others = len(tasks) - target - on_trial
    if rest > others:  # else fewer tasks than `size` would stay
        stay += min(rest - others, target - stay)
    over = {push.target: target - stay}
    if trial is not None:
        over[trial] = on_trial - stay_on_trial
    left = len(tasks) - size
    over_others = left - sum(max(0, n) for n in over.values())
    gone = list[int]()
    classes: tuple[list[TaskSeen], ...] = ([], [], [], [])
    for task in tasks:
        classes[task.missed].append(task)
    for alike in classes:
        if len(alike) <= left:
            picked = alike
        else:
            picked = _picked(alike, left, over, over_others, push.target, trial)
        for task in picked:
            if task.version in over:
                over[task.version] -= 1
            else:
                over_others -= 1
        gone += [task.index for task in picked]
        left -= len(picked)
        if left <= 0:
            break
    return frozenset(gone)


def _picked(
    alike: Sequence[TaskSeen],
    left: int,
    over: Mapping[int, int],
    over_others: int,
    target: int,
    trial: int | None,
) -> list[TaskSeen]:
    """Return `left` tasks of equal `missed`, first from versions that have too many."""
    groups: dict[int | None, list[TaskSeen]] = {}
    for task in alike:
        groups.setdefault(task.version if task.version in over else None, []).append(task)
    picked = list[TaskSeen]()
    for group, too_many in ((target, over[target]), (trial, over.get(trial or 0, 0)), (0, 0)):
        if group in over and group in groups and too_many > 0:
            picked += _first(groups[group], min(too_many, left - len(picked)))
    if None in groups and over_others > 0:
        picked += _first(groups[None], min(over_others, left - len(picked)))
    if len(picked) < left:
        known = {task.index for task in picked}
        picked += _first([t for t in alike if t.index not in known], left - len(picked))
    return picked


def _first(tasks: Iterable[TaskSeen], number: int) -> list[TaskSeen]:
    return sorted(tasks, key=lambda task: (task.rank, -task.index))[:number]


# -- which task runs what


def _canaries(
    canary: CanaryIntent | None,
    push: Pushed,
    tasks: Sequence[TaskSeen],
    new: Sequence[int],
    size: int,
    infrastructure: Infrastructure,
) -> frozenset[int]:
    """Return the canary tasks: present ones, then stable tasks on machines of one type."""
    if canary is None:
        return frozenset()
    most, types = _most(canary, size), infrastructure.machine_types
    tied = canary.machine_type
    chosen = [
        task.index
        for task in tasks
        if task.version == canary.version and tied in ("", types.get(task.index, tied))
    ]
    chosen = sorted(chosen)[:most]
    if len(chosen) == most:
        return frozenset(chosen)
    free = _free(canary, tasks, frozenset(chosen), infrastructure)
    alike = tied or _commonest(types, chosen, free)
    free.sort(
        key=lambda task: (
            task.version == push.target and push.stable != 0,
            types.get(task.index, "") != alike,
            -task.missed,
            task.index,
        )
    )
    chosen += [task.index for task in free[: most - len(chosen)]]
    if not tied:
        chosen += new[: most - len(chosen)]
    return frozenset(chosen)


def _free(
    canary: CanaryIntent,
    tasks: Sequence[TaskSeen],
    chosen: frozenset[int],
    infrastructure: Infrastructure,
) -> list[TaskSeen]:
    """Return the other tasks that may become canaries: they stay, on a machine of the type."""
    excluded, types = chosen | infrastructure.leaving, infrastructure.machine_types
    tied = canary.machine_type
    free = [task for task in tasks if task.index not in excluded]
    return [task for task in free if not tied or types.get(task.index) == tied]


def _commonest(types: Mapping[int, str], chosen: Sequence[int], free: Sequence[TaskSeen]) -> str:
    """Return the commonest machine type of the canaries, or of free tasks, to keep them alike."""
    found: dict[str, int] = {}
    for index in chosen or [task.index for task in free]:
        found[types.get(index, "")] = found.get(types.get(index, ""), 0) + 1
    return min(found, key=lambda name: (-found[name], name), default="")


def _lacks(canary: CanaryIntent, number: int) -> str:
    where = f" on machines of type {canary.machine_type}" if canary.machine_type else ""
    return f"{number} more task{'' if number == 1 else 's'}{where}"


def _versions(
    push: Pushed,
    tasks: Sequence[TaskSeen],
    new: Sequence[int],
    canaries: frozenset[int],
    size: int,
) -> dict[int, Assigned]:
    """Return what all tasks except the canaries run, with the fewest possible changes."""
    to_target = Assigned(push.target, Why.PUSH)
    if not push.stable or push.intent.is_whole:
        spec = {t.index: to_target for t in tasks if t.index not in canaries}
        spec |= {index: to_target for index in new if index not in canaries}
        return spec
    to_stable = Assigned(push.stable, Why.STABLE)
    most = min(_targets(push, size), size - len(canaries))
    have, rest = list[TaskSeen](), list[TaskSeen]()
    for task in tasks:
        if task.index not in canaries:
            (have if task.version == push.target else rest).append(task)
    if len(have) > most:
        have = sorted(have, key=lambda task: (-task.missed, task.index))[:most]
    chosen = {task.index for task in have}
    added = [index for index in new if index not in canaries]
    short = most - len(chosen)
    chosen.update(added[:short])
    if len(chosen) < most:
        queues: tuple[list[int], ...] = ([], [], [], [], [])
        for task in rest:
            queues[_turn(task, push.stable)].append(task.index)
        chosen.update(list(chain(*queues))[: most - len(chosen)])
    spec = {t.index: to_target if t.index in chosen else to_stable for t in tasks}
    spec |= {index: to_target if index in chosen else to_stable for index in new}
    for index in canaries:
        del spec[index]
    return spec


def _turn(task: TaskSeen, stable: int) -> int:
    """Return a task's place in the order of updates to the target, from 0.

    First tasks that run nowhere, then those that must change anyway, unhealthy ones and
    serving ones. Tasks whose machine does not answer come last.
    """
    if task.missed != NOWHERE and task.version != stable:
        return 1
    return (0, 2, 4, 3)[task.missed]
