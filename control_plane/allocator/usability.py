"""Decides whether a machine takes tasks now, and finds tasks that should not run there."""

from __future__ import annotations

from collections.abc import Callable

from agent.api import ProfileState
from control_plane.agents.core.commands import unknown_tasks
from control_plane.agents.core.restored import predates_restore
from control_plane.agents.observations import Observation
from control_plane.agents.region import Region
from control_plane.allocator.ports import Grants
from control_plane.allocator.releases import Releases
from control_plane.allocator.task_directory import TaskDirectory
from control_plane.api.jobs import JobRecord
from control_plane.api.machines import MachineRecord, MachineState
from control_plane.broker.core.unavailability import blocking
from control_plane.portal.core.pools import pool_of
from control_plane.runtime.table import Table


class Usability:
    """Judges machines by their records, and by the reports of their agents."""

    def __init__(
        self,
        region: Region,
        portal: Grants,
        jobs: Table[JobRecord],
        directory: TaskDirectory,
        releases: Releases,
        is_taking: Callable[[str], bool],
    ) -> None:
        """`is_taking(machine)` returns whether an allocation of this allocator takes it now."""
        self._observations, self._runtime = region.observations, region.runtime
        self._settings, self._follows = region.settings, region.follows
        self._portal, self._jobs, self._directory = portal, jobs, directory
        self._releases, self._is_taking = releases, is_taking
        self.awaited: dict[str, None] = {}
        """Machines whose agents have not answered for the first time yet."""

    def blocked(self, record: MachineRecord) -> str:
        """Return why a machine takes no tasks, as a predicate.

        A machine that is switching its profile takes tasks: they start once the profile is proved.
        """
        if record.state is not MachineState.UP:
            return "is down"
        if record.machine in self._releases:
            return "is being given back"
        if record.hold is not None and not self._is_taking(record.machine):
            return f"is held for transaction {record.hold.transaction}"
        if record.unavailability and (planned := blocking(record, self._runtime.date())):
            return planned
        observation = self._observations.peek(record.machine)
        is_silent = not observation.answering and self._follows(record.entitlement)
        if is_silent and not self._is_awaited(record.machine, observation):
            return "does not answer"
        degraded = observation.profile.state is ProfileState.DEGRADED
        if record.entitlement and degraded and not self._observations.ready(record):
            return f"failed to reach profile {record.profile_wanted!r}"
        if self._directory.leaving(record.machine) or (
            observation.tasks and self.unexpected_tasks(record.machine)
        ):
            return "still runs tasks that moved away"
        if self.unclaimed(record.machine) - {record.entitlement}:
            return "runs tasks that the restored store does not contain: twinectl restored show"
        return ""

    def unexpected_tasks(self, machine: str) -> list[str]:
        """Return our tasks that run on a machine although no record places them there."""
        tasks = self._observations.peek(machine).tasks
        if aside := self._jobs.set_aside:
            tasks = {name: status for name, status in tasks.items() if status.job not in aside}
        known, observations = self._directory.tasks(machine).keys(), self._observations
        released: set[str] = observations.released_tasks.get(machine, set())
        return unknown_tasks(tasks, known, observations.restored, released)

    def unclaimed(self, machine: str) -> set[str]:
        """Return the pools of tasks on a machine that are missing only in the restored store."""
        restored = self._observations.restored
        if not restored:
            return set()
        known = self._directory.tasks(machine).keys()
        unknown = {
            status.entitlement
            for name, status in self._observations.peek(machine).tasks.items()
            if name not in known and predates_restore(status, restored)
        }
        found = {name: self._portal.table.find(name) for name in unknown}
        return {pool_of(name, of.spec) if of is not None else name for name, of in found.items()}

    def _is_awaited(self, machine: str, observation: Observation) -> bool:
        """Return whether an agent is silent only because this process has just begun to call it.

        Otherwise the first agents to answer after a start would get all tasks.
        """
        if observation.was_listed:
            return False
        asked_at = observation.asked_since
        if asked_at is None or self._runtime.now() - asked_at < self._settings.down_after_s:
            self.awaited[machine] = None
            return True
        return False
