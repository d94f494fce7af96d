"""Service discovery: which tasks of a job clients may call, and their addresses.

Only listed tasks of the stored records appear here. The scheduler lists a task once it was seen
healthy, and unlists it before the stop (SD1). A task of a private network has its own address
(SD4), any other the address of its machine's last join.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping

from control_plane.agents.ports import KnownMachines
from control_plane.api.endpoints import Endpoint, Endpoints
from control_plane.api.jobs import JobRecord, TaskRecord, task_id
from control_plane.api.machines import MachineRecord
from control_plane.api.shards import ShardMapView
from control_plane.api.watch import EndpointChanges
from control_plane.api.weights import USUAL_WEIGHT, EndpointWeights
from control_plane.discovery.shard_maps import ShardMaps
from control_plane.job_control.core.traffic import traffic_of, weights_by_version
from control_plane.runtime.readable import Readable
from control_plane.runtime.table import ignore
from wire.errors import Conflict, NotFound

_WAIT_MAX_S = 60.0
_USUAL: Mapping[int, int] = {}


class Discovery:
    """Serves endpoints, and wakes the callers that wait for a change."""

    def __init__(
        self,
        jobs: Readable[JobRecord],
        broker: KnownMachines,
        jobs_on: Callable[[str], Collection[str]],
        shards: ShardMaps,
    ) -> None:
        """`jobs_on` returns the jobs that have tasks on a machine."""
        self._shard_maps = shards
        self._jobs = jobs
        self._broker = broker
        self._jobs_on = jobs_on
        self._revisions: dict[str, int] = {}
        """Rises with each change of a job's list."""
        self._endpoints: dict[str, Endpoints] = {}
        """Job → its endpoints, cached until they change."""
        self._weights: dict[str, tuple[Mapping[int, int], asyncio.TimerHandle]] = {}
        """Job → weights of its tasks by index for a load test, and the timer that ends them."""
        self._wakeups: dict[str, set[asyncio.Event]] = {}
        """Job → the events of callers that wait for it to change."""
        jobs.listen(self._job_changed)
        broker.listen(self._machine_changed, loaded=ignore)

    async def endpoints(self, job: str, after: int = 0, wait_s: float = 0.0) -> Endpoints:
        """Return the listed tasks, once their revision is above `after` or `wait_s` is over."""
        await self._wait_until(lambda: self._revision(job) > after, [job], wait_s)
        return self._current(job)

    async def shard_endpoints(self, job: str, shard: str, after: int, wait_s: float) -> Endpoints:
        """Return the listed tasks that serve a shard, the preferred one first.

        Waits as `endpoints` does. `NotFound` if the owner's map lacks the shard.
        """
        await self._wait_until(lambda: self._revision(job) > after, [job], wait_s)
        tasks = self._shard_maps.tasks_of(job, shard)
        if tasks is None:
            hint = f"twinectl job shards {job}"
            raise NotFound(f"the shard map of job {job} has no shard {shard}", hint=hint)
        all_tasks = self._current(job)
        listed = {e.task: e for e in all_tasks.endpoints}
        serving = [listed[t] for t in (task_id(job, i) for i in tasks) if t in listed]
        return Endpoints(job=job, revision=all_tasks.revision, endpoints=serving)

    async def set_shard_map(self, job: str, shards: Mapping[str, list[int]]) -> ShardMapView:
        """Replace the shard map of a job, and wake the callers that wait for the job."""
        before = self._shard_maps.view(job)
        after = await self._shard_maps.put(job, shards)
        if after != before and job in self._revisions:
            self._raise_revision(job)
        return after

    def set_weights(self, job: str, weights: EndpointWeights) -> Endpoints:
        """List tasks with these weights for a limited time, then with the usual ones.

        Raises `NotFound`, and `Conflict` while a canary has a share of the requests.
        """
        self._revision(job)
        if weights.weights and (traffic := traffic_of(self._jobs.get(job))) is not None:
            raise Conflict(
                f"cannot set weights of job {job!r}: a canary gets {traffic:.2%} of its requests",
                hint=f"twinectl job intents {job}; wait until the canary is over, or end it",
            )
        self._drop_weights(job)
        if weights.weights:
            loop = asyncio.get_running_loop()
            ends = loop.call_later(weights.for_s, self.restore_weights, job)
            self._weights[job] = dict(weights.weights), ends
        self._raise_revision(job)
        return self._current(job)

    def restore_weights(self, job: str) -> None:
        """List the tasks of a job with the usual weights again, if the job still exists."""
        if self._weights.pop(job, None) is not None and job in self._revisions:
            self._raise_revision(job)

    def _drop_weights(self, job: str) -> None:
        known = self._weights.pop(job, None)
        if known is not None:
            known[1].cancel()

    def shard_map(self, job: str) -> ShardMapView:
        """Return the shard map of a job."""
        return self._shard_maps.view(job)

    async def watch(self, known: Mapping[str, int | None], wait_s: float = 0.0) -> EndpointChanges:
        """Return the jobs whose revision differs from the known one, or nothing after `wait_s`.

        A job that does not exist has revision 0. A revision below the known one is a change, too:
        the store may have been restored from an older copy.
        """
        await self._wait_until(lambda: bool(self._changed_jobs(known)), known, wait_s)
        changed = self._changed_jobs(known)
        return EndpointChanges(
            changed=[self._current(job) for job in changed if job in self._revisions],
            missing=[job for job in changed if job not in self._revisions],
        )

    def _changed_jobs(self, known: Mapping[str, int | None]) -> list[str]:
        return [job for job, at in known.items() if self._revisions.get(job, 0) != at]

    async def _wait_until(
        self, reached: Callable[[], bool], jobs: Collection[str], wait_s: float
    ) -> None:
        """Wait up to `wait_s` for a condition that changes only when one of these jobs changes."""
        if reached() or wait_s <= 0:
            return
        wakeup = asyncio.Event()
        for job in jobs:
            self._wakeups.setdefault(job, set()).add(wakeup)
        try:
            async with asyncio.timeout(min(wait_s, _WAIT_MAX_S)):
                while not reached():
                    wakeup.clear()
                    await wakeup.wait()
        except TimeoutError:
            pass
        finally:
            for job in jobs:
                self._wakeups[job].discard(wakeup)
                if not self._wakeups[job]:
                    del self._wakeups[job]

    def _current(self, job: str) -> Endpoints:
        revision = self._revision(job)
        endpoints = self._endpoints.get(job)
        if endpoints is None:
            listed = self._list_endpoints(self._jobs.get(job))
            endpoints = Endpoints(job=job, revision=revision, endpoints=listed)
            self._endpoints[job] = endpoints
        return endpoints

    def _revision(self, job: str) -> int:
        revision = self._revisions.get(job)
        if revision is None:
            raise NotFound(f"there is no job {job!r}")
        return revision

    def _job_changed(self, name: str, before: JobRecord | None, after: JobRecord | None) -> None:
        if after is None:
            self._revisions.pop(name, None)
            self._drop_weights(name)  # a new job may get the name
            self._wake_waiting(name)
        elif before is None or name not in self._revisions or _endpoints_differ(before, after):
            self._raise_revision(name)

    def _machine_changed(
        self, name: str, before: MachineRecord | None, after: MachineRecord | None
    ) -> None:
        """Raise the revisions of the jobs on a machine whose address changed."""
        if before is None or after is None or before.address != after.address:
            for job in sorted(self._jobs_on(name)):
                if job in self._revisions:
                    self._raise_revision(job)

    def _raise_revision(self, job: str) -> None:
        """Raise the revision of a job, at least to its record's: so a restart does not lower it."""
        self._revisions[job] = max(self._jobs.revision(job), self._revisions.get(job, 0) + 1)
        self._wake_waiting(job)

    def _wake_waiting(self, job: str) -> None:
        self._endpoints.pop(job, None)
        for wakeup in self._wakeups.get(job, ()):
            wakeup.set()

    def _list_endpoints(self, record: JobRecord) -> list[Endpoint]:
        endpoints, (weights, _) = [], self._weights.get(record.name, (_USUAL, None))
        by_version = weights_by_version(record)
        if by_version:
            weights = _USUAL  # the canary ends a load test's weights
        for task in record.tasks:
            if not task.listed or task.placement is None:
                continue
            machine = self._broker.table.find(task.placement.machine)
            if machine is not None:
                endpoint = Endpoint(
                    task=task_id(record.name, task.index),
                    machine=machine.machine,
                    host=task.address or machine.address.rpartition(":")[0].strip("[]"),
                    ports=task.placement.ports,
                    version=task.version,
                    weight=weights.get(task.index, by_version.get(task.version, USUAL_WEIGHT)),
                )
                endpoints.append(endpoint)
        return endpoints


def _endpoints_differ(before: JobRecord, after: JobRecord) -> bool:
    """Return whether two records have different endpoints; tasks of one object are equal."""
    is_written = before.intents is not after.intents or before.trials != after.trials
    if is_written and traffic_of(before) != traffic_of(after):
        return True
    if before.tasks is after.tasks:
        return False
    return len(before.tasks) != len(after.tasks) or any(
        old is not new and _visible_parts(old) != _visible_parts(new)
        for old, new in zip(before.tasks, after.tasks, strict=True)
    )


def _visible_parts(task: TaskRecord) -> tuple[object, ...]:
    """Return the fields of a task that its endpoint shows."""
    if not task.listed:
        return (task.index,)
    return (task.index, task.placement, task.version, task.address)
