"""Serves calls of owners about single tasks: show one, restart it, run a command inside it.

The service calls the agent of the task's machine and returns its answer.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Protocol

from agent.api import TaskStatus
from control_plane.agents.protocol import AgentApi
from control_plane.api.jobs import TaskRecord, spec_of, task_at, task_id
from control_plane.api.tasks import HostDescription, TaskDescription
from control_plane.identity.authority import TaskSubject
from control_plane.runtime.job_table import JobTable
from control_plane.scheduler.core.operations import machine_of
from wire.duplex import Talk, relay_to
from wire.errors import Forbidden, NotFound


class Agents(Protocol):
    """Returns clients of agents."""

    async def agent(self, machine: str) -> AgentApi:
        """Return a client of a machine's agent."""


class TaskService:
    """Calls agents on behalf of the owners of tasks."""

    def __init__(self, jobs: JobTable, agents: Agents) -> None:
        self._jobs, self._agents = jobs, agents

    def _placed(self, job: str, index: int) -> tuple[TaskRecord, str]:
        task = task_at(self._jobs.get(job), index)
        if task is None:
            raise NotFound(f"job {job!r} has no task {index}", hint=f"twinectl job status {job}")
        if task.placement is None:
            reason = f": {task.reason}" if task.reason else ""
            raise NotFound(f"task {index} of job {job!r} is on no machine{reason}")
        return task, task.placement.machine

    def identity_for(self, machine: str, task: str) -> TaskSubject:
        """Return a task's identity for the machine it is placed on; else `Forbidden`."""
        job, _, index = task.rpartition("-")
        record = self._jobs.find(job)
        found = next((t for t in record.tasks if str(t.index) == index), None) if record else None
        if record is None or found is None or machine_of(found) != machine:
            raise Forbidden(
                f"{machine} may not have the identity of task {task}: the task was not placed "
                "on it",
                hint="a task that was started on the host itself has no identity",
            )
        spec = spec_of(record, found)
        if not spec.identity:
            raise Forbidden(f"task {task} has no identity", hint="identity = true in its job file")
        return TaskSubject(spec.entitlement, job, task)

    async def describe(self, job: str, index: int) -> TaskDescription:
        """Return the state of a task in its record and on its machine."""
        task, machine = self._placed(job, index)
        name = task_id(job, index)
        agent = await self._agents.agent(machine)
        usages = await agent.get_usage()
        return TaskDescription(
            task=name,
            machine=machine,
            phase=task.phase,
            version=task.version,
            reason=task.reason,
            status=await agent.get_task(name),
            usage=next((u for u in usages.tasks if u.task_id == name), None),
        )

    async def describe_host(self, machine: str) -> HostDescription:
        """Return the present profile and usage that the agent of a machine reports."""
        agent = await self._agents.agent(machine)
        profile, usage = await agent.get_profile(), await agent.get_usage()
        return HostDescription(machine=machine, profile=profile, usage=usage)

    async def logs(
        self,
        job: str,
        index: int,
        *,
        follow: bool,
        since: str | None,
        tail: int | None,
        previous: bool = False,
    ) -> AsyncIterator[bytes]:
        """Yield what a task wrote, from the machine where it is now."""
        _, machine = self._placed(job, index)
        agent = await self._agents.agent(machine)
        name = task_id(job, index)
        chunks = agent.task_logs(name, follow=follow, since=since, tail=tail, previous=previous)
        async for chunk in chunks:
            yield chunk

    async def restart(self, job: str, index: int) -> TaskStatus:
        """Restart a task through its agent; its generation stays the same."""
        task, machine = self._placed(job, index)
        agent = await self._agents.agent(machine)
        return await agent.restart_task(task_id(job, index), task.generation, None)

    async def inside(self, job: str, index: int, asked: Mapping[str, str]) -> Talk:
        """Open a connection to a command inside a task; `asked` has the arguments of the route."""
        _, machine = self._placed(job, index)
        agent = await self._agents.agent(machine)
        return await relay_to(agent.open_exec(task_id(job, index), dict(asked)))
