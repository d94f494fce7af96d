"""Now, on both clocks: one for people and one for durations."""

from __future__ import annotations

from dataclasses import dataclass

from control_plane.api.jobs import TaskRecord


@dataclass(frozen=True, slots=True)
class Moment:
    """One moment of this process."""

    wall: float
    """Seconds since 1970, for records and people, as far as that is believed (`Runtime.date`)."""
    steady: float
    """Seconds since some moment, for durations: it never goes back, and starts again with the
    process."""

    def spent_s(self, task: TaskRecord) -> float:
        """Return how long a task has been in its phase, as far as this process knows."""
        return 0.0 if task.begun is None else self.steady - task.begun
