"""Computes the resource use of tasks and the power draw of machines from readings of agents.

Each reading has counters and the agent's time since boot. Two readings of one boot give rates.
Rates are smoothed exponentially, so that a burst of a few seconds moves no task. A load that was
not read for long is unknown, and the task's claim is used instead.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp

from agent.usage import TaskUsage, Usages
from control_plane.broker.core.capacity import Capacity

IDLE_SHARE = 0.5
"""Share of its nominal power that an idle machine draws: about half of its peak (Barroso and
Hölzle, IEEE Computer 40(12), 2007)."""
REST_SHARE = 0.35
"""Share of its nominal power that a machine draws outside its processors; RAPL counts only these.
An assumption: memory, disks and fans differ by machine."""
_STEP = 500
"""Tasks that are visited before the generator yields, so that other coroutines can run."""
_DIGITS = 6
"""The most digits of a task's index: a job has fewer than a million tasks."""
_SHORTEST_S = 1.0
"""The shortest time between two readings that give a rate: the kernel updates CPU time only every
few milliseconds."""


@dataclass(slots=True)
class TaskLoad:
    """The smoothed resource use of one task."""

    rru: float
    memory_bytes: float
    network_mbps: float | None
    """None: the task uses the host's network, whose traffic cannot be attributed to tasks."""
    at: float
    """Time of the last reading, in seconds of the caller's clock."""


@dataclass(slots=True)
class MachineReading:
    """The last reading of one machine, and its power draw."""

    usages: Usages
    tasks: Mapping[str, TaskUsage]
    at: float
    watts: float | None = None
    """Smoothed; None: the host reports no energy counter, or reported it only once."""


@dataclass(slots=True)
class Loads:
    """The loads of all tasks and machines of a region."""

    smooth_s: float
    """Time after which a new level has 63 % of the weight."""
    tasks: dict[str, dict[int, TaskLoad]] = field(default_factory=dict)
    """Job → index → load: a plan needs the loads of all tasks of a job."""
    machines: dict[str, MachineReading] = field(default_factory=dict)

    def read(self, machine: str, capacity: Capacity, usages: Usages, now: float) -> None:
        """Record an agent's reading; the first one, and the first after a boot, gives no rates."""
        before = self.machines.get(machine)
        latest = MachineReading(usages, {task.task_id: task for task in usages.tasks}, now)
        self.machines[machine] = latest
        if before is None:
            return
        passed_s = usages.at_boot_s - before.usages.at_boot_s
        if 0 <= passed_s < _SHORTEST_S:
            self.machines[machine] = before
            return
        latest.watts = self._watts(before, usages, passed_s)
        per_core = capacity.rru / capacity.cpus if capacity.cpus else 0.0
        for name, task in latest.tasks.items():
            earlier = before.tasks.get(name)
            if earlier is not None and passed_s > 0 and task.cpu_s >= earlier.cpu_s:
                self._add_rates(earlier, task, passed_s, per_core, now)

    def _add_rates(
        self,
        earlier: TaskUsage,
        task: TaskUsage,
        passed_s: float,
        per_core: float,
        now: float,
    ) -> None:
        """Smooth the rates of a task over its last two readings, `passed_s` apart."""
        rru = (task.cpu_s - earlier.cpu_s) / passed_s * per_core
        mbps = None
        if task.network_bytes is not None and earlier.network_bytes is not None:
            mbps = max(0, task.network_bytes - earlier.network_bytes) * 8 / 1e6 / passed_s
        job, _, number = task.task_id.rpartition("-")
        if not number.isdecimal() or len(number) > _DIGITS:
            return  # an operator started the task; it belongs to no job
        of_job = self.tasks.setdefault(job, {})
        smoothed = of_job.get(int(number))
        memory = float(task.memory_bytes)
        if smoothed is not None:
            share = self._weight(passed_s)
            rru = smoothed.rru + share * (rru - smoothed.rru)
            memory = smoothed.memory_bytes + share * (memory - smoothed.memory_bytes)
            if mbps is not None and smoothed.network_mbps is not None:
                mbps = smoothed.network_mbps + share * (mbps - smoothed.network_mbps)
        of_job[int(number)] = TaskLoad(rru, memory, mbps, now)

    def _watts(self, before: MachineReading, usages: Usages, passed_s: float) -> float | None:
        """Return the smoothed power draw; the earlier one if the counter was reset."""
        if usages.energy_j is None or before.usages.energy_j is None or passed_s <= 0:
            return None
        if usages.energy_j < before.usages.energy_j:
            return before.watts
        watts = (usages.energy_j - before.usages.energy_j) / passed_s
        if before.watts is None:
            return watts
        return before.watts + self._weight(passed_s) * (watts - before.watts)

    def _weight(self, passed_s: float) -> float:
        """Return the weight of a new rate against the smoothed one."""
        return 1.0 - exp(-passed_s / self.smooth_s)

    def of_tasks(self, job: str, tasks: Sequence[int], since: float) -> list[TaskLoad | None]:
        """Return the loads of a job's tasks; None for each that was not read since `since`."""
        of_job = self.tasks.get(job)
        if of_job is None:
            return [None] * len(tasks)
        loads = map(of_job.get, tasks)
        return [load if load is not None and load.at >= since else None for load in loads]

    def watts_of(self, machine: str, now: float, within_s: float) -> float | None:
        """Return the draw of a machine's processors, if it was read in the last `within_s`."""
        latest = self.machines.get(machine)
        return latest.watts if latest is not None and now - latest.at <= within_s else None

    def oldest_s(self, now: float, within_s: float) -> float | None:
        """Return the age of the oldest reading that is at most `within_s` old."""
        read = (now - m.at for m in self.machines.values() if now - m.at <= within_s)
        return max(read, default=None) if self.tasks else None

    def forget(
        self, machines: Collection[str], now: float, within_s: float
    ) -> Generator[None, None, None]:
        """Remove, in steps, other machines and tasks that were not read within `within_s`."""
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
        """Return the number of tasks with a load."""
        return sum(map(len, self.tasks.values()))


def modelled_w(power_w: float, share: float) -> float:
    """Return the modelled power draw of a machine at a CPU use from 0 to 1."""
    return power_w * (IDLE_SHARE + (1.0 - IDLE_SHARE) * min(1.0, share))


def watts_per_rru(capacity: Capacity) -> float:
    """Return the modelled power draw that each used RRU adds."""
    return (1.0 - IDLE_SHARE) * capacity.power_w / capacity.rru if capacity.rru else 0.0
