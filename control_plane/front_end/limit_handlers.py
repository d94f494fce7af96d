"""The front end's handlers about rate limits, and its own limit: on deletions by one person."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable

from control_plane.api.limits import LimitName, LimitView, LimitViews
from control_plane.runtime.limits import FrontEndLimits, TokenBucket
from wire.errors import Busy
from wire.peers import principal
from wire.server import Call

log = logging.getLogger(__name__)
DELETES_PER_S, DELETES_BURST = 0.5, 30
"""One person's deletions: a program that deletes everything by mistake gets no further than this
before somebody can notice (AV5). What a person or a clean-up types is far below."""
_PEOPLE_MAX = 1000


class LimitHandlers:
    """A handler for each row of `api.limit_routes`."""

    def __init__(self, limits: FrontEndLimits, now: Callable[[], float]) -> None:
        """Take what the handlers call; `now` is the clock that is never set."""
        self._limits, self._now = limits, now
        self._deletes = limits.of(LimitName.DELETES, DELETES_PER_S, DELETES_BURST)
        self._of: OrderedDict[str, TokenBucket] = OrderedDict()

    async def list_limits(self, _: Call) -> LimitViews:
        """List all limits."""
        return self._limits.views(self._now())

    async def lift_limit(self, call: Call) -> LimitView:
        """Lift a limit for a while."""
        limit, now = self._limits.find(call.path["limit"]), self._now()
        by = principal(call.peer) if call.peer.role == "user" else call.peer.name
        limit.lift(now, call.body.for_s, by, call.body.reason)
        log.warning("limit lifted", extra={"limit": limit.name.value, "by": by})
        return limit.view(now)

    def check_deletion(self, call: Call) -> None:
        """Raise `Busy` if somebody deletes too much at once."""
        if call.route.method != "DELETE":
            return
        now, who = self._now(), f"{call.peer.role}:{call.peer.name}"
        if self._deletes.is_lifted(now):
            self._deletes.passed += 1
            return
        bucket = self._of.pop(who, None) or TokenBucket(DELETES_PER_S, DELETES_BURST)
        self._of[who] = bucket
        if len(self._of) > _PEOPLE_MAX:
            self._of.popitem(last=False)
        wait_s = bucket.take(now)
        if wait_s > 0:
            why = f"{who} deletes more than {DELETES_BURST} objects at once"
            self._deletes.hold_back(now, why, 60.0)
            raise Busy(
                f"{why}, and then more than {DELETES_PER_S:g} per second: nothing was deleted",
                hint="an operator may lift that: twinectl limit lift deletes --reason …",
            )
        self._deletes.passed += 1
