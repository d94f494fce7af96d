"""Stores the date that this process believes, for the next process on the same boot of the host.

Without it, a process that starts after a step of its host's clock would believe a wrong date. Each
boot has a record of its own: processes of several hosts lead in turn, and shards run in other
processes than the core.
"""

from __future__ import annotations

import logging

from control_plane.api.clock import ClockAnchor
from control_plane.runtime.date import STEP_S
from control_plane.runtime.runtime import Runtime
from control_plane.store import Delete, Entry, Put, Store
from control_plane.store.records import CLOCK, DamagedRecord, decode, encode
from wire.errors import TwineError

log = logging.getLogger(__name__)
_RETRY_S = 60.0
_KEPT = 64
"""Number of boots whose dates are kept: the latest ones."""


def _intact_anchor(entry: Entry) -> ClockAnchor | None:
    """Return a stored date; None: it is damaged, and a new one replaces it."""
    try:
        return decode(entry.value, ClockAnchor, entry.key)
    except DamagedRecord as e:
        log.warning("a stored date is left out", extra={"reason": str(e)})
        return None


class Anchor:
    """Keeps the date over restarts of the process."""

    def __init__(self, store: Store, runtime: Runtime, boot_id: str) -> None:
        """`boot_id` names this boot of the host; empty: unknown."""
        self._store, self._runtime, self._boot_id = store, runtime, boot_id
        self._stored: float | None = None
        self._old: list[str] = []
        """Keys of older boots, which the next write deletes."""

    async def load(self) -> None:
        """Continue from the stored date, if it is of this boot."""
        entries = (await self._store.list_prefix(CLOCK)).entries
        known = {e.key: anchor for e in entries if (anchor := _intact_anchor(e)) is not None}
        self._old = sorted(known, key=lambda key: known[key].booted_at)[: -_KEPT or None]
        self._old += [entry.key for entry in entries if entry.key not in known]
        own = [anchor.booted_at for anchor in known.values() if anchor.boot_id == self._boot_id]
        if own and self._boot_id:  # an earlier release had one record, which sorts first
            self._stored = own[-1]
            self._runtime.resume_date(own[-1])

    async def run(self) -> None:
        """Store the date whenever it differs from the stored one, until cancelled."""
        while True:
            if self._boot_id and self._has_changed():
                await self._store_date()
            await self._runtime.sleep(_RETRY_S)

    def _has_changed(self) -> bool:
        at = self._runtime.booted_at
        return self._stored is None or abs(at - self._stored) >= STEP_S

    async def _store_date(self) -> None:
        at = self._runtime.booted_at
        anchor = ClockAnchor(boot_id=self._boot_id, booted_at=at)
        try:
            put = Put(f"{CLOCK}/{self._boot_id}", encode(anchor))
            old = [Delete(key) for key in self._old if key != put.key]
            await self._store.txn({}, [put, *old])
        except TwineError as e:  # retried next round; until then a restart uses the wall clock
            log.warning("the date was not stored", extra={"reason": str(e)})
        else:
            self._stored, self._old = at, []
