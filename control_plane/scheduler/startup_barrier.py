"""Delays the first round of a job after a start until all its machines have answered.

After a start every machine answers for the first time, and each has tasks of many jobs. A round of
every job at each answer would grow with machines times jobs, and delay the next answers. So a job
gets its first round once all of its machines answered, or after `ARRIVING_S` without the others.
"""

from __future__ import annotations

from itertools import chain

from control_plane.agents.observations import Observations
from control_plane.runtime.job_table import JobTable

ARRIVING_S = 10.0
"""How long a job waits for its other machines, unless another event wakes it."""


class StartupBarrier:
    """Which machines answered since the start, and which jobs still wait for some."""

    def __init__(self, observations: Observations, jobs: JobTable) -> None:
        self._observations, self._jobs = observations, jobs
        self._arrived: set[str] = set()
        self._missing: dict[str, int] = {}
        """Job → position of a task whose machine is missing: it avoids a scan of thousands of
        tasks at each arrival."""

    def is_first(self, machine: str) -> bool:
        """Return whether this is the first complete answer of a machine."""
        if machine in self._arrived or not self._observations.observation(machine).was_listed:
            return False
        self._arrived.add(machine)
        return True

    def awaits(self, job: str) -> bool:
        """Return whether a job has tasks on a machine that has not answered yet."""
        record = self._jobs.find(job)
        tasks = () if record is None else record.tasks
        start = min(self._missing.get(job, 0), len(tasks))
        for index in chain(range(start, len(tasks)), range(start)):
            placement = tasks[index].placement
            if placement is not None and placement.machine not in self._arrived:
                self._missing[job] = index
                return True
        self._missing.pop(job, None)
        return False
