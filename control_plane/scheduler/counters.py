"""Counts machines by state and tasks by phase, updated with each record.

Reading the counts takes no time. A scan of a million machines and their tasks would block the
process for seconds.
"""

from __future__ import annotations

from collections import Counter

from control_plane.api.job_changes import has_same_tasks_and_specs, task_changes
from control_plane.api.jobs import JobRecord, TaskPhase
from control_plane.api.machines import MachineRecord, MachineState


class Counters:
    """Listens to brokers and jobs from before they are loaded."""

    def __init__(self) -> None:
        self.machines: Counter[MachineState] = Counter()
        self.tasks: Counter[TaskPhase] = Counter()
        self.jobs_of: Counter[str] = Counter()
        self.tasks_of: Counter[str] = Counter()
        """By the entitlement of their job's newest version."""

    def machine_changed(
        self, _: str, before: MachineRecord | None, after: MachineRecord | None
    ) -> None:
        """Follow the change of one machine."""
        if before is not None:
            if after is not None and before.state is after.state:
                return
            self.machines[before.state] -= 1
        if after is not None:
            self.machines[after.state] += 1

    def job_changed(self, _: str, before: JobRecord | None, after: JobRecord | None) -> None:
        """Follow the change of one job."""
        if has_same_tasks_and_specs(before, after):
            return
        for old, task in task_changes(before, after):
            if old is not None:
                self.tasks[old.phase] -= 1
            if task is not None:
                self.tasks[task.phase] += 1
        if before is not None:
            self.jobs_of[before.spec.entitlement] -= 1
            self.tasks_of[before.spec.entitlement] -= len(before.tasks)
        if after is not None:
            self.jobs_of[after.spec.entitlement] += 1
            self.tasks_of[after.spec.entitlement] += len(after.tasks)
