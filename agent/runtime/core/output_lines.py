"""Converts a task's output to journal entries, byte for byte, within a rate (docs/adr/0196).

Pure. The journal's native protocol carries the length of each message, so empty lines, trailing
blanks, NULs and invalid UTF-8 are kept. journald's stream protocol drops them.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

LINE_BYTES = 48 << 10
"""A longer line continues in the next entry, as in journald (`LineMax=`, journald.conf(5))."""
BURST_LINES = 10_000
"""Lines of a task per window; further lines are dropped and counted."""
WINDOW_S = 10.0
_LENGTH = struct.Struct("<Q")
DROPPED = "a596d6fe7bfa4994828e72309e95d61e"
"""Id of journald's message on dropped lines (sd-messages.h, SD_MESSAGE_JOURNAL_DROPPED)."""


def entry(fields: bytes, message: bytes) -> bytes:
    """Return one entry; `fields` are whole lines of `NAME=value`.

    Each entry is a datagram of its own: journald 257 keeps only the first of several in one.
    """
    return b"".join((fields, b"MESSAGE\n", _LENGTH.pack(len(message)), message, b"\n"))


@dataclass(slots=True)
class OutputLines:
    """Splits one task's output into lines, and applies the rate limit."""

    rest: bytes = b""
    """The beginning of a line whose end was not read yet."""
    allowed: int = BURST_LINES
    """Number of lines that may still be passed on in this window."""
    window_ends: float = 0.0
    dropped: int = field(default=0)
    """Number of lines dropped in this window."""

    def add(self, data: bytes, now: float) -> list[bytes]:
        """Return the lines that end in a chunk, up to the rate limit."""
        lines = (self.rest + data).split(b"\n") if self.rest else data.split(b"\n")
        self.rest = lines.pop()
        if len(data) >= LINE_BYTES or len(self.rest) > LINE_BYTES:
            lines = [part for line in lines for part in _parts(line)]
            *full, self.rest = _parts(self.rest)
            lines += full
        return self._limited(lines, now)

    def end(self, now: float) -> list[bytes]:
        """Return the incomplete last line, once the output has ended."""
        last, self.rest = self.rest, b""
        return self._limited([last], now) if last else []

    def take_dropped(self, now: float) -> int:
        """Return how many lines were dropped in a window that is over, and reset the number."""
        if not self.dropped or now < self.window_ends:
            return 0
        lost, self.dropped = self.dropped, 0
        return lost

    def _limited(self, lines: list[bytes], now: float) -> list[bytes]:
        if now >= self.window_ends and not self.dropped:
            self.allowed, self.window_ends = BURST_LINES, now + WINDOW_S
        passed = lines[: self.allowed]
        self.allowed -= len(passed)
        self.dropped += len(lines) - len(passed)
        return passed


def _parts(line: bytes) -> list[bytes]:
    return [line[at : at + LINE_BYTES] for at in range(0, len(line) or 1, LINE_BYTES)]
