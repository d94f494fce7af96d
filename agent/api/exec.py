"""Protocol of a command inside a running task, over a websocket.

Binary frames carry the streams; the first byte of a frame names its stream. Text frames carry
other messages as JSON.

The caller may acknowledge bytes of output in frames of the stream `TAKEN`, and then must send the
first one at once. The agent then acknowledges input in the same way. A side that receives such
frames sends at most one window of unacknowledged bytes (`wire/flow.py`). An older agent drops
these frames.
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
    """A message of the caller other than input; exactly one field is set."""

    window: Window | None = None
    """The new size of the terminal."""
    end_of_input: bool = False
    """The input of the command has ended."""
    signal: SignalNumber | None = None
    """Send this signal to the command."""


class ExecEnd(Reported, frozen=True, kw_only=True):
    """The last message: how the command ended."""

    code: Annotated[int, Meta(ge=-(1 << 31), le=1 << 32)] | None = None
    """Exit code of the command, if it exited."""
    signal: Id | None = None
    """The signal that ended it."""
    problem: Problem | None = None
    """Why it could not be run, or had to end."""
    detail: Words = ""
    """Meaning of an exit code that systemd itself sets; empty for other exit codes."""
