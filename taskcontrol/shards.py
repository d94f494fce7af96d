"""Controller of sharded data with replicas: limits the unavailable replicas of each shard.

Fault domains alone cannot do this. Two tasks of different domains that hold the last two replicas
of a shard must not be unavailable together, for whatever reason (paper §1, Figure 2).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from taskcontrol.api import (
    Ack,
    AdvanceNotice,
    TaskControlRequest,
    TaskControlResponse,
    TaskOperation,
)


@dataclass(frozen=True, slots=True)
class Sharded:
    """Acknowledges operations that leave enough replicas of each shard."""

    most_down: int = 1
    """Replicas of a shard that may be unavailable at once."""
    rebuild_s: float = 1800.0
    """Time to rebuild a replica elsewhere; tasks do not move because of shorter outages."""
    at_once: int | None = None
    """Tasks that may be unavailable at once, for any shards; None: as many as the shards allow."""

    def answer(
        self, request: TaskControlRequest, shards: Mapping[int, Iterable[str]]
    ) -> TaskControlResponse:
        """Return the acknowledgements; `shards` has the shards of each task.

        A task that is not in `shards` holds none. The replicas of a task that is down are
        unavailable already, so an operation on it costs no further replica. A removed task may
        still be in `shards`: its replicas count as unavailable, too.
        """
        unavailable = Counter[str]()
        for task in request.down | request.gone(shards):
            unavailable.update(set(shards.get(task, ())))
        notices = {notice.id: notice for notice in request.advance_notices}
        room = len(request.request) if self.at_once is None else self.at_once - len(request.down)
        newly_down = set[int]()
        ack = list[str | Ack]()
        for operation in sorted(request.request, key=lambda o: (o.latest, o.task)):
            acknowledgement = self._acknowledgement(operation, notices.get(operation.notice))
            if acknowledgement is None:
                continue
            is_down = operation.task in newly_down or operation.task in request.down
            replicas = set() if is_down else set(shards.get(operation.task, ()))
            if not is_down and (
                room <= 0 or any(unavailable[shard] >= self.most_down for shard in replicas)
            ):
                continue
            if not is_down:
                unavailable.update(replicas)
                newly_down.add(operation.task)
                room -= 1
            ack.append(acknowledgement)
        return TaskControlResponse(ack=ack)

    def _acknowledgement(
        self, operation: TaskOperation, notice: AdvanceNotice | None
    ) -> str | Ack | None:
        """Return how to acknowledge an operation: as it is, as `stop`, or None (not at all).

        Maintenance that is shorter than a rebuild only stops the task, or leaves it alone.
        """
        if notice is None or notice.kind != "maintenance":
            return operation.id
        duration_s = notice.expected_duration_s
        if duration_s is None or duration_s >= self.rebuild_s:
            return operation.id
        if notice.tasks_survive:
            return None
        if "stop" in operation.instead:
            return Ack(operation=operation.id, instead="stop")
        return operation.id
