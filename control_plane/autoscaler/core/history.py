"""Stores the load of one job over a year in 7,876 bytes.

It has three rings of 16-bit codes: 3 days of 5-minute means, 8 weeks of half-hour peaks (the
largest mean in each), and 53 weeks of daily peaks. A code is a logarithm, with an error of at most
0.04 %. 10,000 jobs take 79 MB.
"""

from __future__ import annotations

import math
import struct
import sys
from array import array
from dataclasses import dataclass, field

SLOT_S = 300
HALF_HOUR_S = 1800
DAY_S = 86_400
_HALF_HOUR, _DAY = HALF_HOUR_S // SLOT_S, DAY_S // SLOT_S
"""Slots of a half hour and of a day."""
FINE, HALF_HOURS, DAYS = 864, 2688, 371
"""Lengths of the rings: 5-minute slots of 3 days, half hours of 8 weeks, days of 53 weeks."""
_HEADER = struct.Struct("<HqqdI")
"""Format, newest 5-minute slot, first slot ever, sum and count of the open slot."""
_FORMAT = 1
BYTES = _HEADER.size + 2 * (FINE + HALF_HOURS + DAYS)
"""Size of a stored history, of any age."""
STEP_SLOTS = 12
"""The clock was set back if a point is this many slots (an hour) older than the newest one."""
LARGEST = 1e15
"""Upper bound of a stored load."""
_SMALLEST, _CODE_STEP = 1e-6, math.log(1e21) / 65_533
"""Code 2 stands for the least value, 65,535 for 1e15; 0 is missing, 1 is zero."""


def code_of(value: float) -> int:
    """Return the code of a load; a value below 1e-6 counts as 0, one above 1e15 as 1e15."""
    if value < _SMALLEST:
        return 1
    return min(65_535, 2 + round(math.log(value / _SMALLEST) / _CODE_STEP))


def value_of(code: int) -> float | None:
    """Return the load of a code; None: missing."""
    if code == 0:
        return None
    return 0.0 if code == 1 else _SMALLEST * math.exp((code - 2) * _CODE_STEP)


def _zeros(length: int) -> array[int]:
    return array("H", bytes(2 * length))


@dataclass(slots=True)
class LoadHistory:
    """Load by time, in seconds since 1970. Points must come in order; earlier ones are dropped."""

    slot: int = 0
    """Number of the open 5-minute slot."""
    first: int = 0
    """Number of the first slot that ever had a point; 0: none did."""
    total: float = 0.0
    count: int = 0
    fine: array[int] = field(default_factory=lambda: _zeros(FINE))
    half_hours: array[int] = field(default_factory=lambda: _zeros(HALF_HOURS))
    days: array[int] = field(default_factory=lambda: _zeros(DAYS))

    def add(self, at: float, load: float) -> int | None:
        """Add a point; return the slot that it closed, None if it closed none.

        A point before the open slot, or one that is no finite number from 0, changes nothing.
        """
        if not (math.isfinite(load) and load >= 0 and math.isfinite(at) and at > 0):
            return None
        slot, closed = int(at // SLOT_S), None
        if slot < self.slot:
            return None
        if slot > self.slot:
            closed = self.slot if self.count else None
            self._open(slot)
            self.first = self.first or slot
        self.total += min(load, LARGEST)
        self.count += 1
        mean = code_of(self.total / self.count)
        self.fine[slot % FINE] = mean
        for ring, number in ((self.half_hours, slot // _HALF_HOUR), (self.days, slot // _DAY)):
            ring[number % len(ring)] = max(ring[number % len(ring)], mean)
        return closed

    def _open(self, slot: int) -> None:
        """Begin a slot; the slots in between are missing."""
        self._clear(self.slot, slot)
        self.slot, self.total, self.count = slot, 0.0, 0

    def _clear(self, after: int, last: int) -> None:
        """Remove what is stored for the slots from the one after `after` to `last`."""
        for ring, width in ((self.fine, 1), (self.half_hours, _HALF_HOUR), (self.days, _DAY)):
            first, end = after // width + 1, last // width
            for number in range(max(first, end - len(ring) + 1), end + 1):
                ring[number % len(ring)] = 0

    def drop_after(self, at: float) -> bool:
        """Drop the points after `at` if the clock was set back to it; return whether it was.

        Otherwise no point would be stored until that time comes again. After a step of less than an
        hour this waits, because the date follows a step only after an hour.
        """
        slot = int(at // SLOT_S)
        if slot > self.slot - STEP_SLOTS:
            return False
        self._clear(slot, self.slot)
        self.slot, self.first, self.total, self.count = slot, min(self.first, slot), 0.0, 0
        return True

    def mean(self, slot: int) -> float | None:
        """Return the mean load of a 5-minute slot of the last 3 days."""
        return self._read_ring(self.fine, slot, self.slot)

    def peak(self, half_hour: int) -> float | None:
        """Return the peak of a half hour, by its number since 1970, of the last 8 weeks."""
        return self._read_ring(self.half_hours, half_hour, self.slot // _HALF_HOUR)

    def day_peak(self, day: int) -> float | None:
        """Return the peak of a day, by its number since 1970, of the last 53 weeks."""
        return self._read_ring(self.days, day, self.slot // _DAY)

    def _read_ring(self, ring: array[int], number: int, newest: int) -> float | None:
        is_kept = newest - len(ring) < number <= newest
        return value_of(ring[number % len(ring)]) if is_kept else None

    def day_peaks(self) -> list[tuple[float, float]]:
        """Return time and largest load of each measured day of the last 53 weeks, oldest first."""
        newest = self.slot // _DAY
        days = range(max(self.first // _DAY, newest - DAYS + 1), newest + 1)
        found = [(day * float(DAY_S), self.day_peak(day)) for day in days]
        return [(at, load) for at, load in found if load is not None]

    def recent(self) -> list[tuple[float, float]]:
        """Return time and load, oldest first: the 5-minute means of the last 3 days."""
        slots = range(max(self.first, self.slot - FINE + 1), self.slot + 1)
        found = [(slot * float(SLOT_S), self.mean(slot)) for slot in slots]
        return [(at, load) for at, load in found if load is not None]

    def points(self) -> list[tuple[float, float]]:
        """Return time and load, oldest first: half-hour peaks, then 5-minute means."""
        first, newest = self.first // _HALF_HOUR, self.slot // _HALF_HOUR
        fine_from = (self.slot - FINE + 1) // _HALF_HOUR
        halves = range(max(first, newest - HALF_HOURS + 1), fine_from)
        found = [(h * float(HALF_HOUR_S), self.peak(h)) for h in halves]
        return [(at, load) for at, load in found if load is not None] + self.recent()

    def to_bytes(self) -> bytes:
        """Return it as it is stored, in `BYTES` bytes."""
        head = _HEADER.pack(_FORMAT, self.slot, self.first, self.total, self.count)
        return head + b"".join(
            _little_endian(r).tobytes() for r in (self.fine, self.half_hours, self.days)
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> LoadHistory:
        """Return a stored history; `ValueError` for invalid data, or data of a newer release."""
        if len(data) != BYTES:
            raise ValueError(f"a history has {BYTES} bytes, not {len(data)}")
        known, slot, first, total, count = _HEADER.unpack_from(data)
        if known != _FORMAT:
            raise ValueError(f"format {known} of a history is unknown")
        rings, at = [], _HEADER.size
        for length in (FINE, HALF_HOURS, DAYS):
            rings.append(_little_endian(array("H", data[at : at + 2 * length])))
            at += 2 * length
        return cls(slot, first, total, count, *rings)


def _little_endian(ring: array[int]) -> array[int]:
    if sys.byteorder == "little":
        return ring
    swapped = array("H", ring)
    swapped.byteswap()
    return swapped
