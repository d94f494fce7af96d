"""Tasks that are all alike: as many at once as the rest can carry the load of.

While little is asked of the service a release is fast; at its peak it goes slowly, or waits, and
no operator has to be there for it (paper §5.2, the web tier).
"""

from __future__ import annotations

from dataclasses import dataclass

from taskcontrol.api import TaskControlRequest, TaskControlResponse


@dataclass(frozen=True, slots=True)
class Stateless:
    """Which operations a service of like tasks can stand."""

    full_load: float = 0.8
    """How busy its tasks may be at most, between 0 and 1, while some of them are away."""
    at_most: float = 0.25
    """Share of the tasks that may be away at once, however little there is to do …"""
    at_least: int = 1
    """… and how many may, however much there is to do; 0: at the peak everything waits."""

    def answer(self, request: TaskControlRequest, load: float) -> TaskControlResponse:
        """Return what is acknowledged; `load` is how busy the tasks are that serve now (0 to 1)."""
        down = request.down
        free = [o for o in request.request if o.task in down]
        rest = [o for o in request.request if o.task not in down]
        rest.sort(key=lambda o: (o.deadline is None, o.deadline or 0.0, o.task))
        room = max(0, self.room(request.tasks, len(down), load))
        chosen = dict.fromkeys(o.task for o in rest)
        going = frozenset(list(chosen)[:room])
        ack = [o.id for o in free] + [o.id for o in rest if o.task in going]
        return TaskControlResponse(ack=list(ack))

    def room(self, tasks: int, down: int, load: float) -> int:
        """Return how many more may go away now.

        `load * serving` is what there is to do; it needs `load * serving / full_load` tasks.
        """
        serving = tasks - down
        load = min(max(load, 0.0), 1.0)
        needed = -int(-(load * serving) // self.full_load)  # rounded up
        most = min(tasks - needed, int(self.at_most * tasks))
        return max(most, self.at_least) - down
