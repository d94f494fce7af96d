"""Machines that answer for the first time since this process runs.

After a start every machine does, and each has tasks of many jobs: a round for every job at each of
them is work that grows with machines times jobs, while the next machine waits to be heard. A job is
looked at once all of its machines were heard, or after a while without those that are missing.
"""

from __future__ import annotations

from itertools import chain

from control_plane.agents.observations import Observations
from control_plane.runtime.job_table import JobTable

ARRIVING_S = 10.0
"""For so long a job waits for the rest of its machines, unless something else is heard of it."""


class StartupBarrier:
    """Who was heard since the start, and which jobs have machines that were not."""

    def __init__(self, observations: Observations, jobs: JobTable) -> None:
        self._observations, self._jobs = observations, jobs
        self._here: set[str] = set()
        self._missing: dict[str, int] = {}
        """Job → where in its tasks one was found whose machine is missing: a job of thousands of
        tasks is not gone through at each arrival."""

    def is_first(self, machine: str) -> bool:
        """Return whether a machine that is seen now was never known whole before."""
        if machine in self._here or not self._observations.observation(machine).was_listed:
            return False
        self._here.add(machine)
        return True

    def awaits(self, job: str) -> bool:
        """Return whether a job has tasks on a machine that was not heard yet."""
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
