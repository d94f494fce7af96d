"""Service discovery: which tasks of a job may be sent requests, and where they answer.

Only the listed tasks of the stored records appear here, so a task is off before it is told
to stop and on once its successor was seen healthy (SD1).
"""

from __future__ import annotations

import asyncio
from collections import defaultdict

from agent.errors import NotFound
from control_plane.api.jobs import Endpoint, Endpoints, JobRecord, task_id
from control_plane.services.brokers import Brokers
from control_plane.services.table import Table

_WAIT_MAX_S = 60.0


class Discovery:
    """Serves endpoints and wakes those who wait for them to change."""

    def __init__(self, jobs: Table[JobRecord], broker: Brokers) -> None:
        """List nothing until jobs are loaded."""
        self._jobs = jobs
        self._broker = broker
        self._endpoints: dict[str, Endpoints] = {}
        self._changed: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
        jobs.listen(self._job_changed)

    async def endpoints(self, job: str, after: int = 0, wait_s: float = 0.0) -> Endpoints:
        """Return what is listed, once its revision is above `after` or `wait_s` is over."""
        self._find(job)
        try:
            async with asyncio.timeout(min(wait_s, _WAIT_MAX_S)):
                while wait_s > 0 and self._find(job).revision <= after:
                    await self._changed[job].wait()
        except TimeoutError:
            pass
        return self._find(job)

    def _find(self, job: str) -> Endpoints:
        found = self._endpoints.get(job)
        if found is None:
            raise NotFound(f"there is no job {job!r}")
        return found

    def _job_changed(self, name: str, _: JobRecord | None, after: JobRecord | None) -> None:
        if after is None:
            self._endpoints.pop(name, None)
        else:
            listed = self._listed(after)
            known = self._endpoints.get(name)
            if known is not None and known.endpoints == listed:
                return
            revision = self._jobs.revision(name)
            self._endpoints[name] = Endpoints(job=name, revision=revision, endpoints=listed)
        self._changed.pop(name, asyncio.Event()).set()

    def _listed(self, record: JobRecord) -> list[Endpoint]:
        found = []
        for task in record.tasks:
            if not task.listed or task.placement is None:
                continue
            machine = self._broker.table.find(task.placement.machine)
            if machine is not None:
                endpoint = Endpoint(
                    task=task_id(record.name, task.index),
                    machine=machine.machine,
                    host=machine.address.rpartition(":")[0].strip("[]"),
                    ports=task.placement.ports,
                    version=task.version,
                )
                found.append(endpoint)
        return found
