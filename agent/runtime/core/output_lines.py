"""What a task wrote → entries of the journal, byte for byte, within a rate (docs/adr/0196).

Pure. The journal's native protocol takes a message with its length, so empty lines, blanks at the
end, NULs and bytes that are no text stay what they are. journald's stream protocol drops them.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

LINE_BYTES = 48 << 10
"""A longer line goes on in a next entry, as journald's own do (`LineMax=`, journald.conf(5))."""
BURST_LINES = 10_000
"""Lines of a task in a window; the rest is dropped and counted."""
WINDOW_S = 10.0
_LENGTH = struct.Struct("<Q")
DROPPED = "a596d6fe7bfa4994828e72309e95d61e"
"""Id of journald's message on dropped lines (sd-messages.h, SD_MESSAGE_JOURNAL_DROPPED)."""


def entry(fields: bytes, message: bytes) -> bytes:
    """Return one entry; `fields` are whole lines of `NAME=value`.

    It is a datagram of its own: of several in one, journald 257 keeps the first alone.
    """
    return b"".join((fields, b"MESSAGE\n", _LENGTH.pack(len(message)), message, b"\n"))


@dataclass(slots=True)
class OutputLines:
    """The lines of one task's output, cut out of the pieces that are read."""

    rest: bytes = b""
    """The begin of a line whose end was not read."""
    allowed: int = BURST_LINES
    """Lines that may still be passed on in this window."""
    window_ends: float = 0.0
    dropped: int = field(default=0)
    """Lines that were dropped in this window."""

    def take(self, data: bytes, now: float) -> list[bytes]:
        """Return the lines that end in a piece, as many as may be passed on."""
        lines = (self.rest + data).split(b"\n") if self.rest else data.split(b"\n")
        self.rest = lines.pop()
        if len(data) >= LINE_BYTES or len(self.rest) > LINE_BYTES:
            lines = [part for line in lines for part in _parts(line)]
            *full, self.rest = _parts(self.rest)
            lines += full
        return self._within(lines, now)

    def end(self, now: float) -> list[bytes]:
        """Return what was written after the last line, once there is no more."""
        last, self.rest = self.rest, b""
        return self._within([last], now) if last else []

    def told(self, now: float) -> int:
        """Return how many lines were dropped in the window that is over; each is reported once."""
        if not self.dropped or now < self.window_ends:
            return 0
        lost, self.dropped = self.dropped, 0
        return lost

    def _within(self, lines: list[bytes], now: float) -> list[bytes]:
        if now >= self.window_ends and not self.dropped:
            self.allowed, self.window_ends = BURST_LINES, now + WINDOW_S
        passed = lines[: self.allowed]
        self.allowed -= len(passed)
        self.dropped += len(lines) - len(passed)
        return passed


def _parts(line: bytes) -> list[bytes]:
    return [line[at : at + LINE_BYTES] for at in range(0, len(line) or 1, LINE_BYTES)]
