"""Asks the control plane whether another host has the identity of this one (docs/adr/0107).

A copied disk starts as the machine it was copied from: same key, same records. A host that gets the
verdict "second" starts no task any more and ends none, until it joins under a name of its own or an
operator declares it the right one.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import Callable, Mapping
from typing import Protocol

from agent.api.presence import Presence, PresenceAnswer, Verdict
from agent.runtime.events import HostEvents
from wire.errors import Conflict, TwineError

log = logging.getLogger(__name__)

EVERY_S = 600.0
"""Between two rounds: 10,000 hosts are 17 a second."""
SECOND_EVERY_S = 60.0
"""Between two rounds of a host that is the second one: it waits for people."""
RETRY_S = 30.0
"""After a control plane that did not answer."""
FIRST_S = 10.0
"""How long starts of tasks wait for the first verdict at most: then they need no control plane."""
ROUNDS = 3
"""Most requests with the same mark: two are proof."""

WAITS = "the control plane is asked first whether another host has this one's identity"
HINT = "join under a name of its own; to keep this host: twinectl machine forget-duplicate NAME"


class Asker(Protocol):
    """What this asks of the host's identity."""

    def has_joined(self) -> bool:
        """Return whether there is a control plane to ask."""
        ...

    def read_second(self) -> str:
        """Return why this host is the second one, as was noted; empty: it is not."""
        ...

    def note_second(self, why: str) -> None:
        """Keep over a restart why this host is the second one; empty: it is not."""
        ...

    async def show_presence(self, presence: Presence) -> PresenceAnswer:
        """Ask the control plane."""
        ...


class CloneCheck:
    """Whether this host is the only one with its identity, by the control plane's verdict."""

    def __init__(self, identity: Asker, boot_id: str, events: HostEvents) -> None:
        """Read the verdict that an earlier agent got; ask for none yet."""
        self._identity, self._events = identity, events
        self._shown = Presence(boot_id=boot_id)
        self.second = ""
        """Why this host is the second one with its identity; empty: it is not."""
        self._waits = False
        self.served = asyncio.Event()
        """Set once the agent listens: to answer, the control plane connects to its address."""
        self.wake: Callable[[], None] = lambda: None
        """Wakes the loops of all tasks."""
        try:
            self._waits = identity.has_joined()
            self.second = identity.read_second()
        except TwineError as e:
            log.warning("cannot read this host's identity", extra={"reason": str(e)})

    def presence(self) -> Presence:
        """Return which process this is, for a caller at this host's address."""
        return self._shown

    def bars(self) -> str:
        """Return why no task is started now; empty: they may be."""
        return self.second or (WAITS if self._waits else "")

    def check(self, what: str) -> None:
        """Raise `Conflict` for a change that a clone must not make."""
        if self.second:
            raise Conflict(f"{what}: {self.second}", hint=HINT)

    async def watch(self) -> None:
        """Ask periodically, for as long as the agent runs."""
        first = True
        while True:
            pause_s = await self._ask_once(FIRST_S if first else None)
            first = False
            if self._waits:
                self._waits = False
                self.wake()
            await asyncio.sleep(pause_s * random.uniform(0.75, 1.25))

    async def _ask_once(self, patience_s: float | None) -> float:
        """Ask for a verdict; return after how many seconds to ask again."""
        try:
            async with asyncio.timeout(patience_s):
                await self.served.wait()
                self._take(await self.ask())
        except TimeoutError:
            return 0.0
        except TwineError as e:
            log.info("not told whether this host is the only one", extra={"reason": str(e)})
            return RETRY_S
        except Exception:
            log.exception("asking whether this host is the only one failed; this is a bug")
            return RETRY_S
        return SECOND_EVERY_S if self.second else EVERY_S

    async def ask(self) -> PresenceAnswer:
        """Make one round; the mark stays the same within it and was never used before."""
        mark = secrets.token_hex(16)
        self._shown = Presence(mark=mark, boot_id=self._shown.boot_id)
        for _ in range(ROUNDS):
            answer = await self._identity.show_presence(self._shown)
            if answer.verdict is not Verdict.AGAIN:
                break
        return answer

    def _take(self, answer: PresenceAnswer) -> None:
        if answer.verdict is Verdict.AGAIN:
            return
        second = answer.detail or "another host has its identity"
        second = second if answer.verdict is Verdict.SECOND else ""
        if second == self.second:
            return
        fields: Mapping[str, str] = {"reason": second or self.second}
        if second:
            log.error("another host has this one's identity: no task is started", extra=fields)
        else:
            log.warning("this host is the only one with its identity again", extra=fields)
        self.second = second
        self._events.add("identity", "host", second or "the only one with its identity again")
        try:
            self._identity.note_second(second)
        except OSError as e:
            log.warning("cannot note that this host is the second one", extra={"why": str(e)})
        self.wake()
