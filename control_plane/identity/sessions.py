"""Browsers that have the web console open, so that sessions can be listed and ended.

They are in memory. The credential is the certificate or the socket, and a session is valid only for
the caller that opened it. A restart forgets sessions until their next request.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from msgspec.structs import replace

from control_plane.api.people import ConsoleSession, ConsoleSessions
from wire.errors import Forbidden, NotFound

MAX_SESSIONS, MAX_ENDED = 1_000, 10_000
"""Kept in memory; beyond that, the sessions that were used or ended first are forgotten."""
IDLE_S = 3600.0
"""A session without a request for this long is not listed."""
_VALID = re.compile("[0-9a-f]{12}")
_TEXT_MAX = 200


class SessionRefused(Forbidden):
    """A browser cannot use the session of its cookie: it has to open another one."""


class SessionEnded(SessionRefused):
    """A user ended the session."""


class BrowserSessions:
    """The only writer of session state."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """`clock` returns seconds since 1970."""
        self._clock = clock
        self._open: dict[str, ConsoleSession] = {}
        """By number, the longest unseen first."""
        self._ended: dict[str, str] = {}
        """Number → the user who ended it."""

    def record_request(
        self, session: str, who: str, page: str = "", address: str = "", browser: str = ""
    ) -> None:
        """Record a request of a caller's browser; `SessionEnded` if the session was ended."""
        self.check(session, who)
        now, known = self._clock(), self._open.pop(session, None)
        if known is None:
            known = ConsoleSession(
                session=session,
                who=who,
                address=address,
                browser=browser[:_TEXT_MAX],
                opened_at=now,
                seen_at=now,
            )
        page = page[:_TEXT_MAX] or known.page
        self._open[session] = replace(known, seen_at=now, page=page)
        while len(self._open) > MAX_SESSIONS:
            del self._open[next(iter(self._open))]

    def check(self, session: str, who: str) -> None:
        """Raise `SessionRefused` unless a caller may use a session."""
        if not _VALID.fullmatch(session):
            raise SessionRefused(
                "the session of this browser is malformed", hint="load the page again"
            )
        if session in self._ended:
            raise SessionEnded(
                f"this session was ended by {self._ended[session]}",
                hint="`twinectl ui` opens another one; with a certificate, load the page again",
            )
        known = self._open.get(session)
        if known is not None and known.who != who:
            raise SessionRefused(
                f"session {session} was opened by {known.who}, not by {who}",
                hint="load the page again",
            )

    def list_sessions(self, who: str, *, everyone: bool) -> ConsoleSessions:
        """Return the sessions of a caller, or all; the last seen first."""
        since = self._clock() - IDLE_S
        found = [
            session
            for session in reversed(self._open.values())
            if session.seen_at >= since and (everyone or session.who == who)
        ]
        return ConsoleSessions(sessions=found)

    def end(self, session: str, user: str, *, may_end_all: bool) -> None:
        """End a session; `NotFound` if there is none that the caller may end."""
        known = self._open.get(session)
        if known is None or (known.who != user and not may_end_all):
            raise NotFound(
                f"there is no session {session!r} of the web console that you may end",
                hint="twinectl ui --sessions",
            )
        del self._open[session]
        self._ended[session] = user
        while len(self._ended) > MAX_ENDED:
            del self._ended[next(iter(self._ended))]
