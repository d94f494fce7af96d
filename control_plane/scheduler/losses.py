"""Counts the lost capacity of each data center, and postpones voluntary work where it is high.

Four simultaneous events once cost a data center most of its capacity (paper §5.2): moved traffic, a
load test, new racks next to the old ones, and a release of the web tier. The release continued
while power was capped. So releases, rebalancing and deferrable maintenance wait while much of a
data center does not serve or has too little power. The counts are updated with each record.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from control_plane.agents.region import Region
from control_plane.api.job_changes import task_changes
from control_plane.api.jobs import JobRecord, TaskPhase, TaskRecord
from control_plane.api.limits import LimitName
from control_plane.api.machines import EventKind, MachineRecord
from control_plane.api.operations import OperationKind
from control_plane.broker.core.unavailability import open_event
from control_plane.runtime.job_table import JobTable

_NONE: Mapping[str, str] = {}
_NO_LOSS = (OperationKind.START, OperationKind.REMOVE)
"""Operations on tasks that do not serve yet, or are no longer wanted: no capacity is lost."""


class Losses:
    """Listens to brokers and jobs from before they are loaded."""

    def __init__(self, region: Region, jobs: JobTable) -> None:
        self._share = region.settings.capacity_loss_share
        self._least = region.settings.capacity_loss_tasks
        self._runtime = region.runtime
        self._limit = region.limits.of(LimitName.CAPACITY, 1.0, 1)
        self._datacenter_of: dict[str, str] = {}
        """Machine → data center."""
        self._serving: Counter[str] = Counter()
        """Machine → tasks that serve there, as their records say."""
        self._not_serving: Counter[str] = Counter()
        """Machine → tasks there that should serve and do not."""
        self._tasks: Counter[str] = Counter()
        """Data center → tasks on its machines …"""
        self._lost: Counter[str] = Counter()
        """… and those of them that should serve and do not."""
        self._capped: dict[str, None] = {}
        self._capped_tasks: Counter[str] = Counter()
        """Data center → tasks that serve on machines whose power is capped."""
        region.broker.listen(self._machine_changed)
        jobs.listen(self._job_changed)

    def held_back(self, record: JobRecord) -> Mapping[str, str]:
        """Return machine → reason for machines of a job whose voluntary operations must wait."""
        dcs = (
            {dc for dc in self._tasks if self._exceeds_share(dc)} if self._exceeds_least() else None
        )
        now = self._runtime.now()
        if not dcs or self._limit.is_lifted(now):
            return _NONE
        found = {}
        for task in record.tasks:
            machine = task.placement.machine if task.placement is not None else ""
            dc = self._datacenter_of.get(machine, "")
            if dc in dcs:
                found[machine] = self.describe(dc)
        return found

    def note(self, describe: str) -> None:
        """Report through the limit that operations wait for this reason."""
        self._limit.hold_back(self._runtime.now(), describe, for_s=60.0)

    def describe(self, dc: str) -> str:
        """Describe how much of a data center is lost."""
        lost, capped = self._lost[dc], self._capped_tasks[dc]
        return (
            f"{lost + capped} of {self._tasks[dc]} tasks in {dc} do not serve or have too little "
            f"power, more than {self._share:.0%}: no further tasks are taken down there"
        )

    def _exceeds_least(self) -> bool:
        return self._lost.total() + self._capped_tasks.total() >= self._least

    def _exceeds_share(self, dc: str) -> bool:
        gone = self._lost[dc] + self._capped_tasks[dc]
        return gone >= self._least and gone > self._share * self._tasks[dc]

    # -- listeners

    def _machine_changed(
        self, name: str, _: MachineRecord | None, after: MachineRecord | None
    ) -> None:
        if after is None:
            self._set_capped(name, capped=False)
            return
        if self._datacenter_of.get(name) != after.location.datacenter:
            self._change_datacenter(name, after.location.datacenter)
        capped = bool(after.unavailability) and open_event(after, EventKind.POWER_CAP) is not None
        self._set_capped(name, capped=capped)

    def _change_datacenter(self, name: str, dc: str) -> None:
        """Count a machine and its tasks in another data center, as when it joins again there."""
        is_capped = name in self._capped
        self._set_capped(name, capped=False)
        for counted, sign in ((self._datacenter_of.get(name, ""), -1), (dc, 1)):
            self._lost[counted] += sign * self._not_serving[name]
            self._tasks[counted] += sign * (self._serving[name] + self._not_serving[name])
        self._datacenter_of[name] = dc
        self._set_capped(name, capped=is_capped)

    def _set_capped(self, name: str, *, capped: bool) -> None:
        if capped == (name in self._capped):
            return
        dc, serving = self._datacenter_of.get(name, ""), self._serving[name]
        if capped:
            self._capped[name] = None
            self._capped_tasks[dc] += serving
        else:
            del self._capped[name]
            self._capped_tasks[dc] -= serving

    def _job_changed(self, _: str, before: JobRecord | None, after: JobRecord | None) -> None:
        changes = task_changes(before, after)
        self._count((was for was, _ in changes if was is not None), -1)
        self._count((task for _, task in changes if task is not None), 1)

    def _count(self, tasks: Iterable[TaskRecord], sign: int) -> None:
        for task in tasks:
            if task.placement is None:
                continue
            machine = task.placement.machine
            dc = self._datacenter_of.get(machine, "")
            kind = task.operation.kind if task.operation is not None else None
            if task.phase is TaskPhase.RUNNING and task.listed:
                self._serving[machine] += sign
                if machine in self._capped:
                    self._capped_tasks[dc] += sign
            elif kind in _NO_LOSS:
                continue
            else:
                self._not_serving[machine] += sign
                self._lost[dc] += sign
            self._tasks[dc] += sign
