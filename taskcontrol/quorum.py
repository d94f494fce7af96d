"""Ensembles that live as long as most of their members do: ZooKeeper, etcd, Consul.

One member at a time, while a majority stays without it; followers first and the leader last, so
that a release costs one change of leader and not one for each member (paper §2.5).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from taskcontrol.api import TaskControlRequest, TaskControlResponse, TaskOperation


@dataclass(frozen=True, slots=True)
class Quorum:
    """Which operations an ensemble can stand."""

    spare: int = 0
    """Members that must be left beyond the majority."""

    def answer(self, request: TaskControlRequest, leader: int | None) -> TaskControlResponse:
        """Return what is acknowledged; `leader` is the index of the leader, None: not known.

        Without a known leader no task goes: it may be the leader, or an election is under way.
        """
        down, majority = request.down, request.tasks // 2 + 1
        serving = request.tasks - len(down)
        # one that moves leaves its data behind: only while a majority has them
        ack = [
            o.id
            for o in request.request
            if o.task in down and (o.kind in ("update", "restart") or serving >= majority)
        ]
        healthy = [o for o in request.request if o.task not in down]
        is_enough = serving - 1 >= majority + self.spare
        # of one or two none can be missed; an update must be possible all the same
        if healthy and leader is not None and (is_enough or (request.tasks < 3 and not down)):
            ack.append(_first(healthy, leader).id)
        return TaskControlResponse(ack=list(ack))


def _first(operations: Sequence[TaskOperation], leader: int) -> TaskOperation:
    """Return whose turn it is: followers by deadline, then by index; the leader last."""

    def turn(operation: TaskOperation) -> tuple[bool, float, int]:
        deadline = operation.deadline if operation.deadline is not None else float("inf")
        return operation.task == leader, deadline, operation.task

    return min(operations, key=turn)
