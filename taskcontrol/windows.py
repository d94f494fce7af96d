"""Time windows in which operations on a job wait: a launch, a match, working hours."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

from msgspec.structs import replace

from taskcontrol.api import TaskControlRequest
from wire.errors import InvalidInput

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_WINDOW = re.compile(
    r"(?:(?P<first>[a-z]{3})(?:-(?P<last>[a-z]{3}))? )?"
    r"(?P<h1>\d\d):(?P<m1>\d\d)-(?P<h2>\d\d):(?P<m2>\d\d)"
)


@dataclass(frozen=True, slots=True)
class TimeWindow:
    """A time of day on some days of the week. If `end` is before `begin` it ends a day later."""

    days: frozenset[int]
    """Days on which it begins; Monday is 0."""
    begin: int
    """Minutes from midnight."""
    end: int

    def holds(self, day: int, minute: int) -> bool:
        """Return whether the window contains a minute of a day."""
        if self.begin < self.end:
            return day in self.days and self.begin <= minute < self.end
        day_before = (day - 1) % 7
        return (day in self.days and minute >= self.begin) or (
            day_before in self.days and minute < self.end
        )


def window(text: str) -> TimeWindow:
    """Return the window of `mon-fri 09:00-17:30`, `sat 22:00-06:00` or `12:00-13:00`."""
    match = _WINDOW.fullmatch(text.strip().lower())
    hint = "for instance mon-fri 09:00-17:30, sat 22:00-06:00 or 12:00-13:00"
    if match is None:
        raise InvalidInput(f"{text!r} is not a time window", hint=hint)
    begin, end = (int(match[f"h{n}"]) * 60 + int(match[f"m{n}"]) for n in "12")
    minutes_ok = max(int(match["m1"]), int(match["m2"])) < 60
    first, last = match["first"] or "mon", match["last"] or match["first"] or "sun"
    if begin == end or max(begin, end) > 24 * 60 or not minutes_ok:
        raise InvalidInput(f"{text!r} is not a time window: its hours are wrong", hint=hint)
    if first not in DAYS or last not in DAYS:
        raise InvalidInput(f"{text!r} is not a time window: its days are wrong", hint=hint)
    first_day, last_day = DAYS.index(first), DAYS.index(last)
    days = frozenset((first_day + n) % 7 for n in range((last_day - first_day) % 7 + 1))
    return TimeWindow(days, begin, end)


@dataclass(frozen=True, slots=True)
class Never:
    """Holds back operations on tasks that serve during its windows."""

    windows: tuple[TimeWindow, ...]
    zone: str = "UTC"

    @classmethod
    def of(cls, texts: Iterable[str], zone: str = "UTC") -> Never:
        """Return the windows that texts describe, or raise `InvalidInput`."""
        try:
            ZoneInfo(zone)
        except (OSError, ValueError, KeyError) as e:
            raise InvalidInput(f"there is no time zone {zone!r}", hint="as Europe/Berlin") from e
        return cls(tuple(window(text) for text in texts), zone)

    def is_now(self, at: float) -> bool:
        """Return whether a moment (seconds since 1970) is in one of the windows."""
        moment = datetime.fromtimestamp(0, UTC) + timedelta(seconds=at)
        local = moment.astimezone(ZoneInfo(self.zone))
        minute = local.hour * 60 + local.minute
        return any(window.holds(local.weekday(), minute) for window in self.windows)

    def left(self, request: TaskControlRequest) -> TaskControlRequest:
        """Return the request with only the operations that may begin now.

        Operations on tasks that are down are kept: a failed task is replaced at any time.
        """
        if not self.is_now(request.at):
            return request
        down = request.down
        return replace(request, request=[o for o in request.request if o.task in down])
