"""Remembers the control plane that spoke last; refuses an older store and an earlier owner."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from agent.api.term import OwnerTerm, read_owner, read_term
from agent.lease.core.term import is_older, is_passed_on, newest, with_owner
from wire.errors import Conflict, InvalidInput, OlderStore, TwineError

log = logging.getLogger(__name__)

QUIET_S = 60.0
"""Seconds until a term that came with polls is on disk: polls change nothing on this host."""
Write = Callable[[Path, bytes], Coroutine[Any, Any, None]]


class FencingNote:
    """A text that outlives the agent: in memory at once, and soon after on disk."""

    def __init__(self, path: Path) -> None:
        """Go on from what an earlier agent noted, also before a reboot."""
        self._path = path
        self._more, self._at_once = asyncio.Event(), asyncio.Event()
        try:
            self.text = path.read_text(errors="replace")
        except OSError:
            self.text = ""
        self._stored = self.text

    def put(self, text: str, *, commands: bool) -> None:
        """Remember another text; `commands`: something on this host may change because of it."""
        if text != self.text:
            self.text = text
            self._more.set()
        if commands and text != self._stored:
            self._at_once.set()

    def is_forgotten(self) -> bool:
        """Return whether the host joined again since: then there was no owner before."""
        if not self._stored or self._path.exists():
            return False
        self.text = self._stored = ""
        return True

    async def watch(self, write: Write) -> None:
        """Bring what is known to disk until cancelled: at once after a command."""
        while True:
            await self._more.wait()
            self._more.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(QUIET_S):
                    await self._at_once.wait()
            self._at_once.clear()
            text = self.text
            if text == self._stored:
                continue
            try:
                await write(self._path, text.encode())
            except (OSError, TwineError) as e:  # the disk fails, which is reported elsewhere
                extra = {"note": self._path.name, "why": str(e)}
                log.warning("who spoke last was not noted", extra=extra)
            else:
                self._stored = text


class FencingTerm:
    """What the control plane said last of its store."""

    def __init__(self, path: Path) -> None:
        """Go on from what an earlier agent noted."""
        self._note = FencingNote(path)
        self.watch = self._note.watch
        self._known = read_term(self._note.text)

    def hear(self, text: str | None, *, commands: bool) -> None:
        """Remember the caller, or raise `OlderStore`; `commands`: it may change something.

        A control plane of an earlier release sends no term, and is accepted.
        """
        if text is None:
            return
        told = read_term(text)
        if told is None:
            raise InvalidInput(f"{text[:80]!r} is no term of a control plane")
        if is_older(told, self._known):
            assert self._known is not None
            if not self._note.is_forgotten():
                raise OlderStore(
                    f"this host was told at revision {self._known.now} of the control plane's"
                    f" store, and this control plane began with revision {told.began}: an old copy"
                    " of the store was restored",
                    hint="on the control plane's host: twine-control-plane restore-store"
                    " (docs/operating.md)",
                )
            self._known = None
        self._known = newest(told, self._known)
        self._note.put(self._known.text(), commands=commands)


class FencingOwners:
    """Which owner of each entitlement spoke last on this host (docs/adr/0150)."""

    def __init__(self, path: Path) -> None:
        """Go on from what an earlier agent noted."""
        self._note = FencingNote(path)
        self.watch = self._note.watch
        read = [read_owner(line) for line in self._note.text.splitlines()]
        self._known: Mapping[str, int] = {o.entitlement: o.number for o in read if o is not None}

    def hear(self, text: str | None, *, commands: bool) -> None:
        """Remember the caller, or raise `Conflict`: the entitlement has another owner since.

        A request that changes nothing is answered for any caller. A control plane of an earlier
        release sends no owner, and is accepted.
        """
        if text is None:
            return
        told = read_owner(text)
        if told is None:
            raise InvalidInput(f"{text[:80]!r} is no owner of an entitlement")
        if is_passed_on(told, self._known):
            if not self._note.is_forgotten():
                if not commands:
                    return
                raise Conflict(
                    f"nothing is changed: term {told.number} of the owner of entitlement"
                    f" {told.entitlement} is older than {self._known[told.entitlement]}, in which"
                    " another one owns it",
                    hint="twinectl shard show",
                )
            self._known = {}
        known = with_owner(told, self._known)
        if known is not self._known:
            self._known = known
        lines = (OwnerTerm(*item).text() for item in known.items())
        self._note.put("\n".join(lines), commands=True)  # rare: one for each change of owner
