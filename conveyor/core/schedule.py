"""Windows, holds and start times of a pipeline, as functions of a moment."""

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
"""A weekly time is never further in the past."""


@dataclass(frozen=True, slots=True)
class StartTime:
    """A minute of some days of the week; Monday is 0."""

    days: frozenset[int]
    minute: int


def never(during: Sequence[str], zone: str) -> Never:
    """Return the windows `during` in a time zone; `InvalidInput` for a bad one."""
    return Never.of(during, zone)


def start_time(text: str) -> StartTime:
    """Return the start time of `mon-fri 10:00` or `10:00`; `InvalidInput` lists valid forms."""
    match = _START.fullmatch(text.strip().lower())
    hint = "for instance mon-fri 10:00, sat 06:30 or 10:00"
    if match is None or int(match["hour"]) > 23 or int(match["minute"]) > 59:
        raise InvalidInput(f"{text!r} is no time of a week", hint=hint)
    minute = int(match["hour"]) * 60 + int(match["minute"])
    try:
        days = window(f"{match['days'] or ''}00:00-24:00").days
    except InvalidInput as e:
        raise InvalidInput(f"{text!r} is no time of a week: its days are wrong", hint=hint) from e
    return StartTime(days, minute)


def moment(text: str) -> float:
    """Return seconds since 1970 of a date and time with a zone (RFC 3339)."""
    hint = "for instance 2026-12-20T00:00:00Z"
    try:
        found = datetime.fromisoformat(text)
    except ValueError as e:
        raise InvalidInput(f"{text!r} is no date and time", hint=hint) from e
    if found.tzinfo is None:
        raise InvalidInput(f"{text!r} has no time zone", hint=hint)
    return found.timestamp()


def last_start(times: Sequence[str], zone: str, now: float) -> float | None:
    """Return the newest scheduled start at or before `now`, in seconds since 1970."""
    there = datetime.fromtimestamp(now, UTC).astimezone(ZoneInfo(zone))
    found: list[float] = []
    for one in map(start_time, times):
        for back in range(_DAYS_BACK):
            day = there - timedelta(days=back)
            at = day.replace(hour=one.minute // 60, minute=one.minute % 60, second=0, microsecond=0)
            if at.weekday() in one.days and at.timestamp() <= now:
                found.append(at.timestamp())
                break
    return max(found, default=None)


def held_back(spec: PipelineSpec, now: float) -> str:
    """Return why no stage may begin now; empty: one may."""
    for hold in spec.holds:
        if moment(hold.begin) <= now < moment(hold.end):
            return f"held until {hold.end}: {hold.reason}"
    windows = spec.windows
    if windows.during and not never(windows.during, windows.zone).is_now(now):
        return f"outside of its windows ({', '.join(windows.during)} {windows.zone})"
    return ""
