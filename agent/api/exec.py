"""A command inside a running task, over a websocket: what goes which way.

Bytes travel in binary frames whose first byte names the stream; everything else in
text frames, as JSON.

The caller may say how many bytes of output were taken so far, in frames of the stream `TAKEN`, the
first of them at once; then the agent reports the same for input. The receiver of such a frame sends
at most a window beyond it from then on (`wire/flow.py`). An older agent drops these frames.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from agent.api.ranges import Id, Reported, Words, Written
from wire.errors import Problem

STDIN, STDOUT, STDERR, TAKEN = 0, 1, 2, 3
Cells = Annotated[int, Meta(ge=1, le=10_000)]
SignalNumber = Annotated[int, Meta(ge=1, le=64)]


def taken_frame(total: int) -> bytes:
    """Return the frame that acknowledges `total` bytes, counted from the start."""
    return bytes([TAKEN]) + total.to_bytes(8, "big")


class Window(Written, frozen=True, kw_only=True):
    """The size of a terminal."""

    rows: Cells = 24
    columns: Cells = 80


class ExecWord(Written, frozen=True, kw_only=True):
    """A message of the caller other than input; one of the three."""

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
