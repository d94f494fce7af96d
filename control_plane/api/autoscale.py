"""The `[autoscale]` table of a job file: how the size of a job follows its load."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from agent.api.ranges import END
from wire.errors import FieldError

LARGEST = 15_000
"""Tasks of the largest job (§6.1 of the paper)."""
Tasks = Annotated[int, Meta(ge=0, le=LARGEST)]
TimeOfDay = Annotated[
    str,
    Meta(pattern=r"^([01][0-9]|2[0-3]):[0-5][0-9]" + END, description='a time of day, as "07:30"'),
]

Date = Annotated[
    str,
    Meta(
        pattern=r"^(\d{4}-)?(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])" + END,
        description='a day of each year, as "12-24", or of one, as "2026-11-27"',
    ),
]


class _AutoscalePart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the types that users write."""


class AutoscaleMode(StrEnum):
    """What the autoscaler does with its recommendation."""

    RECOMMEND = "recommend"
    """`twinectl autoscale status` shows it; nothing is changed."""
    APPLY = "apply"
    """It becomes the size of the job. `tasks` counts only when the job is created."""


class LoadSignal(StrEnum):
    """The measure of a job's load."""

    CPU = "cpu"
    """Cores that its tasks use, as their agents report."""
    MEMORY = "memory"
    """Memory that its tasks use, as their agents report."""
    NETWORK = "network"
    """Bytes that its tasks send and receive in a second, of jobs with private networks."""
    QUERY = "query"
    """The result of `query` at the region's Prometheus server."""


class Headroom(StrEnum):
    """The loss of tasks that the size compensates for."""

    NONE = "none"
    """No loss: after a loss the remaining tasks exceed their target."""
    MSB = "msb"
    """The loss of the MSB with most tasks: the other tasks carry the load at `ceiling`."""


class Weekday(StrEnum):
    """A day of the week, in UTC."""

    MON = "mon"
    TUE = "tue"
    WED = "wed"
    THU = "thu"
    FRI = "fri"
    SAT = "sat"
    SUN = "sun"


class SpeedLimit(_AutoscalePart, frozen=True, kw_only=True):
    """How fast the size may change in one direction."""

    share: Annotated[float, Meta(gt=0, le=100)]
    """At most this share of the size, and always at least one task …"""
    per_s: Annotated[float, Meta(ge=60, le=3600)]
    """… within this time."""


class ScheduledBounds(_AutoscalePart, frozen=True, kw_only=True):
    """Other bounds at some times of the week, for load that the history does not contain."""

    days: Annotated[list[Weekday], Meta(max_length=7)] = []
    """Days on which it begins, in UTC; empty: all days, or only `dates`."""
    dates: Annotated[list[Date], Meta(max_length=100)] = []
    """Further days, such as holidays."""
    start: TimeOfDay
    """From this time, in UTC …"""
    end: TimeOfDay
    """… to this one; if that is earlier, on the next day."""
    minimum: Tasks | None = None
    """Replaces the minimum of the policy, if larger."""
    maximum: Tasks | None = None
    """Replaces the maximum of the policy, if smaller."""


class LatencyTarget(_AutoscalePart, frozen=True, kw_only=True):
    """Sizes a job by latency: the load of a task at which latency reaches the limit is learnt."""

    query: Annotated[str, Meta(min_length=1, max_length=4096)]
    """PromQL that returns one series: the latency of the whole job in seconds, as
    `histogram_quantile(0.95, sum by (le) (rate(request_seconds_bucket[2m])))`."""
    limit_s: Annotated[float, Meta(gt=0, le=600)]
    """Maximum latency, in seconds."""
    share: Annotated[float, Meta(ge=0.1, le=1)] = 0.8
    """Share of the learnt load that a task should have; all of it after the loss of an MSB."""


class Autoscale(_AutoscalePart, frozen=True, kw_only=True):
    """How the size of a job follows its load (docs/autoscaling.md)."""

    minimum: Annotated[int, Meta(ge=1, le=LARGEST)]
    """Fewest tasks."""
    maximum: Annotated[int, Meta(ge=1, le=LARGEST)]
    """Most tasks."""
    target: Annotated[float, Meta(gt=0, le=1e12)] | None = None
    """Load of one task that the size aims at. For `cpu` and `memory` a share of the task's limit,
    as 0.6; for `network` in bytes a second, for `query` in the unit of the query. Needed, except
    with `latency`: there it counts until the load is learnt."""
    latency: LatencyTarget | None = None
    """With signal `query`: the target load of one task is learnt from latency."""
    mode: AutoscaleMode = AutoscaleMode.RECOMMEND
    signal: LoadSignal = LoadSignal.CPU
    query: Annotated[str, Meta(max_length=4096)] = ""
    """PromQL that returns one series: the load of the whole job, as `sum(rate(requests[2m]))`."""
    headroom: Headroom = Headroom.MSB
    ceiling: Annotated[float, Meta(gt=0, le=1e12)] | None = None
    """Load that a task still carries after the loss of an MSB, in the unit of `target`; None:
    at most `target`."""
    quantile: Annotated[float, Meta(ge=0.5, le=0.999)] = 0.8
    """Share of the forecasts that the load does not exceed. 0.8 cost least on real loads where a
    missing task costs as much as ten idle ones (docs/adr/0160)."""
    horizon_s: Annotated[float, Meta(ge=60, le=7200)] | None = None
    """Seconds that the forecast covers; None: the measured time until new tasks are healthy."""
    up: SpeedLimit = SpeedLimit(share=1.0, per_s=300.0)
    """Speed limit of growth."""
    down: SpeedLimit = SpeedLimit(share=0.1, per_s=600.0)
    """Speed limit of shrinking."""
    schedule: Annotated[list[ScheduledBounds], Meta(max_length=32)] = []
    """Bounds at certain times; if several apply, the largest minimum and the smallest maximum
    count, and a minimum wins over a maximum."""


def starting_size(policy: Autoscale | None, written: int, known: int | None) -> int:
    """Return the tasks of a job whose file says `written` and whose size is `known` (None: new).

    `known` is None also if the autoscaler did not set the size so far.
    """
    if policy is None or policy.mode is not AutoscaleMode.APPLY:
        return written
    size = written if known is None else known
    return min(max(size, policy.minimum), policy.maximum)


def autoscale_errors(document: Any) -> Iterator[FieldError]:
    """Yield the contradictions between keys of an `[autoscale]` table."""
    if not isinstance(document, dict):
        return

    def number(name: str, default: float | None = None) -> float | None:
        value = document.get(name, default)
        if isinstance(value, float):
            return value
        # its type refuses a larger one, which may exceed any float
        return value if type(value) is int and abs(value) <= 1 << 53 else None

    low, high = number("minimum"), number("maximum")
    if low is not None and high is not None and low > high:
        reason = f"{high:g} is below minimum, which is {low:g}"
        yield FieldError(field="autoscale.maximum", reason=reason)
    signal, query = document.get("signal", "cpu"), document.get("query", "")
    if signal == "query" and query == "":
        yield FieldError(field="autoscale.query", reason="missing; signal is query")
    if query and signal in ("cpu", "memory", "network"):
        yield FieldError(field="autoscale.query", reason=f"only for signal query, not {signal}")
    if signal in ("cpu", "memory"):
        for name in ("target", "ceiling"):
            share = number(name)
            if share is not None and share > 1:
                reason = f"{share:g} is over 1: for {signal} it is a share of a task's limit"
                yield FieldError(field=f"autoscale.{name}", reason=reason)
    yield from _latency_errors(document)
    target, ceiling = number("target"), number("ceiling")
    if target is not None and ceiling is not None and ceiling < target:
        reason = f"{ceiling:g} is below target, which is {target:g}"
        yield FieldError(field="autoscale.ceiling", reason=reason)
    yield from _schedule_errors(document.get("schedule"))


def _is_date(text: str) -> bool:
    """Return whether a `Date` exists in the calendar; 02-29 exists in some years."""
    try:
        datetime.date.fromisoformat(text if len(text) > 5 else f"2000-{text}")
    except ValueError:
        return False
    return True


def _latency_errors(document: dict[str, Any]) -> Iterator[FieldError]:
    if document.get("latency") is None:
        if document.get("target") is None:
            reason = "missing; it is optional only with autoscale.latency"
            yield FieldError(field="autoscale.target", reason=reason)
        return
    signal = document.get("signal", "cpu")
    if signal != "query":
        reason = f'needs signal = "query", not {signal}: the latency depends on requests'
        yield FieldError(field="autoscale.latency", reason=reason)
    if document.get("ceiling") is not None:
        reason = (
            "cannot be combined with latency: after the loss of an MSB a task carries the "
            "learnt load"
        )
        yield FieldError(field="autoscale.ceiling", reason=reason)


def _schedule_errors(listed: Any) -> Iterator[FieldError]:
    for i, entry in enumerate(listed[:32] if isinstance(listed, list) else []):
        if not isinstance(entry, dict):
            continue
        at, low, high = f"autoscale.schedule[{i}]", entry.get("minimum"), entry.get("maximum")
        if low is None and high is None:
            yield FieldError(field=at, reason="gives neither minimum nor maximum")
        if isinstance(low, int) and isinstance(high, int) and low > high:
            yield FieldError(field=f"{at}.maximum", reason=f"{high} is below minimum {low}")
        dates = entry.get("dates")
        for date in dates[:100] if isinstance(dates, list) else []:
            if (
                isinstance(date, str)
                and re.match(r"^(\d{4}-)?\d\d-\d\d$", date)
                and not _is_date(date)
            ):
                yield FieldError(field=f"{at}.dates", reason=f"there is no {date}")
        start, end = entry.get("start"), entry.get("end")
        if isinstance(start, str) and start == end and re.match(r"^\d\d:\d\d$", start):
            yield FieldError(
                field=f"{at}.end", reason=f"equals start, {start}: the period is empty"
            )


def limit_errors(document: Any) -> Iterator[FieldError]:
    """Yield the fields that an `[autoscale]` table needs elsewhere in its job, as errors."""
    policy = document.get("autoscale")
    if not isinstance(policy, dict):
        return
    limits = document.get("limits")
    limits = limits if isinstance(limits, dict) else {}
    claims = [limits.get("cpu_max_cores"), document.get("cpus")]
    signal = policy.get("signal", "cpu")
    if signal == "cpu" and not any(claims) and not document.get("resources"):
        reason = "cpu needs limits.cpu_max_cores or cpus: target is a share of it"
        yield FieldError(field="autoscale.signal", reason=reason)
    network = document.get("network")
    mode = network.get("mode") if isinstance(network, dict) else None
    if signal == "network" and mode != "private":
        reason = (
            'network needs network.mode = "private": traffic of the host network is not '
            "counted per task"
        )
        yield FieldError(field="autoscale.signal", reason=reason)
    if signal == "memory" and "memory_max_bytes" not in limits:
        reason = "memory needs limits.memory_max_bytes: target is a share of it"
        yield FieldError(field="autoscale.signal", reason=reason)
