"""Handlers with which operators lift safety measures, and the limit on deletions.

The measures are silent machines without a verdict, limits on destructive operations, and the wait
after the store was restored.
"""

from __future__ import annotations

import logging
from collections import OrderedDict

from agent.api import Ack
from control_plane.api.health import ConfirmedDown, HeldBackMachines
from control_plane.api.limits import LimitName, LimitView, LimitViews
from control_plane.api.restored import Restored, RestoredView
from control_plane.front_end.handlers import PlaneHandlers
from control_plane.front_end.recorder import caller_of
from control_plane.roles import ControlPlane
from control_plane.runtime.limits import TokenBucket
from wire.errors import Busy
from wire.peers import principal
from wire.server import Call

log = logging.getLogger(__name__)
DELETES_PER_S, DELETES_BURST = 0.5, 30
"""Limits on deletions by one user. They stop a program that deletes everything by mistake before a
user can notice (AV5); manual deletions are far below them."""
_MAX_CALLERS = 1000


class SafetyHandlers(PlaneHandlers):
    """A handler for each row of `api.health_routes`."""

    def __init__(self, plane: ControlPlane) -> None:
        super().__init__(plane)
        self._deletes = plane.limits.of(LimitName.DELETES, DELETES_PER_S, DELETES_BURST)
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()

    async def held_back_machines(self, _: Call) -> HeldBackMachines:
        """Return the silent machines without a verdict."""
        return HeldBackMachines(machines=self._plane.health.held_back())

    async def confirm_down(self, call: Call) -> ConfirmedDown:
        """Mark machines as down that an operator confirms."""
        request, by = call.body, principal(call.peer)
        return await self._plane.health.confirm(request.machines, request.scope, request.reason, by)

    async def list_limits(self, _: Call) -> LimitViews:
        """Return all limits."""
        return self._plane.limits.views(self._plane.clock())

    async def lift_limit(self, call: Call) -> LimitView:
        """Lift a limit for a while."""
        limit, now = self._plane.limits.find(call.path["limit"]), self._plane.clock()
        by = principal(call.peer)
        limit.lift(now, call.body.for_s, by, call.body.reason)
        log.warning("limit lifted", extra={"limit": limit.name.value, "by": by})
        return limit.view(now)

    def check_deletion(self, call: Call) -> None:
        """Raise `Busy` if a user deletes too much at once."""
        if call.route.method != "DELETE":
            return
        now, who = self._plane.clock(), caller_of(call.peer)
        if self._deletes.is_lifted(now):
            self._deletes.passed += 1
            return
        bucket = self._buckets.pop(who, None) or TokenBucket(DELETES_PER_S, DELETES_BURST)
        self._buckets[who] = bucket
        if len(self._buckets) > _MAX_CALLERS:
            self._buckets.popitem(last=False)
        wait_s = bucket.take(now)
        if wait_s > 0:
            reason = f"{who} deletes more than {DELETES_BURST} objects at once"
            self._deletes.hold_back(now, reason, 60.0)
            raise Busy(
                f"{reason}, and then more than {DELETES_PER_S:g} per second: nothing was deleted",
                hint="an operator may lift that: twinectl limit lift deletes --reason …",
            )
        self._deletes.passed += 1

    async def show_restored(self, _: Call) -> RestoredView:
        """Return how the tasks on machines differ from the copy of the store."""
        return await self._plane.restored.view()

    async def release_restored(self, call: Call) -> Restored:
        """Let the control plane send commands from now on."""
        return await self._plane.restored.release(principal(call.peer))

    async def let_task_go(self, call: Call) -> Ack:
        """Permit the stop of a task that the restored store does not know."""
        self._plane.restored.release_task(call.path["machine"], call.path["unknown"])
        return Ack(detail="it is stopped once the limit on stops permits it")
