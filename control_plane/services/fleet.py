"""What the agents last said: the control plane's view of the machines, in memory only.

Nothing here is stored: after a start everything is asked again, and until a machine's
tasks were listed nothing is concluded from their absence.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from agent.api import MachineFacts, ProfileState, ProfileStatus, TaskStatus
from control_plane.api.machines import MachineRecord, MachineState
from control_plane.core.big_map import BigMap
from control_plane.core.reconcile import SeenMachine
from control_plane.core.unavailability import leaving, overdue
from control_plane.services.brokers import Brokers

_NO_PROFILE = ProfileStatus()


@dataclass(slots=True)
class Sight:
    """One machine, as its agent describes it. Times are the loop's.

    There is one for each machine of the region, so one of which nothing is known is small.
    """

    asked_since: float
    heard_at: float | None = None
    refused_at: float | None = None
    """When its host refused a connection last: the machine is alive, its agent is not."""
    answering: bool = False
    boot_id: str = ""
    tasks: dict[str, TaskStatus] = field(default_factory=dict)
    stopped: dict[str, int] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    images: frozenset[str] = frozenset()
    profile: ProfileStatus = _NO_PROFILE
    doubtful: bool = False
    """A command had an unknown outcome: the tasks must be listed again."""

    def silent_s(self, now: float) -> float:
        """Return how long nothing was heard, or since when it is asked for the first time."""
        return now - (self.asked_since if self.heard_at is None else self.heard_at)


class Fleet:
    """The sights of all machines, and who wants to know when one changes."""

    def __init__(self, broker: Brokers) -> None:
        """Start blind."""
        self._broker = broker
        self._sights: BigMap[Sight] = BigMap()
        self._listeners: list[Callable[[str], None]] = []

    def listen(self, changed: Callable[[str], None]) -> None:
        """Call `changed(machine)` whenever something about a machine may matter."""
        self._listeners.append(changed)

    def sight(self, machine: str) -> Sight:
        """Return what is known of a machine."""
        known = self._sights.get(machine)
        if known is None:
            known = Sight(asked_since=asyncio.get_running_loop().time())
            self._sights[machine] = known
        return known

    def view(self, pool: str, machines: Iterable[str], now: float) -> dict[str, SeenMachine]:
        """Return machines by name, for `core.reconcile`; `pool` is that of the job's tasks."""
        found = {}
        for name in machines:
            record = self._broker.table.find(name)
            if record is not None:
                found[name] = self._seen(record, record.entitlement == pool, now)
        return found

    def ready(self, record: MachineRecord) -> bool:
        """Return whether tasks may start there: its own profile, verified in this boot."""
        sight = self.sight(record.machine)
        return (
            bool(record.entitlement)
            and record.state is MachineState.UP
            and sight.answering
            and sight.profile.state is ProfileState.VERIFIED
            and sight.profile.name == record.profile_wanted
            and sight.profile.generation == record.assignment_generation
        )

    def listed(
        self,
        machine: str,
        facts: MachineFacts,
        tasks: Iterable[TaskStatus],
        profile: ProfileStatus,
        images: Iterable[str],
    ) -> None:
        """Take in a complete answer: from now on absence means something."""
        sight = self.sight(machine)
        sight.boot_id = facts.boot_id
        sight.tasks = {status.task_id: status for status in tasks}
        sight.images = frozenset(images)
        sight.profile = profile
        sight.refused.clear()
        sight.stopped.clear()
        sight.doubtful = False
        sight.answering = True
        self.heard(machine)
        self.changed(machine)

    def heard(self, machine: str) -> None:
        """Take in a sign of life."""
        self.sight(machine).heard_at = asyncio.get_running_loop().time()

    def silent(self, machine: str, *, refused: bool = False) -> None:
        """Take in that the agent did not answer: what is known may be out of date.

        `refused`: its host did, by refusing the connection.
        """
        sight = self.sight(machine)
        if refused:
            sight.refused_at = asyncio.get_running_loop().time()
        if sight.answering:
            sight.answering = False
            self.changed(machine)

    def saw_task(self, machine: str, status: TaskStatus) -> None:
        """Take in the state of a task, unless something newer is known."""
        sight = self.sight(machine)
        known = sight.tasks.get(status.task_id)
        if known is None or status.generation >= known.generation:
            sight.tasks[status.task_id] = status
            sight.refused.pop(status.task_id, None)
            self.changed(machine)

    def saw_tasks(self, machine: str, tasks: Iterable[TaskStatus]) -> None:
        """Take in a complete list of tasks."""
        self.sight(machine).tasks = {status.task_id: status for status in tasks}
        self.changed(machine)

    def stop_confirmed(self, machine: str, task: str, generation: int, *, gone: bool) -> None:
        """Take in that the agent accepted a stop, or (`gone`) that it knows no such task."""
        sight = self.sight(machine)
        sight.stopped[task] = max(generation, sight.stopped.get(task, 0))
        sight.refused.pop(task, None)
        if gone:
            sight.tasks.pop(task, None)
        self.changed(machine)

    def saw_profile(self, machine: str, profile: ProfileStatus) -> None:
        """Take in the state of the machine's profile."""
        sight = self.sight(machine)
        sight.refused.pop("profile", None)
        if sight.profile != profile:
            sight.profile = profile
            self.changed(machine)

    def refused(self, machine: str, task: str, reason: str, *, doubtful: bool) -> None:
        """Take in that a command failed; with `doubtful`, nobody knows with what effect."""
        sight = self.sight(machine)
        sight.refused[task] = reason
        sight.doubtful = sight.doubtful or doubtful
        self.changed(machine)

    def changed(self, machine: str) -> None:
        """Wake whoever decides something about the machine."""
        for listener in self._listeners:
            listener(machine)

    def _seen(self, record: MachineRecord, held: bool, now: float) -> SeenMachine:
        sight = self.sight(record.machine)
        return SeenMachine(
            up=record.state is MachineState.UP,
            answering=sight.answering,
            ready=self.ready(record),
            held=held,
            leaving=leaving(record, now),
            overdue=overdue(record, now),
            tasks=sight.tasks,
            stopped=sight.stopped,
            refused=sight.refused,
        )
