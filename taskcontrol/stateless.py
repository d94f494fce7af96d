"""Controller of identical tasks: stops as many at once as the other tasks can carry the load of.

At low load a release is fast; at peak load it is slow, or waits, without an operator (paper §5.2,
the web tier).
"""

from __future__ import annotations

from dataclasses import dataclass

from taskcontrol.api import TaskControlRequest, TaskControlResponse


@dataclass(frozen=True, slots=True)
class Stateless:
    """Acknowledges operations by the load of the tasks."""

    full_load: float = 0.8
    """Highest load of the tasks, between 0 and 1, while some of them are unavailable."""
    at_most: float = 0.25
    """Largest share of the tasks that may be unavailable at once, at any load."""
    at_least: int = 1
    """Number of tasks that may always be unavailable, at any load; 0: at peak load all wait."""

    def answer(self, request: TaskControlRequest, load: float) -> TaskControlResponse:
        """Return the acknowledgements; `load` is the load of the tasks that serve now, 0 to 1."""
        down = request.down
        on_down = [o for o in request.request if o.task in down]
        on_serving = [o for o in request.request if o.task not in down]
        on_serving.sort(key=lambda o: (o.latest, o.task))
        room = max(0, self.room(request.tasks, len(down), load))
        tasks = dict.fromkeys(o.task for o in on_serving)
        chosen = frozenset(list(tasks)[:room])
        ack = [o.id for o in on_down] + [o.id for o in on_serving if o.task in chosen]
        return TaskControlResponse(ack=list(ack))

    def room(self, tasks: int, down: int, load: float) -> int:
        """Return how many more tasks may become unavailable now.

        The total load is `load * serving`; it needs `load * serving / full_load` tasks.
        """
        serving = tasks - down
        load = min(max(load, 0.0), 1.0)
        needed = -int(-(load * serving) // self.full_load)  # rounded up
        most = min(tasks - needed, int(self.at_most * tasks))
        return max(most, self.at_least) - down
