"""Remembers the latest term of the control plane; refuses an older store and an earlier owner."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from agent.api.term import OwnerTerm, read_owner, read_term
from agent.lease.core.term import has_later_owner, is_older, newest, with_owner
from agent.runtime.units import wait_woken
from wire.errors import Conflict, InvalidInput, OlderStore, TwineError

log = logging.getLogger(__name__)

QUIET_S = 60.0
"""Time until a term that only polls carried is on disk. Polls change nothing on this host."""
Write = Callable[[Path, bytes], Coroutine[Any, Any, None]]


class FencingFile:
    """A text that outlives the agent. It changes in memory at once, on disk a little later."""

    def __init__(self, path: Path) -> None:
        """Load the text that an earlier agent stored, also before a reboot."""
        self._path = path
        self._changed, self._at_once = asyncio.Event(), asyncio.Event()
        try:
            self.text = path.read_text(errors="replace")
        except OSError:
            self.text = ""
        self._stored = self.text

    def put(self, text: str, *, commands: bool) -> None:
        """Replace the text. `commands`: the request may change something on this host."""
        if text != self.text:
            self.text = text
            self._changed.set()
        if commands and text != self._stored:
            self._at_once.set()

    def was_reset(self) -> bool:
        """Return whether the file was removed since, which a new join does; then clear the text."""
        if not self._stored or self._path.exists():
            return False
        self.text = self._stored = ""
        return True

    async def watch(self, write: Write) -> None:
        """Write each new text to disk until cancelled: after `QUIET_S`, at once for a command."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            await wait_woken(self._at_once, QUIET_S)
            self._at_once.clear()
            text = self.text
            if text == self._stored:
                continue
            try:
                await write(self._path, text.encode())
            except (OSError, TwineError) as e:  # `StateDisk` reports a failing disk
                extra = {"note": self._path.name, "why": str(e)}
                log.warning("the latest sender was not stored", extra=extra)
            else:
                self._stored = text


class FencingTerm:
    """The latest term of the control plane's store on this host."""

    def __init__(self, path: Path) -> None:
        """Load what an earlier agent stored."""
        self._file = FencingFile(path)
        self.watch = self._file.watch
        self._known = read_term(self._file.text)

    def check(self, text: str | None, *, commands: bool) -> None:
        """Remember the caller's term, or raise `OlderStore`.

        `commands`: the request may change something on this host. A control plane of an earlier
        release sends no term and is accepted.
        """
        if text is None:
            return
        sent = read_term(text)
        if sent is None:
            raise InvalidInput(f"{text[:80]!r} is not the term of a control plane")
        if is_older(sent, self._known):
            assert self._known is not None
            if not self._file.was_reset():
                raise OlderStore(
                    f"a control plane called this host at revision {self._known.now} of "
                    "its store, and this control plane began with revision "
                    f"{sent.began}: an old copy of the store was restored",
                    hint="on the control plane's host: twine-control-plane restore-store"
                    " (docs/operating.md)",
                )
            self._known = None
        self._known = newest(sent, self._known)
        self._file.put(self._known.text(), commands=commands)


class FencingOwners:
    """The latest owner of each entitlement on this host (docs/adr/0150)."""

    def __init__(self, path: Path) -> None:
        """Load what an earlier agent stored."""
        self._file = FencingFile(path)
        self.watch = self._file.watch
        read = [read_owner(line) for line in self._file.text.splitlines()]
        self._known: Mapping[str, int] = {o.entitlement: o.number for o in read if o is not None}

    def check(self, text: str | None, *, commands: bool) -> None:
        """Remember the caller as owner, or raise `Conflict` if the entitlement has a later one.

        A request that changes nothing is accepted from any owner. A control plane of an earlier
        release sends no owner and is accepted.
        """
        if text is None:
            return
        sent = read_owner(text)
        if sent is None:
            raise InvalidInput(f"{text[:80]!r} is not an owner of an entitlement")
        if has_later_owner(sent, self._known):
            if not self._file.was_reset():
                if not commands:
                    return
                raise Conflict(
                    f"nothing is changed: term {sent.number} of the owner of entitlement "
                    f"{sent.entitlement} is older than {self._known[sent.entitlement]}, "
                    "the term of its present owner",
                    hint="twinectl shard show",
                )
            self._known = {}
        known = with_owner(sent, self._known)
        if known is not self._known:
            self._known = known
        lines = (OwnerTerm(*item).text() for item in known.items())
        self._file.put("\n".join(lines), commands=True)  # rare: one for each change of owner
