"""The audit log: each change with its caller, address and outcome; also refused changes.

An entry is on disk before the change begins and is completed before it is acknowledged, so every
acknowledged change has one. If the process ends in between it stays `begun`. A change that is one
transaction of the store has its entry in it (docs/adr/0198).
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from control_plane.api.duplicates import Duplicate
from control_plane.api.people import AuditEntry, AuditPage, Outcome
from control_plane.identity.core.duplicates import describe_clone
from control_plane.runtime.runtime import Runtime
from control_plane.store import Delete, Entry, Operation, Put, Store
from wire.errors import Busy, TwineError

log = logging.getLogger(__name__)

AUDIT = "audit/"
HEAD = "audit-head"
"""Key of a recent sequence number, at most about `_HEAD_EVERY` below the newest one. From there
`load` searches for the newest entry."""
_HEAD_EVERY = 500
_SEARCH_FROM = 1000
_DROP_AT_ONCE = 100
"""Entries that one transaction deletes."""
KEEP = 100_000
"""Number of kept entries; at some 300 bytes each this is 30 MB."""
PAGE, MAX_PAGE, MAX_SCAN = 200, 1000, 20_000
"""Entries of an answer: usual, most; and entries that one request reads at most."""
REFUSALS_PER_MINUTE, REFUSALS_IN_ALL = 10, 200
"""Recorded refusals per minute, of one caller and of all, so that no caller can fill the log."""
_MAX_CALLERS = 1000
_MAX_TEXT = 500
_MAX_ALSO = 100


@dataclass(frozen=True, slots=True)
class Query:
    """A selection of entries; all given conditions must hold."""

    before: int = 0
    """Only entries older than this sequence; 0: from the newest."""
    limit: int = PAGE
    since: float = 0.0
    who: str = ""
    object: str = ""

    def matches(self, entry: AuditEntry) -> bool:
        """Return whether an entry is selected; `ann` stands for `user:ann`."""
        if entry.at < self.since:
            return False
        if self.who and entry.caller not in (self.who, f"user:{self.who}"):
            return False
        return not self.object or self.object in (entry.object, *entry.also)


@dataclass(slots=True)
class _Minute:
    """Refusals of one caller within a minute."""

    began: float
    written: int = 0
    suppressed: int = 0


class Trail:
    """Writes the audit log; no other code does. Call `load` first."""

    def __init__(self, store: Store, runtime: Runtime, keep: int = KEEP) -> None:
        self._store = store
        self._runtime = runtime
        self._keep = keep
        self._last = 0
        self._latest = 0.0
        """The latest time of all entries."""
        self._refusals: OrderedDict[str, _Minute] = OrderedDict()
        self._refusals_of_all = _Minute(0.0)
        self.lost = 0
        """Outcomes that could not be written: their entries stay `begun`."""

    async def load(self) -> None:
        """Find the newest entry, and delete entries beyond the kept number."""
        head = await self._store.get(HEAD)
        self._last = int(head.value) if head is not None else 0
        newest: Entry | None = None
        async for raw in self._entries(max(0, self._last - _SEARCH_FROM)):
            self._last = max(self._last, int(raw.key.removeprefix(AUDIT)))
            newest = raw
        if newest is not None and (entry := _read(newest)) is not None:
            self._latest = _latest(entry)
        while True:
            oldest = (await self._store.list_prefix(AUDIT, "", _DROP_AT_ONCE)).entries
            old = [e.key for e in oldest if e.key <= _key(self._last - self._keep)]
            if not old:
                return
            await self._store.txn({}, [Delete(key) for key in old])

    async def begin(self, entry: AuditEntry) -> AuditEntry:
        """Write an entry before the change is made; if that fails, nothing may be changed."""
        entry, operations = self.prepare(entry)
        try:
            await self._store.txn({}, operations)
        except TwineError as e:
            raise Busy(
                f"cannot execute {entry.action}: the audit log cannot be written", hint=e.hint
            ) from e
        return entry

    def prepare(self, entry: AuditEntry) -> tuple[AuditEntry, list[Operation]]:
        """Return the next entry of the log, and the operations that write it.

        If the change's own transaction contains them, the entry exists exactly if the change does.
        Its outcome is then `done`, and its `after` is the revision of that transaction.
        """
        self._last += 1
        now, latest = self._runtime.wall(), self._latest
        self._latest = max(now, latest)
        entry = replace(entry, sequence=self._last, at=now, latest=latest if latest > now else 0.0)
        entry = _truncated(entry)
        return entry, self._operations(entry)

    def _operations(self, entry: AuditEntry) -> list[Operation]:
        number = entry.sequence
        operations: list[Operation] = [Put(_key(number), msgspec.json.encode(entry))]
        if number % _HEAD_EVERY == 1:
            operations.append(Put(HEAD, str(number).encode()))
        if number > self._keep:
            operations.append(Delete(_key(number - self._keep)))
        return operations

    async def end(self, entry: AuditEntry) -> None:
        """Complete an entry; if that fails it stays `begun`, and the answer is still sent."""
        await self._complete(
            entry, [Put(_key(entry.sequence), msgspec.json.encode(_truncated(entry)))]
        )

    async def failed(self, entry: AuditEntry) -> None:
        """Write a prepared entry whose change was not made."""
        await self._complete(entry, self._operations(_truncated(entry)))

    async def _complete(self, entry: AuditEntry, operations: list[Operation]) -> None:
        try:
            await self._store.txn({}, operations)
        except TwineError as e:
            self.lost += 1
            fields = {"sequence": entry.sequence, "action": entry.action, "reason": str(e)}
            log.warning("the outcome of a change is not in the audit log", extra=fields)

    async def refused(self, entry: AuditEntry) -> None:
        """Record a refused or failed attempt, unless there were too many recently."""
        key = entry.caller if entry.caller != "anyone" else entry.address
        own = self._refusals_of(key)
        now = self._runtime.now()
        if now - self._refusals_of_all.began >= 60.0:
            self._refusals_of_all = _Minute(now)
        if own.written >= REFUSALS_PER_MINUTE or self._refusals_of_all.written >= REFUSALS_IN_ALL:
            own.suppressed += 1
            return
        own.written += 1
        self._refusals_of_all.written += 1
        suppressed, own.suppressed = own.suppressed, 0
        try:
            await self.begin(replace(entry, suppressed=suppressed))
        except Busy as e:
            fields = {"action": entry.action, "caller": entry.caller, "reason": str(e)}
            log.warning("a refused attempt is not in the audit log", extra=fields)

    async def record_clone(self, found: Duplicate) -> None:
        """Record a clone; a failure is only logged."""
        entry = AuditEntry(
            sequence=0,
            at=0.0,
            caller=f"host:{found.machine}",
            address=found.address,
            request_id="",
            action="duplicate_identity",
            object=f"machine/{found.machine}",
            outcome=Outcome.REFUSED,
            reason=describe_clone(found),
        )
        try:
            await self.begin(entry)
        except Busy as e:
            fields = {"machine": found.machine, "reason": str(e)}
            log.warning("a clone is not in the audit log", extra=fields)

    async def page(self, query: Query) -> AuditPage:
        """Return the newest selected entries, and where to continue."""
        top = min(query.before - 1, self._last) if query.before > 0 else self._last
        found: list[AuditEntry] = []
        floor = max(0, top - MAX_SCAN)
        while top > floor:
            low = max(floor, top - PAGE)
            listed = await self._store.list_prefix(AUDIT, _key(low), top - low)
            for raw in reversed(listed.entries):
                entry = _read(raw)
                if entry is None or entry.sequence > top:
                    continue
                if _latest(entry) < query.since:
                    return AuditPage(entries=found)
                if query.matches(entry):
                    found.append(entry)
                    if len(found) >= query.limit:
                        return AuditPage(entries=found, next=entry.sequence)
            top = low
        return AuditPage(entries=found, next=top + 1 if top else 0)

    def _refusals_of(self, caller: str) -> _Minute:
        now = self._runtime.now()
        known = self._refusals.get(caller)
        if known is None or now - known.began >= 60.0:
            known = _Minute(now, suppressed=known.suppressed if known else 0)
            self._refusals[caller] = known
        self._refusals.move_to_end(caller)
        while len(self._refusals) > _MAX_CALLERS:
            self._refusals.popitem(last=False)
        return known

    async def _entries(self, after: int) -> AsyncIterator[Entry]:
        key = _key(after)
        while True:
            entries = (await self._store.list_prefix(AUDIT, key, MAX_PAGE)).entries
            for entry in entries:
                yield entry
            if len(entries) < MAX_PAGE:
                return
            key = entries[-1].key


def _key(sequence: int) -> str:
    return f"{AUDIT}{max(0, sequence):016d}"


def _latest(entry: AuditEntry) -> float:
    """Return the latest time of an entry and all older ones; the clock may have been set back."""
    return max(entry.at, entry.latest)


def _read(raw: Entry) -> AuditEntry | None:
    """Return an entry; None if it is damaged. One stored with its change has the same revision."""
    try:
        entry = msgspec.json.decode(raw.value, type=AuditEntry)
    except msgspec.DecodeError as e:
        fields = {"entry": raw.key, "reason": str(e)}
        log.warning("an entry of the audit log is damaged and left out", extra=fields)
        return None
    is_with_change = entry.outcome is Outcome.DONE and entry.before is not None
    if is_with_change and entry.after is None:
        return replace(entry, after=raw.revision)
    return entry


def _truncated(entry: AuditEntry) -> AuditEntry:
    return replace(
        entry,
        object=entry.object[:_MAX_TEXT],
        detail=entry.detail[:_MAX_TEXT],
        reason=entry.reason[:_MAX_TEXT],
        also=entry.also[:_MAX_ALSO],
    )
