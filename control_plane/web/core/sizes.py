"""Rows and charts of autoscaled jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from control_plane.api.autoscale import Autoscale, LoadSignal
from control_plane.api.jobs import JobStatus
from control_plane.api.sizings import SizingView
from control_plane.web.core.usage import LineChart, line_chart

SHOWN_SIZES = ("all", "held", "refused", "differs", "as recommended", "not evaluated")


@dataclass(frozen=True, slots=True)
class SizeRow:
    """A job, its policy, and the last decision about its size."""

    job: JobStatus
    policy: Autoscale
    sizing: SizingView | None
    """None: the autoscaler does not know it, or does not answer."""
    state: str
    """One of `SHOWN_SIZES`."""


def size_row(job: JobStatus, sizing: SizingView | None) -> SizeRow | None:
    """Return a job with the decision about it; None: it has no `[autoscale]`."""
    policy = job.record.spec.autoscale
    return None if policy is None else SizeRow(job, policy, sizing, _state(sizing))


def size_rows(jobs: Iterable[JobStatus], sizings: Iterable[SizingView]) -> list[SizeRow]:
    """Return all autoscaled jobs by name."""
    known: Mapping[str, SizingView] = {one.job: one for one in sizings}
    rows = (size_row(job, known.get(job.record.name)) for job in jobs)
    return sorted((row for row in rows if row), key=lambda row: row.job.record.name)


def _state(sizing: SizingView | None) -> str:
    found = sizing.recommendation if sizing is not None else None
    if sizing is None or found is None:
        return "not evaluated"
    if found.held:
        return "held"
    if found.tasks == sizing.tasks:
        return "as recommended"
    return "refused" if "refused" in sizing.written else "differs"


def amount_of(size: Callable[[float], str]) -> Callable[[LoadSignal, float | None], str]:
    """Return a function that prints a load with its unit; `size` prints bytes."""

    def amount(signal: LoadSignal, load: float | None) -> str:
        if load is None:
            return "–"
        if signal in (LoadSignal.MEMORY, LoadSignal.NETWORK):
            return size(load) + ("/s" if signal is LoadSignal.NETWORK else "")
        return f"{load:.4g}" + (" cores" if signal is LoadSignal.CPU else "")

    return amount


def load_charts(sizing: SizingView, load_text: Callable[[float], str]) -> list[LineChart]:
    """Return charts of the last days and of a year's peaks; none for fewer than two points."""
    kinds = {"Load, 3 days": sizing.loads, "Largest load of a day, 53 weeks": sizing.day_peaks}
    return [
        line_chart(title, points, load_text, 0.0 if any(load for _, load in points) else 1.0)
        for title, points in kinds.items()
        if len(points) > 1
    ]
