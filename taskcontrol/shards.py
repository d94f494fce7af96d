"""Data in shards, each with replicas on several tasks: no shard loses one too many.

This is what fault domains alone cannot do: two tasks of different domains that hold the last two
replicas of a shard must not be away together, whatever took the first of them (paper §1, Figure 2).
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
    """Which operations the shards can stand."""

    most_down: int = 1
    """Replicas of a shard that may be away at once."""
    rebuild_s: float = 1800.0
    """How long it takes to build a replica elsewhere: shorter outages are waited out."""
    at_once: int | None = None
    """Tasks that may be away at once, whatever their shards; None: as many as the shards allow."""

    def answer(
        self, request: TaskControlRequest, shards: Mapping[int, Iterable[str]]
    ) -> TaskControlResponse:
        """Return what is acknowledged; `shards` are those of each task.

        A task that is not in `shards` holds none. One that is down already has lost its replicas:
        to move or restart it costs nothing more. One that the job has not got any more has lost
        them, too: it was given up while it did not serve, and `shards` say still that it has some.
        """
        away = Counter[str]()
        for task in request.down | request.gone(shards):
            away.update(set(shards.get(task, ())))
        notices = {notice.id: notice for notice in request.advance_notices}
        room = len(request.request) if self.at_once is None else self.at_once - len(request.down)
        taken = set[int]()
        ack = list[str | Ack]()
        for operation in sorted(request.request, key=_urgency):
            way = self._way(operation, notices.get(operation.notice))
            if way is None:
                continue
            is_free = operation.task in taken or operation.task in request.down
            held = set() if is_free else set(shards.get(operation.task, ()))
            if not is_free and (room <= 0 or any(away[shard] >= self.most_down for shard in held)):
                continue
            if not is_free:
                away.update(held)
                taken.add(operation.task)
                room -= 1
            ack.append(way)
        return TaskControlResponse(ack=ack)

    def _way(self, operation: TaskOperation, notice: AdvanceNotice | None) -> str | Ack | None:
        """Return how a maintenance is met: move, stop and start again after it, or sit it out."""
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


def _urgency(operation: TaskOperation) -> tuple[float, int]:
    return operation.deadline if operation.deadline is not None else float("inf"), operation.task
