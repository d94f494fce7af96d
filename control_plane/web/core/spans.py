"""Bars of things that last: the waves of a maintenance plan, and the changes of host settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from control_plane.api.maintenance import WaveView
from control_plane.api.profiles import SettingTimes

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
    """Part of its machines that is done with, 0 to 1."""
    title: str


def wave_bars(waves: Sequence[WaveView], now: float) -> list[WaveBar]:
    """Return a bar for each wave that has a start; one without a deadline lasts until `now`."""
    timed = [(w, w.start, max(w.deadline or now, w.start)) for w in waves if w.start is not None]
    if not timed:
        return []
    begin = min(start for _, start, _ in timed)
    span = max(max(end for _, _, end in timed) - begin, 1e-9)
    return [
        WaveBar(
            wave.number,
            wave.state,
            min(100 * (start - begin) / span, 100 - MIN_PERCENT),
            max(100 * (end - start) / span, MIN_PERCENT),
            wave.done / max(1, wave.machines),
            f"wave {wave.number}, {wave.state}: {wave.done} of {wave.machines} machines done",
        )
        for wave, start, end in timed
    ]


@dataclass(frozen=True, slots=True)
class SettingBar:
    """How long one kind of setting takes; widths in percent of the slowest (Figure 17)."""

    times: SettingTimes
    p50: float
    p90: float


def setting_bars(settings: Sequence[SettingTimes]) -> list[SettingBar]:
    """Return a bar for each kind of setting, the slowest first."""
    longest = max((one.p90_ms for one in settings), default=0.0) or 1.0
    return [
        SettingBar(
            one,
            max(100 * one.p50_ms / longest, MIN_PERCENT),
            max(100 * one.p90_ms / longest, MIN_PERCENT),
        )
        for one in sorted(settings, key=lambda one: (-one.p90_ms, one.setting))
    ]
