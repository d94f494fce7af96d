"""Bars for durations: the waves of a maintenance plan, and the changes of host settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

from control_plane.api.maintenance import WaveState, WaveView
from control_plane.api.profiles import SettingTimes
from control_plane.web.core.gantt import ticks_of

MIN_PERCENT = 0.5
"""The shortest bar, in percent of the width, so that it can be seen and pointed at."""


@dataclass(frozen=True, slots=True)
class WaveBar:
    """A wave in the time of its plan; `left` and `width` in percent."""

    number: int
    state: str
    left: float
    width: float
    done: float
    """Part of its machines that are done, 0 to 1."""
    title: str


@dataclass(frozen=True, slots=True)
class WaveChart:
    """The waves of a plan by time."""

    bars: list[WaveBar]
    ticks: list[tuple[float, float]]
    """(percent, seconds since 1970)."""
    now: float | None
    """Position of the present, in percent; None: the plan is over."""
    waiting: int
    """Waves without a time: they begin once those before them are done."""


def wave_chart(waves: Sequence[WaveView], now: float) -> WaveChart | None:
    """Return a bar for each started wave; one without a deadline lasts until `now`."""
    timed = [(w, w.start, max(w.deadline or now, w.start)) for w in waves if w.start]
    if not timed:
        return None
    begin = min(start for _, start, _ in timed)
    end = max(end for _, _, end in timed)
    if any(wave.state not in (WaveState.DONE, WaveState.CANCELLED) for wave in waves):
        end = max(end, now)
    span = max(end - begin, 1e-9)
    bars = [
        WaveBar(
            wave.number,
            wave.state,
            min(100 * (start - begin) / span, 100 - MIN_PERCENT),
            max(100 * (until - start) / span, MIN_PERCENT),
            wave.done / max(1, wave.machines),
            f"wave {wave.number}, {wave.state}: {wave.done} of {wave.machines} machines done",
        )
        for wave, start, until in timed
    ]
    position = 100 * (now - begin) / span
    present = position if 0 <= position <= 100 else None
    later = sum(1 for wave in waves if not wave.start and wave.state is WaveState.WAITING)
    return WaveChart(bars, ticks_of(begin, end), present, later)


@dataclass(frozen=True, slots=True)
class SettingBar:
    """Duration of one kind of setting; positions on a logarithmic axis, in percent."""

    times: SettingTimes
    p50: float
    p90: float


@dataclass(frozen=True, slots=True)
class SettingChart:
    """Switch times of all kinds of settings, the slowest first (Figure 17)."""

    bars: list[SettingBar]
    ticks: list[tuple[float, str]]
    """(percent, `10 ms`)."""


def setting_chart(settings: Sequence[SettingTimes]) -> SettingChart:
    """Return a bar for each kind of setting: they differ by 1,000 times, so the axis is log."""
    known = [one for one in settings if one.p90_ms > 0]
    if not known:
        return SettingChart([], [])
    low = floor(log10(max(0.01, min(one.p50_ms or one.p90_ms for one in known))))
    high = max(low + 1, ceil(log10(max(one.p90_ms for one in known))))

    def place(value_ms: float) -> float:
        at = (log10(max(value_ms, 10.0**low)) - low) / (high - low)
        return max(MIN_PERCENT, 100 * at)

    bars = [
        SettingBar(one, place(one.p50_ms), place(one.p90_ms))
        for one in sorted(known, key=lambda one: (-one.p90_ms, one.setting))
    ]
    ticks = [(100 * (n - low) / (high - low), _duration(10.0**n)) for n in range(low, high + 1)]
    return SettingChart(bars, ticks)


def _duration(value_ms: float) -> str:
    return f"{value_ms:g} ms" if value_ms < 1000 else f"{value_ms / 1000:g} s"
