"""Time windows, holds and start times of a pipeline."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

from conveyor.api import PipelineSpec
from taskcontrol.windows import Never, window
from wire.errors import InvalidInput

_START = re.compile(r"(?P<days>[a-z]{3}(?:-[a-z]{3})? )?(?P<hour>\d\d):(?P<minute>\d\d)")
_DAYS_BACK = 8
"""Days to search for the last start: a weekly time is at most a week ago."""


@dataclass(frozen=True, slots=True)
class StartTime:
    """A time of day on some days of the week."""

    days: frozenset[int]
    """Monday is 0."""
    minute: int
    """Minutes from midnight."""


def parse_windows(during: Sequence[str], zone: str) -> Never:
    """Return time windows in a time zone, or raise `InvalidInput`."""
    return Never.of(during, zone)


def parse_start_time(text: str) -> StartTime:
    """Return the start time of `mon-fri 10:00` or `10:00`; `InvalidInput` lists valid forms."""
    match = _START.fullmatch(text.strip().lower())
    hint = "for instance mon-fri 10:00, sat 06:30 or 10:00"
    if match is None or int(match["hour"]) > 23 or int(match["minute"]) > 59:
        raise InvalidInput(f"{text!r} is not a time of a week", hint=hint)
    minute = int(match["hour"]) * 60 + int(match["minute"])
    try:
        days = window(f"{match['days'] or ''}00:00-24:00").days
    except InvalidInput as e:
        raise InvalidInput(
            f"{text!r} is not a time of a week: its days are wrong", hint=hint
        ) from e
    return StartTime(days, minute)


def parse_time(text: str) -> float:
    """Return seconds since 1970 of a date and time with a zone (RFC 3339)."""
    hint = "for instance 2026-12-20T00:00:00Z"
    try:
        time = datetime.fromisoformat(text)
    except ValueError as e:
        raise InvalidInput(f"{text!r} is not a date and time", hint=hint) from e
    if time.tzinfo is None:
        raise InvalidInput(f"{text!r} has no time zone", hint=hint)
    return time.timestamp()


def last_start(times: Sequence[str], zone: str, now: float) -> float | None:
    """Return the newest scheduled start at or before `now`, in seconds since 1970."""
    local_now = datetime.fromtimestamp(now, UTC).astimezone(ZoneInfo(zone))
    starts: list[float] = []
    for time in map(parse_start_time, times):
        hour, minute = divmod(time.minute, 60)
        for days_ago in range(_DAYS_BACK):
            day = local_now - timedelta(days=days_ago)
            start = day.replace(hour=hour, minute=minute, second=0, microsecond=0)
            if start.weekday() in time.days and start.timestamp() <= now:
                starts.append(start.timestamp())
                break
    return max(starts, default=None)


def block_reason(spec: PipelineSpec, now: float) -> str:
    """Return why no stage may begin now; empty: one may."""
    for hold in spec.holds:
        if parse_time(hold.begin) <= now < parse_time(hold.end):
            return f"held until {hold.end}: {hold.reason}"
    windows = spec.windows
    if windows.during and not parse_windows(windows.during, windows.zone).is_now(now):
        return f"outside of its windows ({', '.join(windows.during)} {windows.zone})"
    return ""
