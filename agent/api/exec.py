"""A command inside a running task, over a websocket: what goes which way.

Bytes travel in binary frames of which the first byte names the stream; everything else in
text frames, as JSON.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from agent.api.ranges import Id, Reported, Words, Written
from agent.errors import Problem

STDIN, STDOUT, STDERR = 0, 1, 2
Cells = Annotated[int, Meta(ge=1, le=10_000)]
SignalNumber = Annotated[int, Meta(ge=1, le=64)]


class Window(Written, frozen=True, kw_only=True):
    """The size of a terminal."""

    rows: Cells = 24
    columns: Cells = 80


class ExecWord(Written, frozen=True, kw_only=True):
    """What the one who asks says beside input; one of the three."""

    window: Window | None = None
    """The terminal has this size now."""
    end_of_input: bool = False
    """There is nothing more to read for the command."""
    signal: SignalNumber | None = None
    """Send this signal to the command."""


class ExecEnd(Reported, frozen=True, kw_only=True):
    """The last word: how it ended."""

    code: Annotated[int, Meta(ge=-(1 << 31), le=1 << 32)] | None = None
    """Exit code of the command, where it ended by itself."""
    signal: Id | None = None
    """The signal that ended it."""
    problem: Problem | None = None
    """Why it could not be run, or had to end."""
    detail: Words = ""
    """What an exit code of systemd's own means, in words; empty for any other."""
