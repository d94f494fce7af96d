"""The agents' last reports: the control plane's view of the machines, in memory only.

Nothing here is stored: after a start every agent is asked again. Until a machine's tasks were
listed, nothing is concluded from their absence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from msgspec.structs import replace

from agent.api import MachineFacts, ProfileState, ProfileStatus, TaskStatus
from control_plane.agents.core.observed import ObservedMachine
from control_plane.agents.ports import KnownMachines
from control_plane.agents.protocol import EventStream
from control_plane.api.machines import MachineRecord, MachineState
from control_plane.broker.core.unavailability import departure, excused, overdue, planned, returning
from control_plane.runtime.big_map import BigMap
from control_plane.runtime.runtime import Runtime
from control_plane.runtime.table import ignore

PROFILE = "profile"
"""The subject of a refusal that is about no task and no image."""
_KEPT = 1_000
"""Confirmed stops and refusals that are kept of one machine; one that is missing costs a command
that its agent answers again."""
_NO_PROFILE = ProfileStatus()
_NO_HOME = frozenset[str]()
T = TypeVar("T")
Changed = Callable[[str], None]
"""Called with a machine."""
OneChanged = Callable[[str, str], None]
"""Called with a machine, and with the task or the digest of the image that it is about."""


@dataclass(slots=True)
class Observation:
    """One machine, as its agent describes it. Times are the loop's.

    There is one for each machine of the region, so one without information is small.
    """

    asked_since: float | None = None
    """Since when this process calls the agent; None: it does not, so silence means nothing."""
    answered_at: float | None = None
    """When a call was answered last; `stream` has the last contact of its own requests."""
    stream: EventStream | None = None
    """Open while the agent is followed."""
    alive_at: float | None = None
    """When its host gave its last sign of life while its agent gave no usable answer."""
    answering: bool = False
    boot_id: str = ""
    tasks: dict[str, TaskStatus] = field(default_factory=dict)
    stopped: dict[str, int] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    images: frozenset[str] = frozenset()
    profile: ProfileStatus = _NO_PROFILE
    profile_refusals: int = 0
    """How often in a row the agent answered that it will not take its profile."""
    doubtful: bool = False
    """A command had an unknown outcome: the tasks must be listed again."""

    @property
    def was_listed(self) -> bool:
        """Return whether this process ever listed the machine completely."""
        return bool(self.boot_id)

    def forgive_profile(self) -> None:
        """Forget that the agent refused its profile: it accepted it, or another is wanted."""
        self.refused.pop(PROFILE, None)
        self.profile_refusals = 0

    @property
    def last_contact_at(self) -> float | None:
        """Return when the agent gave its last sign of life; None: never to this process."""
        if self.stream is not None:
            at = self.stream.last_contact_at
            if self.answered_at is None or at > self.answered_at:
                return at if at > float("-inf") else None
        return self.answered_at

    def silent_s(self, now: float) -> float:
        """Return the time without a sign of life, or since the first request."""
        since = self.last_contact_at
        if since is None:
            since = now if self.asked_since is None else self.asked_since
        return now - since


UNSEEN = Observation()
"""The observation of every machine without reports; never changed."""


class Observations:
    """The observations of all machines, and the listeners that are called when one changes."""

    def __init__(self, broker: KnownMachines, runtime: Runtime) -> None:
        self._runtime = runtime
        self._broker = broker
        self._observations: BigMap[Observation] = BigMap()
        self.restored = 0
        """The term in which the store was restored from a copy; 0: it never was."""
        self.released_tasks: dict[str, set[str]] = {}
        """Machine → tasks that the restored store lacks, and that may be stopped."""
        self._listeners: list[Changed] = []
        self._listeners_of_one: list[OneChanged] = []
        broker.listen(self._record_changed, loaded=ignore)

    def listen(self, changed: Changed, of_one: OneChanged | None = None) -> None:
        """Call `changed(machine)` whenever something about a machine may matter.

        If only one task or image changed, `of_one(machine, which)` is called instead, if given.
        """
        self._listeners.append(changed)
        self._listeners_of_one.append(of_one or (lambda machine, _: changed(machine)))

    def observation(self, machine: str) -> Observation:
        """Return what is known of a machine; an unknown machine gets a value that is not kept."""
        known = self._observations.get(machine)
        if known is None:
            known = Observation()
            if self._broker.table.find(machine) is not None:
                self._observations[machine] = known
        return known

    def peek(self, machine: str) -> Observation:
        """Return what is known of a machine, to be read only; `UNSEEN` for one without reports.

        Objects for machines without reports were a quarter of an allocator's memory at 100,000
        machines.
        """
        known = self._observations.get(machine)
        return UNSEEN if known is None else known

    def view(
        self, pools: Mapping[str, str], machines: Iterable[str], now: float
    ) -> dict[str, ObservedMachine]:
        """Return machines by name, as the scheduler sees them.

        `pools`: entitlement → its pool, of all versions that tasks of the job may run.
        """
        found, find, steady = {}, self._broker.table.find, self._runtime.now()
        homes = {pool: frozenset(e for e in pools if pools[e] == pool) for pool in pools.values()}
        for name in machines:
            record = find(name)
            if record is not None:
                found[name] = self._seen(record, homes, now, steady)
        return found

    def ready(self, record: MachineRecord) -> bool:
        """Return whether tasks may start there: its own profile, verified in this boot."""
        return _is_ready(record, self.peek(record.machine))

    def steady(self, machine: str, pool: str) -> Mapping[str, TaskStatus] | None:
        """Return the tasks on a machine that is ready for a pool and has no planned events.

        None: `view` has to judge the machine.
        """
        record, observation = self._broker.table.find(machine), self._observations.get(machine)
        if record is None or observation is None:
            return None
        is_steady = not record.unavailability and record.entitlement == pool
        return observation.tasks if is_steady and _is_ready(record, observation) else None

    def listed(
        self,
        machine: str,
        facts: MachineFacts,
        tasks: Iterable[TaskStatus],
        profile: ProfileStatus,
        images: Iterable[str],
    ) -> None:
        """Record a complete answer: from now on a task that is missing does not exist."""
        observation = self.observation(machine)
        observation.boot_id = facts.boot_id
        observation.tasks = {status.task_id: status for status in tasks}
        observation.images = frozenset(images)
        observation.profile = profile
        observation.forgive_profile()
        observation.refused.clear()
        observation.stopped.clear()
        observation.doubtful = False
        observation.answering = True
        self.record_contact(machine)
        self.changed(machine)

    def asked(self, machine: str) -> None:
        """Record that this process calls the agent from now on: its silence counts."""
        observation = self.observation(machine)
        if observation.asked_since is None:
            observation.asked_since = self._runtime.now()

    def unasked(self, machine: str) -> None:
        """Record that this process does not call the agent now: its silence does not count."""
        self.observation(machine).asked_since = None

    def record_contact(self, machine: str, at: float | None = None) -> None:
        """Record a sign of life, now or at another time."""
        observation, at = self.observation(machine), self._runtime.now() if at is None else at
        last = observation.answered_at
        observation.answered_at = at if last is None else max(last, at)

    def silent(self, machine: str, *, alive: bool = False) -> None:
        """Record that the agent did not answer: its observation may be out of date.

        `alive`: its host accepted or refused the connection, or the agent's answer was unusable.
        """
        observation = self.observation(machine)
        if alive:
            observation.alive_at = self._runtime.now()
        if observation.answering:
            observation.answering = False
            self.changed(machine)

    def saw_task(self, machine: str, status: TaskStatus) -> None:
        """Record the state of a task, unless something newer is known."""
        self.record_contact(machine)
        observation = self.observation(machine)
        known = observation.tasks.get(status.task_id)
        if known is None or status.generation >= known.generation:
            observation.tasks[status.task_id] = status
            observation.refused.pop(status.task_id, None)
            self._one_changed(machine, status.task_id)

    def answered(self, machine: str, status: TaskStatus, *, removed: bool = False) -> None:
        """Record the answer to a command, unless events overtook it.

        Events come in order and on another connection: a state of the same generation from an event
        is newer. So is the event that a task which was to be `removed` is gone.
        """
        known = self.observation(machine).tasks.get(status.task_id)
        if status.generation > (0 if known is None else known.generation) and (
            known is not None or not removed
        ):
            self.saw_task(machine, status)

    def saw_tasks(self, machine: str, tasks: Iterable[TaskStatus]) -> None:
        """Record a complete list of tasks."""
        self.record_contact(machine)
        self.observation(machine).tasks = {status.task_id: status for status in tasks}
        self.changed(machine)

    def stop_confirmed(self, machine: str, task: str, generation: int, *, gone: bool) -> None:
        """Record that the agent accepted a stop, or (`gone`) that it knows no such task."""
        self.record_contact(machine)
        observation = self.observation(machine)
        _put(observation.stopped, task, max(generation, observation.stopped.get(task, 0)))
        observation.refused.pop(task, None)
        if gone:
            observation.tasks.pop(task, None)
        self._one_changed(machine, task)

    def saw_profile(self, machine: str, profile: ProfileStatus) -> None:
        """Record the state of the machine's profile."""
        self.record_contact(machine)
        observation = self.observation(machine)
        observation.forgive_profile()
        if observation.profile != profile:
            observation.profile = profile
            self.changed(machine)

    def image_came(self, machine: str, digest: str) -> None:
        """Record that a machine has an image."""
        observation = self.observation(machine)
        observation.images |= {digest}
        observation.refused.pop(digest, None)
        self._one_changed(machine, digest)

    def refused(self, machine: str, task: str, reason: str, *, doubtful: bool) -> None:
        """Record that a command failed; with `doubtful`, its effect is not known.

        It was about a task, an image or `PROFILE`.
        """
        observation = self.observation(machine)
        _put(observation.refused, task, reason)
        if task == PROFILE and not doubtful:
            observation.profile_refusals += 1
        observation.doubtful = observation.doubtful or doubtful
        self.changed(machine)

    def forget_reports(self, machine: str) -> None:
        """Forget a machine's reports: another process follows it from now on."""
        observation, blank = self._observations.get(machine), Observation()
        if observation is not None:
            for name in Observation.__slots__:
                setattr(observation, name, getattr(blank, name))
            self.changed(machine)

    def changed(self, machine: str) -> None:
        """Wake the services that decide something about the machine."""
        for listener in self._listeners:
            listener(machine)

    def _one_changed(self, machine: str, which: str) -> None:
        for listener in self._listeners_of_one:
            listener(machine, which)

    def _record_changed(
        self, name: str, _before: MachineRecord | None, after: MachineRecord | None
    ) -> None:
        if after is None:
            self._observations.pop(name, None)

    def _seen(
        self, record: MachineRecord, homes: Mapping[str, frozenset[str]], now: float, steady: float
    ) -> ObservedMachine:
        observation = self.observation(record.machine)
        up = record.state is MachineState.UP
        is_in_contact = up and observation.answering
        seen = ObservedMachine(
            up=up,
            answering=observation.answering,
            ready=is_in_contact and _is_ready(record, observation),
            homes=homes.get(record.entitlement, _NO_HOME),
            known=observation.was_listed or not up,
            tasks=observation.tasks,
            stopped=observation.stopped,
            refused=observation.refused,
            restored=self.restored,
            no_report_s=0.0 if is_in_contact else observation.silent_s(steady),
        )
        plans = planned(record) if record.unavailability else ()
        if not plans:  # almost always
            return seen
        return replace(
            seen,
            departure=departure(record, now),
            overdue=overdue(record, now),
            plans=plans,
            excused=excused(record, now),
            returning=returning(record, now),
        )


def _put(known: dict[str, T], key: str, value: T) -> None:
    """Set a value, and drop the oldest entry if there are too many."""
    known[key] = value
    if len(known) > _KEPT:
        del known[next(iter(known))]


def _is_ready(record: MachineRecord, observation: Observation) -> bool:
    profile = observation.profile
    return (
        bool(record.entitlement)
        and record.state is MachineState.UP
        and observation.answering
        and profile.state is ProfileState.VERIFIED
        and profile.name == record.profile_wanted
        and profile.generation == record.assignment_generation
    )
