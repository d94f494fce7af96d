"""Machines that answer for the first time since the start of this process.

After a start every machine does, and each has tasks of many jobs. A round for every job at each
answer would be work that grows with machines times jobs, and delays the next answers. So a job gets
a round once all of its machines answered, or after a while without those that are missing.
"""

from __future__ import annotations

from itertools import chain

from control_plane.agents.observations import Observations
from control_plane.runtime.job_table import JobTable

ARRIVING_S = 10.0
"""How long a job waits for the rest of its machines, unless another event wakes it."""


class StartupBarrier:
    """Which machines answered since the start, and which jobs still wait for some."""

    def __init__(self, observations: Observations, jobs: JobTable) -> None:
        self._observations, self._jobs = observations, jobs
        self._here: set[str] = set()
        self._missing: dict[str, int] = {}
        """Job → position of a task whose machine is missing: it avoids a scan of thousands of
        tasks at each arrival."""

    def is_first(self, machine: str) -> bool:
        """Return whether this is the first complete answer of a machine."""
        if machine in self._here or not self._observations.observation(machine).was_listed:
            return False
        self._here.add(machine)
        return True

    def awaits(self, job: str) -> bool:
        """Return whether a job has tasks on a machine that has not answered yet."""
        record = self._jobs.find(job)
        tasks = () if record is None else record.tasks
        hint = min(self._missing.get(job, 0), len(tasks))
        for index in chain(range(hint, len(tasks)), range(hint)):
            placement = tasks[index].placement
            if placement is not None and placement.machine not in self._here:
                self._missing[job] = index
                return True
        self._missing.pop(job, None)
        return False
