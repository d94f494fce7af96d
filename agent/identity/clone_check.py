"""Asks the control plane whether this host is a clone of another one (docs/adr/0107).

A host with a copied disk has the key and the records of the original machine. A host that gets the
verdict "second" starts and ends no tasks. This ends when it joins under another name, or when an
operator declares it the original.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import Callable, Mapping

from agent.api.presence import Presence, PresenceAnswer, Verdict
from agent.identity.identity import HostIdentity
from agent.runtime.events import HostEvents
from wire.errors import Conflict, TwineError

log = logging.getLogger(__name__)

EVERY_S = 600.0
"""Pause between two checks: 10,000 hosts make 17 checks a second."""
CLONE_EVERY_S = 60.0
"""Pause between two checks of a clone, which waits for people."""
RETRY_S = 30.0
"""Pause after a control plane that did not answer."""
FIRST_S = 10.0
"""How long starts of tasks wait for the first verdict; then they begin without one."""
ROUNDS = 3
"""Most requests with the same mark; two prove that no other process answered."""

WAITS = "the agent first asks the control plane whether another host has this one's identity"
HINT = "join under another name; to keep this host: twinectl machine forget-duplicate NAME"


class CloneCheck:
    """Knows from the control plane's verdict whether this host is a clone."""

    def __init__(self, identity: HostIdentity, boot_id: str, events: HostEvents) -> None:
        """Read the verdict that an earlier agent stored."""
        self._identity, self._events = identity, events
        self._shown = Presence(boot_id=boot_id)
        self.clone_reason = ""
        """Why this host is a clone; empty: it is none."""
        self._waits = False
        self.served = asyncio.Event()
        """Set once the agent listens: before it answers, the control plane calls its address."""
        self.wake: Callable[[], None] = lambda: None
        """Wakes the loops of all tasks."""
        try:
            self._waits = identity.has_joined()
            self.clone_reason = identity.read_clone_reason()
        except TwineError as e:
            log.warning("cannot read this host's identity", extra={"reason": str(e)})

    def presence(self) -> Presence:
        """Return the identification of this process, for a caller at this host's address."""
        return self._shown

    def start_refusal(self) -> str:
        """Return why no task may start now; empty: tasks may start."""
        return self.clone_reason or (WAITS if self._waits else "")

    def check(self, what: str) -> None:
        """Raise `Conflict` for a change that a clone must not make."""
        if self.clone_reason:
            raise Conflict(f"{what}: {self.clone_reason}", hint=HINT)

    async def watch(self) -> None:
        """Check periodically until cancelled."""
        first = True
        while True:
            pause_s = await self._ask_once(FIRST_S if first else None)
            first = False
            if self._waits:
                self._waits = False
                self.wake()
            await asyncio.sleep(pause_s * random.uniform(0.75, 1.25))

    async def _ask_once(self, patience_s: float | None) -> float:
        """Check once; return the seconds until the next check."""
        try:
            async with asyncio.timeout(patience_s):
                await self.served.wait()
                self._apply_verdict(await self.ask())
        except TimeoutError:
            return 0.0
        except TwineError as e:
            log.info(
                "the control plane did not answer whether another host has this identity",
                extra={"reason": str(e)},
            )
            return RETRY_S
        except Exception:
            log.exception("the check for a clone failed; this is a bug")
            return RETRY_S
        return CLONE_EVERY_S if self.clone_reason else EVERY_S

    async def ask(self) -> PresenceAnswer:
        """Make one check with a new mark, of up to `ROUNDS` requests."""
        mark = secrets.token_hex(16)
        self._shown = Presence(mark=mark, boot_id=self._shown.boot_id)
        for _ in range(ROUNDS):
            answer = await self._identity.show_presence(self._shown)
            if answer.verdict is not Verdict.AGAIN:
                break
        return answer

    def _apply_verdict(self, answer: PresenceAnswer) -> None:
        if answer.verdict is Verdict.AGAIN:
            return
        clone_reason = answer.detail or "another host has its identity"
        clone_reason = clone_reason if answer.verdict is Verdict.SECOND else ""
        if clone_reason == self.clone_reason:
            return
        fields: Mapping[str, str] = {"reason": clone_reason or self.clone_reason}
        if clone_reason:
            log.error("another host has this one's identity: no task is started", extra=fields)
        else:
            log.warning("this host is again the only one with its identity", extra=fields)
        self.clone_reason = clone_reason
        self._events.add(
            "identity", "host", clone_reason or "again the only host with its identity"
        )
        try:
            self._identity.store_clone_reason(clone_reason)
        except OSError as e:
            log.warning("cannot record that this host is a clone", extra={"why": str(e)})
        self.wake()
