"""Finds hosts that have the identity of another one, and stores the findings.

Each agent asks when it starts and every ten minutes. Then the process at the machine's address is
asked for its mark. If it is another process, the caller has to confirm that it still runs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import msgspec

from agent.api.presence import Presence, PresenceAnswer, Verdict
from control_plane.api.duplicates import Duplicate, Duplicates
from control_plane.identity.core.duplicates import (
    CloneFinding,
    Round,
    describe_clone,
    finding_of,
    is_clone,
    is_still_clone,
)
from control_plane.identity.stored import decode_if_intact
from control_plane.runtime.runtime import Runtime
from control_plane.store import Delete, Operation, Put, Store
from wire.errors import Busy, NotFound, TwineError, Unreachable

log = logging.getLogger(__name__)

DUPLICATES = "duplicates/"
ANSWER_S = 4.0
"""Time limit of the process at a machine's address; an agent's first start waits for 10 s."""
MAX_CHECKS = 32
"""Concurrent checks: if all hosts start together, their checks wait for one another."""
_BOOTS = 8
"""Boots of a machine that are remembered."""


async def _ask_no_host(_machine: str) -> Presence:
    raise Unreachable("no host is asked")


async def _do_nothing(_: object) -> None:
    return None


class DuplicateHosts:
    """The only writer of duplicates. `load` comes before everything else."""

    def __init__(self, store: Store, runtime: Runtime) -> None:
        self._store, self._runtime = store, runtime
        self.known: dict[str, Duplicate] = {}
        """By machine: the last found clone."""
        self._doubted: dict[str, str] = {}
        self._boots: dict[str, list[str]] = {}
        self._checking: set[str] = set()
        self._slots = asyncio.Semaphore(MAX_CHECKS)
        self.ask: Callable[[str], Awaitable[Presence]] = _ask_no_host
        """Asks the process at a machine's address for its mark, on a new connection."""
        self.audit: Callable[[Duplicate], Awaitable[None]] = _do_nothing
        """Records a finding in the audit log."""
        self.disconnect: Callable[[str], Awaitable[None]] = _do_nothing
        """Closes the connections to a machine's address."""

    async def load(self) -> None:
        """Read the stored findings; an unreadable one is found again."""
        for entry in (await self._store.list_prefix(DUPLICATES)).entries:
            machine = entry.key.removeprefix(DUPLICATES)
            if (known := decode_if_intact(entry, Duplicate)) is not None:
                self.known[machine] = known

    def all(self) -> Duplicates:
        """Return the clones that were found and not forgotten."""
        return Duplicates(duplicates=[self.known[name] for name in sorted(self.known)])

    def is_clone(self, machine: str, boot_id: str) -> bool:
        """Return whether the host of this boot has the identity of another one."""
        return is_clone(self.known.get(machine), boot_id)

    def problem(self, machine: str) -> str:
        """Return the problem with a machine's identity; empty: none."""
        return describe_clone(self.known[machine]) if machine in self.known else ""

    async def check(self, machine: str, caller: Presence, address: str) -> PresenceAnswer:
        """Return whether a host is the only one with its identity.

        Raises `Busy` while another process asks for the same machine.
        """
        if self.is_clone(machine, caller.boot_id):
            return self._clone_answer(machine)
        if machine in self._checking:
            raise Busy(f"machine {machine} is being checked already; try again")
        self._checking.add(machine)
        try:
            async with self._slots:
                answered = await self._ask_address(machine)
            boots = self._boots.setdefault(machine, [])
            check = Round(caller, answered, self._doubted.get(machine, ""), boots)
            return await self._conclude(machine, check, address)
        finally:
            self._checking.discard(machine)

    async def forget(self, machine: str) -> None:
        """Check a machine's hosts again: one of them is gone, or has joined again.

        Raises `NotFound` if there is no clone.
        """
        if machine not in self.known:
            raise NotFound(
                f"machine {machine} has no known clone", hint="twinectl machine duplicates"
            )
        await self._write(machine, None)
        self._boots.pop(machine, None)
        log.warning("clone forgotten", extra={"machine": machine})

    async def joined(self, machine: str) -> None:
        """Record that a host became this machine by a token: it is the original."""
        if machine in self.known:
            await self.forget(machine)

    async def _ask_address(self, machine: str) -> Presence | None:
        try:
            async with asyncio.timeout(ANSWER_S):
                return await self.ask(machine)
        except (TwineError, TimeoutError) as e:
            log.debug("no answer to compare", extra={"machine": machine, "reason": str(e)})
            return None

    async def _conclude(self, machine: str, check: Round, address: str) -> PresenceAnswer:
        """Store the finding of a round, and return the answer to the caller."""
        finding, caller = finding_of(check), check.caller
        if finding is CloneFinding.DOUBT:
            self._doubted[machine] = caller.mark
            return PresenceAnswer(verdict=Verdict.AGAIN)
        if check.doubted == caller.mark:
            self._doubted.pop(machine, None)
        known = self.known.get(machine)
        if finding is CloneFinding.NOTHING and is_still_clone(known, caller.boot_id):
            return self._clone_answer(machine)
        if finding is CloneFinding.ALONE and caller.boot_id not in check.boots:
            self._boots[machine] = [*check.boots, caller.boot_id][-_BOOTS:]
        if finding is CloneFinding.CALLER_IS_CLONE:
            assert check.answered is not None
            await self._record_clone(machine, caller.boot_id, address, check.answered.boot_id)
            return self._clone_answer(machine)
        if finding is CloneFinding.OTHER_IS_CLONE:
            assert check.answered is not None
            other = check.answered.boot_id
            await self._record_clone(machine, other, "at its address", caller.boot_id)
            await self.disconnect(machine)
        return PresenceAnswer(verdict=Verdict.ALONE)

    async def _record_clone(self, machine: str, boot_id: str, address: str, other: str) -> None:
        before = self.known.get(machine)
        duplicate = Duplicate(
            machine=machine,
            boot_id=boot_id,
            address=address,
            other_boot_id=other,
            at=self._runtime.wall(),
        )
        if before is not None and (before.boot_id, before.other_boot_id) == (boot_id, other):
            return
        await self._write(machine, duplicate)
        fields = {"machine": machine, "reason": describe_clone(duplicate)}
        log.error("two hosts have one identity", extra=fields)
        await self.audit(duplicate)

    def _clone_answer(self, machine: str) -> PresenceAnswer:
        return PresenceAnswer(verdict=Verdict.SECOND, detail=self.problem(machine))

    async def _write(self, machine: str, duplicate: Duplicate | None) -> None:
        key = DUPLICATES + machine
        operation: Operation = (
            Delete(key) if duplicate is None else Put(key, msgspec.json.encode(duplicate))
        )
        entry = await self._store.get(key)  # the last write may have been made without an answer
        await self._store.txn({key: entry.revision if entry else 0}, [operation])
        if duplicate is None:
            self.known.pop(machine, None)
        else:
            self.known[machine] = duplicate
