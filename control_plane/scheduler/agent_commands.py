"""The commands that agents need about tasks, derived from the stored records.

A command is derived when it is sent: the dispatcher asks again once its turn has come.
"""

from __future__ import annotations

from collections.abc import Callable

from agent.api import TaskSpec
from control_plane.agents.core.commands import Start, Stop
from control_plane.agents.core.observed import View
from control_plane.agents.dispatcher import Dispatcher
from control_plane.agents.region import Region
from control_plane.api.jobs import JobRecord
from control_plane.runtime.job_table import JobTable
from control_plane.scheduler.core.task_commands import command_about, commands
from control_plane.scheduler.placement import Placements
from control_plane.scheduler.unknown_copies import UnknownCopies


class AgentCommands:
    """Derives the commands of one shard, and hands them to the dispatcher."""

    def __init__(
        self,
        region: Region,
        jobs: JobTable,
        placements: Placements,
        dispatcher: Dispatcher,
        unknown: UnknownCopies,
    ) -> None:
        self._broker, self._observations = region.broker, region.observations
        self._runtime, self._jobs, self._placements = region.runtime, jobs, placements
        self._dispatcher, self._unknown = dispatcher, unknown
        self.number: Callable[[], int] = int
        """Returns the number of the term that commands are made in."""

    async def send(self, record: JobRecord, view: View) -> bool:
        """Send the commands that a stored record needs; return whether there are any."""
        asked = commands(record, view)
        for command in asked:
            self._dispatcher.send(command)  # the dispatcher derives it again before it sends it
            await self._runtime.checkpoint()
        return bool(asked)

    def stop_unknown_tasks(self, name: str) -> None:
        """Stop tasks that run on a machine although they were moved away or their job is gone."""
        observation, record = self._observations.observation(name), self._broker.table.find(name)
        is_ours = record is not None and self._placements.owns(record.entitlement)
        if observation.answering and is_ours:
            for task in self._placements.allocator.unexpected_tasks(name):
                if (stop := self._stop(name, task)) is not None:
                    self._dispatcher.send(stop)

    def wanted(self, machine: str, task: str) -> TaskSpec | Stop | None:
        """Return the command that a machine needs about a task now, if it needs one."""
        job, _, index = task.rpartition("-")
        record = self._jobs.find(job)
        if record is not None and index.isdecimal():
            now = self._runtime.date()
            left = [name for name, tasks in record.leaving.items() if task in tasks]
            view = self._observations.view(self._placements.pools_of(record), [machine, *left], now)
            command = command_about(record, int(index), machine, view)
            if isinstance(command, Start):
                if self._unknown.elsewhere(task, machine):
                    return None
                spec = record.specs.get(command.version, record.spec)
                return self._placements.task_spec(spec, command, self.number())
            if command is not None:
                return command
        stop = self._stop(machine, task)
        if stop is None or not self._observations.observation(machine).answering:
            return None
        return stop if task in self._placements.allocator.unexpected_tasks(machine) else None

    def _stop(self, machine: str, task: str) -> Stop | None:
        """Return the stop of a task that runs on a machine, unless that was confirmed."""
        observation = self._observations.observation(machine)
        status = observation.tasks.get(task)
        if status is None or observation.stopped.get(task, 0) >= status.generation:
            return None
        return Stop(machine, task, status.generation, urgent=True)
