"""Remembers which term of the control plane spoke last, and refuses one with an older store."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

from agent.api.term import Term, read_term
from agent.core.term import is_older, newest
from wire.errors import InvalidInput, OlderStore, TwineError

log = logging.getLogger(__name__)

QUIET_S = 60.0
"""What only polls told is on disk after so long: they change nothing on this host."""
Write = Callable[[Path, bytes], Coroutine[Any, Any, None]]


class FencingTerm:
    """What the control plane said last of its store, in memory and soon after on disk."""

    def __init__(self, path: Path) -> None:
        """Go on from what an earlier agent noted, also before a reboot."""
        self._path = path
        self._known = self._stored = self._read()
        self._more, self._at_once = asyncio.Event(), asyncio.Event()

    def hear(self, text: str | None, *, commands: bool) -> None:
        """Take note of who asks, or raise `OlderStore`; `commands`: it may change something.

        A control plane of an earlier release says nothing, and is not judged.
        """
        if text is None:
            return
        told = read_term(text)
        if told is None:
            raise InvalidInput(f"{text[:80]!r} is no term of a control plane")
        if is_older(told, self._known) and not self._is_forgotten():
            assert self._known is not None
            raise OlderStore(
                f"this host was told at revision {self._known.now} of the control plane's store,"
                f" and this control plane began with revision {told.began}: an old copy of the"
                " store was put back",
                hint="on the control plane's host: twine-control-plane restore-store"
                " (docs/operating.md)",
            )
        known = newest(told, self._known)
        if known is not self._known:
            self._known = known
            self._more.set()
        if commands and self._known != self._stored:
            self._at_once.set()

    async def watch(self, write: Write) -> None:
        """Bring what is known to disk until cancelled: at once after a command."""
        while True:
            await self._more.wait()
            self._more.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(QUIET_S):
                    await self._at_once.wait()
            self._at_once.clear()
            known = self._known
            if known is None or known == self._stored:
                continue
            try:
                await write(self._path, known.text().encode())
            except (OSError, TwineError) as e:  # the disk fails, which is told elsewhere
                log.warning("the last term was not noted", extra={"why": str(e)})
            else:
                self._stored = known

    def _is_forgotten(self) -> bool:
        """Return whether the host joined anew since: then nobody was there before."""
        if self._stored is None or self._path.exists():
            return False
        self._known = self._stored = None
        return True

    def _read(self) -> Term | None:
        try:
            return read_term(self._path.read_text(errors="replace"))
        except OSError:
            return None
