"""Composes all intents of a job into one specification: which version each task runs, and why.

The result depends on the intents, the tasks and the time, but not on the order in which the intents
were written. Its rules, the strongest first (docs/intents.md):

- Under a hold every task keeps its version, and the job its size.
- Exactly `part_of(share, size)` tasks, or the given number, run the pushed version. They are fewer
  only where canaries need tasks.
- Canary tasks are taken from tasks that run the earlier version, and do not count for the push.
- As few tasks as possible change their version. A smaller size removes tasks of all versions in
  proportion.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import chain
from operator import attrgetter

from control_plane.api.intents import CanaryIntent, Dimension, PushIntent, SizeIntent, part_of

NOWHERE, ILL, SILENT, SERVES = range(4)
"""How much a task would be missed, the least first: it runs nowhere; it does not serve; its machine
does not answer; it serves."""
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
    """Of tasks with equal `missed` the lowest rank is removed first, then the highest index."""


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
    """Return the composed specification at a moment; `now` is in seconds since 1970."""
    tasks = sorted(tasks, key=attrgetter("index"))
    waits = dict[Dimension, str]()
    runtime = wanted.push.runtime
    if wanted.runtime and wanted.runtime != runtime:
        waits[Dimension.INFRASTRUCTURE] = NEXT_PUSH
    if wanted.held_until is not None and now < wanted.held_until:
        held = _under_hold(wanted, tasks, infrastructure.taken, runtime)
        free = compose(replace(wanted, held_until=None), tasks, infrastructure, now)
        return replace(held, waits={**free.waits, **_postponed(wanted, held, free)})
    size, canary = wanted.size.wanted, wanted.canary
    if wanted.canary_ends_at is not None and now >= wanted.canary_ends_at:
        canary = None
    removed = frozenset[int]()
    if size < len(tasks):
        removed = _tasks_to_remove(wanted.push, canary, tasks, size)
        tasks = [task for task in tasks if task.index not in removed]
    new = _new_indexes(tasks, size, infrastructure.taken)
    canaries = _choose_canaries(canary, wanted.push, tasks, new, size, infrastructure)
    if canary is not None and (missing := _canary_count(canary, size) - len(canaries)) > 0:
        waits[Dimension.CANARY] = _missing_text(canary, missing)
    spec = _assign_versions(wanted.push, tasks, new, canaries, size)
    if canary is not None:
        spec |= dict.fromkeys(sorted(canaries), Assigned(canary.version, Why.CANARY))
    return UnifiedSpec(size, spec, removed, runtime, waits)


def _under_hold(
    wanted: JobWants, tasks: Sequence[TaskSeen], taken: frozenset[int], runtime: str
) -> UnifiedSpec:
    """Return the specification under a hold, which only lets a resize finish that began before."""
    size = len(tasks) if wanted.size_in_force is None else wanted.size_in_force
    removed = frozenset[int]()
    if size < len(tasks):
        removed = _tasks_to_remove(wanted.push, wanted.canary, tasks, size)
        tasks = [task for task in tasks if task.index not in removed]
    held = {v: Assigned(v, Why.HOLD) for v in {task.version for task in tasks}}
    spec = {task.index: held[task.version] for task in tasks}
    new = Assigned(wanted.push.stable or wanted.push.target, Why.HOLD)
    spec |= dict.fromkeys(_new_indexes(tasks, size, taken), new)
    return UnifiedSpec(size, spec, removed, runtime)


def _postponed(wanted: JobWants, held: UnifiedSpec, free: UnifiedSpec) -> dict[Dimension, str]:
    """Return the dimensions that would change versions if there were no hold."""
    canary = wanted.canary.version if wanted.canary is not None else None
    postponed = set[Dimension]()
    for index in held.tasks.keys() & free.tasks.keys():
        now, then = held.tasks[index].version, free.tasks[index].version
        if now != then:
            postponed.add(Dimension.CANARY if canary in (now, then) else Dimension.PUSH)
    return dict.fromkeys(postponed, Why.HOLD)


# -- how many tasks


def _canary_count(canary: CanaryIntent | None, size: int) -> int:
    """Return how many of `size` tasks should be canaries."""
    if canary is None:
        return 0
    wanted = canary.tasks if canary.share is None else max(1, part_of(canary.share, size))
    return min(size, wanted)


def _pushed_count(push: Pushed, size: int) -> int:
    """Return how many of `size` tasks should run the pushed version."""
    return push.intent.of(size) if push.stable else size


def _new_indexes(tasks: Sequence[TaskSeen], size: int, taken: frozenset[int]) -> list[int]:
    """Return the lowest free indexes, one for each task that is missing."""
    missing = size - len(tasks)
    if missing <= 0:
        return []
    known, new, index = taken | {task.index for task in tasks}, list[int](), 0
    while len(new) < missing:
        if index not in known:
            new.append(index)
        index += 1
    return new


def _target_tasks_kept(push: Pushed, now: int, of: int, size: int) -> int:
    """Return how many of `now` tasks of the target stay when `of` tasks become `size`.

    A push that has reached its share keeps the share. Another one keeps its present proportion, so
    that a smaller size does not advance it (the article's figure 4).
    """
    most = _pushed_count(push, size)
    return most if now >= _pushed_count(push, of) else min(most, part_of(now / of, size))


# -- which tasks are removed


def _tasks_to_remove(
    push: Pushed, canary: CanaryIntent | None, tasks: Sequence[TaskSeen], size: int
) -> frozenset[int]:
    """Return the tasks to remove: the least missed first, equal ones in proportion to versions."""
    trial = canary.version if canary is not None else None
    on_target, on_trial = 0, 0
    for task in tasks:
        on_target += task.version == push.target
        on_trial += task.version == trial
    stay_on_trial = min(on_trial, _canary_count(canary, size))
    stay = min(_target_tasks_kept(push, on_target, len(tasks), size), size - stay_on_trial)
    rest = size - stay - stay_on_trial
    others = len(tasks) - on_target - on_trial
    if rest > others:  # else fewer tasks than `size` would stay
        stay += min(rest - others, on_target - stay)
    over = {push.target: on_target - stay}
    if trial is not None:
        over[trial] = on_trial - stay_on_trial
    left = len(tasks) - size
    over_others = left - sum(max(0, n) for n in over.values())
    removed = list[int]()
    classes: tuple[list[TaskSeen], ...] = ([], [], [], [])
    for task in tasks:
        classes[task.missed].append(task)
    for equals in classes:
        if len(equals) <= left:
            picked = equals
        else:
            picked = _pick(equals, left, over, over_others, push.target, trial)
        for task in picked:
            if task.version in over:
                over[task.version] -= 1
            else:
                over_others -= 1
        removed += [task.index for task in picked]
        left -= len(picked)
        if left <= 0:
            break
    return frozenset(removed)


def _pick(
    equals: Sequence[TaskSeen],
    left: int,
    over: Mapping[int, int],
    over_others: int,
    target: int,
    trial: int | None,
) -> list[TaskSeen]:
    """Return `left` tasks of equal `missed`, first from versions that have too many."""
    groups: dict[int | None, list[TaskSeen]] = {}
    for task in equals:
        groups.setdefault(task.version if task.version in over else None, []).append(task)
    picked = list[TaskSeen]()
    for group, too_many in ((target, over[target]), (trial, over.get(trial or 0, 0)), (0, 0)):
        if group in over and group in groups and too_many > 0:
            picked += _first_removed(groups[group], min(too_many, left - len(picked)))
    if None in groups and over_others > 0:
        picked += _first_removed(groups[None], min(over_others, left - len(picked)))
    if len(picked) < left:
        known = {task.index for task in picked}
        picked += _first_removed([t for t in equals if t.index not in known], left - len(picked))
    return picked


def _first_removed(tasks: Iterable[TaskSeen], number: int) -> list[TaskSeen]:
    return sorted(tasks, key=lambda task: (task.rank, -task.index))[:number]


# -- which task runs what


def _choose_canaries(
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
    count, types = _canary_count(canary, size), infrastructure.machine_types
    wanted_type = canary.machine_type
    chosen = [
        task.index
        for task in tasks
        if task.version == canary.version
        and wanted_type in ("", types.get(task.index, wanted_type))
    ]
    chosen = sorted(chosen)[:count]
    if len(chosen) == count:
        return frozenset(chosen)
    candidates = _other_candidates(canary, tasks, frozenset(chosen), infrastructure)
    machine_type = wanted_type or _commonest_type(types, chosen, candidates)
    candidates.sort(
        key=lambda task: (
            task.version == push.target and push.stable != 0,
            types.get(task.index, "") != machine_type,
            -task.missed,
            task.index,
        )
    )
    chosen += [task.index for task in candidates[: count - len(chosen)]]
    if not wanted_type:
        chosen += new[: count - len(chosen)]
    return frozenset(chosen)


def _other_candidates(
    canary: CanaryIntent,
    tasks: Sequence[TaskSeen],
    chosen: frozenset[int],
    infrastructure: Infrastructure,
) -> list[TaskSeen]:
    """Return the other tasks that may become canaries: they stay, on a machine of the type."""
    excluded, types = chosen | infrastructure.leaving, infrastructure.machine_types
    wanted_type = canary.machine_type
    free = [task for task in tasks if task.index not in excluded]
    return [task for task in free if not wanted_type or types.get(task.index) == wanted_type]


def _commonest_type(
    types: Mapping[int, str], chosen: Sequence[int], free: Sequence[TaskSeen]
) -> str:
    """Return the commonest machine type of the chosen canaries, or of `free` without any."""
    counts: dict[str, int] = {}
    for index in chosen or [task.index for task in free]:
        counts[types.get(index, "")] = counts.get(types.get(index, ""), 0) + 1
    return min(counts, key=lambda name: (-counts[name], name), default="")


def _missing_text(canary: CanaryIntent, number: int) -> str:
    where = f" on machines of type {canary.machine_type}" if canary.machine_type else ""
    return f"{number} more task{'' if number == 1 else 's'}{where}"


def _assign_versions(
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
    most = min(_pushed_count(push, size), size - len(canaries))
    on_target, others = list[TaskSeen](), list[TaskSeen]()
    for task in tasks:
        if task.index not in canaries:
            (on_target if task.version == push.target else others).append(task)
    if len(on_target) > most:
        on_target = sorted(on_target, key=lambda task: (-task.missed, task.index))[:most]
    chosen = {task.index for task in on_target}
    added = [index for index in new if index not in canaries]
    chosen.update(added[: most - len(chosen)])
    if len(chosen) < most:
        queues: tuple[list[int], ...] = ([], [], [], [], [])
        for task in others:
            queues[_update_order(task, push.stable)].append(task.index)
        chosen.update(list(chain(*queues))[: most - len(chosen)])
    spec = {t.index: to_target if t.index in chosen else to_stable for t in tasks}
    spec |= {index: to_target if index in chosen else to_stable for index in new}
    for index in canaries:
        del spec[index]
    return spec


def _update_order(task: TaskSeen, stable: int) -> int:
    """Return a task's place in the order of updates to the target, from 0.

    First tasks that run nowhere, then those that must change anyway, unhealthy ones and
    serving ones. Tasks whose machine does not answer come last.
    """
    if task.missed != NOWHERE and task.version != stable:
        return 1
    return (0, 2, 4, 3)[task.missed]
