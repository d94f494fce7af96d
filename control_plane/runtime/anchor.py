"""What this process believes of the date, stored for the next one on the same boot of the host.

A process that is started after its host's clock stepped would take a wrong date for the right
one; and the steps of the clock are no reason not to restart a process.
"""

from __future__ import annotations

import logging

from control_plane.api.clock import ClockAnchor
from control_plane.runtime.date import STEP_S
from control_plane.runtime.runtime import Runtime
from control_plane.store import Put, Store
from control_plane.store.records import CLOCK, decode, encode
from wire.errors import TwineError

log = logging.getLogger(__name__)
_RETRY_S = 60.0


class Anchor:
    """Keeps the date over restarts of the process."""

    def __init__(self, store: Store, runtime: Runtime, boot_id: str) -> None:
        """`boot_id` names this boot of the host; empty: it is not known."""
        self._store, self._runtime, self._boot_id = store, runtime, boot_id
        self._stored: float | None = None

    async def load(self) -> None:
        """Go on from the stored date, if it is of this boot."""
        entry = await self._store.get(CLOCK)
        if entry is None or not self._boot_id:
            return
        known = decode(entry.value, ClockAnchor, CLOCK)
        if known.boot_id == self._boot_id:
            self._stored = known.booted_at
            self._runtime.go_on(known.booted_at)

    async def run(self) -> None:
        """Store the date when it is another than the stored one, until cancelled."""
        while True:
            if self._boot_id and self._is_news():
                await self._store_it()
            await self._runtime.sleep(_RETRY_S)

    def _is_news(self) -> bool:
        at = self._runtime.booted_at
        return self._stored is None or abs(at - self._stored) >= STEP_S

    async def _store_it(self) -> None:
        at = self._runtime.booted_at
        known = ClockAnchor(boot_id=self._boot_id, booted_at=at)
        try:
            await self._store.txn({}, [Put(CLOCK, encode(known))])
        except TwineError as e:  # the next look tries again; until then a restart asks the wall
            log.warning("the date was not stored", extra={"reason": str(e)})
        else:
            self._stored = at
