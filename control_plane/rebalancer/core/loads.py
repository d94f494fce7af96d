"""What tasks use and what machines draw, from readings of agents: rates, smoothed, with their age.

Each reading has counters and the agent's time since boot; two of one boot give rates. Rates are
smoothed exponentially, so that a burst of seconds moves nothing. What was not read for long is not
known any more, and claims count again.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp

from agent.usage import TaskUsage, Usages
from control_plane.broker.core.capacity import Capacity

IDLE_SHARE = 0.5
"""Of its nominal draw, what an idle machine draws: about half of its peak (Barroso and Hölzle, IEEE
Computer 40(12), 2007)."""
REST_SHARE = 0.35
"""Of its nominal draw, what a machine draws besides its processors, which alone RAPL counts. An
assumption: memory, disks and fans differ by machine."""
_STEP = 500
"""Tasks that are looked at between two chances for others to run."""
_DIGITS = 6
"""Of an index: no job has a million tasks."""
_SHORTEST_S = 1.0
"""Between two readings that give a rate: the kernel adds CPU time up every few milliseconds."""


@dataclass(slots=True)
class TaskLoad:
    """What one task uses, smoothed."""

    rru: float
    memory_bytes: float
    network_mbps: float | None
    """None: it uses its host's network, where traffic is not counted by task."""
    at: float
    """When it was read last; seconds of the caller's clock."""


@dataclass(slots=True)
class MachineReading:
    """The last reading of one machine, and what it draws."""

    usages: Usages
    tasks: Mapping[str, TaskUsage]
    at: float
    watts: float | None = None
    """Smoothed; None: the host does not report it, or reported it only once."""


@dataclass(slots=True)
class Loads:
    """All that was read of a region."""

    smooth_s: float
    """After this long a new level has 63 % of the weight."""
    tasks: dict[str, dict[int, TaskLoad]] = field(default_factory=dict)
    """By job and index: a plan asks for all tasks of a job."""
    machines: dict[str, MachineReading] = field(default_factory=dict)

    def read(self, machine: str, capacity: Capacity, usages: Usages, now: float) -> None:
        """Count a report of one agent; a first reading, or one after a boot, gives no rates."""
        before = self.machines.get(machine)
        known = MachineReading(usages, {task.task_id: task for task in usages.tasks}, now)
        self.machines[machine] = known
        if before is None:
            return
        passed_s = usages.at_boot_s - before.usages.at_boot_s
        if 0 <= passed_s < _SHORTEST_S:
            self.machines[machine] = before
            return
        known.watts = self._watts(before, usages, passed_s)
        per_core = capacity.rru / capacity.cpus if capacity.cpus else 0.0
        for name, task in known.tasks.items():
            earlier = before.tasks.get(name)
            if earlier is not None and passed_s > 0 and task.cpu_s >= earlier.cpu_s:
                self._count(earlier, task, passed_s, per_core, now)

    def _count(
        self,
        earlier: TaskUsage,
        task: TaskUsage,
        passed_s: float,
        per_core: float,
        now: float,
    ) -> None:
        rru = (task.cpu_s - earlier.cpu_s) / passed_s * per_core
        mbps = None
        if task.network_bytes is not None and earlier.network_bytes is not None:
            mbps = max(0, task.network_bytes - earlier.network_bytes) * 8 / 1e6 / passed_s
        job, _, number = task.task_id.rpartition("-")
        if not number.isdecimal() or len(number) > _DIGITS:
            return  # no task of a job: it was started by hand
        of_job = self.tasks.setdefault(job, {})
        known = of_job.get(int(number))
        memory = float(task.memory_bytes)
        if known is not None:
            share = self._weight(passed_s)
            rru = known.rru + share * (rru - known.rru)
            memory = known.memory_bytes + share * (memory - known.memory_bytes)
            if mbps is not None and known.network_mbps is not None:
                mbps = known.network_mbps + share * (mbps - known.network_mbps)
        of_job[int(number)] = TaskLoad(rru, memory, mbps, now)

    def _watts(self, before: MachineReading, usages: Usages, passed_s: float) -> float | None:
        """Return the smoothed draw; a counter that was reset gives no new value."""
        if usages.energy_j is None or before.usages.energy_j is None or passed_s <= 0:
            return None
        if usages.energy_j < before.usages.energy_j:
            return before.watts
        watts = (usages.energy_j - before.usages.energy_j) / passed_s
        if before.watts is None:
            return watts
        return before.watts + self._weight(passed_s) * (watts - before.watts)

    def _weight(self, passed_s: float) -> float:
        return 1.0 - exp(-passed_s / self.smooth_s)

    def of_tasks(self, job: str, tasks: Sequence[int], since: float) -> list[TaskLoad | None]:
        """Return what tasks of a job use; None: it was not read since then."""
        known = self.tasks.get(job)
        if known is None:
            return [None] * len(tasks)
        found = map(known.get, tasks)
        return [load if load is not None and load.at >= since else None for load in found]

    def watts_of(self, machine: str, now: float, within_s: float) -> float | None:
        """Return what a machine's processors draw, if it was read not longer ago than that."""
        known = self.machines.get(machine)
        return known.watts if known is not None and now - known.at <= within_s else None

    def oldest_s(self, now: float, within_s: float) -> float | None:
        """Return how long ago the machine was read that was not read for longest, and counts."""
        read = (now - m.at for m in self.machines.values() if now - m.at <= within_s)
        return max(read, default=None) if self.tasks else None

    def forgetting(
        self, machines: Collection[str], now: float, within_s: float
    ) -> Generator[None, None, None]:
        """Forget, in steps, all machines but these, and tasks that were not read for long."""
        for name in self.machines.keys() - set(machines):
            del self.machines[name]
        seen = 0
        for job, of_job in list(self.tasks.items()):
            for task in [t for t, load in of_job.items() if now - load.at > within_s]:
                del of_job[task]
            if not of_job:
                self.tasks.pop(job, None)
            seen += len(of_job)
            if seen >= _STEP:
                seen = 0
                yield

    def __len__(self) -> int:
        """Return how many tasks have a load."""
        return sum(map(len, self.tasks.values()))


def modelled_w(power_w: float, share: float) -> float:
    """Return what a machine draws at a use of its CPU from 0 to 1, by the model."""
    return power_w * (IDLE_SHARE + (1.0 - IDLE_SHARE) * min(1.0, share))


def watts_per_rru(capacity: Capacity) -> float:
    """Return what a machine draws more for each RRU that is used, by the model."""
    return (1.0 - IDLE_SHARE) * capacity.power_w / capacity.rru if capacity.rru else 0.0
