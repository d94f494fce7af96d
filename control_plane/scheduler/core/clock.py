"""Now, on both clocks: one for people and one for durations."""

from __future__ import annotations

from dataclasses import dataclass

from control_plane.api.jobs import TaskRecord


@dataclass(frozen=True, slots=True)
class Moment:
    """One moment of this process."""

    wall: float
    """Seconds since 1970, for records and users: the believed date (`Runtime.date`)."""
    steady: float
    """Seconds of the monotonic clock, for durations: never goes back, restarts with the
    process."""

    def spent_s(self, task: TaskRecord) -> float:
        """Return for how many seconds this process has seen a task in its phase."""
        return 0.0 if task.begun is None else self.steady - task.begun
