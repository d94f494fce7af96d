"""Controller of ensembles that need a majority of their members: ZooKeeper, etcd, Consul.

One member at a time, if a majority remains without it. Followers go first and the leader last, so
that a release causes one change of leader instead of one for each member (paper §2.5).
"""

from __future__ import annotations

from dataclasses import dataclass

from taskcontrol.api import TaskControlRequest, TaskControlResponse


@dataclass(frozen=True, slots=True)
class Quorum:
    """Acknowledges operations that keep the ensemble's majority."""

    spare: int = 0
    """Members that must stay in addition to the majority."""

    def answer(self, request: TaskControlRequest, leader: int | None) -> TaskControlResponse:
        """Return the acknowledgements; `leader` is the index of the leader, None: unknown.

        Without a known leader no healthy task is stopped: it may be the leader, or an election
        may be running.
        """
        down, majority = request.down, request.tasks // 2 + 1
        serving = request.tasks - len(down)
        # a task that moves loses its data, so a majority must have them
        ack = [
            o.id
            for o in request.request
            if o.task in down and (o.kind in ("update", "restart") or serving >= majority)
        ]
        healthy = [o for o in request.request if o.task not in down]
        is_enough = serving - 1 >= majority + self.spare
        # one or two members cannot keep a majority, but updates must be possible
        if healthy and leader is not None and (is_enough or (request.tasks < 3 and not down)):
            # followers by deadline, then by index; the leader last
            first = min(healthy, key=lambda o: (o.task == leader, o.latest, o.task))
            ack.append(first.id)
        return TaskControlResponse(ack=list(ack))
